"""A record of the implementations that operations choose while a program is traced."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A chosen implementation.

    Attributes:
      operation: what the implementation computes.
      name: name of the implementation.
      refusals: (name, reason) of each rejected implementation.
    """

    operation: str
    name: str
    refusals: tuple[tuple[str, str], ...]

    def lines(self) -> list[str]:
        """Formats the choice for the log: the implementation, then the rejected ones by reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.refusals:
            reasons.setdefault(reason, []).append(name)
        refused = (f"  not {', '.join(names)}: {reason}" for reason, names in reasons.items())
        return [f"{self.operation}: {self.name}", *refused]


_open_record: ContextVar[list[Choice] | None] = ContextVar("open_record", default=None)


@contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Yields a list of the distinct choices made inside, in order. Operations choose when they are
    traced, so a function that jax has already traced adds none."""
    choices: list[Choice] = []
    token = _open_record.set(choices)
    try:
        yield choices
    finally:
        _open_record.reset(token)


def record(operation: str, name: str, refusals: Mapping[str, str]) -> None:
    """Adds a choice to the open record, if there is one."""
    choices, choice = _open_record.get(), Choice(operation, name, tuple(refusals.items()))
    if choices is not None and choice not in choices:
        choices.append(choice)
