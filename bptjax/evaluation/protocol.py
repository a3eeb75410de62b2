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
    `EVALUATIONS`. `args.model` holds the names of the models. They are measured one after the
    other, the last one first.

    Attributes:
      longest: tokens of the longest text that a model reads; None if the model decides.
    """

    longest: int | None

    @property
    def plot(self) -> Callable[[list[dict[str, Any]], Path, dict[str, int]], None] | None:
        """Function that plots the rows to a file, given the known trained length of each model, in
        tokens. None for an evaluation without a plot."""

    def __init__(self, args: Namespace):
        """Opens the data.

        Raises:
          ValueError, OSError: the data cannot be read.
        """

    @staticmethod
    def asked(args: Namespace) -> bool:
        """Returns whether the flags ask for this evaluation."""
        ...

    def check(self, name: str, tokenizer: Tokenizer) -> None:
        """Checks the flags for a model before any model is loaded.

        Raises:
          ValueError: a flag does not fit the tokenizer.
        """

    def rows(self, name: str, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Returns the measurements of a model, in its dtype.

        Raises:
          ValueError: the data hold nothing to measure.
        """
        ...

    def table(self, rows: list[dict[str, Any]]) -> Table:
        """Returns the rows as a table. Each row has the name of its model, `model`."""
        ...


def by_model(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each model, by the last part of its name if that is unique."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    short = [Path(name).name for name in names]
    labels = short if len(set(short)) == len(names) else names
    return {
        label: [row for row in rows if row["model"] == name]
        for label, name in zip(labels, names, strict=True)
    }


def directory(args: Namespace, name: str) -> Path:
    """Returns the directory of files about one model alone: `args.out`, or `model_N` in it, if
    there are several models."""
    return args.out if len(args.model) == 1 else args.out / f"model_{args.model.index(name) + 1}"
