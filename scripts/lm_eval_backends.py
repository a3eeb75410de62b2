"""Compares `evaluate --lm_eval` with lm_eval's own backend for transformers, in float32 on a CPU.

python scripts/lm_eval_backends.py MODEL --out scripts/results/lm_eval_cpu.json

Needs torch and `pip install "lm_eval[hf]"`. MODEL is a Hugging Face directory. The tasks are made
here: multiple choice, answers up to a stop string, and log-likelihoods of whole modules of Python's
standard library, in windows of 256 tokens. Each row is a task with or without the chat template:
the scores of both backends (`theirs` is that of transformers), the largest relative difference of a
log-likelihood, and the shares of equal answers and of equal greedy flags.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from bptjax.evaluation.lm_eval import load_tasks, task_rows
from bptjax.evaluation.served import serve
from bptjax.models.decoder import Decoder
from bptjax.weights.loading import load

WINDOW = 256
CHOICES = [
    ("The capital of France is", ["London", "Paris", "Rome", "Madrid"], 1),
    ("The largest planet of the solar system is", ["Mars", "Venus", "Jupiter", "Mercury"], 2),
    ("Water freezes at a temperature of", ["0 degrees Celsius", "50 degrees Celsius"], 0),
    ("The opposite of hot is", ["warm", "cold", "spicy"], 1),
    ("A triangle has", ["three sides", "four sides", "five sides and a hole"], 0),
    ("Two plus two is", ["three", "four", "five", "twenty-two"], 1),
    ("The author of Hamlet is", ["Shakespeare", "Goethe", "Tolstoy"], 0),
    ("Cats are", ["animals", "plants", "kinds of metal"], 0),
]
QUESTIONS = [
    ("What is the capital of Italy?", "Rome"),
    ("Name a color of the rainbow, and say where it stands in it.", "red"),
    ("Write one sentence about the sea.", "sea"),
    ("What is 7 + 5? Explain step by step.", "12"),
    ("Which animal barks?", "dog"),
    ("Translate 'good morning' into French.", "bonjour"),
]
MODULES = ["this", "bisect", "textwrap", "heapq", "keyword"]
COMMON = dict(dataset_path="json", test_split="test", metadata=dict(version=1.0))
TASKS: dict[str, dict[str, Any]] = {
    "choices": dict(
        output_type="multiple_choice",
        doc_to_text="{{text}}",
        doc_to_target="{{answer}}",
        doc_to_choice="{{choices}}",
        metric_list=[dict(metric="acc"), dict(metric="acc_norm")],
    ),
    "answers": dict(
        output_type="generate_until",
        doc_to_text="Question: {{text}}\nAnswer:",
        doc_to_target="{{answer}}",
        generation_kwargs=dict(until=["\nQuestion:"], max_gen_toks=64, do_sample=False),
        metric_list=[dict(metric="exact_match")],
    ),
    "modules": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[dict(metric="word_perplexity"), dict(metric="bits_per_byte")],
    ),
}


def write_tasks(directory: Path) -> list[str]:
    """Writes the tasks and their data; returns the files of the tasks."""
    import yaml

    stdlib = Path(os.__file__).parent
    records = {
        "choices": [dict(text=a, choices=b, answer=c) for a, b, c in CHOICES],
        "answers": [dict(text=a, answer=b) for a, b in QUESTIONS],
        "modules": [dict(text=(stdlib / f"{name}.py").read_text()[:8000]) for name in MODULES],
    }
    files = []
    for name, task in TASKS.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records[name]))
        files.append(directory / f"{name}.yaml")
        source = dict(dataset_kwargs=dict(data_files=dict(test=str(data))))
        files[-1].write_text(yaml.safe_dump(dict(task=name) | COMMON | source | task))
    return list(map(str, files))


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the responses of two backends to the samples of a task."""
    pairs = [
        pair
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a["resps"], b["resps"], strict=True)
        for pair in zip(x, y, strict=True)
    ]
    row: dict[str, Any] = dict(requests=len(pairs))
    if isinstance(pairs[0][0], str):
        return row | dict(equal_answers=sum(a == b for a, b in pairs) / len(pairs))
    if isinstance(pairs[0][0], tuple):
        row["equal_greedy"] = sum(a[1] == b[1] for a, b in pairs) / len(pairs)
        pairs = [(a[0], b[0]) for a, b in pairs]
    return row | dict(largest_difference=max(abs(a / b - 1) for a, b in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    import lm_eval
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, _ = load(args.model, dtype="float32", device="cpu")
    assert tokenizer is not None and isinstance(model, Decoder)
    backends = [
        serve(model, tokenizer, max_length=WINDOW, name=args.model),
        HFLM(args.model, dtype="float32", device="cpu", max_length=WINDOW, batch_size=4),
    ]
    versions = dict(lm_eval=lm_eval.__version__, transformers=transformers.__version__)
    versions |= dict(torch=torch.__version__, jax=jax.__version__)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        files = write_tasks(Path(directory))
        for chat in (False, True):
            ours, theirs = (
                lm_eval.simple_evaluate(lm, tasks=load_tasks(files), apply_chat_template=chat)
                for lm in backends
            )
            scores = [
                {(row["task"], row["metric"]): row["value"] for row in task_rows(results)}
                for results in (ours, theirs)
            ]
            for name in TASKS:
                row: dict[str, Any] = dict(
                    task=name, model=Path(args.model).name, chat=chat, dtype="float32"
                )
                row |= compare(ours["samples"][name], theirs["samples"][name])
                for key, values in zip(("ours", "theirs"), scores, strict=True):
                    row[key] = {metric: x for (task, metric), x in values.items() if task == name}
                rows.append(row | versions)
                print(json.dumps(rows[-1]), flush=True)
    args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
