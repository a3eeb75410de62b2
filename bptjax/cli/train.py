"""Trains, resumes and reports: `bptjax train --config FILE [--group.key=value …]` on the command
line, `bptjax.train(config)` in Python.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bptjax.cli.run_command import end_imports_at_interrupts, run_command
from bptjax.run.child_python import PYTHON
from bptjax.run.heartbeat import beat, dump_stacks_on_signal, record_run_dir
from bptjax.run.output import describe, explain_full_disk

if TYPE_CHECKING:
    from bptjax.config import Config
    from bptjax.training.setup import TrainingRun

DESCRIPTION = """Trains a model as set by a YAML file and flags: from scratch, from a checkpoint, or
adapters on a checkpoint. The same command resumes a run that was stopped."""
# A flag, not a key: it applies to one start of a run, not to its config or checkpoints.
PROFILE = (
    "--profile",
    "profile the third step from the start or the resumption, or the last step of a shorter run, "
    "into profile in run_dir",
)
# A flag, not a key: it applies to the process, not to the run.
SUPERVISE = (
    "--supervise",
    "restart the run after a crash, a lost peer or a hang, until restarts bring no new checkpoint",
)
# Rank variables set by launchers. The process of rank 0 prints.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JAX_PROCESS_ID")


def train(config: "Config | Mapping[str, Any] | str | Path", *, profile: bool = False) -> Path:
    """Trains a config, or resumes the run in its `run_dir`, like `bptjax train`.

    Args:
      config: a `Config`, a dict of its groups and keys, or the path of a YAML file.
      profile: profile a step, like the flag `--profile`.

    Returns:
      The run directory, which `bptjax.load` takes.

    Raises:
      ValueError, NotImplementedError, OSError: a bad config or bad data; nothing was trained.
      RuntimeError: the run failed.
      KeyboardInterrupt, SystemExit: stopped by Ctrl-C, or by SIGTERM with code 143. The state was
        saved, and the same call resumes.
    """
    from bptjax.training.setup import setup

    run = setup(_config(config))
    code = _loop(run, profile)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)
    return run.directory


def _loop(run: "TrainingRun", profile: bool) -> int:
    """Trains a checked run to its end or until a signal. Returns the exit code."""
    from bptjax.training import loop

    try:
        with explain_full_disk(run.directory):
            return loop.train(run, profile=profile)
    except ChildProcessError:  # A bad chat template is an input error.
        raise
    except OSError as error:  # Inputs were validated, so the run itself failed.
        raise RuntimeError(describe(error)) from error


def _config(config: "Config | Mapping[str, Any] | str | Path") -> "Config":
    from bptjax.config import Config
    from bptjax.config_parser import parse
    from bptjax.parsing.tree_parser import parse_tree

    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return parse([f"--config={config}"])
    # Convert paths to text.
    return parse_tree(json.loads(json.dumps(dict(config), default=str)), Config)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    end_imports_at_interrupts()
    argv = list(sys.argv[1:] if argv is None else argv)
    if SUPERVISE[0] in argv:
        from bptjax.run.supervise import supervise

        rest = (word for word in argv if word != SUPERVISE[0])
        command = [*PYTHON, "-m", "bptjax.train", *rest]
        return run_command(lambda _: supervise(command), argv)
    dump_stacks_on_signal()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # Silence grain and orbax before absl is set up, and jax about an unused GPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from bptjax.parallel.distributed import exit_without_barriers
    from bptjax.parallel.members import end_run
    from bptjax.run.supervise import FINAL

    def train_and_tell() -> int:
        code = run_command(_train, argv)
        if code in FINAL:
            end_run(code)
        return code

    return exit_without_barriers(train_and_tell)


def _train(argv: list[str]) -> int:
    from bptjax.config_parser import parse

    config = parse(argv, DESCRIPTION, switches=[PROFILE, SUPERVISE])
    if all(os.environ.get(rank, "0") == "0" for rank in RANKS):
        print("starting: loading libraries", flush=True)
    beat("loading libraries")
    interrupted = "interrupted before training; no step is lost"
    try:
        from bptjax.training.setup import setup

        run = setup(config)
        record_run_dir(run.directory)
        interrupted = "interrupted; the same command continues from the last finished checkpoint"
        return _loop(run, PROFILE[0] in argv)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
