"""Compares GGUF files with llama.cpp, which computes with the files that bptjax wrote.

    python -m venv V && V/bin/pip install numpy xllamacpp
    python scripts/llamacpp.py families --python V/bin/python --out scripts/results/gguf.jsonl

`families` writes a row for every configuration of tests/weights/hf/cases.py and every type: greedy
tokens and log-likelihoods of random models. `tokenizers` compares token ids of texts. `types
--model MODEL.gguf` measures the perplexity of a real model in every type; `loop --model MODEL.gguf`
imports a real model, trains it and its adapter, exports both, and compares the tokens of the run
with those of llama.cpp. Each replaces its own rows in `--out`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bptjax import load
from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.models.generation import generate
from bptjax.models.sampling import Sampling
from bptjax.weights.gguf.export import TYPES, to_gguf
from bptjax.weights.gguf.lora import lora_to_gguf
from bptjax.weights.hf.peft import modules, write_peft
from bptjax.weights.lora import AdapterConfig, Adapters, new_adapters, target_kernels
from bptjax.weights.pretrained import open_pretrained

ROOT = Path(__file__).parents[1]
READER = Path(__file__).with_name("llamacpp_reader.py")
# Texts that are on every Debian system, and in Python.
PAGES = Path("/usr/share/common-licenses/GPL-3"), Path(argparse.__file__)
TOKENS, NEW, PROMPT = 48, 16, 12
# Texts that tokenizers split differently.
TEXTS = (
    "Hello there, be brief.",
    "  two spaces,\ttab\n\n\nlines  \n end ",
    "It's 3.14159 or 1234567890; I'LL don't can't",
    "naïve café, 你好世界, привет, 🙂👩‍👩‍👧, ﬁ, Å",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "",
)


def llamacpp(python: str, model: Path, **asked: Any) -> dict[str, Any]:
    """Returns the answer of `llamacpp_reader.py`.

    Raises:
      RuntimeError: llama.cpp cannot load the file or compute with it.
    """
    request = json.dumps(dict(model=str(model), prompts=[]) | asked)
    done = subprocess.run([python, str(READER)], input=request, capture_output=True, text=True)
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if "rror" in x or "ailed" in x] or ["killed"]
        raise RuntimeError(" | ".join(lines[:3]))
    return json.loads(done.stdout)


def log_likelihoods(model: Any, text: list[int]) -> np.ndarray:
    """Returns the log-likelihood of each token but the first, in float64."""

    @jax.jit
    def logits(model, tokens):
        *_, last = type(model).hidden_states(model, tokens)
        return model.logits(last)

    found = np.asarray(logits(model, jnp.asarray([text])), np.float64)[0, :-1]
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return found[np.arange(len(found)), text[1:]]


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Returns the most likely tokens after each prompt."""
    steps = generate(model, prompts, new_tokens=count, sampling=Sampling(temperature=0.0))
    return np.stack(list(steps), 1).tolist()


def compared(
    python: str, model: Any, file: Path, text: list[int], lora: Path | None = None
) -> dict[str, Any]:
    """Returns the part of a row that compares a model with its file."""
    prompts = [text[:PROMPT], text[PROMPT : PROMPT + 5]]
    more = {} if lora is None else {"lora": str(lora)}
    theirs = llamacpp(python, file, prompts=prompts, new=NEW, texts=[text], **more)
    ours, wanted = greedy(model, prompts, NEW), log_likelihoods(model, text)
    got = np.array(theirs["log_likelihoods"][0])
    return dict(
        tokens_equal=int((np.array(ours) == np.array(theirs["greedy"])).sum()),
        tokens=NEW * len(prompts),
        log_likelihood=round(float(wanted.sum()), 4),
        log_likelihood_llamacpp=round(float(got.sum()), 4),
        largest_difference=float(f"{np.abs(got - wanted).max():.2e}"),
        xllamacpp=theirs["xllamacpp"],
    )


def random_model(directory: Path, case: str) -> None:
    """Writes a random model of a case, with a tokenizer of bytes."""
    from chats import raw_tokenizer
    from weights.hf.cases import CASES, config
    from weights.hf.loading import random_base

    raw, tokenizer = config(case), raw_tokenizer("bytes")
    raw.vocab_size = len(tokenizer)
    if "vocab_size_per_layer_input" in CASES[case][1]:
        raw.vocab_size_per_layer_input = len(tokenizer)
    random_base(directory, raw)
    tokenizer.save_pretrained(str(directory))


def cases(only: list[str] | None) -> Iterator[tuple[str, Path]]:
    """Yields the cases of decoders that begin with one of the names, and their random models."""
    sys.path.insert(0, str(ROOT / "tests"))
    from weights.hf.cases import CASES

    for case, (_, keywords) in CASES.items():
        if "text_config" in keywords or only and not case.startswith(tuple(only)):
            continue
        with tempfile.TemporaryDirectory() as work:
            random_model(Path(work) / "model", case)
            yield case, Path(work) / "model"


def random_text(config: ModelConfig) -> list[int]:
    longest = min(TOKENS, config.max_position_embeddings or TOKENS)
    return np.random.default_rng(0).integers(0, config.V, longest).tolist()


def measured(measure: Callable[[], dict[str, Any]], work: Path) -> dict[str, Any]:
    """Returns the measurement, or the reason why there is none."""
    try:
        return measure()
    except (ValueError, RuntimeError) as error:
        name = "refused" if isinstance(error, ValueError) else "failed"
        return {name: str(error).replace(str(work), "DIR")}


def families(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for every case and type."""
    for case, directory in cases(args.only):
        model, _, config = load(directory, dtype="float32", device="cpu", warn=print)

        def measure(kind: str, directory=directory, model=model, config=config) -> dict[str, Any]:
            file = directory.with_name(f"{kind}.gguf")
            to_gguf(str(directory), file, type=kind, pre="gpt-2", warn=print)
            return compared(args.python, model, file, random_text(config))

        for kind in args.types:
            row = measured(partial(measure, kind), directory.parent)
            yield dict(kind="family", family=case.split(":")[0], case=case, type=kind) | row
            if "refused" in row:
                break


def random_adapter(directory: Path) -> Path:
    """Writes an adapter of all linear layers of a model, in PEFT's format."""
    base = open_pretrained(ModelConfig(name_or_path=str(directory)))
    assert base.family is not None
    config = AdapterConfig(type="lora", r=3, alpha=6.0)
    model = jax.eval_shape(lambda: new_model(base.config, jax.random.key(0)))
    paths = target_kernels(config.target_modules, modules(base.config, base.family))
    rng, values = np.random.default_rng(1), {}
    for path, (a, b, scale) in new_adapters(
        model, paths, config, jnp.float32, jax.random.key(0)
    ).items():
        values[path] = np.asarray(a), 0.1 * rng.normal(size=b.shape).astype(np.float32), scale
    out = directory.with_name("adapter")
    out.mkdir()
    write_peft(out, Adapters(config, values), base.family, base.config, str(directory))
    return out


def adapters(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for the adapter of every case, with the base model in f16."""
    for case, directory in cases(args.only):
        file, lora = directory.with_name("f16.gguf"), directory.with_name("lora.gguf")

        def measure(directory=directory, file=file, lora=lora) -> dict[str, Any]:
            to_gguf(str(directory), file, type="f16", pre="gpt-2", warn=print)
            adapter = random_adapter(directory)
            lora_to_gguf(str(adapter), lora, type="f16")
            model, _, config = load(adapter, dtype="float32", device="cpu", warn=print)
            return compared(args.python, model, file, random_text(config), lora)

        row = dict(kind="adapter", family=case.split(":")[0], case=case, type="f16")
        yield row | measured(measure, directory.parent)


def page(tokenizer: Any, length: int) -> list[int]:
    """Returns the first token ids of each page, `length` together."""
    each = length // len(PAGES)
    return [i for x in PAGES for i in tokenizer.encode(x.read_text())[:each].tolist()]


MODES = {"families": families, "adapters": adapters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--python", required=True, help="Python with numpy and xllamacpp")
    parser.add_argument("--out", type=Path, help="file of rows")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of cases")
    parser.add_argument("--types", nargs="+", default=["f32", "f16"], choices=TYPES)
    parser.add_argument("--model", type=Path, help="GGUF file of a real model")
    args = parser.parse_args()
    packages = {name: version(name) for name in ("jax", "gguf")}
    rows = []
    for row in MODES[args.mode](args):
        rows.append(row | packages)
        print(json.dumps(row), flush=True)
    if args.out:
        old = [json.loads(x) for x in args.out.open()] if args.out.exists() else []
        kinds = {row["kind"] for row in rows}
        rows = [row for row in old if row["kind"] not in kinds] + rows
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
