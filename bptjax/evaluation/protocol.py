"""The protocol of a kind of evaluation."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from bptjax.data.tokenizer import Tokenizer
from bptjax.models.decoder import Decoder


class Evaluation(Protocol):
    """A kind of evaluation, with the flags of one call of `bptjax evaluate`; a value of
    `EVALUATIONS`.

    Attributes:
      longest: tokens of the longest text that the model reads; None if the model decides.
    """

    longest: int | None

    @property
    def plot(self) -> Callable[[list[dict[str, Any]], Path, int | None], None] | None:
        """Function that plots the rows to a file, given the trained length in tokens, or None if it
        is unknown. None for an evaluation without a plot."""

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
