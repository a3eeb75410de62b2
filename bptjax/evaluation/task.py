"""The protocol of a kind of evaluation."""

from argparse import Namespace
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from bptjax.data.tokenizer import Tokenizer
from bptjax.models.decoder import Decoder


class Task(Protocol):
    """A kind of evaluation, with the flags of one call of `bptjax evaluate`; a value of `TASKS`.

    Attributes:
      longest: tokens of the longest text that the model reads.
    """

    longest: int

    def __init__(self, args: Namespace):
        """Opens the data.

        Raises:
          ValueError, OSError: the data cannot be read.
        """

    @staticmethod
    def asked(args: Namespace) -> bool:
        """Returns whether the flags ask for this evaluation."""
        ...

    def check(self, tokenizer: Tokenizer) -> None:
        """Checks the flags before the model is loaded.

        Raises:
          ValueError: a flag does not fit the tokenizer.
        """

    def rows(self, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Returns the measurements, in the dtype of the model.

        Raises:
          ValueError: the data hold nothing to measure.
        """
        ...

    def table(self, rows: list[dict[str, Any]]) -> Table:
        """Returns the rows as a table."""
        ...

    def plot(self, rows: list[dict[str, Any]], file: Path, trained: int | None) -> None:
        """Plots the rows. `trained` is the trained length in tokens, or None if unknown."""
        ...
