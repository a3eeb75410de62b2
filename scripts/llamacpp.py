"""Compares GGUF files with llama.cpp, which computes with the files that bptjax wrote.

    python -m venv V && V/bin/pip install numpy xllamacpp
    python scripts/llamacpp.py families --python V/bin/python --out scripts/results/gguf.jsonl

`families` writes a row for every configuration of tests/weights and every type: greedy tokens and
log-likelihoods of random models, in f32 the latter alone, computed in float32; `adapters` does so
for their adapters. `tokenizers` compares token ids of texts. `types --model MODEL.gguf` measures
the perplexity of a real model in every type. `loop --model MODEL.gguf` imports a real model, trains
it and adapters of it, exports them, and compares the tokens of the runs with those of llama.cpp.
Each row replaces its like in `--out` at once; cases whose rows are there are skipped, unless
`--only` names them. Needs torch for `loop` alone.
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
from bptjax.data.templates import chat_prompt
from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.models.generation import generate
from bptjax.models.sampling import Sampling
from bptjax.weights.gguf.export import TYPES, to_gguf
from bptjax.weights.gguf.file import GGUF
from bptjax.weights.gguf.lora import lora_to_gguf
from bptjax.weights.gguf.reading import from_gguf
from bptjax.weights.hf.peft import write_peft
from bptjax.weights.hf.peft_modules import modules
from bptjax.weights.lora import AdapterConfig, Adapters, new_adapters, target_kernels
from bptjax.weights.pretrained import open_pretrained

ROOT = Path(__file__).parents[1]
READER = Path(__file__).with_name("llamacpp_reader.py")
# Keys that together name a measurement.
NAMES = ("kind", "case", "model", "tokenizer", "type", "step", "adapter", "file")
# Texts that are on every Debian system, and in Python.
PAGES = Path("/usr/share/common-licenses/GPL-3"), Path(argparse.__file__)
TOKENS, NEW = 48, 16
# llama.cpp rounds a context up to a multiple of it.
CONTEXT = 256
# llama.cpp also rounds activations, keys and values to float16.
TIE = 4
# Bits of a weight in each type, scales included.
BITS = dict(f32=32, f16=16.1, bf16=16, q8_0=8.5, q5_1=6, q5_0=5.5, q4_1=5, q4_0=4.5)
RATES = {"none": 2e-4, "lora": 2e-3}
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


@jax.jit
def logits(model: Any, tokens: jax.Array) -> jax.Array:
    *_, last = type(model).hidden_states(model, tokens)
    return model.logits(last)


def log_likelihoods(model: Any, text: list[int]) -> np.ndarray:
    """Returns the log-likelihood of each token but the first, in float64."""
    found = np.asarray(logits(model, jnp.asarray([text])), np.float64)[0, :-1]
    found -= found.max(-1, keepdims=True)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    return found[np.arange(len(found)), text[1:]]


def rounding(model: Any, text: list[int]) -> float:
    """Returns the largest change of a token's log-likelihood if the matrices are rounded to
    float16."""
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.float16).astype(x.dtype) if x.ndim > 1 else x, model
    )
    return float(np.abs(log_likelihoods(rounded, text) - log_likelihoods(model, text)).max())


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Returns the most likely tokens after each prompt."""
    steps = generate(model, prompts, new_tokens=count, sampling=Sampling(temperature=0.0))
    return np.stack(list(steps), 1).tolist()


def compared(
    python: str,
    model: Any,
    file: Path,
    text: list[int],
    prompts: list[list[int]] | None = None,
    **asked: str,
) -> dict[str, Any]:
    """Returns the part of a row that compares a model with its file; `asked` goes to the reader.

    `gaps` has, for each prompt after which a greedy token differs, the difference of the two
    tokens' log-likelihoods for our model. If it is a near tie, at most `TIE` times the effect of
    rounding the matrices, the tokens from there on are not compared.
    """
    half = len(text) // 2
    prompts = [text[:half], text[-half:]] if prompts is None else prompts
    new = min(NEW, len(text) - half)
    theirs = llamacpp(python, file, prompts=prompts, new=new, texts=[text], **asked)
    ours = greedy(model, prompts, new) if prompts else []
    wanted = log_likelihoods(model, text)
    got = np.array(theirs["log_likelihoods"][0])
    noise = rounding(model, text)
    equal, tokens, gaps = 0, 0, []
    for prompt, a, b in zip(prompts, ours, theirs["greedy"], strict=True):
        same = next((i for i in range(new) if a[i] != b[i]), new)
        equal, tokens = equal + same, tokens + new
        if same < new:
            each = [log_likelihoods(model, [*prompt, *x[: same + 1]])[-1] for x in (a, b)]
            gaps.append(float(f"{each[0] - each[1]:.2e}"))
            tokens -= (new - same) * (gaps[-1] <= TIE * noise)
    return dict(
        tokens_equal=equal,
        tokens=tokens,
        log_likelihood=round(float(wanted.sum()), 4),
        log_likelihood_llamacpp=round(float(got.sum()), 4),
        largest_difference=float(f"{np.abs(got - wanted).max():.2e}"),
        rounding=float(f"{noise:.2e}"),
        **({"gaps": gaps} if gaps else {}),
        xllamacpp=theirs["xllamacpp"],
    )


def random_model(directory: Path, case: str) -> None:
    """Writes a random model of a case, with a tokenizer of bytes."""
    from chats import raw_tokenizer
    from weights.gguf.cases import new
    from weights.hf.loading import random_base

    raw, tokenizer = new(case), raw_tokenizer("bytes")
    raw.vocab_size = len(tokenizer)
    random_base(directory, raw)
    tokenizer.save_pretrained(str(directory))


def cases(args: argparse.Namespace, kind: str) -> Iterator[tuple[str, Path]]:
    """Yields the cases of text models that begin with one of the names in `--only`, by default
    those without rows of this kind, and their random models."""
    sys.path.insert(0, str(ROOT / "tests"))
    from weights.gguf.cases import ALL, keywords

    there = {row["case"] for row in read(args.out) if row["kind"] == kind}
    for case in ALL:
        wanted = case.startswith(tuple(args.only)) if args.only else case not in there
        if "text_config" in keywords(case) or not wanted:
            continue
        with tempfile.TemporaryDirectory() as work:
            random_model(Path(work) / "model", case)
            yield case, Path(work) / "model"


def random_text(config: ModelConfig, file: Path) -> list[int]:
    """Returns a random text of up to `TOKENS` tokens and the file's context length, which is the
    window if all layers have one that llama.cpp does not.

    Raises:
      RuntimeError: llama.cpp takes other factors of LongRoPE for the text.
    """
    metadata = GGUF(file).metadata
    arch = metadata["general.architecture"]
    length = metadata.get(f"{arch}.context_length", TOKENS)
    original = metadata.get(f"{arch}.rope.scaling.original_context_length", 0)
    if metadata.get(f"{arch}.rope.scaling.type") == "longrope" and TOKENS < original < CONTEXT:
        raise RuntimeError(f"long factors, because a context of {CONTEXT} tokens is the shortest")
    return np.random.default_rng(0).integers(0, config.V, min(TOKENS, length)).tolist()


def measured(measure: Callable[[], dict[str, Any]], work: Path) -> dict[str, Any]:
    """Returns the measurement, or the reason why there is none."""
    try:
        return measure()
    except (ValueError, RuntimeError) as error:
        name = "refused" if isinstance(error, ValueError) else "failed"
        return {name: str(error).replace(str(work), "DIR")}


def families(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for every case and type."""
    for case, directory in cases(args, "family"):
        model, _, config = load(directory, dtype="float32", device="cpu", warn=print)

        def measure(kind: str, directory=directory, model=model, config=config) -> dict[str, Any]:
            file = directory.with_name(f"{kind}.gguf")
            to_gguf(str(directory), file, type=kind, pre="gpt-2", warn=print)
            text = random_text(config, file)
            if kind == "f32":
                return compared(args.python, model, file, text, [], precision="f32")
            return compared(args.python, model, file, text)

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
    for case, directory in cases(args, "adapter"):
        file, lora = directory.with_name("f16.gguf"), directory.with_name("lora.gguf")

        def measure(directory=directory, file=file, lora=lora) -> dict[str, Any]:
            to_gguf(str(directory), file, type="f16", pre="gpt-2", warn=print)
            adapter = random_adapter(directory)
            lora_to_gguf(str(adapter), lora, type="f16", warn=print)
            model, _, config = load(adapter, dtype="float32", device="cpu", warn=print)
            text = random_text(config, file)
            return compared(args.python, model, file, text, lora=str(lora))

        row = dict(kind="adapter", family=case.split(":")[0], case=case, type="f16")
        yield row | measured(measure, directory.parent)


def types(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the perplexity of a real model on `PAGES`, computed here and by llama.cpp from a file
    of each type."""
    with tempfile.TemporaryDirectory() as work:
        directory, before = Path(work) / "model", 0.0
        from_gguf(str(args.model), directory, dtype="float32", max_shard_size="5GB")
        model, tokenizer, _ = load(directory, dtype="float32", device="cpu", warn=print)
        texts = page(tokenizer)
        ours = [log_likelihoods(model, text) for text in texts]
        for kind in sorted(TYPES, key=lambda kind: -BITS[kind]):
            file = Path(work) / f"{kind}.gguf"
            to_gguf(str(directory), file, type=kind, warn=print)
            theirs = llamacpp(args.python, file, texts=texts)
            found = perplexity(theirs["log_likelihoods"])
            before = before or found
            yield dict(
                kind="perplexity",
                model=args.model.stem,
                type=kind,
                tokens=sum(map(len, texts)),
                bytes=file.stat().st_size,
                perplexity=round(perplexity(ours), 4),
                perplexity_llamacpp=round(found, 4),
                loss=round(found / before - 1, 6),
                xllamacpp=theirs["xllamacpp"],
            )
            file.unlink()


def perplexity(each: list[Any]) -> float:
    return float(np.exp(-np.concatenate(each).mean()))


def page(tokenizer: Any) -> list[list[int]]:
    """Returns the first token ids of each page."""
    return [tokenizer.encode(file.read_text())[:512].tolist() for file in PAGES]


def tokenizers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields whether llama.cpp has the token ids of `TEXTS`, for the tokenizer of a real model and
    for small ones, one of each kind."""
    sys.path.insert(0, str(ROOT / "tests"))
    from chats import raw_tokenizer
    from weights.hf.cases import config
    from weights.hf.loading import random_base

    with tempfile.TemporaryDirectory() as work:
        made = {"byte-level": raw_tokenizer("bytes"), "SentencePiece": sentencepiece()}
        for name, own in made.items():
            raw = config("llama")
            raw.vocab_size = len(own)
            own.save_pretrained(str(random_base(Path(work) / name, raw)))
        if args.model:
            name = args.model.stem
            from_gguf(str(args.model), Path(work) / name, dtype="float16", max_shard_size="5GB")
        for directory in sorted(Path(work).iterdir()):
            file = directory.with_suffix(".gguf")
            to_gguf(str(directory), file, type="f16", warn=print)
            _, tokenizer, _ = load(directory, device="cpu", warn=print)
            theirs = llamacpp(args.python, file, tokenize=TEXTS)
            assert tokenizer is not None
            start = [] if not len(tokenizer.prefix) else tokenizer.prefix.tolist()
            ours = [start + tokenizer.encode_parts([text])[0].tolist() for text in TEXTS]
            pairs = zip(TEXTS, ours, theirs["tokens"], strict=True)
            different = [text for text, a, b in pairs if a != b]
            row = dict(kind="tokenizer", tokenizer=directory.name, texts=len(TEXTS))
            yield row | dict(different=different, xllamacpp=theirs["xllamacpp"])


def sentencepiece() -> Any:
    """Returns a small tokenizer of Llama 2's kind, with tokens of bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bare.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bare.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = special + [f"<0x{i:02X}>" for i in range(256)]
    lines = PAGES[0].read_text().splitlines()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=tokens, show_progress=False)
    bare.train_from_iterator(lines, trainer)
    bare.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def loop(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of a real model: imported, trained in full, and with adapters."""
    with tempfile.TemporaryDirectory() as work:
        directory, base = Path(work) / "model", Path(work) / "base.gguf"
        from_gguf(str(args.model), directory, dtype="float32", max_shard_size="5GB")
        model, tokenizer, _ = load(directory, dtype="float32", device="cpu", warn=print)
        assert tokenizer is not None
        text = page(tokenizer)[0][:128]
        row = dict(kind="loop", model=args.model.stem)
        yield row | dict(step="import", logits_off=off_transformers(args.model, model, text))
        to_gguf(str(directory), base, type="f16", warn=print)
        yield row | dict(step="export") | compared(args.python, model, base, text)
        with (Path(work) / "chats.jsonl").open("w") as file:
            for i in range(60):
                user = {"role": "user", "content": f"What is {i} plus {i % 7}?"}
                answer = {"role": "assistant", "content": f"It is {i + i % 7}, said the owl."}
                file.write(json.dumps({"messages": [user, answer]}) + "\n")
        questions = ("What is 5 plus 6?", "Name a bird.")
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = [chat_prompt(chat, tokenizer).tolist() for chat in chats]
        for kind in ("none", "lora"):
            run = Path(work) / f"run-{kind}"
            flags = [f"--model.name_or_path={directory}", f"--data.path={work}/chats.jsonl"]
            flags += [f"--run_dir={run}", f"--adapter.type={kind}", "--train.max_steps=20"]
            flags += ["--train.seq_len=96", "--train.per_device_train_batch_size=1"]
            flags += ["--device=cpu", f"--optimizer.learning_rate={RATES[kind]}"]
            subprocess.run([sys.executable, "-m", "bptjax", "train", *flags], check=True)
            trained, _, _ = load(run, dtype="float32", device="cpu", warn=print)
            for lora in (False, True)[: 1 + (kind == "lora")]:
                out = Path(work) / f"{kind}-{lora}.gguf"
                convert = [sys.executable, "-m", "bptjax", "convert", "to-gguf", str(run), str(out)]
                subprocess.run([*convert, *["--lora"] * lora], check=True)
                file, asked = (base, {"lora": str(out)}) if lora else (out, {})
                told = dict(step="train", adapter=kind, file="lora" if lora else "model")
                measurement = compared(args.python, trained, file, text, prompts, **asked)
                yield row | told | measurement


def off_transformers(file: Path, model: Any, text: list[int]) -> float:
    """Returns the largest difference of logits from transformers' own import of the file, relative
    to the largest logit."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    with torch.no_grad():
        wanted = theirs(torch.tensor([text])).logits.numpy()
    *_, last = type(model).hidden_states(model, jnp.asarray([text]))
    got = np.asarray(model.logits(last))
    return float(f"{np.abs(got - wanted).max() / np.abs(wanted).max():.2e}")


def read(out: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.open()] if out and out.exists() else []


MODES = dict(families=families, adapters=adapters, tokenizers=tokenizers, types=types, loop=loop)


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
    for row in MODES[args.mode](args):
        print(json.dumps(row := row | packages), flush=True)
        if args.out:
            others = [x for x in read(args.out) if any(x.get(k) != row.get(k) for k in NAMES)]
            args.out.write_text("".join(json.dumps(x) + "\n" for x in [*others, row]))


if __name__ == "__main__":
    main()
