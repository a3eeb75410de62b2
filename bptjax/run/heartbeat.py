"""Heartbeats of a supervised process, in a directory shared with its supervisor.

Without a supervisor, the functions do nothing. Every process writes heartbeats, at every step and
during work between steps, whereas only the first process writes metrics.jsonl.
"""

import faulthandler
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

# Environment variable with the path of the directory, and the files in that directory.
DIRECTORY = "BPTJAX_SUPERVISOR"
BEAT, ERROR, RUN_DIR, STACKS = "beat", "error", "run_dir", "stacks"
# Exit code of a run that its supervisor is to start again with processes that have returned.
AGAIN = 75
# Start of the error of a run that has lost another process.
LOST = "a peer process is lost"
# Minimum size of a file in bytes.
SIZE = 1024


def beat(work: str, step: int | None = None) -> None:
    """Tells the supervisor that this process is alive.

    Args:
      work: description of the work that the process begins or continues.
      step: number of completed optimizer steps; None if the work is not a step.
    """
    record = {"work": work[:100], "step": step, "time": time.monotonic_ns()}
    _write(BEAT, json.dumps(record, ensure_ascii=False))  # Shorter than SIZE.


def record_error(message: str) -> None:
    """Tells the supervisor which error ends this process."""
    _write(ERROR, message)


def record_run_dir(directory: Path) -> None:
    """Tells the supervisor where the log and the checkpoints are."""
    _write(RUN_DIR, str(directory.absolute()))


def dump_stacks_on_signal() -> None:
    """Makes SIGUSR1 write the stacks of all threads to a file for the supervisor, even if no thread
    can run Python code."""
    if directory := os.environ.get(DIRECTORY):
        file = (Path(directory) / STACKS).open("w")
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def _write(name: str, text: str) -> None:
    """Writes a file in place, because a rename may wait for the disk. Pads the text with spaces to
    overwrite a longer previous text."""
    if directory := os.environ.get(DIRECTORY):
        with suppress(OSError):  # The run matters more than its supervision.
            file = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, text.encode(errors="replace").ljust(SIZE), 0)
            finally:
                os.close(file)
