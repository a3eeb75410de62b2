"""The held-out loss: the loss of a run's evaluations, on other data or of another model."""

import math
import zlib
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from bptjax.config import Config
from bptjax.data.examples import Example
from bptjax.data.loader import data_check, eval_loader
from bptjax.data.records import readable
from bptjax.data.references import FILE, REFERENCE, References
from bptjax.data.sources import Mixture, open_held_out
from bptjax.data.tokenizer import Tokenizer, utf8
from bptjax.evaluation.protocol import by_model
from bptjax.models.decoder import Decoder
from bptjax.objectives import OBJECTIVES
from bptjax.objectives.reference import CACHED
from bptjax.ops.labels import IGNORED
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.parsing.keys import replace_keys
from bptjax.parsing.tree_parser import parse_tree
from bptjax.run.progress import Progress
from bptjax.run.yaml_files import RUN_CONFIG, read_yaml
from bptjax.tasks.scores import bootstrap
from bptjax.training.checks import check_objective
from bptjax.training.histogram import MARGINS
from bptjax.training.run_directory import saved_start
from bptjax.training.spec import TrainSpec
from bptjax.training.step import RECORDS, evaluator

# Largest default of the tokens in a sequence, for a model that is not a run.
MOST_TOKENS = 4096
# Groups of a run's config that decide its held-out loss.
GROUPS = "objective", "adapter", "data", "train"
MISSING = "which scored only its own data; evaluate those, or start a run that holds this file out"


def saved_config(model: str) -> Config:
    """Returns the settings that the held-out loss of a run depends on; for another model, the
    defaults.

    Raises:
      ValueError: the file is not the config of a run.
    """
    file = Path(model).expanduser() / RUN_CONFIG
    if not file.exists():
        return Config()
    try:
        tree = read_yaml(file)
        return parse_tree({name: tree[name] for name in GROUPS if name in tree}, Config)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{file}: must be the config of a run: {error}") from error


class _Counted:
    """Batches, and the number and a checksum of the tokens in the loss in the last pass over them,
    in their order."""

    def __init__(self, batches: Iterable[Example]):
        self._batches, self.tokens, self.checksum = batches, 0, 0

    def __iter__(self) -> Iterator[Example]:
        self.tokens = self.checksum = 0
        for batch in self._batches:
            labels = batch["labels"][batch["labels"] != IGNORED]
            self.tokens += len(labels)
            self.checksum = zlib.crc32(labels.tobytes(), self.checksum)
            yield batch


class HeldOut:
    """The mean loss of `--data`: over the tokens in the loss, or over the pairs of preferences. Of
    each model with the settings of its run, or the defaults.

    With several records, the mean has a 95 % interval, from `low` to `high`, by a bootstrap over
    records. The interval is too narrow if packing splits a text over several sequences, or a text
    is longer than a sequence: each sequence then counts it as a record. `difference` is the loss
    per token minus that of the last model, with an interval over the same records. Only models that
    counted the same tokens in the same order have it.
    """

    plot = None

    def __init__(self, args: Namespace):
        self.of = {name: _OfModel(name, args) for name in args.model}
        # Losses and counts of the records, of the model that is measured first, and the checksum of
        # their tokens.
        self.last: np.ndarray | None = None
        self.checksum = 0
        lengths = (each.longest for each in self.of.values() if each.longest is not None)
        self.longest = max(lengths, default=None)

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.data) and args.perplexity is None

    def check(self, name: str, tokenizer: Tokenizer) -> None:
        self.of[name].check(tokenizer)

    def rows(self, name: str, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        row, records, checksum = self.of[name].row(model, tokenizer)
        losses, counts = records
        row |= _interval("", losses, counts)
        if self.last is None:
            self.last, self.checksum = records, checksum
        elif (
            "perplexity" in row
            # Other records, or in another order, may count equally many tokens each.
            and checksum == self.checksum
            and np.array_equal(counts, self.last[1])
        ):
            change = losses - self.last[0]
            row |= dict(difference=float(change.sum() / counts.sum()))
            row |= _interval("difference_", change, counts)
        return [row]

    @staticmethod
    def table(rows: list[dict[str, Any]]) -> Table:
        """Returns a table with one line per value, and a column per model."""
        shown, models = Table(title=f"Held-out loss of {rows[0]['data']}"), by_model(rows)
        shown.add_column("")
        for label in models:
            title = label if len(models) > 1 else ""
            shown.add_column(title, justify="right", overflow="fold")
        columns = [_lines(row) for row in rows]
        for name in dict.fromkeys(name for lines in columns for name in lines):
            shown.add_row(name, *(lines.get(name, "") for lines in columns))
        return shown


class _OfModel:
    """The held-out loss of one model."""

    def __init__(self, name: str, args: Namespace):
        self.args, self.run = args, Path(name).expanduser()
        saved = saved_config(name)
        # The fields of a run are for its own format.
        fields = {"data.fields": {}} if args.format is not None else {}
        given = {
            "data.format": args.format,
            "data.fields": args.fields,
            "data.text_key": args.text_key,
            "train.seq_len": args.seq_len,
        }
        changes = {"data.path": None, "data.sources": [], "data.eval_path": args.data}
        changes |= {"train.eval_batches": args.batches, **fields}
        changes |= {key: value for key, value in given.items() if value is not None}
        self.references, self.file = References(MISSING), self.run / FILE
        if self.file.exists():
            self.references.load(self.file)
            changes["objective.reference"] = CACHED
        self.config = replace_keys(saved, changes)
        self.is_run = (self.run / RUN_CONFIG).exists()
        objective = OBJECTIVES.get(self.config.objective.type)
        self.documents = open_held_out(self.config.data, objective.record if objective else None)
        self.longest = self.config.train.seq_len if args.seq_len or self.is_run else None

    def check(self, tokenizer: Tokenizer) -> None:
        if self.is_run:
            tokenizer.now = saved_start(self.run)

    def row(self, model: Decoder, tokenizer: Tokenizer) -> tuple[dict[str, Any], np.ndarray, int]:
        """Returns the row, the losses and counts of its records, [2, n], and the checksum of their
        tokens."""
        spec = self._spec(model)
        data, seq_len = spec.config.data, spec.config.train.seq_len
        objective = check_objective(model.config, spec.config)
        encoding = spec.encoding
        if REFERENCE in encoding.fields and not self.file.exists():
            raise ValueError(
                f"{self.file}: must be there, because the loss of objective.type={objective.name} "
                "compares the model with its start; restore it"
            )
        how: dict[str, Any] = dict(seq_len=seq_len, encoding=encoding)
        named = Mixture([self.documents], [str(self.args.data)], [1.0])
        check = data_check(named, [], tokenizer, data, **how)
        check.run()
        print("\n".join(check.summary()))
        (account,) = check.accounts
        if account.complete and not account.loss_tokens:
            raise ValueError(
                f"--data={self.args.data}: must have a token that counts in the loss; see "
                "--seq_len, --format and --fields"
            )
        size, limit = spec.micro_batch_size, spec.config.train.eval_batches
        how |= dict(batch_size=size, max_batches=limit)
        evaluation = eval_loader(self.documents, tokenizer, data, **how)
        sample = evaluation.sample
        sources = {name: _Counted(batches) for name, batches in evaluation.sources.items()}
        total = sample.batches if sample else -(-(account.epoch(data.packing) or 0) // size)
        with Progress("held-out loss", total) as progress:
            means = evaluator(spec, by_record=True)(model, sources, progress.advance)
        loss, _ = means.pop("eval/loss"), means.pop(MARGINS, None)
        of_records = means.pop(RECORDS)
        tokens = sum(batches.tokens for batches in sources.values())
        row = dict(
            data=self.args.data,
            loss=loss,
            **({"perplexity": float(np.exp(loss))} if objective.unit == "token" else {}),
            tokens=tokens,
            records=sample.documents if sample else len(self.documents),
            of_records=len(self.documents),
            seq_len=seq_len,
            # A mean over nothing is NaN.
            **{name: x for name, x in means.items() if not math.isnan(x)},
        )
        if objective.likelihood and (sample is None or sample.complete):
            texts = list(readable(self.documents, data.bad_records))
            if all(isinstance(text, str) for text in texts):
                bytes_of_text = sum(len(utf8(str(text))) for text in texts)
                row["bits_per_byte"] = loss * tokens / bytes_of_text / math.log(2)
        return row, of_records, sum(batches.checksum for batches in sources.values())

    def _spec(self, model: Decoder) -> TrainSpec:
        """Returns the settings of a run that evaluates the model on its devices.

        Raises:
          ValueError: the sequences are longer than the learned positions.
        """
        config, most = self.config, model.config.max_position_embeddings
        dtype = self.args.dtype or (config.train.compute_dtype if self.is_run else None)
        changes = {"train.compute_dtype": dtype or str(model.head_matrix.dtype)}
        if self.longest is None:
            changes["train.seq_len"] = min(MOST_TOKENS, most or MOST_TOKENS)
        elif model.config.position_embedding == "learned" and self.longest > (most or 0):
            raise ValueError(
                f"--seq_len={self.longest}: must be at most {most}, the model's positions"
            )
        where = model.head_matrix.sharding
        mesh = getattr(where, "mesh", None)
        if not isinstance(mesh, Mesh):
            mesh = make_mesh(ParallelConfig(fsdp=1), list(where.device_set))
        config = replace_keys(config, changes)
        return TrainSpec(config, model.config, mesh, references=self.references)


def _interval(name: str, losses: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Returns the ends of the 95 % interval of the mean loss, given the sums of the losses of
    records and their counts; of a single record, none."""
    if len(losses) < 2:
        return {}
    low, high = bootstrap(losses / counts, 0, counts)
    return {f"{name}low": low, f"{name}high": high}


def _text(value: float, ends: Iterable[float], form: str) -> str:
    """Returns a value with its interval below it, if there is one."""
    interval = " to ".join(format(end, form) for end in ends)
    return format(value, form) + (f"\n{interval}" if interval else "")


def _lines(row: dict[str, Any]) -> dict[str, str]:
    """Returns the values of a row, by their descriptions."""
    of = row["of_records"]
    sample = f", a sample of {of:,}" if row["records"] < of else ""
    of_tokens = "perplexity" in row
    ends = [row[name] for name in ("low", "high") if name in row]
    lines = {"loss (nats per token)" if of_tokens else "loss": _text(row["loss"], ends, ".4f")}
    if "difference" in row:
        ends_of = [row[f"difference_{name}"] for name in ("low", "high") if name in row]
        lines["loss less the last model's"] = _text(row["difference"], ends_of, "+.4f")
    if of_tokens:
        lines["perplexity"] = _text(row["perplexity"], np.exp(ends), ".4g")
    if "bits_per_byte" in row:
        lines["bits per byte"] = f"{row['bits_per_byte']:.4f}"
    lines |= {name: f"{row[name]:.4f}" for name in row if name.startswith("eval/")}
    lines |= {
        "tokens in the loss": f"{row['tokens']:,}",
        "records": f"{row['records']:,}{sample}",
        "tokens per sequence": f"{row['seq_len']:,}",
    }
    return lines
