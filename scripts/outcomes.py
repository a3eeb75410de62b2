"""Outcomes of the events of a drill."""

import json
from collections import Counter
from pathlib import Path


class Outcomes:
    """Outcomes of a drill, printed as they occur, because a drill may be stopped.

    Attributes:
      numbers: number of each (event, outcome).
      faults: descriptions of outcomes that must not be.
    """

    def __init__(self, seed: int, file: Path | None):
        """Names the file to which each outcome is appended, as a line of JSON."""
        self._seed, self._file = seed, file
        self.numbers: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []

    def add(self, runs: str, event: str, outcome: str) -> None:
        """Adds the outcome of an event in a kind of runs."""
        self.numbers[event, outcome] += 1
        self._tell({"runs": runs, "event": event, "outcome": outcome})

    def fault(self, text: str) -> None:
        """Adds the description of a fault."""
        self.faults.append(text)
        self._tell({"fault": text})

    def _tell(self, row: dict[str, str]) -> None:
        print(*row.values(), sep=": ", flush=True)
        if self._file:
            with self._file.open("a") as stream:
                stream.write(json.dumps({"seed": self._seed} | row) + "\n")

    def table(self) -> str:
        """Formats the numbers."""
        numbers = sorted(self.numbers.items())
        rows = [f"| {event} | {n} | {outcome} |" for (event, outcome), n in numbers]
        return "\n".join(["| event | number | outcome |", "| --- | --- | --- |", *rows])
