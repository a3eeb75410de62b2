"""Reads damaged input: configs, and files of models, adapters, tokenizers, templates and records.

    python scripts/fuzz.py --kind index --number 10000 --seed 0

A case is one file, changed at random places. It must be accepted, or refused with one line and exit
code 2. Prints a row of counts, and the faults: any other outcome. Exits with 1 if there is one.
A case depends on kind, seed and its number only. `--save FILE` adds the faults to a corpus, which
`--corpus FILE` reads again.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_kinds import KINDS, Kind
from mutations import changed

from bptjax.cli.run_command import run_command

# Seconds that a case may take, and bytes of memory beyond the start.
HANG_S, MEMORY_BYTES = 60, 2**33


class Hang(BaseException):
    """A case has taken too long."""


@dataclass
class Counts:
    """Outcomes of the cases of a kind.

    Attributes:
      hang_s: seconds after which a case counts as a hang.
    """

    hang_s: int = HANG_S
    accepted: int = 0
    refused: int = 0
    faults: list[dict[str, str]] = field(default_factory=list)
    slowest: float = 0.0

    def run(self, kind: Kind, name: str, file: str, content: bytes) -> None:
        """Writes the file, reads it, counts the outcome, and restores the file."""
        path = kind.directory / file
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)

        def command(_: list[str]) -> int:
            kind.check()
            return 0

        start, errors = time.monotonic(), io.StringIO()
        signal.alarm(self.hang_s)
        try:
            with contextlib.redirect_stderr(errors):
                code, said = run_command(command, []), ""
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            code, said = -1, f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.alarm(0)
            if before is None:
                path.unlink()
            else:
                path.write_bytes(before)
        seconds = time.monotonic() - start
        self.slowest = max(self.slowest, seconds)
        # The alarm cannot interrupt a library's code.
        if seconds > self.hang_s:
            code, said = -1, f"Hang: {seconds:.0f} s"
        self.accepted += code == 0
        self.refused += code == 2
        lines = errors.getvalue().splitlines()
        if code not in (0, 2) or code == 2 and sum(x.startswith("error: ") for x in lines) != 1:
            said = said or f"exit code {code}: {errors.getvalue()[:200]}"
            case = {"kind": name, "file": file, "content": content.decode("latin-1")}
            self.faults.append(case | {"error": said})


def fuzz(name: str, number: int, seed: int, seconds: float = float("inf")) -> tuple[Counts, int]:
    """Runs cases of a kind. Returns the counts, and the number of cases run."""
    counts, end = Counts(), time.monotonic() + seconds
    with working(name) as kind:
        for i in range(number):
            if time.monotonic() > end:
                return counts, i
            rng = random.Random(f"{name}/{seed}/{i}")
            file = rng.choice(sorted(kind.files))
            head = kind.head if kind.binary and not file.endswith(".json") else None
            content = changed(rng.choice(kind.files[file]), rng, file, head)
            counts.run(kind, name, file, content)
    return counts, number


def replay(cases: list[dict[str, str]], hang_s: int = HANG_S) -> Counts:
    """Runs the cases of a corpus."""
    counts = Counts(hang_s)
    for name in dict.fromkeys(case["kind"] for case in cases):
        with working(name) as kind:
            for case in cases:
                if case["kind"] == name:
                    counts.run(kind, name, case["file"], case["content"].encode("latin-1"))
    return counts


@contextlib.contextmanager
def working(name: str) -> Iterator[Kind]:
    """Yields a kind in a temporary directory."""

    def hang(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory(prefix="bptjax-fuzz-") as directory:
        kind = KINDS[name](Path(directory))
        for file, contents in kind.files.items():
            (kind.directory / file).write_bytes(contents[0])
        yield kind
    signal.signal(signal.SIGALRM, before)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, help="kind of input")
    parser.add_argument("--number", type=int, default=1000, help="number of cases")
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which none starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--save", type=Path, help="corpus to which faults are added")
    parser.add_argument("--out", type=Path, help="file to which the row of counts is appended")
    parser.add_argument("--corpus", type=Path, help="corpus to run in place of new cases")
    args = parser.parse_args(argv)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    if args.corpus:
        counts = replay(json.loads(args.corpus.read_text()))
        number = counts.accepted + counts.refused + len(counts.faults)
    else:
        counts, number = fuzz(args.kind, args.number, args.seed, args.seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = dict(kind=args.kind or "corpus", seed=args.seed, cases=number)
    row |= dict(accepted=counts.accepted, refused=counts.refused, faults=len(counts.faults))
    row |= dict(slowest_s=round(counts.slowest, 1), peak_gib=round(peak, 2))
    print(json.dumps(row))
    if args.out:
        with args.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    kinds: dict[str, dict[str, str]] = {}
    for fault in counts.faults:
        kinds.setdefault(fault["error"][:60], fault)
    for fault in kinds.values():
        print(f"fault: {fault['file']}: {fault['error']}", file=sys.stderr)
    if args.save and kinds:
        old = json.loads(args.save.read_text()) if args.save.exists() else []
        args.save.write_text(json.dumps([*old, *kinds.values()], indent=1) + "\n")
    return 1 if counts.faults else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
