"""Perplexity by position in long documents."""

from argparse import Namespace
from collections.abc import Callable
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
from bptjax.evaluation.plots import finish, mark_trained, new_figure
from bptjax.evaluation.protocol import by_model
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.ops.labels import IGNORED
from bptjax.ops.loss import linear_cross_entropy
from bptjax.run.output import plural
from bptjax.run.progress import Progress
from bptjax.tasks.scores import bootstrap

# Log-probabilities (nats) that choose the tokens of LongPPL, from the paper: α and β.
LEAST_GAIN, LEAST_LOG_PROB = 2.0, -2.0
# Ratio of perplexities beyond which their plot has a logarithmic axis.
LOG_SCALE = 20


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
    short_context: int | None = None,
    need: dict[bytes, np.ndarray] | None = None,
    seed: int = 0,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
) -> list[dict]:
    """Measures the loss (nats per token) and the perplexity in `buckets` equal ranges of positions.

    Reads the first `length` tokens of up to `limit` documents, and skips shorter documents. `seed`
    chooses the documents; of streamed documents, the first ones are read.

    Args:
      short_context: also measures the loss of the same tokens when the model reads only this number
        of tokens before each, or up to a quarter more; and the loss, in full context, of the tokens
        that need the long context (`needs_long`).
      need: these tokens, by the bytes of a document's token ids, as another model chose them.
        Receives those of documents that it lacks.

    Returns:
      One row per range of positions. Of several documents, with the 95 % interval of the
      perplexity from `low` to `high`, by a bootstrap over documents, and that of its ratio to the
      perplexity with the short context from `ratio_low` to `ratio_high`.

    Raises:
      ValueError: no document has `length` tokens.
    """
    names = ["", "short_"][: 1 if short_context is None else 2]
    ranges, longest = np.array_split(np.arange(length - 1), buckets), 0
    # The mean loss of each document in each range.
    means: dict[str, list[list[float]]] = {name: [] for name in names}
    # Of the tokens that need the long context: their number, and the sum of their losses.
    needing = np.zeros((2, length - 1))
    need = {} if need is None else need
    total, chosen = limit, documents
    if not isinstance(documents, Stream):
        total = min(limit, len(documents))
        chosen = cast(Any, Subset(documents, random_order(len(documents), seed)))
    landmarks = model.config.landmarks

    def losses(tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns the losses [B, T] of tokens [B, T]."""
        rows = [{"tokens": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]
        if landmarks is not None:
            rows = [ignored(landmarks.insert(row)) for row in rows]
        batch = {name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels")}
        arrays = (jnp.asarray(batch[name]) for name in ("tokens", "labels"))
        found = np.asarray(_losses(model, *arrays, dtype=dtype, execution=execution))
        return np.stack(
            [row[at != IGNORED] for row, at in zip(found, batch["labels"], strict=True)]
        )

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
            tokens, labels = tokens[: length - 1], tokens[1:length]
            found = {"": (whole := losses(tokens[None], labels[None])[0])}
            if short_context is not None:
                found["short_"] = short = _in_windows(losses, tokens, labels, short_context)
                needed = need.setdefault(tokens.tobytes(), needs_long(whole, short))
                needing += needed, needed * whole
            for name, each in found.items():
                means[name].append([float(each[at].mean()) for at in ranges])
            progress.advance()
            if len(means[""]) == limit:
                break
    if not means[""]:
        raise ValueError(
            f"--perplexity={length}: must be at most {longest}, the length of the longest "
            "document; lower it, or give longer documents"
        )
    rows = []
    for i, at in enumerate(ranges):
        row: dict[str, Any] = dict(start=int(at[0]) + 1, end=int(at[-1]) + 1)
        row["documents"] = len(means[""])
        losses_of = {name: np.array(each)[:, i] for name, each in means.items()}
        for name, each in losses_of.items():
            loss = float(each.mean())
            row |= {f"{name}loss": loss, f"{name}perplexity": float(np.exp(loss))}
        row |= _interval("", losses_of[""])
        if short_context is not None:
            row |= _interval("ratio_", losses_of[""] - losses_of["short_"])
            count, loss = needing[:, at].sum(1).tolist()
            row |= dict(short_context=short_context, long_tokens=int(count))
            row["long_loss"] = loss / count if count else None
        rows.append(row)
    return rows


def _interval(name: str, losses: np.ndarray) -> dict[str, float]:
    """Returns the ends of the 95 % interval of the exponential of the mean, given the means of
    documents; of a single document, none."""
    if len(losses) == 1:
        return {}
    low, high = (float(np.exp(end)) for end in bootstrap(losses, seed=0))
    return {f"{name}low": low, f"{name}high": high}


def needs_long(loss: np.ndarray, short_loss: np.ndarray) -> np.ndarray:
    """Returns whether each token needs the long context, given its losses (nats) in the full
    context and in a short one: the full context raises its log-probability by more than 2, to more
    than -2.

    The perplexity of these tokens is LongPPL: Fang et al. 2024, https://arxiv.org/abs/2410.23771.
    """
    return (short_loss - loss > LEAST_GAIN) & (-loss > LEAST_LOG_PROB)


def _in_windows(
    losses: Callable[[np.ndarray, np.ndarray], np.ndarray],
    tokens: np.ndarray,
    labels: np.ndarray,
    context: int,
) -> np.ndarray:
    """Returns the losses [T] of tokens [T], each computed from at most 5/4 of `context` tokens.

    Windows overlap by `context` tokens, and only the labels after these count.
    """
    step = max(context // 4, 1)
    width, T = context + step, len(tokens)
    if width >= T:
        return losses(tokens[None], labels[None])[0]
    starts = np.arange(0, T - width + step, step)
    # The last window ends with the document, and repeats labels of the one before it.
    starts[-1] = T - width
    found = np.empty(T, np.float32)
    together = max(T // width, 1)
    for first in range(0, len(starts), together):
        # A smaller last batch would be compiled again.
        chosen = starts[np.minimum(np.arange(first, first + together), len(starts) - 1)]
        at = chosen[:, None] + np.arange(width)
        for start, row in zip(chosen, losses(tokens[at], labels[at]), strict=True):
            counted = context if start else 0
            found[start + counted : start + width] = row[counted:]
    return found


def perplexity_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table with one row per range of positions."""
    shown, models = Table(title=_title(rows)), by_model(rows)
    columns = ["positions", "loss (nats per token)", "perplexity"]
    if short := rows[0].get("short_context"):
        columns += [f"with the last {short:,} tokens only", "ratio"]
    for name in columns:
        shown.add_column(name, justify="right", overflow="fold")
    if len(models) > 1:
        shown.add_column("model", overflow="fold")
    for together in zip(*models.values(), strict=True):
        for label, row in zip(models, together, strict=True):
            cells = [f"{row['start']:,} to {row['end']:,}", f"{row['loss']:.4f}"]
            cells.append(f"{row['perplexity']:.4g}" + _ends(row, "", ".4g"))
            if short:
                ratio = row["perplexity"] / row["short_perplexity"]
                cells.append(f"{row['short_perplexity']:.4g}")
                cells.append(f"{ratio:.3f}" + _ends(row, "ratio_", ".3f"))
            shown.add_row(*cells, *([label] if len(models) > 1 else []))
    if short:
        lines = {label: _long_perplexity(some) for label, some in models.items()}
        several = (f"{label}: {line}" for label, line in lines.items())
        shown.caption = "\n".join(several if len(models) > 1 else lines.values())
    return shown


def _ends(row: dict[str, Any], name: str, form: str) -> str:
    """Returns a line of an interval, if the row has it; rows of earlier versions do not."""
    ends = [format(row[key], form) for key in (f"{name}low", f"{name}high") if key in row]
    return "\n" * bool(ends) + "–".join(ends)


def _title(rows: list[dict[str, Any]]) -> str:
    counts = sorted({row["documents"] for row in rows})
    return f"Perplexity by position ({plural(counts[-1], 'document')})"


def _long_perplexity(rows: list[dict[str, Any]]) -> str:
    """Returns a line about the tokens of all ranges that need the long context."""
    count = sum(row["long_tokens"] for row in rows)
    share = count / sum((row["end"] - row["start"] + 1) * row["documents"] for row in rows)
    text = f"LongPPL, of {plural(count, 'token')} ({share:.2%}) that need the long context: "
    if not count:
        return text + "none"
    loss = sum(row["long_tokens"] * (row["long_loss"] or 0) for row in rows) / count
    return text + f"{np.exp(loss):.4g}"


def plot_perplexity(rows: list[dict[str, Any]], file: Path, trained: dict[str, int]) -> None:
    """Plots perplexity against position, for each model."""
    curves = len(by_model(rows)) * (2 if rows[0].get("short_context") else 1)
    figure, (axes,) = new_figure(height=3.8 + 0.3 * curves)
    draw_perplexity(axes, rows, trained)
    figure.savefig(file, dpi=120)


def draw_perplexity(axes: Any, rows: list[dict[str, Any]], trained: dict[str, int]) -> None:
    """Draws the perplexity of each model against the position. Lines mark trained lengths, in
    tokens."""
    short, models = rows[0].get("short_context"), by_model(rows)
    (ranges, *_) = models.values()
    edges = [row["start"] for row in ranges] + [ranges[-1]["end"]]
    how: dict[str, Any] = dict(baseline=None, linewidth=2)
    for i, (label, some) in enumerate(models.items()):
        names = [label] if len(models) > 1 else []
        whole = axes.stairs([row["perplexity"] for row in some], edges, color=f"C{i}", **how)
        whole.set_label(", ".join(names + ["full context"] * bool(short)))
        if short:
            dashed = dict(label=", ".join([*names, f"last {short:,} tokens only"]), linestyle="--")
            values = [row["short_perplexity"] for row in some]
            axes.stairs(values, edges, color=f"C{i}", **dashed, **how)
        mark_trained(axes, trained.get(some[0]["model"]), edges[-1], names, f"C{i}")
    axes.set(xlabel="position (tokens)", ylabel="perplexity", title=_title(rows))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    values = [row["perplexity"] for row in rows]
    if max(values) > LOG_SCALE * min(values):
        axes.set_yscale("log")
    finish(axes)


class Perplexity:
    """Perplexity in ranges of positions, over the documents of `--data`. The last model chooses the
    tokens that need the long context, also for models with the same token ids."""

    table, plot = staticmethod(perplexity_table), staticmethod(plot_perplexity)

    def __init__(self, args: Namespace):
        self.args, self.longest = args, args.perplexity
        self.documents = open_documents(args.data, text_key=args.text_key or "text")
        self.need: dict[bytes, np.ndarray] = {}

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.data) and args.perplexity is not None

    def check(self, name: str, tokenizer: Tokenizer) -> None:
        pass

    def rows(self, name: str, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return by_position(
            model,
            tokenizer,
            self.documents,
            length=self.args.perplexity,
            buckets=self.args.buckets,
            limit=self.args.documents,
            short_context=self.args.short_context,
            need=self.need,
            seed=self.args.seed,
            dtype=model.head_matrix.dtype,
        )
