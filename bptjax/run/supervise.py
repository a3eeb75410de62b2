"""`bptjax train --supervise`: runs training in a child process, and restarts it after a crash, a
lost peer or a hang. The supervisor itself does not import JAX."""

import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from bptjax.run.child_python import python_environment
from bptjax.run.heartbeat import AGAIN, BEAT, DIRECTORY, ERROR, LOST, RUN_DIR, STACKS
from bptjax.run.metrics import append_log
from bptjax.run.output import plural

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit codes after which a restart is pointless: done, bad input, stopped by a signal.
FINAL = (0, 2, *(128 + number for number in SIGNALS))


@dataclass(frozen=True)
class Limits:
    """Patience of a supervisor. Durations are in seconds.

    Attributes:
      restarts: number of restarts without a new checkpoint after which the supervisor gives up;
        twice as many if the last failure was the loss of another process.
      step: duration without a new step after which the process counts as hung, if it also exceeds
        step_factor times the median duration of a step.
      work: duration without a heartbeat after which the process counts as hung during other
        work: loading, compiling, evaluating, saving.
      stop: duration after which a process that a signal has stopped counts as hung.
      stacks: wait for a hung process to write its stacks.
      end: wait after SIGTERM before SIGKILL.
      pause: pause before a restart, for peers and devices to notice the end.
      poll: time between polls of the process.
    """

    restarts: int = 3
    step: float = 120.0
    step_factor: float = 10.0
    work: float = 3600.0
    stop: float = 120.0
    stacks: float = 5.0
    end: float = 30.0
    pause: float = 5.0
    poll: float = 1.0


LIMITS = Limits()


class Watch:
    """Watches the heartbeats of one process, and recognizes a hang.

    Silence is measured in polls without a new sign, so that a suspended machine or a stopped
    supervisor is not mistaken for a hang.

    Attributes:
      silent: seconds since the last sign.
    """

    def __init__(self, shared: Path, limits: Limits):
        self._file, self._limits = shared / BEAT, limits
        self.silent, self._stopped, self._last = 0.0, 0.0, ""
        self._work, self._stepping = "starting", False
        self._step: tuple[int, float] | None = None
        self._seconds: deque[float] = deque(maxlen=101)

    def poll(self, *, stopped: bool = False) -> None:
        """Looks for a new sign, `Limits.poll` seconds after the last look.

        Args:
          stopped: a signal has stopped the process.
        """
        self._stopped = self._stopped + self._limits.poll if stopped else 0.0
        text = _read(self._file)
        try:
            record = json.loads(text) if text != self._last else None
        except ValueError:  # The process is just writing the file.
            return
        if record is None:
            self.silent += self._limits.poll
            return
        self.silent, self._last = 0.0, text
        self._work, self._stepping = record["work"], record["step"] is not None
        if self._stepping:
            now = record["step"], record["time"] / 1e9
            if self._step and now[0] > self._step[0]:
                self._seconds.append((now[1] - self._step[1]) / (now[0] - self._step[0]))
            self._step = now

    @property
    def limit(self) -> float:
        """Seconds of silence that count as a hang."""
        if not (self._stepping and self._seconds):
            return self._limits.work
        return max(self._limits.step, self._limits.step_factor * statistics.median(self._seconds))

    @property
    def hang(self) -> str:
        """Description of the hang; empty if there is none."""
        if self._stopped >= self._limits.stop:
            return (
                f"a process on {socket.gethostname()} was stopped by a signal for "
                f"{self._stopped:,.0f} s while {self._work}"
            )
        if self.silent < self.limit:
            return ""
        if self._stepping and self._step:
            return f"no new step for {self.silent:,.0f} s after step {self._step[0]}"
        return f"no heartbeat for {self.silent:,.0f} s while {self._work}"


class Supervisor:
    """Starts a command again and again, until a restart would not help."""

    def __init__(self, command: Sequence[str], shared: Path, limits: Limits):
        self._command, self._shared, self._limits = command, shared, limits
        self._child: subprocess.Popen[bytes] | None = None
        self._signal = 0

    def run(self) -> int:
        """Returns the exit code of the last child; 128 + n if signal n killed it."""
        failures, newest = 0, -1
        while True:
            code, reason = self._run_once()
            if self._signal or code in FINAL:
                return code
            if code == AGAIN:
                continue
            if (now := self._newest()) > newest:
                failures, newest = 0, now
            # A process that fails gives up before the others, which may go on without it.
            most = self._limits.restarts * (2 if LOST in reason else 1)
            if failures >= most:
                restarts = plural(failures, "restart")
                self._say(f"{reason}; not restarted, as {restarts} brought no new checkpoint")
                return code
            failures += 1
            self._say(
                f"restarting after {reason} (restart {failures} of {most} without a new checkpoint)"
            )
            self._sleep(self._limits.pause)
            if self._signal:
                return 128 + self._signal

    def forward(self, number: int, frame: object) -> None:
        """Forwards a signal to the child, and prevents further restarts."""
        self._signal = number
        if self._child is not None:
            self._child.send_signal(number)

    def _run_once(self) -> tuple[int, str]:
        """Runs the command. Returns its exit code and, if it failed, the reason."""
        for name in (BEAT, ERROR, STACKS):
            (self._shared / name).unlink(missing_ok=True)
        watch, hang = Watch(self._shared, self._limits), ""
        # A separate process group, so that Ctrl-C reaches the child only once, through `forward`.
        self._child = subprocess.Popen(
            self._command,
            env=python_environment() | {DIRECTORY: str(self._shared)},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        if self._signal:  # The signal came before the child.
            self._child.send_signal(self._signal)
        while not self._ended(self._limits.poll):
            watch.poll(stopped=_is_stopped(self._child.pid))
            if not self._signal and (hang := watch.hang):
                hang += self._end_hung()
                break
        code = self._child.wait()
        self._child = None
        if hang and code:
            return 1, hang
        if code < 0:
            # Most real-time signals have no name.
            names = {each.value: each.name for each in signal.Signals}
            name = names.get(-code, f"signal {-code}")
            if code == -signal.SIGKILL:
                # Only root can read the kernel's log, which would tell for certain.
                name += ", probably by the kernel because the host ran out of memory"
            return 128 - code, f"the run was killed by {name}"
        error = _read(self._shared / ERROR)
        return code, f"exit code {code}" + (f": {error}" if error else "")

    def _end_hung(self) -> str:
        """Saves the stacks of the child and ends it. Returns where the stacks are."""
        assert self._child is not None
        self._child.send_signal(signal.SIGUSR1)
        waited, stacks = 0.0, ""
        while waited < self._limits.stacks and not self._ended(self._limits.poll):
            waited += self._limits.poll
            before, stacks = stacks, _read(self._shared / STACKS)
            if stacks and stacks == before:
                break
        self._child.terminate()
        if not self._ended(self._limits.end):
            self._child.kill()
        directory = _read(self._shared / RUN_DIR)
        if not stacks or not directory:
            return ", without stacks"
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{socket.gethostname()}-{self._child.pid}.txt"
        file = Path(directory) / "stacks" / name
        try:
            file.parent.mkdir(exist_ok=True)
            file.write_text(stacks)
        except OSError as error:
            return f", stacks not saved: {error}"
        return f", stacks in {file}"

    def _ended(self, seconds: float) -> bool:
        """Waits up to `seconds` for the end of the child. Returns whether it has ended."""
        assert self._child is not None
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._signal and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._limits.poll))

    def _newest(self) -> int:
        """Returns the step of the newest checkpoint; -1 if there is none."""
        directory = _read(self._shared / RUN_DIR)
        names = [path.name for path in Path(directory, "checkpoints").glob("*") if directory]
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def _say(self, line: str) -> None:
        line = f"supervisor: {line}"
        print(line, file=sys.stderr, flush=True)
        if directory := _read(self._shared / RUN_DIR):
            with suppress(OSError):
                append_log(Path(directory), line)


def supervise(command: Sequence[str], limits: Limits = LIMITS) -> int:
    """Runs a training command, and restarts it after a crash, a lost peer or a hang. Forwards
    SIGINT, SIGTERM and SIGHUP. Returns the command's exit code; 128 + n if signal n killed it."""
    with TemporaryDirectory(prefix="bptjax-supervisor-") as shared:
        supervisor = Supervisor(command, Path(shared), limits)
        with _handled(supervisor):
            return supervisor.run()


@contextmanager
def _handled(supervisor: Supervisor) -> Iterator[None]:
    before = {kind: signal.getsignal(kind) for kind in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # Ignored by nohup; the run ignores it too.
        del before[signal.SIGHUP]
    for kind in before:
        signal.signal(kind, supervisor.forward)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _is_stopped(pid: int) -> bool:
    """Returns whether a signal such as SIGSTOP has stopped a process; False where there is no
    /proc."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2][1:2] == "T"


def _read(file: Path) -> str:
    """Returns the text of a file; empty if there is none."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
