"""Kinds of input that `fuzz.py` damages: their files, and the code that reads them."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as pillow
from safetensors.numpy import save_file

from bptjax.cli.evaluate import check_flags
from bptjax.cli.main import evaluate
from bptjax.config_parser import parse
from bptjax.data.branches import BRANCHED, encode_branches
from bptjax.data.config import DataConfig
from bptjax.data.encode import encode
from bptjax.data.hf_tokenizer import GENERATION
from bptjax.data.images import FORMATS, PROCESSOR, Image, ImageProcessor
from bptjax.data.preferences import PREFERENCE, encode_preference
from bptjax.data.renderer import Renderer
from bptjax.data.templates import render
from bptjax.data.text import open_documents
from bptjax.data.tokenizer import FILE, ByteTokenizer, load_tokenizer
from bptjax.data.unpaired import UNPAIRED, encode_unpaired, with_another
from bptjax.evaluation.context import ContextTasks
from bptjax.run.json_files import read_json
from bptjax.run.lazy_imports import transformers
from bptjax.weights.gguf.export import to_gguf
from bptjax.weights.gguf.reading import from_gguf
from bptjax.weights.hf.checkpoint import HFCheckpoint
from bptjax.weights.hf.config import read_config
from bptjax.weights.hf.families import FAMILIES
from bptjax.weights.hf.peft import read_peft
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG, BASE_CONFIG, read_base
from bptjax.weights.hf.tensors import INDEX, SINGLE

CONFIGS = Path(__file__).parents[1] / "configs"
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


@dataclass
class Kind:
    """Files to change, and the check that reads them.

    Attributes:
      directory: where the files are.
      files: contents of the files that are changed; of each, several to choose from.
      check: reads the files, and raises what the commands would print.
      binary: the files are no text.
      head: first bytes of a file that is no text; most changes are in them.
    """

    directory: Path
    files: dict[str, list[bytes]]
    check: Callable[[], object]
    binary: bool = False
    head: int = 300


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


def trained_tokenizers() -> list[Any]:
    """Returns tokenizers of each kind of model of the tokenizers library, with most kinds of the
    other parts."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import BertProcessing, ByteLevel, TemplateProcessing

    special = ["<s>", "</s>", "<unk>"]
    options: dict[str, Any] = dict(vocab_size=300, special_tokens=special, show_progress=False)
    split = pre.Split(Regex(r"'s|\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated")
    around = TemplateProcessing("<s> $A </s>", "$A </s> $B:1", [("<s>", 0), ("</s>", 1)])
    metaspace, words = pre.Metaspace(), pre.WhitespaceSplit()
    replaced = normalizers.Replace(Regex(r"\s+"), " ")
    unigram = partial(trainers.UnigramTrainer, unk_token="<unk>")
    parts: list[tuple[Any, Callable[..., Any], Any, Any]] = [
        (models.BPE(), trainers.BpeTrainer, pre.Sequence([split, pre.ByteLevel(False)]), None),
        (
            models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
            trainers.BpeTrainer,
            pre.Sequence([pre.Digits(True), pre.Punctuation(), metaspace]),
            normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")]),
        ),
        (models.Unigram(), unigram, metaspace, replaced),
        (
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer,
            pre.BertPreTokenizer(),
            normalizers.BertNormalizer(),
        ),
        (
            models.WordLevel(unk_token="<unk>"),
            trainers.WordLevelTrainer,
            words,
            normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()]),
        ),
    ]
    decoded = [
        decoders.ByteLevel(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.Strip(" ", 1, 0),
    ]
    processors = [ByteLevel(False), around, around, BertProcessing(("</s>", 1), ("<s>", 0)), around]
    found = []
    for each, decoder, processor in zip(parts, decoded, processors, strict=True):
        one, trainer = Tokenizer(each[0]), each[1](**options)
        one.pre_tokenizer, one.decoder, one.post_processor = each[2], decoder, processor
        if each[3] is not None:
            one.normalizer = each[3]
        one.train_from_iterator(["hello world, it's 1234 x é"] * 9, trainer)
        found.append(one)
    return found


def tokenizer_json(directory: Path) -> Kind:
    found = [one.to_str().encode() for one in trained_tokenizers()]
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>")
    (directory / "tokenizer_config.json").write_bytes(text(settings))
    words = "hello  world,\tit's 12345 é😀\n", " a" * 2000, "x" * 2000

    def check():
        one = load_tokenizer(directory, 300)
        for word in words:
            one.decode(one.encode_prompt(word))
        one.encode_parts([words[0], words[0]])
        one.vocabulary()

    return Kind(directory, {"tokenizer.json": found}, check)


def images(directory: Path) -> Kind:
    rng = np.random.default_rng(0)
    small = pillow.fromarray(rng.integers(256, size=(23, 37, 3), dtype=np.uint8))
    small.info["comment"] = b"a comment"
    exif = pillow.Exif()
    exif[0x0112] = 6  # Orientation.
    files = []
    for format in FORMATS:
        for mode in ("RGB", "L", "P", "RGBA", "1", "CMYK", "I;16", "F"):
            for options in ({}, {"save_all": True, "append_images": [small.convert("P")] * 3}):
                more = {"exif": exif} if format in ("JPEG", "PNG", "WEBP", "TIFF") else {}
                more |= {"compression": "tiff_deflate"} if format == "TIFF" and options else {}
                more |= {"progressive": True} if format == "JPEG" and options else {}
                stream = io.BytesIO()
                with contextlib.suppress(OSError, ValueError, KeyError):
                    small.convert(mode).save(stream, format, **options, **more)
                    files.append(stream.getvalue())
    # Small files of large images: long, within the limit of pixels, and beyond it.
    stream = io.BytesIO()
    pillow.new("1", (1, 10_000_000)).save(stream, "PNG")
    files.append(stream.getvalue())
    for format, side in (("PNG", 4000), ("GIF", 4000), ("PNG", 10_000), ("TIFF", 14_000)):
        stream, more = io.BytesIO(), {"compression": "tiff_deflate"} if format == "TIFF" else {}
        pillow.new("1", (side, side)).save(stream, format, **more)
        files.append(stream.getvalue())
    settings = dict(image_processor_type="ViTImageProcessor", size=dict(height=16, width=16))
    cropped = dict(size=dict(shortest_edge=18), do_center_crop=True, crop_size=settings["size"])
    (directory / "a").mkdir()
    file = directory / "a" / "a.png"

    def check():
        processor = ImageProcessor(directory, (3, 16, 16), (4, 4), ["a"])
        processor.check()
        processor(Image(file, "a"))

    return Kind(
        directory, {"a/a.png": files, PROCESSOR: [text(settings), text(cropped)]}, check, True
    )


def gguf(directory: Path) -> Kind:
    found, made = [], directory / "made"
    for number, one in enumerate(trained_tokenizers()[:2]):
        made.mkdir()
        settings = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        transformers().PreTrainedTokenizerFast(tokenizer_object=one, **settings).save_pretrained(
            str(made)
        )
        model(made, vocab_size=300)
        for type in ("f32", "q8_0"):
            file = directory / f"{number}{type}.gguf"
            how = dict(pre="gpt-2") if number == 0 else {}
            to_gguf(str(made), file, type=type, warn=lambda line: None, **how)
            found.append(file.read_bytes())
        shutil.rmtree(made)
    for path in directory.iterdir():
        path.unlink()
    source, out = directory / "a.gguf", directory / "out"

    def check():
        try:
            from_gguf(str(source), out, dtype=None, max_shard_size="5GB")
            shutil.rmtree(out)
        finally:
            # A failed conversion leaves nothing.
            assert [*directory.iterdir()] == [source], "files are left"

    return Kind(directory, {source.name: [*found]}, check, True, head=len(found[0]) // 2)


def preferences(directory: Path) -> Kind:
    turns, user = [{"role": "system", "content": "s"}, *TALK], TALK[:1]
    other = [*user, {"role": "assistant", "content": "No"}]
    pairs: list[dict[str, Any]] = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": "same b", "rejected": "same c"},
        {"chosen": TALK, "rejected": other},
        {"prompt": user, "chosen": TALK[1:], "rejected": other[1:]},
        {"prompt": turns, "chosen": TALK[1:], "rejected": other[1:], "tools": [CALL]},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ]
    singles: list[dict[str, Any]] = [
        {"prompt": "a b", "completion": "c d", "label": True},
        {"prompt": user, "completion": TALK[1:], "label": False, "tools": [CALL]},
        {"prompt": turns, "completion": "text", "label": True, "chat_template_kwargs": {"x": 1}},
    ]
    trees: list[dict[str, Any]] = [{"messages": user, "branches": [TALK[1:], other[1:], turns]}]
    fixed = directory / "fixed.jsonl"
    fixed.write_bytes(text(singles[0]) + b"\n")
    config, one = DataConfig(path="a"), ByteTokenizer()
    one = one.with_chat(TEMPLATES[0], [])

    def check():
        for shared in (False, True):
            for document in open_documents(directory / "pairs.jsonl", format=PREFERENCE):
                encode_preference(document, one, config, shared=shared)
            paths = [str(directory / "unpaired.jsonl"), str(fixed)]
            documents = open_documents(paths, format=UNPAIRED)
            encode_unpaired(with_another(0, [*documents], 0), one, config, shared=shared)
        for document in open_documents(directory / "branches.jsonl", format=BRANCHED):
            encode_branches(document, one, config)

    rows = {"pairs.jsonl": pairs, "unpaired.jsonl": singles, "branches.jsonl": trees}
    files = {name: [text(row) + b"\n" for row in found] for name, found in rows.items()}
    return Kind(directory, files, check)


def tasks(directory: Path, **more: Any) -> Kind:
    """Flags of `bptjax evaluate --tasks`, its haystack and questions, and the rows of an earlier
    call. `more` replaces flags."""
    flags = {
        "tasks": ["passkey", "niah_multikey", "variable_tracking", "common_words"],
        "lengths": ["1500"],
        "samples": "2",
        "seed": "0",
        "text_key": "text",
        "haystack": ["words.jsonl", "words.txt"],
    } | more
    words = "A first sentence. A second one! Is it the third?\nNo。"
    rows = dict(model="m", task="passkey", length=1500, seed=0, samples=2, score=1.0)
    asked = dict(question="Is it?", document=words, answer="No")
    squad = asked | dict(context=words + "!", answers={"text": ["No", "no"], "answer_start": [0]})
    del squad["document"], squad["answer"]
    one = ByteTokenizer()

    def check():
        argv = ["--model=m", f"--out={directory / 'out'}"]
        for name, value in read_json(directory / "flags.json").items():
            values = [str(x) for x in value] if isinstance(value, list) else [str(value)]
            if name in ("haystack", "questions"):
                values = [str(directory / x) for x in values]
            argv += [f"--{name}", *values]
        args = evaluate().parse_args(argv)
        check_flags(args)
        if not ContextTasks.asked(args):
            raise ValueError("no tasks")
        found = ContextTasks(args)
        found.check("m", one)
        for name in found.names:
            found.sampler("m", name, found.lengths[-1], one)[0]

    (directory / "out").mkdir()
    files = {
        "flags.json": [text(flags)],
        "words.jsonl": [text({"text": words}) + b"\n"],
        "words.txt": [words.encode()],
        "out/tasks.json": [b"[]", b"[" + text(rows) + b"]"],
    }
    if "questions" in flags:
        files["questions.jsonl"] = [text(x) + b"\n" for x in (asked, squad)]
        files["questions.jsonl"].append(b"".join(files["questions.jsonl"]))
    return Kind(directory, files, check)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "configs": configs,
    "safetensors": model,
    "index": lambda directory: model(directory, shards=2),
    "config_json": config_json,
    "adapter_config": adapter_config,
    "tokenizer": tokenizer,
    "template": template,
    "records": records,
    "tokenizer_json": tokenizer_json,
    "images": images,
    "gguf": gguf,
    "preferences": preferences,
    "tasks": tasks,
    "questions": lambda directory: tasks(
        directory, tasks=["questions"], questions=["questions.jsonl"], samples="1"
    ),
}
