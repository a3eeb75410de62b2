"""Tasks that predict whether a model uses its context: scores by task and prompt length."""

import hashlib
import json
import os
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import numpy as np
from rich.table import Table

from bptjax.data.templates import describe_clock_and_chance
from bptjax.data.tokenizer import Tokenizer
from bptjax.evaluation.plots import mark, new_figure
from bptjax.evaluation.tasks import TASKS
from bptjax.evaluation.tasks.sample import Sample, Sampler, encoder
from bptjax.evaluation.tasks.words import Haystack
from bptjax.models.decoder import Decoder
from bptjax.models.generation import continuations
from bptjax.models.sampling import Sampling
from bptjax.run.output import plural, write_atomically
from bptjax.run.progress import Progress

# Probability that an interval covers, and resamples of a bootstrap.
COVERAGE, RESAMPLES = 0.95, 2000
# Largest number of prompt tokens that the model reads at a time.
CHUNK = 2048
# Samples that are made before the model needs them.
AHEAD = 4


def task_names(given: list[str]) -> list[str]:
    """Returns the tasks that `--tasks` names, in the order of the table.

    Raises:
      ValueError: a task is unknown.
    """
    for name in given:
        if name not in TASKS and name != "all":
            raise ValueError(f"--tasks={name}: must be all or one of {', '.join(TASKS)}")
    return [name for name in TASKS if name in given or "all" in given]


def interval(scores: np.ndarray, whole: bool, seed: int) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of the mean score: Wilson's if each score is 0 or 1
    (`whole`), else a bootstrap's."""
    n, mean = len(scores), float(scores.mean())
    if not whole:
        chosen = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
        edges = (1 - COVERAGE) / 2, (1 + COVERAGE) / 2
        low, high = np.quantile(scores[chosen].mean(1), edges).tolist()
        return low, high
    z = NormalDist().inv_cdf((1 + COVERAGE) / 2)
    center = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * (mean * (1 - mean) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)
    return max(center - half, 0.0), min(center + half, 1.0)


def digest(model: Decoder) -> str:
    """Returns a hash of the first numbers of each parameter, which tells checkpoints apart."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(model):
        found.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)] if leaf.ndim else leaf).tobytes())
    return found.hexdigest()[:16]


def made_ahead(make: Callable[[int], Sample], count: int) -> Iterator[Sample]:
    """Yields `make(i)` for each i below `count`, and makes a few in threads meanwhile. Tokenizers
    run in parallel."""
    with ThreadPoolExecutor(min(AHEAD, os.cpu_count() or 1)) as pool:
        waiting = deque(pool.submit(make, i) for i in range(min(AHEAD, count)))
        for i in range(count):
            sample = waiting.popleft().result()
            if i + AHEAD < count:
                waiting.append(pool.submit(make, i + AHEAD))
            yield sample


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
        self.args, self.names = args, task_names(args.tasks)
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
        self.encode = encoder(tokenizer, chat)
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
        task, args = TASKS[name], self.args
        sampler = self._sampler(name, length, tokenizer)
        scores, depths, whole = [], [], True
        # Prompts of nearly the same length then have caches of the same size.
        chunk = min(CHUNK, 2 ** max(int(np.log2(length)) - 2, 0))
        file = args.out / "prompts" / f"{name}_{length}.jsonl"
        if args.save_prompts:
            file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") if args.save_prompts else nullcontext() as saved:
            for sample in made_ahead(sampler.__getitem__, args.samples):
                *_, (text,) = continuations(
                    model,
                    tokenizer,
                    [sample.ids],
                    new_tokens=sample.new_tokens,
                    sampling=Sampling(temperature=0.0),
                    prefill_chunk=chunk,
                    dtype=model.head_matrix.dtype,
                )
                drawn = sample.drawn
                scores.append(task.score(text, drawn.references))
                depths.append(drawn.depth)
                whole = whole and len(drawn.references) == 1
                if saved:
                    line = dict(task=name, length=length, sample=len(scores) - 1)
                    line |= dict(prompt=sample.prompt, start=sample.start, answer=text)
                    line |= dict(references=drawn.references, score=scores[-1], depth=drawn.depth)
                    saved.write(json.dumps(line) + "\n")
                progress.advance(length)
        array = np.array(scores)
        low, high = interval(array, whole, args.seed)
        row: dict[str, Any] = dict(task=name, length=length, samples=len(scores))
        row |= dict(score=float(array.mean()), low=low, high=high)
        if None not in depths:
            at = np.array(depths)
            row["by_depth"] = {f"{d:g}": float(array[at == d].mean()) for d in np.unique(at)}
        return row | self.settings
