"""Converts tokenizers between Hugging Face's tokenizer.json and GGUF metadata."""

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from bptjax.data.hf_tokenizer import HFTokenizer, write_generation_config
from bptjax.models.config import ModelConfig
from bptjax.weights.gguf.pretokenizers import (
    BEGUN,
    COMPOSED,
    WHOLE,
    pre_tokenizer,
    recognize,
)

PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
# Special tokens: names in a GGUF file and in Hugging Face's files.
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"} | {
    "mask": "mask"
}
# Tokens that end a text besides eos.
ENDS = "eot", "eom"
SPACE = "\u2581"
# Score of tokens that no merge makes, in SentencePiece's order.
UNMERGED = -1e9
# Most characters of a token of SentencePiece: the time to find its merges is quadratic.
LONGEST = 1024


class Type(IntEnum):
    """Types of tokens in tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_tokenizer(
    tokenizer: HFTokenizer, config: ModelConfig, pre: str | None = None
) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, by whole key.

    Args:
      pre: name of the pre-tokenizer; None to recognize it.

    Raises:
      ValueError: llama.cpp does not have this tokenizer.
    """
    own = tokenizer.transformers
    if not own.is_fast:
        raise ValueError(f"{own.name_or_path}: must have a tokenizer.json")
    file = json.loads(own.backend_tokenizer.to_str())
    model, kind = file["model"], file["model"]["type"]
    texts, added = tokenizer.vocabulary(), own.added_tokens_decoder
    spaced = kind == "BPE" and model.get("byte_fallback", False)
    if kind != "BPE":
        raise ValueError(
            f"{own.name_or_path}: must be a byte-level BPE or SentencePiece BPE tokenizer, not "
            f"{kind}, to be written to a GGUF file"
        )
    tokens, types = [], []
    for i in range(config.V):
        text, special = texts.get(i, f"[PAD{i}]"), added.get(i)
        kind = Type.NORMAL if i in texts else Type.UNUSED
        if spaced and text == model.get("unk_token"):
            kind = Type.UNKNOWN
        elif special is not None:
            kind = Type.CONTROL if special.special else Type.USER_DEFINED
            text = text if special.special else text.replace(SPACE, " ")
        elif spaced and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kind = Type.BYTE
        tokens.append(text)
        types.append(int(kind))
    keys: dict[str, Any] = {"model": "llama" if spaced else "gpt2"}
    known, outside = set(tokens), {token.content for token in added.values()}
    merges = [x.split(" ") if isinstance(x, str) else x for x in model["merges"]]
    # The model may have fewer tokens than the tokenizer.
    merges = [x for x in merges if {*x, "".join(x)} <= known]
    if spaced:
        keys |= {"pre": "default", "tokens": tokens, "scores": _scores(merges, tokens, outside)}
        keys["add_space_prefix"] = _adds_space(file)
    else:
        name = pre or recognize(own, file)
        if name is None:
            raise ValueError(
                f"{own.name_or_path}: its pre-tokenizer must be one that llama.cpp has; with an "
                "unknown one llama.cpp would split text otherwise; if you know its name there, "
                "give it with --pre NAME"
            )
        keys |= {"pre": name, "tokens": tokens, "merges": [" ".join(x) for x in merges]}
    keys["token_type"] = types
    ids = {ours: getattr(own, f"{hf}_token_id", None) for ours, hf in SPECIAL.items()}
    # The stop ids are those the model was trained with; tokenizers often name another.
    ends = [i for i in tokenizer.stop_ids if i < config.V]
    if ends:
        ids["eos"] = ids["eos"] if ids["eos"] in ends else ends[0]
        others = [i for i in ends if i != ids["eos"]]
        ids |= dict(zip(ENDS, others, strict=False))
    keys |= {f"{k}_token_id": i for k, i in ids.items() if i is not None and i < config.V}
    around = own.encode("a")
    keys["add_bos_token"] = bool(around) and around[0] == ids["bos"]
    keys["add_eos_token"] = len(around) > 1 and around[-1] == own.eos_token_id
    values = {f"{PREFIX}{key}": value for key, value in keys.items()}
    if template := tokenizer.chat_template:
        values[TEMPLATE] = template
    return values


def _scores(merges: list[list[str]], tokens: list[str], added: set[str]) -> list[float]:
    """Returns the scores by which llama.cpp merges tokens in the order of the merges. It merges any
    two neighbors that are a token together.

    Args:
      added: tokens outside the merges.

    Raises:
      ValueError: scores cannot express the merges.
    """
    scores: dict[str, int] = {}
    pairs: dict[str, set[tuple[str, ...]]] = {}
    last, mergeable = "", set(tokens) - added
    for rank, merge in enumerate(merges):
        token = "".join(merge)
        neighbors = token not in scores or token == last
        scores.setdefault(token, -rank)
        pairs.setdefault(token, set()).add(tuple(merge))
        last = token if neighbors else ""
        if not neighbors:
            break
    for token, own in pairs.items() if last else ():
        parts = ((token[:k], token[k:]) for k in range(1, len(token)))
        if any({*part} <= mergeable and part not in own for part in parts):
            last = ""
            break
    if merges and not last:
        raise ValueError(
            f"the tokenizer's merges to {token!r} must be all pairs of tokens, next to each other, "
            "as in SentencePiece, to be written to a GGUF file"
        )
    return [float(scores.get(token, UNMERGED)) for token in tokens]


def _parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Returns the parts of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _adds_space(file: dict[str, Any]) -> bool:
    """Returns whether a SentencePiece tokenizer puts a space before a text."""
    prepends = (x["type"] == "Prepend" for x in _parts(file["normalizer"], "normalizers"))
    spaces = (
        x["type"] == "Metaspace" and x.get("prepend_scheme", "always") != "never"
        for x in _parts(file["pre_tokenizer"], "pretokenizers")
    )
    return any(prepends) or any(spaces)


def read_tokenizer(metadata: dict[str, Any], directory: Path, length: int) -> dict[str, Any]:
    """Writes the files of a tokenizer, and generation_config.json, to `directory`. Returns the ids
    of config.json.

    Args:
      length: number of positions of the model.

    Raises:
      ValueError: the tokenizer is missing, damaged or of an unknown kind.
    """
    get = {
        key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)
    }
    kind, tokens = get.get("model"), get.get("tokens")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{PREFIX}model={kind!r}: must be gpt2 or llama")
    types = get.get("token_type", np.ones(len(tokens or ()), np.int32))
    if not isinstance(tokens, list) or not isinstance(types, np.ndarray):
        raise ValueError(f"{PREFIX}tokens, {PREFIX}token_type: must be arrays")
    if len(types) != len(tokens) or len({*tokens}) != len(tokens):
        raise ValueError(f"{PREFIX}tokens: must be different tokens, each with a token_type")
    ids: dict[str, int] = {}
    for ours in (*SPECIAL, *ENDS):
        value = get.get(f"{ours}_token_id")
        if isinstance(value, int) and 0 <= value < len(tokens):
            ids[ours] = value
    vocab = {token: i for i, token in enumerate(tokens)}
    begun = kind == "llama" or get.get("pre") in BEGUN
    file: dict[str, Any] = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[
            dict(
                id=i,
                content=token,
                single_word=False,
                lstrip=False,
                rstrip=False,
                normalized=False,
                special=bool(types[i] != Type.USER_DEFINED),
            )
            for i, token in enumerate(tokens)
            if types[i] in (Type.CONTROL, Type.USER_DEFINED, Type.UNKNOWN)
        ],
    )
    if kind == "gpt2":
        file |= _byte_level(get, vocab)
    else:
        file |= _sentencepiece(get, vocab, ids)
    start = [("bos", get.get("add_bos_token", begun)), ("eos", get.get("add_eos_token", False))]
    around = {key: tokens[ids[key]] for key, added in start if added and key in ids}
    file["post_processor"] = _template(around, vocab) or file.get("post_processor")
    config: dict[str, Any] = {
        f"{hf}_token": tokens[ids[ours]] for ours, hf in SPECIAL.items() if ours in ids
    }
    config |= dict(
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        model_max_length=length,
    )
    if isinstance(template := metadata.get(TEMPLATE), str):
        config["chat_template"] = template
    for name, content in (("tokenizer.json", file), ("tokenizer_config.json", config)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    ends = [ids[key] for key in ("eos", *ENDS) if key in ids]
    fields = {f"{hf}_token_id": ids[o] for o, hf in SPECIAL.items() if o in ids and hf in HEADED}
    write_generation_config(directory, fields | ({"eos_token_id": ends} if len(ends) > 1 else {}))
    return fields


# Special tokens that config.json names.
HEADED = "bos", "eos", "pad"


def _byte_level(get: dict[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    """Returns the parts of tokenizer.json of a byte-level tokenizer."""
    merges, name = get.get("merges", []), get.get("pre", "gpt-2")
    if not isinstance(merges, list):
        raise ValueError(f"{PREFIX}merges: must be an array of strings")
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(
        normalizer={"type": "NFC"} if name in COMPOSED else None,
        pre_tokenizer=pre_tokenizer(name),
        post_processor=level | dict(trim_offsets=False),
        decoder=level,
        model=_bpe(vocab, [m.split(" ") for m in merges], ignore_merges=name in WHOLE),
    )


def _sentencepiece(
    get: dict[str, Any], vocab: dict[str, int], ids: dict[str, int]
) -> dict[str, Any]:
    """Returns the parts of tokenizer.json of a SentencePiece tokenizer."""
    scores = get.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocab):
        raise ValueError(f"{PREFIX}scores: must have one number for each token")
    texts = list(vocab)
    pairs = []
    for i in np.argsort(-scores, kind="stable"):
        text = texts[i]
        if len(text) > LONGEST:
            raise ValueError(
                f"{PREFIX}tokens: must have at most {LONGEST:,} characters each, not {len(text):,}"
            )
        parts = ((text[:k], text[k:]) for k in range(1, len(text)))
        known = [(a, b) for a, b in parts if a in vocab and b in vocab]
        pairs += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    space = get.get("add_space_prefix", True)
    normalizers: list[dict[str, Any]] = [dict(type="Prepend", prepend=SPACE)] * bool(space)
    normalizers.append(dict(type="Replace", pattern={"String": " "}, content=SPACE))
    decoders: list[dict[str, Any]] = [
        dict(type="Replace", pattern={"String": SPACE}, content=" "),
        dict(type="ByteFallback"),
        dict(type="Fuse"),
    ]
    decoders += [dict(type="Strip", content=" ", start=1, stop=0)] * bool(space)
    unknown = texts[ids["unknown"]] if "unknown" in ids else None
    return dict(
        normalizer=dict(type="Sequence", normalizers=normalizers),
        pre_tokenizer=None,
        decoder=dict(type="Sequence", decoders=decoders),
        model=_bpe(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    )


def _bpe(vocab: dict[str, int], merges: list, **more: Any) -> dict[str, Any]:
    default = dict(
        type="BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=False,
    )
    return default | more | dict(vocab=vocab, merges=merges)


def _template(around: dict[str, str], vocab: dict[str, int]) -> dict[str, Any] | None:
    """Returns the post-processor that adds tokens around a text; None if it adds none."""
    if not around:
        return None

    def pieces(name: str, number: int) -> list[dict[str, Any]]:
        text = [{"Sequence": dict(id=name, type_id=number)}]
        special = {
            key: [{"SpecialToken": dict(id=token, type_id=number)}] for key, token in around.items()
        }
        return special.get("bos", []) + text + special.get("eos", [])

    return dict(
        type="TemplateProcessing",
        single=pieces("A", 0),
        pair=pieces("A", 0) + pieces("B", 1),
        special_tokens={
            token: dict(id=token, ids=[vocab[token]], tokens=[token]) for token in around.values()
        },
    )
