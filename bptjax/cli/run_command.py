"""Runs a command in this process: one-line errors, exit codes, interrupts."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from bptjax.run.heartbeat import record_error
from bptjax.run.output import describe, full_disk

# CUDA's names for errors after which a process can no longer use its GPU.
LOST_DEVICE = re.compile(
    "CUDA_ERROR_(ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR|DEVICE_UNAVAILABLE|"
    "ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|LAUNCH_FAILED|LAUNCH_TIMEOUT|UNKNOWN)"
)
INSTALL = "pip install -e . (with a GPU: -e '.[gpu]')"


def run_command(command: Callable[[list[str]], int], argv: list[str] | None) -> int:
    """Runs `command(argv)` and returns its exit code. Prints an error as one line on stderr.

    With `--debug` in `argv`, errors are raised instead. By default, `argv` is the process's.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = command(argv)
        except SystemExit as done:  # argparse has printed --help or --version.
            code = int(done.code or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if full_disk(error):
            return _fail(error, 1, argv)
        if isinstance(error, ValueError | NotImplementedError | OSError):
            return _fail(error, 2, argv)
        if isinstance(error, RuntimeError | MemoryError):
            return _fail(_explained(error), 1, argv)
        # An import that fails in bptjax itself is a bug.
        if isinstance(error, ImportError) and (error.name or "").split(".")[0] != "bptjax":
            missing = ImportError(f"{error}; {INSTALL}")
            missing.__cause__ = error
            return _fail(missing, 2, argv)
        raise


def end_imports_at_interrupts() -> None:
    """Lets Ctrl-C end the process at once during imports, when an extension may lose or replace the
    exception that Python would raise."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)


def _explained(error: Exception) -> Exception:
    """Explains errors of a host out of memory or a failed GPU; returns other errors unchanged."""
    text = " ".join(str(error).split())
    message = ""
    if isinstance(error, MemoryError):
        text = text and f" ({text})"
        message = f"the host is out of memory{text}; free some memory, or use another host"
    elif match := LOST_DEVICE.search(text):
        message = (
            f"a GPU has failed ({text[match.start() :][:200]}); start the same command again; if "
            "it fails again, look for lines with Xid in the kernel's log, and exclude the GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
    if not message:
        return error
    explained = RuntimeError(message)
    explained.__cause__ = error
    return explained


def _fail(error: Exception, code: int, argv: list[str]) -> int:
    if "--debug" in argv:
        raise error
    message = describe(error)
    record_error(message)
    print(f"error: {message}", file=sys.stderr)
    return code
