"""Renders chat templates in a separate process, whose time and memory are limited.

A template is a program from a checkpoint. transformers runs it in a sandbox that denies access to
files, modules and private attributes, but does not limit time and memory. A single `*` can exhaust
both, in a C call that no thread can interrupt. The kernel can end a process.
"""

import atexit
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from bptjax.run.child_python import PYTHON, python_environment

# Limits of one rendering: seconds of CPU time, bytes of memory beyond the idle process's, and
# characters of text, plus TEXT_FACTOR times the text of the request.
SECONDS: float = 10
MEMORY_BYTES = 2**30
TEXT_CHARACTERS = 2**20
TEXT_FACTOR = 16
# Renderings per request; together they must fit into the memory. A request takes 15 to 50
# microseconds, a rendering 30 or more.
PARTS = 8

# Exit code of the process when it is out of memory.
OUT_OF_MEMORY = 77

# Names by which a template reads the date or draws random values.
CLOCK = re.compile(r"\bstrftime_now\b")
CHANCE = re.compile(r"\|\s*random\b|['\"]random['\"]|\blipsum\b")

# The first `count` messages (None for all), with or without the start of an answer.
Part = tuple[int | None, bool]
# A text, and the character ranges that the template marks with `{% generation %}`.
Text = tuple[str, list[tuple[int, int]]]


class TemplateFault(ChildProcessError):
    """A chat template cannot be parsed, or exceeds its limit of time, memory or text.

    Not a ValueError: the record is not to blame, so `data.bad_records=skip` must not skip it.
    """


class TemplateRefusal(ValueError):
    """A chat template refuses the messages."""


class Renderer:
    """The process that renders, started by the first call of `render`. Shared by threads; ends with
    this process.

    Args:
      seconds: CPU time of one rendering.
    """

    def __init__(self, seconds: float = SECONDS):
        self._seconds, self._lock = seconds, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        parts: Sequence[Part],
        marks: bool,
        now: str | None = None,
    ) -> list[Text]:
        """Returns the text of each part. Random values depend on the other arguments alone, and are
        equal in all parts.

        Args:
          marks: return the ranges that the template marks.
          now: date and time that the template reads, in ISO 8601; None for the present.

        Raises:
          TemplateRefusal: the template refuses a part.
          TemplateFault: the template cannot be parsed or exceeds a limit. The error does not name
            the template's file.
        """
        now = now or datetime.now().isoformat()
        request = [self._seconds, template, list(map(dict, messages)), dict(variables)]
        request += [parts, marks, now]
        # As in transformers, a template sees only the type of a value that JSON cannot represent.
        try:
            sent = json.dumps(request, default=lambda value: f"<{type(value).__name__}>").encode()
        except RecursionError as error:
            raise TemplateRefusal("they are nested too deeply") from error
        with self._lock:
            process = self._started()
            try:
                write(process.stdin.fileno(), sent)
                kind, answer = json.loads(read(process.stdout.fileno()))
            except BaseException as error:
                # After Ctrl-C, the next request would read the answer to the interrupted one.
                self._process = None
                ended = isinstance(error, OSError | EOFError)
                with process:  # Closes the pipes, and waits.
                    if not ended:
                        process.kill()
                if not ended:
                    raise
                raise TemplateFault(self._reason(process.returncode)) from None
        if kind == "fault":
            raise TemplateFault(answer)
        if kind == "refusal":
            raise TemplateRefusal(answer)
        return [(text, [(a, b) for a, b in found]) for text, found in answer]

    def _started(self) -> Any:
        # A forked process must not share the pipes.
        if self._process is None or self._owner != os.getpid():
            # Make the order of sets and the seconds since 1970 (%s) equal in every process.
            fixed = {"PYTHONHASHSEED": "0", "TZ": "UTC"}
            self._process = subprocess.Popen(
                [*PYTHON, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=python_environment() | fixed,
            )
            self._owner = os.getpid()
            atexit.register(_end, self._process, self._owner)
        return self._process

    def _reason(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"takes more than {self._seconds} s for one chat"
        if code == OUT_OF_MEMORY:
            return f"takes more than {MEMORY_BYTES >> 30} GiB of memory for one chat"
        return f"ended the process that renders it (exit code {code})"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        with process:
            process.kill()


def write(pipe: int, data: bytes) -> None:
    """Writes a message, preceded by its length."""
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(pipe, view) :]


def read(pipe: int) -> bytes:
    """Reads a message.

    Raises:
      EOFError: the other process has ended.
    """
    parts, left, header = [], 8, True
    while left:
        part = os.read(pipe, min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
        if header and not left:
            left, parts, header = int.from_bytes(b"".join(parts), "little"), [], False
    return b"".join(parts)


def serve() -> None:
    """Answers requests on stdin until stdin is closed: the main function of the process."""
    import resource

    # Signals to the process group are for the run, which closes stdin when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Ends a rendering that takes too long. libtpu ignores it, and child processes inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.modules["torch"] = None  # pyrefly: ignore[unsupported-operation]  Not needed, and large.
    from transformers.utils import chat_template_utils

    # transformers' `strftime_now` reads the date through this name.
    clock = _Clock()
    vars(chat_template_utils)["datetime"] = clock
    render = chat_template_utils.render_jinja_template
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            data = read(0)
        except EOFError:
            return
        try:
            write(1, json.dumps(_answer(render, clock, data)).encode())
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


class _Clock:
    """A `datetime` whose present is a given date."""

    date = datetime.min

    def now(self) -> datetime:
        return self.date


def _answer(render: Any, clock: _Clock, data: bytes) -> tuple[str, Any]:
    from jinja2 import TemplateSyntaxError

    seconds, template, messages, variables, parts, marks, now = json.loads(data)
    clock.date = datetime.fromisoformat(now)
    seed = json.dumps([template, messages, variables]) if CHANCE.search(template) else None
    most = TEXT_CHARACTERS + TEXT_FACTOR * len(data)
    answers = []
    for count, answer in parts:
        if seed is not None:
            random.seed(seed)
        # Without a handler, the signal makes the kernel end this process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            texts, spans = render(
                conversations=[messages[:count]],
                chat_template=template,
                add_generation_prompt=answer,
                return_assistant_tokens_mask=marks,
                **variables,
            )
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            return "fault", f"is invalid: line {error.lineno}: {error.message}"[:1000]
        except SyntaxError as error:  # From the Python code that jinja generates.
            return "fault", f"is invalid: {error.msg}"
        # A template is a program and may raise any exception.
        except Exception as error:
            return "refusal", str(error)[:1000]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if len(texts[0]) > most:
            return "fault", f"writes more than {most:,} characters for one chat"
        answers.append((texts[0], spans[0] if spans else []))
    return "texts", answers


if __name__ == "__main__":
    serve()
