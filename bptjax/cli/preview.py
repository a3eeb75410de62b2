"""`bptjax preview --config FILE`: shows the data that a run would train on, without its model."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from bptjax.cli.run_command import run_command
from bptjax.config import DEFAULT_STEPS, Config
from bptjax.config_parser import parse
from bptjax.data.account import Account
from bptjax.data.chat import Chat
from bptjax.data.check import DataCheck
from bptjax.data.config import DataConfig
from bptjax.data.examples import Example
from bptjax.data.files import Location
from bptjax.data.images import ImageProcessor
from bptjax.data.landmarks import ignored
from bptjax.data.loader import data_check, train_loader
from bptjax.data.marked import marked
from bptjax.data.records import readable
from bptjax.data.rows import Compound, Document, TokenIds
from bptjax.data.sources import Mixture
from bptjax.ops.labels import IGNORED
from bptjax.parallel.mesh import select_devices
from bptjax.run.metrics import printable
from bptjax.training.data import RunData, open_data, say
from bptjax.training.notes import describe_adapter
from bptjax.training.run_directory import saved_start, with_old_values

DESCRIPTION = """Shows what a run would train on: counts over the data, one record before and after
the chat template, and the first packed sequences. Tokens in the loss are green, or in [[ ]] if the
output is not a terminal. Reads no weights. Takes the keys of bptjax train."""
IN_LOSS = "bold green"


@dataclass(frozen=True)
class PreviewConfig(Config):
    """A training config, and how much of its data to show.

    Attributes:
      sequences: number of packed sequences to show.
      shown_documents: documents to show of each sequence. If there are more, the ones in the middle
        are left out.
      shown_tokens: tokens to show of each document. The middle of a longer document is left out.
      seconds: time limit for counting records. Beyond the limit, counts are extrapolated, and the
        output says so.
      out: directory of lengths.png. If not set, no plot is drawn.
    """

    sequences: int = 3
    shown_documents: int = 6
    shown_tokens: int = 400
    seconds: float = 60.0
    out: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("sequences", "shown_documents", "shown_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds={self.seconds}: must be finite and positive")


def preview(config: PreviewConfig, console: Console) -> None:
    """Prints the preview.

    Raises:
      ValueError: one line about the error in the data.
    """
    plain = with_old_values(Config(**{f.name: getattr(config, f.name) for f in fields(Config)}))
    # Skip bad records, so that they are counted and the other records are shown.
    data_config = replace(plain.data, bad_records="skip")
    now = saved_start(Path(plain.run_dir).expanduser())
    data = open_data(replace(plain, data=data_config), now)
    if isinstance(data.processor, ImageProcessor):
        raise ValueError(
            f"model.name_or_path={config.model.name_or_path}: must be a model of text; bptjax "
            "preview shows no images"
        )
    seq_len = config.train.seq_len
    how: dict[str, Any] = dict(seq_len=seq_len, encoding=data.encoding)
    check = data_check(data.train, data.held_out, data.tokenizer, data_config, **how)
    say(f"checking the records for up to {config.seconds:g} s")
    check.run(config.seconds)
    console.rule("data")
    adapter = describe_adapter(config, data.pretrained)
    steps = _steps(config, check)
    for line in (*check.lines(), *data.notes, *adapter, *steps):
        console.print(line, markup=False, soft_wrap=not console.is_terminal)
    for bad in check.bad[:3]:
        print(f"bad record: {Location(bad.file, bad.record)}: {bad.reason}")
    if check.bad and plain.data.bad_records == "error":
        print("bptjax train stops at bad records unless data.bad_records=skip")
    accounts = check.accounts
    if any(a.bad for a in accounts) and not any(a.examples or a.too_long for a in accounts):
        raise ValueError(
            "training data: must have a token that counts in the loss; correct the bad "
            "records above"
        )
    counted = [account for account in check.accounts if account.lengths]
    for account in counted:
        _print_lengths(account, console)
    if config.out is not None and counted:
        _draw_lengths(counted, Path(config.out))
    first = _first(data, data_config)
    if first is not None:
        _print_record(first, data, data_config, config.shown_tokens, console)
    shards = data_config.num_shards
    batches = train_loader(
        data.train,
        data.tokenizer,
        data_config,
        **how,
        batch_size=-(-config.sequences // shards) * shards,
    )
    try:
        batch = next(batches)
    finally:
        batches.close()
    for i in range(config.sequences):
        sequence = {name: x[i] for name, x in batch.items()}
        _print_sequence(i + 1, sequence, data, config, console)


def _steps(config: Config, check: DataCheck) -> list[str]:
    """Formats the steps per epoch and the passes over the data, for one device."""
    train, sequences = config.train, check.sequences_per_epoch
    batch = train.per_device_train_batch_size * train.gradient_accumulation_steps
    passes = check.describe_passes(
        epochs=train.epochs, sequences=batch * (train.max_steps or DEFAULT_STEPS)
    )
    if sequences is None:
        return passes
    return [
        f"steps: about {-(-sequences // batch):,} per epoch on one device, with a global batch "
        f"size of {batch} ({batch * train.seq_len:,} tokens); divide by dp × fsdp × ep",
        *passes,
    ]


def _print_lengths(account: Account, console: Console) -> None:
    """Prints a bar for each length in `account.lengths`."""
    console.rule(f"lengths in tokens: {account.name}")
    most = max(account.lengths.values())
    for size, count in sorted(account.lengths.items()):
        bar = "█" * max(1, round(40 * count / most))
        print(f"up to {size:>9,} {bar} {count:,}")


def _draw_lengths(accounts: list[Account], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        title="Lengths of the examples", xlabel="tokens, up to", ylabel="examples", xscale="log"
    )
    for account in accounts:
        sizes, counts = zip(*sorted(account.lengths.items()), strict=True)
        axes.step(sizes, counts, where="pre", marker="o", label=account.name)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(out / "lengths.png")
    print(f"plot: {out / 'lengths.png'}")


def _first(data: RunData, config: DataConfig) -> Document | None:
    """Returns the first record that can be read, with the records that its examples depend on; None
    if there is none."""
    train = data.train
    if data.encoding.pick is None:
        return next(readable(train, "skip"), None)
    # `data_check` has refused streams.
    sources: Any = train.files if isinstance(train, Mixture) else [train]
    for documents in sources:
        for index in range(len(documents)):
            with suppress(ValueError):
                return data.encoding.pick(config.seed, documents, index)
    return None


def _print_record(
    document: Document, data: RunData, config: DataConfig, shown: int, console: Console
) -> None:
    """Prints a record as it is in its file, then each of its examples."""
    console.rule("first record, as read")
    if isinstance(document, Chat):
        record = {"messages": list(document.messages), **document.variables}
        print(_shortened(json.dumps(record, indent=2, ensure_ascii=False, default=str), shown))
    elif isinstance(document, Compound):
        for name, text in document.parts():
            print(f"{name}: {_shortened(text, shown)}")
    elif isinstance(document, str):
        print(_shortened(document, shown))
    else:
        ids = document.ids if isinstance(document, TokenIds) else document
        print(_shortened(" ".join(map(str, ids)), shown))
    examples = data.encoding.examples(document, tokenizer=data.tokenizer, config=config)
    examples = [ignored(each) for each in examples]
    if masking := data.encoding.masks(data.tokenizer, config):
        examples = [masking(each, np.random.default_rng(config.seed)) for each in examples]
    for number, example in enumerate(examples, 1):
        of = f", example {number} of {len(examples)}" if len(examples) > 1 else ""
        console.rule(f"first record, as trained on{of}: {_count(example)}")
        _print_parts(example, data, shown, console)


def _shortened(text: str, shown: int) -> str:
    """Returns a text without its middle, if it is longer than about `shown` tokens."""
    half = 2 * shown
    if len(text) <= 2 * half:
        return printable(text)
    left_out = f" … {len(text) - 2 * half:,} characters … "
    return printable(text[:half]) + left_out + printable(text[-half:])


def _print_sequence(
    number: int, sequence: Example, data: RunData, config: PreviewConfig, console: Console
) -> None:
    """Prints a packed sequence, one document at a time, without the middle of many documents."""
    segments = sequence["segments"]
    ids = list(dict.fromkeys(segments[segments != 0].tolist()))
    padding = int((segments == 0).sum())
    title = f"sequence {number}: {len(segments):,} tokens, {padding:,} of them padding"
    console.rule(f"{title}; documents: {len(ids)}")
    head = tail = len(ids)
    if len(ids) > config.shown_documents:
        head = -(-config.shown_documents // 2)
        tail = len(ids) - config.shown_documents // 2
    for index, segment in enumerate(ids):
        if index == head:
            chosen = np.isin(segments, ids[head:tail])
            left_out = {name: x[chosen] for name, x in sequence.items()}
            which = (
                f"documents {head + 1:,} to {tail:,}" if tail - head > 1 else f"document {tail:,}"
            )
            print(f"… {which} left out: {_count(left_out)} …")
        if head <= index < tail:
            continue
        document = {name: x[segments == segment] for name, x in sequence.items()}
        first, last = document["positions"][[0, -1]]
        print(f"document {index + 1}, positions {first:,} to {last:,}: {_count(document)}")
        _print_parts(document, data, config.shown_tokens, console)


def _print_parts(example: Example, data: RunData, shown: int, console: Console) -> None:
    for what, own in data.encoding.parts(example):
        if what:
            print(f"{what}: {_count(own)}")
        console.print(_marked(own, data, shown, console), soft_wrap=True)


def _count(example: Example) -> str:
    labels = example["labels"]
    return f"{len(labels):,} tokens, {int((labels != IGNORED).sum()):,} labels in the loss"


def _marked(example: Example, data: RunData, shown: int, console: Console) -> Text:
    pieces = marked(example, data.tokenizer, shown, data.encoding.text)
    return marked_text(pieces, console.is_terminal)


def marked_text(pieces: Iterator[tuple[str, bool] | tuple[str, None]], colored: bool) -> Text:
    """Returns the text that `marked` yields, with the tokens in the loss in color or in [[ ]]."""
    text = Text()
    for piece, in_loss in pieces:
        piece = f"[[{printable(piece)}]]" if in_loss and not colored else printable(piece)
        text.append(piece, "dim" if in_loss is None else IN_LOSS if in_loss and colored else "")
    return text


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""

    def command(argv: list[str]) -> int:
        config = parse(argv, DESCRIPTION, PreviewConfig, "preview")
        select_devices("cpu")
        preview(config, Console(highlight=False))
        return 0

    return run_command(command, argv)
