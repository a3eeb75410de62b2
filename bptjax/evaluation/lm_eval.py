"""Tasks of lm-evaluation-harness (`lm_eval`), which the model is served to."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bptjax.data.templates import describe_clock_and_chance
from bptjax.data.tokenizer import Tokenizer
from bptjax.evaluation.held_out import saved_config
from bptjax.evaluation.protocol import by_model, directory
from bptjax.evaluation.served import serve
from bptjax.models.decoder import Decoder
from bptjax.run.output import describe
from bptjax.run.yaml_files import RUN_CONFIG

# lm_eval's default number of tokens of a text, for a model that does not tell.
MAX_LENGTH = 2048


def _manager() -> Any:
    """Returns lm_eval's table of tasks.

    Raises:
      ValueError: lm_eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f'--lm_eval: {error}; pip install -e ".[eval]"') from error
    return TaskManager()


def load_tasks(names: Sequence[str]) -> list[Any]:
    """Loads tasks and groups of lm_eval with their data. A name may be a pattern such as `mmlu_*`,
    or a YAML file.

    Raises:
      ValueError: a name that is no task, or a task that cannot be loaded.
    """
    manager, tasks = _manager(), []
    for name in names:
        found = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not found:
            raise ValueError(
                f"--lm_eval={name}: must be a task of lm_eval, a pattern or a YAML file; `lm_eval "
                "ls tasks` lists the tasks"
            )
        try:
            loaded = manager.load(found)
        # Of the network, of data or of code of the task.
        except Exception as error:
            raise ValueError(f"--lm_eval={name}: cannot be loaded: {describe(error)}") from error
        groups = list(loaded["groups"].values())
        inner = {id(each) for group in groups for each in group.get_all_groups()}
        inner |= {id(task) for group in groups for task in group.get_all_tasks()}
        tasks += [x for x in (*groups, *loaded["tasks"].values()) if id(x) not in inner]
    return tasks


def task_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per task, metric and filter of lm_eval's results."""
    rows = []
    for name, metrics in (results["results"] | results.get("groups", {})).items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            row = dict(task=name, metric=metric, filter=kind, value=value)
            row["stderr"] = error if isinstance(error, int | float) else None
            row["higher_is_better"] = results["higher_is_better"].get(name, {}).get(metric)
            row["num_fewshot"] = results["n-shot"].get(name)
            row["samples"] = results["n-samples"].get(name, {}).get("effective")
            rows.append(row | {"version": results["versions"].get(name)})
    return rows


class LmEval:
    """Scores in the tasks of `--lm_eval`, as lm-evaluation-harness computes them."""

    plot = None

    def __init__(self, args: Namespace):
        self.args, self.longest = args, args.seq_len
        self.tasks = load_tasks(args.lm_eval)

    @staticmethod
    def asked(args: Namespace) -> bool:
        return bool(args.lm_eval)

    def check(self, name: str, tokenizer: Tokenizer) -> None:
        if self._chat(tokenizer):
            lines = "prompts are in the chat template", *describe_clock_and_chance(tokenizer)
            print("\n".join(lines))
        if tokenizer.eos_id is None and not tokenizer.special_tokens.get("bos_token"):
            raise ValueError("--lm_eval: the tokenizer must have a BOS or EOS token")

    def _chat(self, tokenizer: Tokenizer) -> bool:
        return tokenizer.chat_template is not None and not self.args.no_chat

    def _max_length(self, name: str, model: Decoder) -> int:
        if length := self.args.seq_len or model.config.max_position_embeddings:
            return length
        is_run = (Path(name).expanduser() / RUN_CONFIG).exists()
        return saved_config(name).train.seq_len if is_run else MAX_LENGTH

    def rows(self, name: str, model: Decoder, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        import lm_eval
        from lm_eval.utils import handle_non_serializable

        args, length, chat = self.args, self._max_length(name, model), self._chat(tokenizer)
        how: Any = dict(max_length=length, name=args.tokenizer or name, seed=args.seed)
        results = lm_eval.simple_evaluate(
            serve(model, tokenizer, **how),
            tasks=self.tasks,
            num_fewshot=args.num_fewshot,
            apply_chat_template=chat,
            log_samples=args.save_prompts,
        )
        out = directory(args, name)
        out.mkdir(parents=True, exist_ok=True)
        for task, samples in results.pop("samples", {}).items():
            lines = (json.dumps(x, default=handle_non_serializable) + "\n" for x in samples)
            file = out / "prompts" / f"lm_eval_{task}.jsonl"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(lines))
        text = json.dumps(results, indent=1, default=handle_non_serializable)
        (out / "lm_eval_results.json").write_text(text + "\n")
        dtype = str(model.head_matrix.dtype)
        settings = dict(chat=chat, max_length=length, dtype=dtype)
        return [row | settings for row in task_rows(results)]

    def table(self, rows: list[dict[str, Any]]) -> Table:
        shown, models = Table(title="Scores of lm-evaluation-harness"), by_model(rows)
        for name in ("task", "metric", "filter", *(["model"] if len(models) > 1 else [])):
            shown.add_column(name, overflow="fold")
        for name in ("score", "examples", "samples"):
            shown.add_column(name, justify="right")
        labels = {row["model"]: label for label, some in models.items() for row in some}
        for row in sorted(rows, key=lambda row: (row["task"], row["metric"], row["filter"])):
            error = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
            cells = [row[name] for name in ("task", "metric", "filter")]
            cells += [labels[row["model"]]] if len(models) > 1 else []
            counts = (row[name] for name in ("num_fewshot", "samples"))
            shown.add_row(
                *cells,
                f"{row['value']:.4f}{error}",
                *("" if n is None else f"{n:,}" for n in counts),
            )
        return shown
