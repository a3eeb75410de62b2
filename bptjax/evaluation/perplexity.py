"""Perplexity by position in long documents."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from rich.table import Table

from bptjax.data.encode import check_ids
from bptjax.data.landmarks import ignored
from bptjax.data.rows import TokenIds
from bptjax.data.sample import random_order
from bptjax.data.stream import Stream
from bptjax.data.text import Subset, open_documents
from bptjax.data.tokenizer import Tokenizer
from bptjax.evaluation.plots import mark, new_figure
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.ops.labels import IGNORED
from bptjax.ops.loss import linear_cross_entropy
from bptjax.run.output import plural
from bptjax.run.progress import Progress


@partial(jax.jit, static_argnames=("dtype", "execution"))
def _losses(model, tokens, labels, *, dtype, execution):
    hidden, _ = model(tokens, dtype=dtype, execution=execution)
    hidden, cap = model.for_head(hidden), model.config.logits_softcap
    return linear_cross_entropy(
        hidden, model.head_matrix, labels, bias=model.logits_bias, softcap=cap, reduction="none"
    )


def by_position(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Any,
    *,
    length: int,
    buckets: int,
    limit: int,
    dtype: DTypeLike,
    seed: int = 0,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
) -> list[dict]:
    """Measures the loss (nats per token) and the perplexity in `buckets` equal ranges of positions.

    Reads the first `length` tokens of up to `limit` documents, and skips shorter documents. `seed`
    chooses the documents; of streamed documents, the first ones are read.

    Returns:
      One row per range of positions.

    Raises:
      ValueError: no document has `length` tokens.
    """
    sums, seen, longest = np.zeros(length - 1), 0, 0
    total, chosen = limit, documents
    if not isinstance(documents, Stream):
        total = min(limit, len(documents))
        chosen = cast(Any, Subset(documents, random_order(len(documents), seed)))
    with Progress("perplexity by position", total) as progress:
        for document in chosen:
            if isinstance(document, str):
                tokens = tokenizer.encode_prompt(document)
            else:
                tokens = document.ids if isinstance(document, TokenIds) else document
                check_ids(tokens, tokenizer)
            longest = max(longest, len(tokens))
            if len(tokens) < length:
                continue
            batch = {"tokens": tokens[: length - 1], "labels": tokens[1:length]}
            if (landmarks := model.config.landmarks) is not None:
                batch = ignored(landmarks.insert(batch))
            arrays = (jnp.asarray(batch[name][None]) for name in ("tokens", "labels"))
            losses = _losses(model, *arrays, dtype=dtype, execution=execution)[0]
            sums += np.asarray(losses)[batch["labels"] != IGNORED]
            seen += 1
            progress.advance()
            if seen == limit:
                break
    if not seen:
        raise ValueError(
            f"--length={length}: must be at most {longest}, the length of the longest document; "
            "lower it, or give longer documents"
        )
    rows = []
    for bucket in np.array_split(np.arange(length - 1), buckets):
        loss = float(sums[bucket].mean() / seen)
        rows.append(
            dict(
                start=int(bucket[0]) + 1,
                end=int(bucket[-1]) + 1,
                documents=seen,
                loss=loss,
                perplexity=float(np.exp(loss)),
            )
        )
    return rows


def perplexity_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table with one row per range of positions."""
    shown = Table(title=f"Perplexity by position ({plural(rows[0]['documents'], 'document')})")
    for name in ("positions", "loss (nats per token)", "perplexity"):
        shown.add_column(name, justify="right")
    for row in rows:
        positions = f"{row['start']:,} to {row['end']:,}"
        shown.add_row(positions, f"{row['loss']:.4f}", f"{row['perplexity']:.4g}")
    return shown


def plot_perplexity(rows: list[dict[str, Any]], file: Path, trained: int | None) -> None:
    """Plots perplexity against position. A line marks the trained length, in tokens."""
    figure, axes = new_figure()
    edges = [row["start"] for row in rows] + [rows[-1]["end"]]
    axes.stairs([row["perplexity"] for row in rows], edges, baseline=None, linewidth=2)
    axes.set(
        xlabel="position (tokens)",
        ylabel="perplexity",
        title=f"Perplexity by position ({plural(rows[0]['documents'], 'document')})",
    )
    axes.grid(alpha=0.3)
    # A mark far beyond the data would squeeze the plot.
    if trained is not None and trained <= 1.25 * edges[-1]:
        mark(axes, trained, trained)
    figure.savefig(file, dpi=120)


class Perplexity:
    """Perplexity in ranges of positions, over the documents of `--data`."""

    table, plot = staticmethod(perplexity_table), staticmethod(plot_perplexity)

    def __init__(self, args: Namespace):
        self.args, self.longest = args, args.length
        self.documents = open_documents(args.data, text_key=args.text_key or "text")

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.data) and args.length is not None

    def check(self, tokenizer: Tokenizer) -> None:
        pass

    def rows(self, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return by_position(
            model,
            tokenizer,
            self.documents,
            length=self.args.length,
            buckets=self.args.buckets,
            limit=self.args.documents,
            seed=self.args.seed,
            dtype=model.head_matrix.dtype,
        )
