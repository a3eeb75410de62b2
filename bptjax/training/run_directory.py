"""The run directory, which belongs to one config and holds a copy of it."""

import json
from collections.abc import Container, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bptjax.config import Config, to_yaml
from bptjax.data.config import SourceConfig
from bptjax.models.execution import Execution, ExecutionConfig
from bptjax.parsing.keys import flatten, replace_keys
from bptjax.run.json_files import read_json
from bptjax.run.output import leftovers, write_atomically
from bptjax.run.yaml_files import RUN_CONFIG, read_yaml
from bptjax.weights.hf.config import LEAST_THETA, OLD_LEAST_THETA

# The start date of a run, which chat templates may read.
START = "start.json"
# Extensions of the files of a run.
FILES = ".html", ".json", ".jsonl", ".png", ".txt", ".yaml"
# Keys that may change on resume. `find_start` checks that the global batch size is the same and
# that the run does not end before its checkpoint.
RESUMABLE_KEYS = (
    "run_dir",
    "device",
    "parallel.",
    "execution.",
    "memory.",
    "checkpoint.",
    "logging.",
    "data.bad_records",
    "train.max_steps",
    "train.epochs",
    "train.deterministic",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.eval_",
    "train.num_eval_generations",
    "train.early_stopping_patience",
    "train.on_spike.",
    "train.sample_tokens",
    "optimizer.state_memory_kind",
    "optimizer.in_backward",
)
# Values of newer keys with which a run of an older version continues, if not the defaults.
OLD_VALUES: dict[str, Any] = {"data.eval_split": "spaced"}


def check_run_dir(run_dir: Path) -> None:
    """Checks that `run_dir` does not exist, is empty or holds a run. Writes nothing.

    Raises:
      ValueError: `run_dir` is a file, or holds other files, or directories with the names of files.
    """
    file = run_dir / RUN_CONFIG
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir={run_dir}: must be a directory, not a file; choose another")
    if run_dir.exists() and not file.exists() and {*run_dir.iterdir()} - leftovers(file):
        raise ValueError(f"run_dir={run_dir}: must be empty or hold a run; choose another run_dir")
    for path in sorted(run_dir.glob("*")):
        if path.suffix in FILES and path.is_dir():
            raise ValueError(f"{path}: must be a file, not a directory; remove it")
        if path.name == "checkpoints" and not path.is_dir():
            raise ValueError(f"{path}: must be a directory, not a file; remove it")


def acquire_run_dir(run_dir: Path, config: Config, unset: Mapping[str, Any] | None = None) -> None:
    """Creates `run_dir` for this config, or checks that it already belongs to this config.

    Args:
      unset: values that null and auto stand for, by key.

    Raises:
      ValueError: the directory belongs to another config, or holds other files.
      OSError: the directory cannot be written.
    """
    check_run_dir(run_dir)
    if (run_dir / RUN_CONFIG).exists():
        ours, default = flatten(config), flatten(Config())
        # The config of an older version lacks newer keys, and has the defaults of a new model for
        # empty ones.
        theirs = default | OLD_VALUES | saved_values(run_dir)
        if theirs["model.extend_to"] is not None:
            theirs["model.extend_theta"] = theirs["model.extend_theta"] or OLD_LEAST_THETA
        for key, value in (unset or {}).items():
            for each in (theirs, ours):
                each[key] = value if each.get(key) in (None, "auto") else each[key]
        named = ours | {key: default[key] for key, value in ours.items() if value == {}}
        for key in sorted(theirs.keys() | ours.keys()):
            same = theirs.get(key) in (ours.get(key), named.get(key))
            if key.startswith(RESUMABLE_KEYS) or same:
                continue
            then, now = ("null" if each.get(key) is None else each[key] for each in (theirs, ours))
            raise ValueError(
                f"{run_dir} belongs to a run with {key}={then}, and this run has {now}; choose "
                "another run_dir"
            )
        return
    write_config(run_dir, config)


def saved_values(run_dir: Path) -> dict[str, Any]:
    """Returns the config in a run directory as `{"group.key": value}`; an empty dict if the
    directory has no config.

    Raises:
      ValueError: the config file is damaged.
    """
    file = run_dir / RUN_CONFIG
    if not file.exists():
        return {}
    try:
        saved = _flat(read_yaml(file), flatten(Config()).keys())
        alpha = saved.get("adapter.alpha")
        if not isinstance(alpha, int | float | None):
            raise ValueError(f"adapter.alpha={alpha}: must be a number")
        if isinstance(sources := saved.get("data.sources"), list):
            # The sources of an older version lack newer keys too.
            plain = asdict(SourceConfig(""))
            saved["data.sources"] = [plain | x if isinstance(x, dict) else x for x in sources]
        return saved
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; choose another run_dir") from error


def with_old_values(config: Config) -> Config:
    """Returns the config with `OLD_VALUES` of keys that the saved config of its run lacks, and with
    the run's `extend_theta`, or that of a new run.

    Raises:
      ValueError: the saved config is damaged.
    """
    saved = saved_values(Path(config.run_dir).expanduser())
    lacking = {key: value for key, value in OLD_VALUES.items() if saved and key not in saved}
    if config.model.extend_to is not None and config.model.extend_theta is None:
        old = saved.get("model.extend_theta") or OLD_LEAST_THETA
        lacking["model.extend_theta"] = old if saved else LEAST_THETA
    return replace_keys(config, lacking)


def saved_execution(config: Config) -> Execution | None:
    """Returns the saved execution of a resumed run, with the keys that this config sets replaced;
    None for a new run, or if the set keys are incompatible with the saved ones."""
    saved = saved_values(Path(config.run_dir).expanduser())
    if not saved:
        return None
    values: dict[str, Any] = {k: saved.get(f"execution.{k}") for k in config.execution.unset}
    if "head_groups" in values:
        # Runs that were saved before this key existed computed all heads at once.
        values["head_groups"] = values["head_groups"] or 1
    if None in values.values():
        return None
    # YAML has no tuples.
    values |= {key: tuple(x) for key, x in values.items() if isinstance(x, list)}
    try:
        execution = config.execution.complete(**values)
        replace(config, execution=ExecutionConfig(**asdict(execution)))
    except ValueError:
        return None
    return execution


def saved_start(run_dir: Path) -> str | None:
    """Returns the date and time at which a run started, in ISO 8601; None if the run has not
    started.

    Raises:
      ValueError: the file is damaged.
    """
    file = run_dir / START
    if not file.exists():
        return None
    date = read_json(file).get("date")
    try:
        return datetime.fromisoformat(str(date)).isoformat()
    except ValueError as error:
        raise ValueError(
            f"{file}: date={date!r}: must be a date and time in ISO 8601; correct it, or choose "
            "another run_dir"
        ) from error


def write_start(run_dir: Path, date: str) -> None:
    """Writes the date and time at which the run started."""
    write_atomically(run_dir / START, json.dumps({"date": date}) + "\n")


def write_config(run_dir: Path, config: Config) -> None:
    """Writes `config.yaml`, complete or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    try:
        write_atomically(run_dir / RUN_CONFIG, to_yaml(config))
    except OSError as error:
        text = f"run_dir={run_dir}: must be writable ({error.strerror}); choose another"
        raise OSError(text) from error


def _flat(tree: dict, leaves: Container[str], prefix: str = "") -> dict[str, Any]:
    """Flattens a config read from YAML. A key in `leaves` is a value even if it holds a dict."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and prefix + key not in leaves:
            flat |= _flat(value, leaves, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
