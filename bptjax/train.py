"""`python -m bptjax.train --config FILE [--group.key=value …]`: trains, resumes, reports."""

import logging
import os
import sys

# Set by launchers; 0 is the process that prints.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JAX_PROCESS_ID")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed, 2 usage or config, 130 Ctrl-C, 143 SIGTERM."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    if debug:
        argv.remove("--debug")
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    # Grain and orbax speak through absl before it is set up; jax warns of a CPU beside no GPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from bptjax.parallel.processes import run

    return run(lambda: _train(argv, debug))


def _train(argv: list[str], debug: bool) -> int:
    if not {"-h", "--help"} & set(argv) and all(os.environ.get(r, "0") == "0" for r in RANKS):
        print("starting: loading libraries", flush=True)
    from bptjax.config import fail, parse
    from bptjax.fit import fit
    from bptjax.parallel.processes import PeerLost
    from bptjax.run import prepare

    try:
        run = prepare(parse(argv, main.__doc__ or ""))
    except PeerLost as error:
        return fail(error, 1, debug)
    except (ValueError, NotImplementedError, OSError) as error:
        return fail(error, 2, debug)
    except KeyboardInterrupt:
        print("interrupted before training; no step is lost", file=sys.stderr)
        return 130
    try:
        return fit(run)
    except ValueError as error:
        return fail(error, 2, debug)
    except (RuntimeError, OSError) as error:
        return fail(error, 1, debug)
    except KeyboardInterrupt:
        line = "interrupted; the same command continues from the last finished checkpoint"
        print(line, file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
