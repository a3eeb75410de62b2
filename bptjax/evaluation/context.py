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
from bptjax.evaluation.plots import finish, mark, mark_trained, new_figure
from bptjax.evaluation.protocol import by_model, directory
from bptjax.models.decoder import Decoder
from bptjax.run.output import plural, write_atomically
from bptjax.run.progress import Progress
from bptjax.tasks import TASKS, task_names
from bptjax.tasks.questions import Questions
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
    form, models = "{score:.2f}\n{low:.2f}–{high:.2f}", by_model(rows)
    lengths, names, _ = _grid(rows, form)
    grids = {label: _grid(some, form)[2] for label, some in models.items()}
    title = "Score and 95 % interval, by task and length (tokens)"
    shown = Table(title=title, min_width=len(title) + 4)
    shown.add_column("task", no_wrap=True)
    if len(models) > 1:
        shown.add_column("model", overflow="fold")
    for length in lengths:
        shown.add_column(f"{length:,}", justify="right", no_wrap=True)
    for name in names:
        for label, cells in grids.items():
            start = [name, label] if len(models) > 1 else [name]
            shown.add_row(*start, *(cells.get((name, length), "") for length in lengths))
    return shown


def _grid(rows: list[dict[str, Any]], form: str) -> tuple[list[int], list[str], dict]:
    """Returns the lengths, the tasks, and the rows in this form by task and length."""
    lengths = sorted({row["length"] for row in rows})
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    return lengths, names, {(row["task"], row["length"]): form.format(**row) for row in rows}


def plot_context(rows: list[dict[str, Any]], file: Path, trained: dict[str, int]) -> None:
    """Plots the scores of one task by length, and those of several by length and task, in a panel
    per model, where a line separates lengths beyond the trained length."""
    lengths, names, _ = _grid(rows, "")
    models = by_model(rows)
    if len(names) == 1:
        figure, (axes,) = new_figure(height=3.8 + 0.4 * len(models))
        draw_scores(axes, rows, trained)
        figure.savefig(file, dpi=120)
        return
    figure, panels = new_figure(max(6.0, 0.8 * len(lengths) + 4), len(models))
    for axes, (label, some) in zip(panels, models.items(), strict=True):
        grid = np.full((len(names), len(lengths)), np.nan)
        for row in some:
            at = names.index(row["task"]), lengths.index(row["length"])
            grid[at] = row["score"]
            text = f"{row['score']:.2f}"
            axes.text(*at[::-1], text, ha="center", va="center", fontsize="small")
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        title = "Scores by task" + (f", {label}" if len(models) > 1 else "")
        axes.set(xlabel="prompt length (tokens)", title=title)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(names)), names)
        figure.colorbar(image, label="score")
        each = trained.get(some[0]["model"], lengths[-1])
        if (within := sum(n <= each for n in lengths)) < len(lengths):
            mark(axes, within - 0.5, f"trained length, {each:,}")
            axes.legend(fontsize="small", loc="upper right")
    figure.savefig(file, dpi=120)


def draw_scores(axes: Any, rows: list[dict[str, Any]], trained: dict[str, int]) -> None:
    """Draws the scores of one task, with their intervals, against the length of prompts, for each
    model. Lines mark trained lengths, in tokens."""
    lengths, (task,), _ = _grid(rows, "")
    models = by_model(rows)
    for i, (label, some) in enumerate(models.items()):
        some = sorted(some, key=lambda row: row["length"])
        scores = [row["score"] for row in some]
        # An end of an interval may differ from an equal score by rounding, in either direction.
        ends = [
            [max(row["score"] - row["low"], 0.0) for row in some],
            [max(row["high"] - row["score"], 0.0) for row in some],
        ]
        at = [row["length"] for row in some]
        axes.errorbar(at, scores, ends, fmt="o-", color=f"C{i}", linewidth=2, label=label)
        names = [label] if len(models) > 1 else []
        mark_trained(axes, trained.get(some[0]["model"]), lengths[-1], names, f"C{i}")
    axes.set(xlabel="prompt length (tokens)", ylabel="score", ylim=(-0.03, 1.03))
    axes.set(title=f"{task}, with 95 % intervals")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    finish(axes)


def _checksum(text: str) -> str:
    return f"crc32 {zlib.crc32(text.encode(errors='replace')):08x}"


class ContextTasks:
    """The scores of `--tasks` in prompts of `--lengths`. Finished rows of an earlier call with the
    same settings are kept."""

    table, plot = staticmethod(context_table), staticmethod(plot_context)

    def __init__(self, args: Namespace):
        self.args, self.names = args, task_names(args.tasks, "--tasks", bool(args.questions))
        self.lengths, self.longest = sorted(set(args.lengths)), max(args.lengths)
        self.file = args.out / "tasks.json"
        self.filler = None
        if args.haystack:
            self.filler = Haystack(args.haystack, args.text_key or "text", args.seed)
        self.questions = None
        if args.questions:
            self.questions = Questions(args.questions, args.seed, self.filler)
            if args.samples > (most := len(self.questions.questions)):
                raise ValueError(
                    f"--samples={args.samples}: must be at most {most}, the number of --questions"
                )
        common: dict[str, Any] = dict(tokenizer=args.tokenizer, seed=args.seed)
        common |= dict(samples=args.samples, haystack=None)
        if self.filler:
            common["haystack"] = [*args.haystack, _checksum("".join(self.filler.pieces))]
        if self.questions:
            common["questions"] = [*args.questions, _checksum(repr(self.questions.questions))]
        self.settings = {name: dict(model=name) | common for name in args.model}
        self.encoders: dict[str, Any] = {}

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.tasks)

    def check(self, name: str, tokenizer: Tokenizer) -> None:
        chat = tokenizer.chat_template is not None and not self.args.no_chat
        self.settings[name]["chat"] = chat
        if chat:
            lines = "prompts are in the chat template", *describe_clock_and_chance(tokenizer)
            print("\n".join(lines))
        self._finished()
        try:
            self.encoders[name] = encoder(tokenizer, chat)
        except ValueError as error:
            raise ValueError(f"--tasks: {error}; use --no_chat") from error
        for task in self.names:
            self.sampler(name, task, self.lengths[0], tokenizer)

    def sampler(self, name: str, task: str, length: int, tokenizer: Tokenizer) -> Sampler:
        how: dict[str, Any] = dict(tokenizer=tokenizer, encode=self.encoders[name])
        how |= dict(seed=self.args.seed)
        how["filler"] = self.questions if TASKS[task].files else self.filler
        return Sampler(task, TASKS[task], length, **how)

    def _finished(self) -> list[dict[str, Any]]:
        """Returns the rows of an earlier call, and of models that were measured before.

        Raises:
          ValueError: they have other settings, or the file is damaged.
        """
        if not self.file.exists():
            return []
        first = self.args.model[0]
        try:
            rows = json.loads(self.file.read_text())
            wanted = [self.settings.get(row["model"], self.settings[first]) for row in rows]
            pairs = [
                (key, row[key], value)
                for row, settings in zip(rows, wanted, strict=True)
                for key, value in settings.items()
            ]
            # Earlier versions hid pass keys at this depth, which no row has now.
            outdated = any("0.25" in row.get("by_depth", ()) for row in rows)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"{self.file}: must hold the rows of --tasks; choose another --out"
            raise ValueError(text) from error
        if outdated:
            raise ValueError(
                f"--out={self.args.out}: tasks.json has rows of passkey from an earlier version, "
                "with keys at five depths; choose another --out"
            )
        for key, earlier, value in pairs:
            if earlier != value:
                raise ValueError(
                    f"--out={self.args.out}: tasks.json has rows with {key}={earlier}, "
                    f"not {key}={value}; choose another --out"
                )
        return rows

    def rows(self, name: str, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        self.settings[name] |= dict(weights=digest(model), dtype=str(model.head_matrix.dtype))
        rows = self._finished()
        asked = [(task, length) for length in self.lengths for task in self.names]
        known = {(row["task"], row["length"]) for row in rows if row["model"] == name}
        if kept := sum(each in known for each in asked):
            print(f"{self.file}: {plural(kept, 'row')} of the same settings kept")
        missing = [each for each in asked if each not in known]
        total = sum(length for _, length in missing) * self.args.samples
        with Progress("tasks", total) as progress:
            for task, length in missing:
                progress.describe(f"{task}, {length:,} tokens")
                sampler = self.sampler(name, task, length, tokenizer)
                rows.append(self._row(name, model, tokenizer, sampler, progress))
                write_atomically(self.file, json.dumps(rows, indent=1) + "\n")
        return [row for row in rows if row["model"] == name]

    def _row(
        self, name: str, model: Decoder, tokenizer: Tokenizer, sampler: Sampler, progress: Progress
    ) -> dict[str, Any]:
        """Measures the score of one task and length."""
        args, task, length = self.args, sampler.name, sampler.length
        scores, dtype = Scores(sampler, args.seed), model.head_matrix.dtype
        file = directory(args, name) / "prompts" / f"{task}_{length}.jsonl"
        if args.save_prompts:
            file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") if args.save_prompts else nullcontext() as saved:
            for answer in answers(model, tokenizer, sampler, args.samples, dtype):
                scores.add(answer)
                if saved:
                    sample, drawn = answer.sample, answer.sample.drawn
                    line = dict(task=task, length=length, sample=len(scores.scores) - 1)
                    line |= dict(prompt=sample.prompt, start=sample.start, answer=answer.text)
                    line |= dict(references=drawn.references, score=answer.score, depth=drawn.depth)
                    saved.write(json.dumps(line) + "\n")
                progress.advance(length)
        return scores.row() | self.settings[name]
