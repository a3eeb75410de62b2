"""The model card of an export: README.md, from the files of the run that trained the model."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bptjax.run.json_files import REPORT_FACTS, read_json
from bptjax.run.metrics import read_metrics
from bptjax.run.versions import versions
from bptjax.run.yaml_files import RUN_CONFIG, read_yaml

CARD = "README.md"
# Keys that are shown even with their default values.
SHOWN = "train.seq_len", "optimizer.type", "optimizer.learning_rate", "adapter.type"
SHOWN_OF_ADAPTERS = "adapter.r", "adapter.alpha"
# Keys that tell only of the machine.
OF_MACHINE = re.compile(r"(run_dir|device|local_dir)$")
# A file or directory with the directories that lead to it.
DIRECTORIES = re.compile(r"(?<![\w/.:])[~.]{0,2}/(?:[^\s/:,;]+/)*(?=[^\s/])")
LICENSE = (
    "Not chosen yet. Set `license` at the top of this file, after reading the licenses of the base "
    "model and of the data."
)


def write_card(directory: Path, source: Path, title: str, *, adapter: bool, base: str = "") -> None:
    """Writes the card of an export to `directory`, without the names of this machine's directories.

    Args:
      source: run or other directory that was exported. Sections whose facts it lacks are left out.
      title: name of the model.
      adapter: whether the export is an adapter for PEFT.
      base: directory or hub id of the base model; by default that of the run.
    """
    from huggingface_hub import ModelCardData

    config = read_yaml(source / RUN_CONFIG) if (source / RUN_CONFIG).exists() else {}
    facts = read_json(source / REPORT_FACTS) if (source / REPORT_FACTS).exists() else {}
    results = "\n".join(facts.get("results") or [])
    base = base or config.get("model", {}).get("name_or_path") or ""
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) and not Path(base).exists()
    data = ModelCardData(
        base_model=base if on_hub else None,
        library_name="peft" if adapter else "transformers",
        tags=["bptjax"],
    )
    kind = "An adapter for" if adapter else "Trained from"
    origin = f"{kind} {base if on_hub else Path(base).name}" if base else "Trained from scratch"
    own = facts.get("environment", {}).get("bptjax") or versions()["bptjax"]
    sections = [
        ("", f"{origin}, with bptjax {own}."),
        ("Data", _block(facts.get("data", ""))),
        ("Evaluation", _block(results)),
        ("", _table(("step", "metric", "value"), _evaluations(source))),
        ("Settings", _table(("key", "value"), _settings(config, facts.get("changed", [])))),
        ("License", LICENSE),
    ]
    texts = [f"---\n{data.to_yaml()}\n---\n\n# {title}"]
    for head, text in sections:
        if text:
            texts += [f"## {head}"] * bool(head) + [DIRECTORIES.sub("", text)]
    (directory / CARD).write_text("\n\n".join(texts) + "\n", encoding="utf-8", errors="replace")


def _block(text: str) -> str:
    return f"```text\n{text.replace('```', '')}\n```" if text else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table; empty without rows."""
    lines = ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in rows]
    head = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    return "\n".join(head + lines) if lines else ""


def _evaluations(source: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the metrics of the first and the last evaluation of a run."""
    file = source / "metrics.jsonl"
    records = list(read_metrics(file)) if file.exists() else []
    records = [r for r in records if any(name.startswith("eval/") for name in r)]
    for record in records[:: max(len(records) - 1, 1)]:
        for name, value in record.items():
            if name.startswith("eval/"):
                text = "not finite" if value is None else f"{value:.4f}"
                yield f"{record['step']:,}", name, text


def _settings(config: dict[str, Any], changed: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the changed keys and `SHOWN` with their values, without those of `OF_MACHINE`."""
    adapted = config.get("adapter", {}).get("type", "none") != "none"
    for key in dict.fromkeys([*changed, *SHOWN, *SHOWN_OF_ADAPTERS * adapted]):
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not OF_MACHINE.search(key):
            yield f"`{key}`", f"`{value if isinstance(value, str) else json.dumps(value)}`"
