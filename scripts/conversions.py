"""Conversions of models and adapters that are killed or interrupted, or whose disk fails."""

import shutil
import signal
import time
from pathlib import Path
from random import Random

from disturbances import NEVER, Started, can_mount, fork
from outcomes import Outcomes

# Exit codes of a disturbed conversion that does not end before.
CODES = {
    "kill": (-signal.SIGKILL,),
    "": (-signal.SIGKILL,),
    "interrupt": (130,),
    "terminate": (-signal.SIGTERM,),
    "full": (1,),
    "read-only": (1, 2),
}


class Conversions:
    """Conversions of a run with adapters that are disturbed: the output is complete or absent, and
    the next call removes what is left."""

    EVENTS = {
        "SIGKILL of a conversion at a file operation": "kill",
        "SIGKILL of a conversion at a random moment": "",
        "Ctrl-C of a conversion": "interrupt",
        "SIGTERM to a conversion": "terminate",
        "full disk of a conversion": "full",
        "read-only disk of a conversion": "read-only",
    }

    def __init__(self, run: Path, base: Path, rng: Random, outcomes: Outcomes):
        """Takes a run with adapters, and their base model."""
        self.directory, self.rng, self.outcomes = run.parent / "converted", rng, outcomes
        self.events = dict(self.EVENTS)
        if not can_mount():
            del self.events["read-only disk of a conversion"]
        ours = run.parent / "ours"
        self.sources = {"export-adapter": run, "merge-adapter": run, "hf-to-bptjax": base}
        self.sources["bptjax-to-hf"] = ours
        self.wanted: dict[str, dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        for way in self.sources:
            begin = time.monotonic()
            code, lines = self.convert(way)
            if code or lines:
                raise RuntimeError(f"{way} failed: {lines}")
            self.wanted[way], self.seconds[way] = self.files(), time.monotonic() - begin
            if way == "hf-to-bptjax":
                (self.directory / "out").rename(ours)
            shutil.rmtree(self.directory)

    def convert(
        self, way: str, kind: str = "", at: int = NEVER, size: int = 0, after: float | None = None
    ) -> tuple[int, list[str]]:
        """Returns the exit code and the errors of a conversion, killed after some seconds."""
        argv = [way, str(self.sources[way]), str(self.directory / "out")]
        process, pipe = fork("bptjax.cli.convert", argv, (str(self.directory),), {}, kind, at, size)
        process.join(after)
        if process.exitcode is None:
            process.kill()
        codes, lines = Started([process], [pipe], 0, False).finish()
        return codes[0], lines[0]

    def files(self) -> dict[str, bytes]:
        """Returns the content of all files, and the names of empty directories."""
        found = sorted(self.directory.rglob("*"))
        return {str(x.relative_to(self.directory)): x.read_bytes() for x in found if x.is_file()}

    def one_run(self, number: int) -> None:
        """Disturbs a conversion, and repeats it."""
        rng = self.rng
        event, way = rng.choice(list(self.events)), rng.choice(list(self.sources))
        kind = self.events[event]
        after = None if kind else rng.random() * self.seconds[way]
        self.directory.mkdir(exist_ok=True)
        size = rng.choice([0, 500, 3000])
        code, lines = self.convert(way, kind, rng.randrange(1, 60), size, after)
        found, whole = self.files(), (self.directory / "out").exists()
        wrong = code not in (0, *CODES[kind])
        wrong |= len(lines) != (code in (1, 2)) or whole and found != self.wanted[way]
        wrong |= code in (0, 1, 2) and whole != (code == 0)
        if whole:
            shutil.rmtree(self.directory / "out")
        again = self.convert(way)
        outcome = "complete" if whole else "absent"
        outcome = f"output {outcome}; the next call equal"
        if wrong or again != (0, []) or self.files() != self.wanted[way]:
            outcome = "FAULT"
            text = f"{event}, {way}: {code}, {lines}, {sorted(found)}, then {again}"
            self.outcomes.fault(text)
        self.outcomes.add("conversions", event, outcome)
        shutil.rmtree(self.directory)
