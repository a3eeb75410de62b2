"""Reads damaged input: configs, and files of models, adapters, tokenizers, templates and records.

    python scripts/fuzz.py --kind index --number 10000 --seed 0

A case is one file, changed at random places. It must be accepted, or refused with one line and exit
code 2. Prints a row of counts, and the faults: any other outcome. Exits with 1 if there is one.
A case depends on kind, seed and its number only. `--save FILE` adds the faults to a corpus, which
`--corpus FILE` reads again.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mutations import changed
from safetensors.numpy import save_file

from bptjax.cli.run_command import run_command
from bptjax.config_parser import parse
from bptjax.data.encode import encode
from bptjax.data.hf_tokenizer import GENERATION
from bptjax.data.renderer import Renderer
from bptjax.data.templates import render
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import FILE, ByteTokenizer, load_tokenizer
from bptjax.run.lazy_imports import transformers
from bptjax.weights.hf.checkpoint import HFCheckpoint
from bptjax.weights.hf.config import read_config
from bptjax.weights.hf.families import FAMILIES
from bptjax.weights.hf.peft import read_peft
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG, BASE_CONFIG, read_base
from bptjax.weights.hf.tensors import INDEX, SINGLE

CONFIGS = Path(__file__).parents[1] / "configs"
# Seconds that a case may take, and bytes of memory beyond the start.
HANG_S, MEMORY_BYTES = 60, 2**33
LLAMA: dict[str, Any] = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "{% set at = namespace(n=0, x='a') %}{% for m in messages if m.role != 'system' %}"
    "{% set at.n = at.n + loop.index0 %}{% set at.x = at.x ~ at.x %}{{ m.content[::-1] }}"
    "{% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{% endfor %}{{ at.x * at.n }}",
    "{% macro show(x, n=3) %}{% for i in range(n) %}{{ x.split(' ') | join('-') }}{% endfor %}"
    "{% endmacro %}{{ show(messages[0].content, 2) }}{{ '%5s' % 3 }}{{ messages | map('length') }}"
    "{% if tools is defined %}{{ raise_exception('no') }}{% endif %}{{ 2 ** 9 }}",
]
TALK = [{"role": "user", "content": "Hi a b"}, {"role": "assistant", "content": "Hello b a"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RECORDS: list[dict[str, Any]] = [
    {"text": "some text"},
    {"messages": TALK, "tools": [{"type": "function", "function": {"name": "add"}}]},
    {"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{}"}]},
    {"instruction": "a", "input": "b", "output": "c"},
    {"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}},
    {"chosen": "\n\nHuman: a\n\nAssistant: b"},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
]


class Hang(BaseException):
    """A case has taken too long."""


@dataclass
class Kind:
    """Files to change, and the check that reads them.

    Attributes:
      directory: where the files are.
      files: contents of the files that are changed; of each, several to choose from.
      check: reads the files, and raises what the commands would print.
      binary: the files are no text.
    """

    directory: Path
    files: dict[str, list[bytes]]
    check: Callable[[], object]
    binary: bool = False


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def model(directory: Path, shards: int = 1, vocab_size: int = 64) -> Kind:
    """Returns a tiny checkpoint of Llama; its check reads all tensors."""
    (directory / "config.json").write_bytes(text(LLAMA | {"vocab_size": vocab_size}))
    family, config = read_config(directory)
    rng = np.random.default_rng(0)
    arrays = {
        tensor: rng.normal(size=rule.shape).astype(np.float32)
        for rule, names in family.names(config).items()
        for tensor in names.values()
    }
    places = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(arrays)}
    for file in set(places.values()) if shards > 1 else ():
        save_file({n: x for n, x in arrays.items() if places[n] == file}, directory / file)
    if shards > 1:
        (directory / INDEX).write_bytes(text({"metadata": {}, "weight_map": places}))
    else:
        save_file(arrays, directory / SINGLE)
    changed = INDEX if shards > 1 else SINGLE

    def check():
        for _ in HFCheckpoint(directory, family, config).slices():
            pass

    return Kind(directory, {changed: [(directory / changed).read_bytes()]}, check, shards == 1)


def config_json(directory: Path) -> Kind:
    found = [text(LLAMA)]
    for name in FAMILIES:
        raw = transformers().AutoConfig.for_model(name).to_dict()
        found.append(json.dumps(raw, default=str).encode())
    return Kind(directory, {"config.json": found}, lambda: read_config(directory))


def adapter_config(directory: Path) -> Kind:
    (directory / "base").mkdir()
    (directory / "base" / "config.json").write_bytes(text(LLAMA))
    family, config = read_config(directory / "base")
    prefix = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    arrays = {prefix.format(i, "A"): np.ones((2, 16), np.float32) for i in range(2)}
    arrays |= {prefix.format(i, "B"): np.ones((16, 2), np.float32) for i in range(2)}
    save_file(arrays, directory / "adapter_model.safetensors")
    raw = dict(peft_type="LORA", r=2, lora_alpha=4, lora_dropout=0.0, bias="none")
    raw |= dict(target_modules=["q_proj"], rank_pattern={"q_proj": 2}, alpha_pattern={})
    raw |= dict(base_model_name_or_path="base", use_rslora=False)
    base = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 9}

    def check():
        read_base(directory)
        read_peft(directory, family, config)

    return Kind(directory, {ADAPTER_CONFIG: [text(raw)], BASE_CONFIG: [text(base)]}, check)


def tokenizer(directory: Path) -> Kind:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = trainers.BpeTrainer(vocab_size=270, special_tokens=["<s>", "</s>"])
    backend.train_from_iterator(["hello world"] * 9, special)
    found = transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    found.chat_template = TEMPLATES[0]
    found.save_pretrained(str(directory / "hf"))
    (directory / "hf" / GENERATION).write_bytes(text({"eos_token_id": 1, "bos_token_id": 0}))
    (directory / "own").mkdir()
    own = {"type": "char", "characters": "abc", "chat_template": None}
    (directory / "own" / FILE).write_bytes(text(own))

    def check():
        for name in ("own", "hf"):
            one = load_tokenizer(directory / name, 300)
            word = "b" if name == "own" else "hello é"
            one.decode(one.encode_prompt(word))
            one.encode_parts([word, word])
            assert one.chat_template is None or isinstance(one.chat_template, str)
            one.vocabulary()

    files = [path for path in directory.rglob("*") if path.suffix in (".json", ".jinja")]
    files = {str(path.relative_to(directory)): [path.read_bytes()] for path in files}
    return Kind(directory, files, check)


def template(directory: Path) -> Kind:
    file, one, renderer = directory / "chat_template.jinja", ByteTokenizer(), Renderer(seconds=1)

    def check():
        text, variables = file.read_text(errors="replace"), {"x": [1, {"a": "b"}]}
        render(TALK, text, one, variables, answer=True, renderer=renderer)

    return Kind(directory, {file.name: [one.encode() for one in TEMPLATES]}, check)


def records(directory: Path) -> Kind:
    one = ByteTokenizer()

    def check():
        documents = open_documents(directory / "a.jsonl", format="auto")
        for document in documents:
            encode(document, one)

    return Kind(directory, {"a.jsonl": [text(row) + b"\n" for row in RECORDS]}, check)


def configs(directory: Path) -> Kind:
    found = [path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))]
    argv = [f"--config={directory / 'a.yaml'}"]
    return Kind(directory, {"a.yaml": found}, lambda: parse(argv).on("cpu"))


KINDS: dict[str, Callable[[Path], Kind]] = {
    "configs": configs,
    "safetensors": model,
    "index": lambda directory: model(directory, shards=2),
    "config_json": config_json,
    "adapter_config": adapter_config,
    "tokenizer": tokenizer,
    "template": template,
    "records": records,
}


@dataclass
class Counts:
    """Outcomes of the cases of a kind.

    Attributes:
      hang_s: seconds after which a case counts as a hang.
    """

    hang_s: int = HANG_S
    accepted: int = 0
    refused: int = 0
    faults: list[dict[str, str]] = field(default_factory=list)
    slowest: float = 0.0

    def run(self, kind: Kind, name: str, file: str, content: bytes) -> None:
        """Writes the file, reads it, counts the outcome, and restores the file."""
        path = kind.directory / file
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)

        def command(_: list[str]) -> int:
            kind.check()
            return 0

        start, errors = time.monotonic(), io.StringIO()
        signal.alarm(self.hang_s)
        try:
            with contextlib.redirect_stderr(errors):
                code, said = run_command(command, []), ""
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            code, said = -1, f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.alarm(0)
            if before is None:
                path.unlink()
            else:
                path.write_bytes(before)
        self.slowest = max(self.slowest, time.monotonic() - start)
        self.accepted += code == 0
        self.refused += code == 2
        lines = errors.getvalue().splitlines()
        if code not in (0, 2) or code == 2 and sum(x.startswith("error: ") for x in lines) != 1:
            said = said or f"exit code {code}: {errors.getvalue()[:200]}"
            case = {"kind": name, "file": file, "content": content.decode("latin-1")}
            self.faults.append(case | {"error": said})


def fuzz(name: str, number: int, seed: int, seconds: float = float("inf")) -> tuple[Counts, int]:
    """Runs cases of a kind. Returns the counts, and the number of cases run."""
    counts, end = Counts(), time.monotonic() + seconds
    with working(name) as kind:
        for i in range(number):
            if time.monotonic() > end:
                return counts, i
            rng = random.Random(f"{name}/{seed}/{i}")
            file = rng.choice(sorted(kind.files))
            content = changed(rng.choice(kind.files[file]), rng, file, kind.binary)
            counts.run(kind, name, file, content)
    return counts, number


def replay(cases: list[dict[str, str]], hang_s: int = HANG_S) -> Counts:
    """Runs the cases of a corpus."""
    counts = Counts(hang_s)
    for name in dict.fromkeys(case["kind"] for case in cases):
        with working(name) as kind:
            for case in cases:
                if case["kind"] == name:
                    counts.run(kind, name, case["file"], case["content"].encode("latin-1"))
    return counts


@contextlib.contextmanager
def working(name: str) -> Iterator[Kind]:
    """Yields a kind in a temporary directory."""

    def hang(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory(prefix="bptjax-fuzz-") as directory:
        kind = KINDS[name](Path(directory))
        for file, contents in kind.files.items():
            (kind.directory / file).write_bytes(contents[0])
        yield kind
    signal.signal(signal.SIGALRM, before)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, help="kind of input")
    parser.add_argument("--number", type=int, default=1000, help="number of cases")
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which none starts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--save", type=Path, help="corpus to which faults are added")
    parser.add_argument("--corpus", type=Path, help="corpus to run in place of new cases")
    args = parser.parse_args(argv)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    if args.corpus:
        counts = replay(json.loads(args.corpus.read_text()))
        number = counts.accepted + counts.refused + len(counts.faults)
    else:
        counts, number = fuzz(args.kind, args.number, args.seed, args.seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("| kind | seed | cases | accepted | refused | faults | slowest, s | peak memory, GiB |")
    row = args.kind or "corpus", args.seed, number, counts.accepted, counts.refused
    row = *row, len(counts.faults), f"{counts.slowest:.1f}", f"{peak:.2f}"
    print("|", " | ".join(map(str, row)), "|")
    kinds: dict[str, dict[str, str]] = {}
    for fault in counts.faults:
        kinds.setdefault(fault["error"][:60], fault)
    for fault in kinds.values():
        print(f"fault: {fault['file']}: {fault['error']}", file=sys.stderr)
    if args.save and kinds:
        old = json.loads(args.save.read_text()) if args.save.exists() else []
        args.save.write_text(json.dumps([*old, *kinds.values()], indent=1) + "\n")
    return 1 if counts.faults else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
