"""`bptjax train --config FILE [--group.key=value …]`: trains, resumes, reports."""

import logging
import os
import sys

from bptjax.command_line import run_command

DESCRIPTION = """Trains a model as a YAML file and flags say: from scratch, from a checkpoint, or
adapters beside it. The same command again resumes a run that was stopped."""
# Set by launchers; 0 is the process that prints.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JAX_PROCESS_ID")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # Grain and orbax speak through absl before it is set up; jax warns of a CPU beside no GPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from bptjax.parallel.processes import run

    return run(lambda: run_command(_train, argv))


def _train(argv: list[str]) -> int:
    from bptjax.config import parse

    config = parse(argv, DESCRIPTION)
    if all(os.environ.get(rank, "0") == "0" for rank in RANKS):
        print("starting: loading libraries", flush=True)
    interrupted = "interrupted before training; no step is lost"
    try:
        from bptjax.training.loop import train
        from bptjax.training.setup import setup

        run = setup(config)
        interrupted = "interrupted; the same command continues from the last finished checkpoint"
        try:
            return train(run)
        except OSError as error:  # The input was in order: the run failed.
            raise RuntimeError(str(error)) from error
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
