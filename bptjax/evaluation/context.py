"""Tasks that predict whether a model uses its context: scores by task and prompt length."""

import hashlib
import json
import zlib
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from bptjax.data.templates import describe_clock_and_chance
from bptjax.data.tokenizer import Tokenizer
from bptjax.evaluation.plots import mark, new_figure
from bptjax.models.decoder import Decoder
from bptjax.run.output import plural, write_atomically
from bptjax.run.progress import Progress
from bptjax.tasks import TASKS, task_names
from bptjax.tasks.sample import Sampler, encoder
from bptjax.tasks.scores import Scores, answers
from bptjax.tasks.words import Haystack


def digest(model: Decoder) -> str:
    """Returns a hash of the first numbers of each parameter, which tells checkpoints apart."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(model):
        found.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)] if leaf.ndim else leaf).tobytes())
    return found.hexdigest()[:16]


def context_table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of scores by task and length, each above its interval."""
    lengths, names, cells = _grid(rows, "{score:.2f}\n{low:.2f}–{high:.2f}")
    title = "Score and 95 % interval, by task and length (tokens)"
    shown = Table(title=title, min_width=len(title) + 4)
    shown.add_column("task")
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right")
    for name in names:
        shown.add_row(name, *(cells.get((name, length), "") for length in lengths))
    return shown


def _grid(rows: list[dict[str, Any]], form: str) -> tuple[list[int], list[str], dict]:
    """Returns the lengths, the tasks, and the rows in this form by task and length."""
    lengths = sorted({row["length"] for row in rows})
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    return lengths, names, {(row["task"], row["length"]): form.format(**row) for row in rows}


def plot_context(rows: list[dict[str, Any]], file: Path, trained: int | None) -> None:
    """Plots scores by length and task. A line separates lengths beyond the trained length."""
    lengths, names, cells = _grid(rows, "{score:.2f}")
    figure, axes = new_figure(max(6.0, 0.8 * len(lengths) + 4))
    grid = np.full((len(names), len(lengths)), np.nan)
    for row in rows:
        grid[names.index(row["task"]), lengths.index(row["length"])] = row["score"]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (name, length), text in cells.items():
        where = lengths.index(length), names.index(name)
        axes.text(*where, text, ha="center", va="center", fontsize="small")
    axes.set(xlabel="prompt length (tokens)", title="Scores by task")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, label="score")
    within = sum(n <= trained for n in lengths) if trained is not None else len(lengths)
    if trained is not None and within < len(lengths):
        mark(axes, within - 0.5, trained)
    figure.savefig(file, dpi=120)


class ContextTasks:
    """The scores of `--tasks` in prompts of `--lengths`. Finished rows of an earlier call with the
    same settings are kept."""

    table, plot = staticmethod(context_table), staticmethod(plot_context)

    def __init__(self, args: Namespace):
        self.args, self.names = args, task_names(args.tasks, "--tasks")
        self.lengths, self.longest = sorted(set(args.lengths)), max(args.lengths)
        self.file = args.out / "tasks.json"
        self.filler = None
        if args.haystack:
            self.filler = Haystack(args.haystack, args.text_key or "text", args.seed)
        self.settings: dict[str, Any] = dict(model=args.model, tokenizer=args.tokenizer)
        self.settings |= dict(seed=args.seed, samples=args.samples, haystack=None)
        if self.filler:
            text = "".join(self.filler.pieces).encode(errors="replace")
            self.settings["haystack"] = [*args.haystack, f"crc32 {zlib.crc32(text):08x}"]

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.tasks)

    def check(self, tokenizer: Tokenizer) -> None:
        chat = tokenizer.chat_template is not None and not self.args.no_chat
        self.settings["chat"] = chat
        if chat:
            lines = "prompts are in the chat template", *describe_clock_and_chance(tokenizer)
            print("\n".join(lines))
        self._finished()
        try:
            self.encode = encoder(tokenizer, chat)
        except ValueError as error:
            raise ValueError(f"--tasks: {error}; use --no_chat") from error
        for name in self.names:
            self._sampler(name, self.lengths[0], tokenizer)

    def _sampler(self, name: str, length: int, tokenizer: Tokenizer) -> Sampler:
        how: dict[str, Any] = dict(tokenizer=tokenizer, encode=self.encode)
        how |= dict(seed=self.args.seed, filler=self.filler)
        return Sampler(name, TASKS[name], length, **how)

    def _finished(self) -> list[dict[str, Any]]:
        """Returns the rows of an earlier call.

        Raises:
          ValueError: they have other settings, or the file is damaged.
        """
        if not self.file.exists():
            return []
        try:
            rows = json.loads(self.file.read_text())
            known = [{key: row[key] for key in self.settings} for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            text = f"{self.file}: must hold the rows of --tasks; choose another --out"
            raise ValueError(text) from error
        for earlier in known:
            for key, value in self.settings.items():
                if earlier[key] != value:
                    raise ValueError(
                        f"--out={self.args.out}: tasks.json has rows with {key}={earlier[key]}, "
                        f"not {key}={value}; choose another --out"
                    )
        return rows

    def rows(self, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        self.settings |= dict(weights=digest(model), dtype=str(model.head_matrix.dtype))
        rows = self._finished()
        asked = [(name, length) for length in self.lengths for name in self.names]
        known = {(row["task"], row["length"]) for row in rows}
        if kept := sum(each in known for each in asked):
            print(f"{self.file}: {plural(kept, 'row')} of the same settings kept")
        missing = [each for each in asked if each not in known]
        total = sum(length for _, length in missing) * self.args.samples
        with Progress("tasks", total) as progress:
            for name, length in missing:
                progress.describe(f"{name}, {length:,} tokens")
                rows.append(self._row(model, tokenizer, name, length, progress))
                write_atomically(self.file, json.dumps(rows, indent=1) + "\n")
        return rows

    def _row(
        self, model: Decoder, tokenizer: Tokenizer, name: str, length: int, progress: Progress
    ) -> dict[str, Any]:
        """Measures the score of one task and length."""
        args, sampler = self.args, self._sampler(name, length, tokenizer)
        scores, dtype = Scores(sampler, args.seed), model.head_matrix.dtype
        file = args.out / "prompts" / f"{name}_{length}.jsonl"
        if args.save_prompts:
            file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") if args.save_prompts else nullcontext() as saved:
            for answer in answers(model, tokenizer, sampler, args.samples, dtype):
                scores.add(answer)
                if saved:
                    sample, drawn = answer.sample, answer.sample.drawn
                    line = dict(task=name, length=length, sample=len(scores.scores) - 1)
                    line |= dict(prompt=sample.prompt, start=sample.start, answer=answer.text)
                    line |= dict(references=drawn.references, score=answer.score, depth=drawn.depth)
                    saved.write(json.dumps(line) + "\n")
                progress.advance(length)
        return scores.row() | self.settings
