"""`bptjax evaluate`: measures a model by `EVALUATIONS`; writes tables, rows and plots."""

import json
import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bptjax.cli.main import launch, warn
from bptjax.evaluation import EVALUATIONS, Evaluation
from bptjax.models.decoder import Decoder
from bptjax.models.generation import length_warning, mesh_setter
from bptjax.parsing.keys import check_seed
from bptjax.run.yaml_files import RUN_CONFIG, read_yaml
from bptjax.tasks import QUESTIONS, task_names
from bptjax.weights.loading import load_opened, open_decoder

# Largest number that a flag may have. That many losses take 128 MiB.
MOST = 2**24


main = partial(launch, "evaluate")


def run(args: Namespace) -> int:
    """Prints tables, and writes JSON and plots to `args.out`.

    Raises:
      ValueError, OSError: one line about the wrong flag, data or checkpoint.
    """
    check_flags(args)
    chosen = {name: kind(args) for name, kind in EVALUATIONS.items() if kind.asked(args)}
    opened = {name: open_decoder(name, args.tokenizer, warn) for name in args.model}
    longest = max(each.longest or 1 for each in chosen.values())
    for name, (pretrained, tokenizer) in opened.items():
        if line := length_warning(pretrained.config, longest, name):
            warn(line)
        for evaluation in chosen.values():
            evaluation.check(name, tokenizer)
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in chosen}
    trained: dict[str, int] = {}
    # The last model chooses the tokens of LongPPL.
    for name in reversed(args.model):
        pretrained, tokenizer = opened[name]
        if len(opened) > 1:
            print(f"measuring {name}")
        how: dict[str, Any] = dict(tp=args.tp, sp=args.sp, cached=(1, longest))
        model = load_opened(pretrained, args.dtype, args.device, warn, **how)
        if (length := trained_length(name, model)) is not None:
            trained[name] = length
        for kind, evaluation in chosen.items():
            with mesh_setter(model)():
                found = evaluation.rows(name, model, tokenizer)
            rows[kind] = [dict(model=name) | row for row in found] + rows[kind]
            if name == args.model[0]:
                _report(evaluation, rows[kind], args.out / kind, trained)
        # Before the next model is loaded.
        del model
    for name in args.model:
        if name in trained:
            of = f" of {name}" if len(opened) > 1 else ""
            print(f"trained length{of}: {trained[name]:,} tokens")
    return 0


def check_flags(args: Namespace) -> None:
    """Checks the flags that need neither data nor a model.

    Raises:
      ValueError: a flag is missing, or out of range.
    """
    for name in args.model:
        if args.model.count(name) > 1:
            raise ValueError(f"--model={name}: must be given once")
    if not any(kind.asked(args) for kind in EVALUATIONS.values()):
        raise ValueError(
            "--data (held-out loss), --tasks (use of the context) or --lm_eval must be given"
        )
    if QUESTIONS in args.tasks and not args.questions:
        raise ValueError(f"--tasks={QUESTIONS}: requires --questions FILES")
    if args.questions and not {QUESTIONS, "all"} & {*args.tasks}:
        raise ValueError(f"--questions: requires --tasks {QUESTIONS}")
    task_names(args.tasks, "--tasks", bool(args.questions))
    if bool(args.tasks) != bool(args.lengths):
        raise ValueError("--tasks and --lengths: must be given together")
    if args.length is not None:
        raise ValueError("--length: is now --perplexity")
    names = "perplexity", "seq_len", "batches", "buckets", "documents", "samples", "short_context"
    numbers = [(name, getattr(args, name)) for name in names if getattr(args, name) is not None]
    for name, number in [*numbers, *(("lengths", n) for n in args.lengths)]:
        least = 2 if name == "perplexity" else 1
        if not least <= number <= MOST:
            raise ValueError(f"--{name}={number}: must be in [{least}, {MOST}]")
    if args.perplexity is not None:
        for name in ("format", "fields", "seq_len", "batches"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name}: must not be given with --perplexity, which reads text")
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise ValueError(f"--num_fewshot={args.num_fewshot}: must not be negative")
    if args.perplexity is not None and args.buckets >= args.perplexity:
        raise ValueError(
            f"--buckets={args.buckets}: must be less than --perplexity={args.perplexity}"
        )
    if args.short_context is not None and args.short_context >= (args.perplexity or 0):
        raise ValueError(f"--short_context={args.short_context}: requires a larger --perplexity")
    there = next(path for path in (args.out, *args.out.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--out={args.out}: must be a directory, but {there} is a file")
    check_seed("--seed", args.seed)
    for name, kind in EVALUATIONS.items():
        if kind.asked(args):
            _check_other_models(args.out / f"{name}.json", args.model)


def _check_other_models(file: Path, names: list[str]) -> None:
    """Checks that no measurements of other models would be replaced.

    Raises:
      ValueError: the file has rows of other models, or is damaged.
    """
    try:
        found = [row["model"] for row in json.loads(file.read_text())] if file.exists() else []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{file}: must hold the rows of an evaluation; choose another --out"
        raise ValueError(text) from error
    for other in found:
        if other not in names:
            raise ValueError(
                f"--out={file.parent}: {file.name} has rows of the model {other}; "
                "choose another --out"
            )


def trained_length(name: str, model: Decoder) -> int | None:
    """Returns the tokens per sequence of a run, or the number of positions of a checkpoint."""
    file = Path(os.path.expanduser(name)) / RUN_CONFIG
    if file.exists():
        return read_yaml(file)["train"]["seq_len"]
    return model.config.max_position_embeddings


def _report(
    evaluation: Evaluation, rows: list[dict[str, Any]], file: Path, trained: dict[str, int]
) -> None:
    Console().print(evaluation.table(rows))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"rows: {file}.json")
    if evaluation.plot is not None:
        evaluation.plot(rows, file.with_suffix(".png"), trained)
        print(f"plot: {file}.png")
