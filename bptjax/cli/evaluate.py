"""`bptjax evaluate`: measures a model on long text. Perplexity by position, and pass-key retrieval
by depth and length, as tables, rows and plots.
"""

import json
import os
import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from rich.console import Console
from rich.table import Table

from bptjax.cli.evaluate_report import (
    passkey_table,
    perplexity_table,
    plot_passkey,
    plot_perplexity,
)
from bptjax.cli.main import launch, warn
from bptjax.data.encode import check_ids
from bptjax.data.files import TokenIds
from bptjax.data.landmarks import ignored
from bptjax.data.sample import random_order
from bptjax.data.stream import Stream
from bptjax.data.text import Subset, open_documents
from bptjax.data.tokenizer import Tokenizer
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.generation import continuations, length_warning
from bptjax.models.sampling import Sampling
from bptjax.ops.loss import linear_cross_entropy
from bptjax.parsing.keys import check_seed
from bptjax.run.progress import Progress
from bptjax.run.yaml_files import RUN_CONFIG, read_yaml
from bptjax.weights.loading import load_opened, open_decoder

# Mohtashami & Jaggi 2023, arXiv 2305.16300, Section 4.2.
INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
KEY = "The pass key is {0}. Remember it. {0} is the pass key.\n"
# Largest number of any flag. Its losses take 128 MiB.
MOST = 2**24
QUESTION = "What is the pass key? The pass key is"


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
    """Returns rows of loss (nats per token) and perplexity in each of `buckets` equal ranges of
    positions, over the first `length` tokens of up to `limit` documents of at least that length, in
    an order that `seed` decides. Documents that are streamed keep their order.

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
            sums += np.asarray(losses)[batch["labels"] != -100]
            seen += 1
            progress.advance()
            if seen == limit:
                break
    if not seen:
        raise ValueError(
            f"--length={length}: must be at most {longest}, the length of the longest document; "
            "lower it, or give longer text"
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
    while len(found := prompt(fillers)) > limit:
        fillers -= 1
    return found


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
    execution: Execution = Execution(),  # noqa: B008 (frozen)
) -> list[dict]:
    """Returns rows of the fraction of keys that the model retrieves, by length (tokens) and
    depth."""
    rng, room, rows = np.random.default_rng(seed), answer_room(tokenizer), []
    with Progress("pass keys", sum(lengths) * len(depths) * trials) as progress:
        for length, depth in product(lengths, depths):
            progress.describe(f"pass keys, {length:,} tokens, depth {depth:g}")
            found = 0
            for key in rng.integers(10_000, 100_000, trials).tolist():
                prompt = passkey_prompt(tokenizer, length, depth, key)
                *_, (text,) = continuations(
                    model,
                    tokenizer,
                    [prompt],
                    new_tokens=room,
                    sampling=Sampling(temperature=0.0),
                    dtype=dtype,
                    execution=execution,
                )
                numbers = re.findall(r"\d+", text)
                found += bool(numbers) and numbers[0] == str(key)
                progress.advance(length)
            rows.append(dict(length=length, depth=depth, trials=trials, accuracy=found / trials))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return launch("evaluate", argv)


def run(args: Namespace) -> int:
    """Prints tables, and writes JSON and plots to `args.out`.

    Raises:
      ValueError, OSError: one line about the wrong flag, data or checkpoint.
    """
    _check(args)
    documents = open_documents(args.data, text_key=args.text_key) if args.data else None
    found, tokenizer = open_decoder(args.model, args.tokenizer, warn)
    longest = max([args.length] * bool(args.data) + args.passkey_lengths, default=0)
    if line := length_warning(found.config, longest):
        warn(line)
    for length in args.passkey_lengths:
        # Refuse a length that is too short before any evaluation.
        passkey_prompt(tokenizer, length, 0.0, 99_999)
    model = load_opened(found, args.dtype, args.device, warn, cached=(1, longest))
    dtype = model.head_matrix.dtype
    trained = trained_length(args.model, model)
    if documents is not None:
        rows = by_position(
            model,
            tokenizer,
            documents,
            length=args.length,
            buckets=args.buckets,
            limit=args.documents,
            seed=args.seed,
            dtype=dtype,
        )
        file = args.out / "perplexity"
        _report(rows, perplexity_table(rows), plot_perplexity, file, trained)
    if args.passkey_lengths:
        rows = passkey(
            model,
            tokenizer,
            lengths=args.passkey_lengths,
            depths=args.depths,
            trials=args.trials,
            seed=args.seed,
            dtype=dtype,
        )
        _report(rows, passkey_table(rows), plot_passkey, args.out / "passkey", trained)
    if trained is not None:
        print(f"trained length: {trained:,} tokens")
    return 0


def _check(args: Namespace) -> None:
    if not args.data and not args.passkey_lengths:
        raise ValueError("--data (perplexity) or --passkey_lengths (retrieval) must be given")
    numbers = [(name, getattr(args, name)) for name in ("length", "buckets", "documents", "trials")]
    for name, number in [*numbers, *(("passkey_lengths", n) for n in args.passkey_lengths)]:
        least = 2 if name == "length" else 1
        if not least <= number <= MOST:
            raise ValueError(f"--{name}={number}: must be in [{least}, {MOST}]")
    if args.buckets >= args.length:
        raise ValueError(f"--buckets={args.buckets}: must be less than --length={args.length}")
    there = next(path for path in (args.out, *args.out.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--out={args.out}: must be a directory, but {there} is a file")
    check_seed("--seed", args.seed)
    for depth in args.depths:
        if not 0.0 <= depth <= 1.0:
            raise ValueError(f"--depths={depth}: must be between 0 and 1")


def trained_length(name: str, model: Decoder) -> int | None:
    """Returns the tokens per sequence of a run, or the number of positions of a checkpoint."""
    file = Path(os.path.expanduser(name)) / RUN_CONFIG
    if file.exists():
        return read_yaml(file)["train"]["seq_len"]
    return model.config.max_position_embeddings


def _report(
    rows: list[dict], table: Table, plot: Callable, file: Path, trained: int | None
) -> None:
    Console().print(table)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, file.with_suffix(".png"), trained)
    print(f"rows: {file}.json\nplot: {file}.png")
