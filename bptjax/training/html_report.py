"""report.html, a single file about a run: data, curves, memory, results, settings, environment.

`reporting` writes to run.json the facts that no other file of the run directory holds.
`write_report` reads only the run directory, so the report also covers a resumed run.
"""

import functools
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bptjax.config import Config, defaults
from bptjax.cost.devices import GIB
from bptjax.cost.memory import predict
from bptjax.data.images import ImageProcessor
from bptjax.data.marked import marked
from bptjax.ops.labels import IGNORED
from bptjax.parsing.keys import flatten
from bptjax.run.json_files import REPORT_FACTS, read_json
from bptjax.run.metrics import printable, read_metrics
from bptjax.run.output import write_atomically
from bptjax.run.versions import versions
from bptjax.training.data import say
from bptjax.training.eval_tasks import METRIC, score
from bptjax.training.histogram import MARGINS, histogram_chart
from bptjax.training.line_chart import POINTS, Chart, line_chart
from bptjax.training.logs import TASK_ROWS
from bptjax.training.notes import describe_adapter
from bptjax.training.report import ADAPTER
from bptjax.training.run_directory import saved_values
from bptjax.training.setup import TrainingRun
from bptjax.training.state import TrainState
from bptjax.weights.model_card import write_card

FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report_template.html")
# Maximum tokens shown of an example, and lines shown of the log.
SHOWN_TOKENS, SHOWN_LINES = 2000, 1000
# Title and metrics of each chart, and whether its vertical axis starts at 0.
CHARTS = (
    ("loss, nats per token", ("train/loss", "eval/loss"), False),
    ("reward margin", ("train/rewards/margins", "eval/rewards/margins"), True),
    (
        "pairs with the larger reward for the better answer",
        ("train/rewards/accuracies", "eval/rewards/accuracies"),
        True,
    ),
    ("throughput, tokens/s", ("throughput/tokens_per_second",), True),
    ("MFU", ("throughput/mfu",), True),
    ("peak memory of a device, GiB", ("memory/peak_gib",), True),
    ("exact match of answers", ("eval/exact_match",), True),
    ("mean score of tasks", (METRIC,), True),
    ("learning rate", ("train/learning_rate",), True),
    ("gradient norm", ("train/grad_norm",), True),
)


@contextmanager
def reporting(run: TrainingRun) -> Iterator[dict[str, Any]]:
    """Yields a dict for facts about the run, and writes the report at the end, even after an error
    if the step was compiled. Only the first process writes.

    Facts are `kernels`, `memory` (see `memory_of`), `results`, `sample`, `end` and
    `compile_seconds`, which is from an earlier part of the run until the step is compiled.
    """
    facts: dict[str, Any] = {"failed": False}
    if isinstance(seconds := _recorded(run).get("compile_seconds"), float):
        facts["compile_seconds"] = seconds
    try:
        yield facts
    except Exception as error:
        if "memory" in facts:
            facts |= {"end": f"failed: {' '.join(str(error).split())}", "failed": True}
        raise
    finally:
        if "end" in facts and jax.process_index() == 0:
            _write(run, facts)


def _recorded(run: TrainingRun) -> dict[str, Any]:
    """Returns the facts of earlier parts of the run; empty if there are none."""
    try:
        return read_json(run.directory / REPORT_FACTS)
    except ValueError:
        return {}


def _write(run: TrainingRun, facts: dict[str, Any]) -> None:
    if not run.directory.is_dir():
        return  # The directory was removed; the run's own error says so.
    try:
        text = json.dumps(_recorded(run) | describe(run) | facts, indent=1, default=str)
        write_atomically(run.directory / REPORT_FACTS, text)
        write_report(run.directory)
        pretrained, adapter = run.spec.pretrained, run.directory / ADAPTER
        if pretrained is not None and adapter.is_dir():
            # The base model, although the run may continue from another adapter.
            base = str(pretrained.config.name_or_path)
            write_card(adapter, run.directory, run.directory.name, adapter=True, base=base)
    except Exception as error:  # A finished run must not fail because of its report.
        say(f"warning: {run.directory / FILE} is not written: {error!r}")
    else:
        say(f"report:     {run.directory / FILE}")


def describe(run: TrainingRun) -> dict[str, Any]:
    """Returns facts of a checked run: data, first examples, changed keys, environment."""
    config, mesh = run.config, run.spec.mesh
    device = mesh.local_devices[0]
    usual = flatten(Config()) | dict.fromkeys(defaults(Config(), device.platform))
    usual |= defaults(config, device.platform)
    encoding = run.spec.encoding
    masking = encoding.masks(run.processor, config.data)
    text = not isinstance(run.processor, ImageProcessor)
    accounts = run.check.accounts if text else []
    firsts = [(account.name, account.first) for account in accounts if account.first]
    if masking is not None:
        rng = np.random.default_rng(config.data.seed)
        firsts = [(name, masking(first, rng)) for name, first in firsts]
    return {
        # Join lines that were wrapped, for narrow screens.
        "data": "\n".join(run.check.lines()).replace("\n    ", " "),
        "notes": run.notes,
        "adapter": describe_adapter(config, run.spec.pretrained),
        "examples": [
            {
                "source": name,
                "tokens": len(first["tokens"]),
                "in_loss": int((first["labels"] != IGNORED).sum()),
                "spans": [
                    [printable(text), flag]
                    for text, flag in marked(first, run.tokenizer, SHOWN_TOKENS, encoding.text)
                ],
            }
            for name, first in firsts
        ],
        "template": run.tokenizer.chat_template if text else None,
        "changed": [key for key, value in flatten(config).items() if value != usual.get(key)],
        "environment": {
            "devices": f"{mesh.size} × {device.device_kind}",
            "processes": jax.process_count(),
            "mesh": " ".join(f"{name}={size}" for name, size in mesh.shape.items()),
            **{name: version for name, version in versions().items() if version is not None},
        },
    }


def memory_of(
    run: TrainingRun, state: TrainState, compiled: jax.stages.Compiled
) -> dict[str, Any] | None:
    """Returns the predicted memory of a compiled step and the available memory, in bytes; None if
    the compiler reports none."""
    if compiled.memory_analysis() is None:
        return None
    device = run.spec.mesh.local_devices[0]
    available = (device.memory_stats() or {}).get("bytes_limit")
    predicted = predict(run.spec, state, compiled, device.device_kind, available)
    return vars(predicted) | {"peak": predicted.peak}


def write_report(directory: Path) -> None:
    """Writes report.html of a run directory, complete or not at all."""
    facts = json.loads((directory / REPORT_FACTS).read_text())
    records = list(read_metrics(directory / "metrics.jsonl"))
    keys = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in saved_values(directory).items()
    }
    log = (directory / "log.txt").read_text(errors="replace").splitlines()
    changed = set(facts["changed"])
    answers = directory / "predictions.jsonl"
    answers = list(read_metrics(answers)) if answers.exists() else []
    tasks = directory / TASK_ROWS
    kernels = {"kernels of attention": "\n".join(facts["kernels"])} if "kernels" in facts else {}
    text = _template().render(
        facts,
        name=directory.name,
        figures=[*_figures(records, facts.get("memory")), *_adapter(facts.get("adapter", []))],
        charts=list(_charts(records, facts.get("memory"))),
        points=POINTS,
        evaluations=_evaluations(records),
        tasks=_tasks(list(read_metrics(tasks)) if tasks.exists() else []),
        answers=list(_answers(answers)),
        memory=list(_memory(records, facts.get("memory"))),
        changed=[(key, keys[key]) for key in keys if key in changed],
        others=[(key, value) for key, value in keys.items() if key not in changed],
        environment=(facts["environment"] | kernels).items(),
        files=list(_files(directory)),
        log=log[-SHOWN_LINES:],
        cut=len(log) > SHOWN_LINES,
    )
    write_atomically(directory / FILE, text)


@functools.cache
def _template() -> Any:
    from jinja2 import Environment

    # Autoescape texts from data and configs.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text())


def _answers(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the last answers of a run, with the one before training as `before` if there is
    one."""
    before = {r["prompt"]: r["prediction"] for r in records if r["step"] == 0}
    last = records[-1]["step"] if records else 0
    for record in (r for r in records if r["step"] == last):
        yield record | {"before": before.get(record["prompt"]) if last else None}


def _values(records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Returns the finite values of a metric by step."""
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]


def _charts(records: list[dict[str, Any]], memory: dict[str, Any] | None) -> Iterator[Chart]:
    for title, names, from_zero in CHARTS:
        lines = {name: _values(records, name) for name in names}
        if any(lines.values()):
            planned = memory if memory and names == ("memory/peak_gib",) else None
            levels = {"predicted": planned["peak"] / GIB} if planned else {}
            yield line_chart(title, lines, levels=levels, from_zero=from_zero)
    for record in [r for r in records if MARGINS in r][-1:]:
        title = f"held-out pairs by reward margin, step {record['step']:,}"
        yield histogram_chart(title, **record[MARGINS])


def _figures(
    records: list[dict[str, Any]], memory: dict[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each key figure."""

    def last(name):
        return _values(records, name)[-1:]

    yield "optimizer steps", f"{max((r['step'] for r in records), default=0):,}"
    for _, value in last("train/tokens_seen"):
        yield "tokens seen", f"{value:,}"
    for name, label in (("train/loss", "train/loss, last"), ("eval/loss", "eval/loss, last")):
        for _, value in last(name):
            yield label, f"{value:.4f}"
    if held_out := _values(records, "eval/loss"):
        step, least = min(held_out, key=lambda pair: pair[1])
        yield f"eval/loss, least (step {step:,})", f"{least:.4f}"
    for _, value in last(METRIC):
        yield "mean score of tasks, last", f"{value:.2f}"
    for _, value in last("eval/exact_match"):
        yield "answers as the reference", f"{value:.1%}"
    if speeds := _values(records, "throughput/tokens_per_second"):
        yield "tokens/s, median", f"{statistics.median(x for _, x in speeds):,.0f}"
    if shares := _values(records, "throughput/mfu"):
        yield "MFU, median", f"{statistics.median(x for _, x in shares):.1%}"
    for _, value in last("memory/peak_gib"):
        yield "memory of a device, peak", _size(value * GIB)
    if memory:
        yield "memory of a device, predicted", _size(memory["peak"])


def _adapter(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the scale of the adapters, from the line of `describe_adapter`."""
    for line in lines:
        kind, name, scale = line.partition(": adapter scale ")
        yield f"{name.strip(': ')}; {kind.removeprefix('adapter: ')}", scale.partition(";")[0]


def _evaluations(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Returns the header and the rows of the table of evaluations, without single tasks; None
    without evaluations."""
    evaluations = [r for r in records if r.keys() & {"eval/loss", METRIC}]
    names = list(dict.fromkeys(n for r in evaluations for n in r if n.startswith("eval/")))
    names = [name for name in names if not name.startswith(f"{METRIC}/")]
    rows = [[f"{r['step']:,}", *(_cell(r.get(n, "")) for n in names)] for r in evaluations]
    return (["step", *names], rows) if rows else None


def _tasks(records: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Returns the header and the rows of the table of tasks by step; None without tasks."""
    if not records:
        return None
    cells = {(r["task"], r["length"], r["step"]): score(r) for r in records}
    steps = sorted({step for *_, step in cells})
    pairs = dict.fromkeys((task, length) for task, length, _ in cells)
    rows = [
        [task, f"{length:,}", *(cells.get((task, length, step), "") for step in steps)]
        for task, length in pairs
    ]
    return ["task", "tokens", *(f"step {step:,}" for step in steps)], rows


def _cell(value: float | str | None) -> str:
    """Formats a value of metrics.jsonl, where null means not finite."""
    return "not finite" if value is None else value if isinstance(value, str) else f"{value:.4f}"


def _memory(
    records: list[dict[str, Any]], memory: dict[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """Yields the predicted memory, the measured peak and the available memory."""
    for name, label in (
        ("parameters", "parameters"),
        ("optimizer", "optimizer state"),
        ("batch", "batch"),
        ("gradients", "gradients"),
        ("activations", "activations and workspace"),
        ("peak", "predicted peak"),
    ):
        if memory:
            yield label, _size(memory[name])
    if measured := [value for _, value in _values(records, "memory/peak_gib")]:
        yield "measured peak", _size(max(measured) * GIB)
    for name, label in (("available", "available"), ("host", "host memory, predicted")):
        if memory and memory[name]:
            yield label, _size(memory[name])


def _files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the size of each file and directory of the run."""
    for path in sorted(directory.iterdir()):
        each = path.rglob("*") if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in each if file.is_file())
        yield path.name + "/" * path.is_dir(), _size(size)


def _size(size: float) -> str:
    """Formats a number of bytes."""
    unit, name = next(
        ((n, name) for n, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= n), (2**10, "KiB")
    )
    return f"{size / unit:,.2f} {name}"
