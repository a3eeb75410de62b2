"""Passkey retrieval by depth and length. Mohtashami & Jaggi 2023, arXiv 2305.16300, section 4.2."""

import re
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from rich.table import Table

from bptjax.data.tokenizer import Tokenizer
from bptjax.evaluation.plots import mark, new_figure
from bptjax.models.decoder import Decoder
from bptjax.models.generation import continuations
from bptjax.models.sampling import Sampling
from bptjax.run.progress import Progress

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
KEY = "The pass key is {0}. Remember it. {0} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"


def passkey_prompt(tokenizer: Tokenizer, length: int, depth: float, key: int) -> np.ndarray:
    """Returns a prompt of filler text with the key at `depth` (0 at the start, 1 at the end) and
    the question at the end. Prompt and answer together have up to `length` tokens.

    Raises:
      ValueError: `length` is too short for key and question.
    """

    def prompt(fillers):
        # Tokenize the joined text, because some tokenizers put a space before every text.
        before = round(fillers * depth)
        parts = INTRODUCTION, FILLER * before, KEY.format(key), FILLER * (fillers - before)
        return tokenizer.encode_prompt("".join(parts) + QUESTION)

    limit = length - answer_room(tokenizer)
    shortest, filler = len(prompt(1)), len(prompt(2)) - len(prompt(1))
    fillers = 1 + (limit - shortest) // filler
    if fillers < 1:
        raise ValueError(
            f"--passkey_lengths={length}: must be at least {shortest + length - limit} tokens, "
            "the length of a prompt with a pass key"
        )
    while len(ids := prompt(fillers)) > limit:
        fillers -= 1
    return ids


def answer_room(tokenizer: Tokenizer) -> int:
    """Returns the largest number of tokens in an answer."""
    return 1 + max(len(tokenizer.encode(f" {key}")) for key in (10_000, 55_555, 99_999))


def passkey(
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    lengths: list[int],
    depths: list[float],
    trials: int,
    seed: int,
    dtype: DTypeLike,
) -> list[dict]:
    """Returns one row per length (tokens) and depth, with the fraction of keys that the model
    finds."""
    rng, new_tokens, rows = np.random.default_rng(seed), answer_room(tokenizer), []
    with Progress("pass keys", sum(lengths) * len(depths) * trials) as progress:
        for length, depth in product(lengths, depths):
            progress.describe(f"pass keys, {length:,} tokens, depth {depth:g}")
            correct = 0
            for key in rng.integers(10_000, 100_000, trials).tolist():
                prompt = passkey_prompt(tokenizer, length, depth, key)
                *_, (text,) = continuations(
                    model,
                    tokenizer,
                    [prompt],
                    new_tokens=new_tokens,
                    sampling=Sampling(temperature=0.0),
                    dtype=dtype,
                )
                numbers = re.findall(r"\d+", text)
                correct += bool(numbers) and numbers[0] == str(key)
                progress.advance(length)
            rows.append(dict(length=length, depth=depth, trials=trials, accuracy=correct / trials))
    return rows


def passkey_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of found and hidden keys by length and depth. The longer axis is vertical."""
    title = "Pass keys found, by prompt length (tokens) and depth of the key"
    shown = Table(title=title, min_width=min(len(title) + 4, 80))
    lengths, depths, cells = _grid(rows)
    columns, lines = [f"{n:,}" for n in lengths], [f"{d:g}" for d in depths]
    corner = "depth \\ tokens"
    if len(lengths) > len(depths):
        columns, lines, corner = lines, columns, "tokens \\ depth"
        cells = {(i, j): text for (j, i), text in cells.items()}
    for name in (corner, *columns):
        shown.add_column(name, justify="right")
    for i, line in enumerate(lines):
        shown.add_row(line, *(cells[i, j] for j in range(len(columns))))
    return shown


def _grid(rows: list[dict[str, Any]]) -> tuple[list[int], list[float], dict]:
    """Returns lengths, depths, and "found/hidden" by (index of depth, index of length)."""
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    cells = {
        (depths.index(row["depth"]), lengths.index(row["length"])): (
            f"{round(row['accuracy'] * row['trials'])}/{row['trials']}"
        )
        for row in rows
    }
    return lengths, depths, cells


def plot_passkey(rows: list[dict[str, Any]], file: Path, trained: int | None) -> None:
    """Plots keys found by length and depth. A line separates lengths beyond the trained length."""
    lengths, depths, cells = _grid(rows)
    figure, axes = new_figure(max(6.0, 0.8 * len(lengths) + 2.5))
    grid = np.zeros((len(depths), len(lengths)))
    for row in rows:
        grid[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (i, j), text in cells.items():
        axes.text(j, i, text, ha="center", va="center", fontsize="small")
    axes.set(
        xlabel="prompt length (tokens)",
        ylabel="depth of the key (0 start, 1 end)",
        title="Pass keys found",
    )
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:.2f}" for d in depths])
    figure.colorbar(image, label="share of keys found")
    within = sum(n <= trained for n in lengths) if trained is not None else len(lengths)
    if trained is not None and within < len(lengths):
        mark(axes, within - 0.5, trained)
    figure.savefig(file, dpi=120)


class PassKey:
    """The share of keys that the model finds in prompts of `--passkey_lengths`."""

    table, plot = staticmethod(passkey_table), staticmethod(plot_passkey)

    def __init__(self, args: Namespace):
        self.args, self.longest = args, max(args.passkey_lengths)

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.passkey_lengths)

    def check(self, tokenizer: Tokenizer) -> None:
        for length in self.args.passkey_lengths:
            passkey_prompt(tokenizer, length, 0.0, 99_999)

    def rows(self, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return passkey(
            model,
            tokenizer,
            lengths=self.args.passkey_lengths,
            depths=self.args.depths,
            trials=self.args.trials,
            seed=self.args.seed,
            dtype=model.head_matrix.dtype,
        )
