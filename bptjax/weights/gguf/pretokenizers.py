"""Pre-tokenizers of llama.cpp, which a file names in tokenizer.ggml.pre.

A pre-tokenizer is recognized by the ids of a test string, as in llama.cpp's converter, or else by
its regular expressions.
"""

import hashlib
import json
from typing import Any

# The test string of llama.cpp's converter.
TEST_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d"
    "\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 333"
    "3 33333 333333 3333333 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2"
    "\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple"
    "\u5de5\u4f5c1314151\u5929\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 "
    "\u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''''```````\"\"\"\"......!!!!!!"
    "?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like s"
    "ome tea? We'Ve a'lL"
)
# Names by the start of the SHA-256 hash of the ids of the test string.
HASHES = {
    "b6e8e1518dc4305b": "chatglm-bpe",
    "81d72c7348a9f0eb": "chatglm-bpe",
    "a1336059768a55c9": "glm4",
    "9ca2dd618e8afaf0": "glm4",
    "cdf5f35325780597": "glm4",
    "1431a23e583c9743": "minerva-7b",
    "7e57df22b1fe23a7": "hunyuan",
    "bba3b3366b646dbd": "hunyuan-dense",
    "e6ddf9c6686791c1": "hy_v4",
    "a6b57017d60e6edb": "falcon-h1",
    "60476e1243776c4f": "falcon-h1",
    "3eda48b4c4dc7de7": "falcon-h1",
    "48f8e02c0359c0bb": "falcon-h1",
    "81212dc7cdb7e0c1": "kimi-k2",
    "d4540891389ea895": "qwen2",
    "1444df51289cfa80": "qwen35",
    "66b8d4e19ab16c3b": "grok-2",
    "b3d1dd861f1d4c5c": "jina-v2-de",
    "0fe1cf6eda062318": "gpt-2",
    "9e454714343b69b9": "lfm2",
    "846deafc5b0fa786": "gemma4",
    "0a766d034107bc73": "spark2_5",
    "0ef9807a4087ebef": "llama-bpe",
    "049ecf7629871e30": "deepseek-llm",
    "347715f544604f91": "deepseek-coder",
    "8aeee3860c56296a": "falcon",
    "9d032fcbd5501f4a": "falcon3",
    "b6dc8df998e1cfbd": "mpt",
    "35d91631860c815f": "starcoder",
    "3ce83efda5659b07": "gpt-2",
    "32d85c31273f8019": "stablelm2",
    "6221ad2852e85ce9": "refact",
    "9c2227e4dd922002": "command-r",
    "d772b220ace2baec": "tiny_aya",
    "52df12b4c8d4176e": "cohere2moe",
    "e636dc30a262dcc0": "qwen2",
    "a8594e3edff7c29c": "dbrx",
    "c7699093ba4255a9": "jina-v1-en",
    "171aeeedd6fb548d": "jina-v2-es",
    "27949a2493fc4a9f": "jina-v2-de",
    "a023e9fdc5a11f03": "jina-v5-nano",
    "c136ed14d01c2745": "smaug-bpe",
    "c7ea5862a53e4272": "poro-chat",
    "7967bfa498ade6b7": "jina-v2-code",
    "7fc505bd3104ca10": "viking",
    "b53802fb28e26d64": "jais",
    "bc5108ee1eb6a3d6": "jais-2",
    "7b3e7548e4308f52": "codeshell",
    "63b97e4253352e6f": "tekken",
    "855059429035d75a": "smollm",
    "3c30d3ad1d6b6420": "bloom",
    "bc01ce58980e1db4": "gpt3-finnish",
    "4e2b24cc4770243d": "exaone",
    "fcace8b9cac38ce8": "phi-2",
    "60824e3c0d9401f8": "chameleon",
    "8b5a93ed70405748": "roberta-bpe",
    "ad851be1dba641f2": "gigachat",
    "d4c8f286ea6b520b": "megrez",
    "877081d19cf6996e": "deepseek-v3",
    "b3f499bb4255f8ca": "deepseek-r1-qwen",
    "ccc2ef013c104be7": "gpt-4o",
    "7dec86086fcc38b6": "superbpe",
    "1994ffd01900cfb3": "trillion",
    "96a5f08be6259352": "bailingmoe",
    "d353350c764d8c3b": "llama4",
    "0e9433cbbb161f89": "pixtral",
    "d5f1dd6f980fec56": "seed-coder",
    "b0a6b1c0bd5998eb": "a.x-4.0",
    "f6791d196f87ce6b": "midm-2.0",
    "169bf0296a13c4d9": "lfm2",
    "2085e1638f6c377a": "exaone4",
    "a1e163ecab2e718a": "mellum",
    "a0b64b4385f12366": "modern-bert",
    "49fc0303c9e0d2c2": "afmoe",
    "9b1be57e70d20d95": "bailingmoe2",
    "53e325976a6e1423": "granite-docling",
    "f4f37b6c8eb9ea29": "minimax-m2",
    "4a2e2abae11ca2b8": "kormo",
    "9d70134b369a70e5": "youtu",
    "16389f0a1f51ee53": "solar-open",
    "6c81ce329e080288": "exaone-moe",
    "d30d75d9059f1aa2": "qwen35",
    "b4b8ca1f9769494f": "joyai-llm",
    "e4d54df1ebc1f2b9": "kanana2",
    "862f827721df9560": "f2llmv2",
    "62f6fb0a6fd5098c": "sarvam-moe",
    "f728162c1315c26e": "talkie",
    "36f3066e97b7f399": "minicpm5",
    "f241072145675bf8": "granite-embed-multi-97m",
    "789696f5946cc0fc": "granite-embed-multi-311m",
    "9dcf830ee9990cdb": "mellum2",
    "972da7b59cec44d1": "laguna",
    "653660222fb704f6": "ufakzeka",
}
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
QWEN35 = (
    _ENGLISH
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    + _SPACES
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SLASHED = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASHED}"
GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_ENGLISH}?|{_START}{_UPPER}+{_LOWER}*{_ENGLISH}?|\p{{N}}{{1,3}}"
    + _SLASHED
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_BLOOM = r" ?[^(\s|[.,!?" "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" r"])]+"
# Regular expressions, applied in turn, by name. Of several names with the same expressions, an
# export takes the first.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), (GPT2,)),
    **dict.fromkeys(("granite-docling", "gigachat", "mellum", "a.x-4.0"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("exaone", "codeshell", "minerva-7b", "mellum2"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("dbrx", "llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"), (LLAMA3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), (QWEN2,)),
    **dict.fromkeys(("kormo", "f2llmv2", "solar-open", "grok-2"), (QWEN2,)),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (GPT4O,)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
}
# Names whose tokenizers take a whole piece if it is a token, before merging.
WHOLE = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("tekken", "glm4"),
)
# Names whose files add the beginning-of-text token without a key that says so.
BEGUN = (*WHOLE[:-1], "chameleon")
# Names whose original tokenizers compose characters.
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "stablelm2")


def recognize(tokenizer: Any, model: dict[str, Any]) -> str | None:
    """Returns the name of a tokenizer's pre-tokenizer; None if it is unknown.

    Args:
      tokenizer: transformers' tokenizer.
      model: content of its tokenizer.json.
    """
    ids = tokenizer.encode(TEST_TEXT)
    name = HASHES.get(hashlib.sha256(str(ids).encode()).hexdigest()[:16])
    if name is not None:
        return name
    found, whole = splits(model.get("pre_tokenizer")), bool(model["model"].get("ignore_merges"))
    return next((n for n, s in SPLITS.items() if s == found and (n in WHOLE) == whole), None)


def splits(pre_tokenizer: dict[str, Any] | None) -> tuple[str, ...] | None:
    """Returns the regular expressions of a byte-level pre-tokenizer of tokenizer.json; None if it
    has other parts."""
    parts, found = [pre_tokenizer or {}], []
    if parts[0].get("type") == "Sequence":
        parts = parts[0]["pretokenizers"]
    for part in parts:
        kind = part.get("type")
        if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            found.append(part["pattern"].get("Regex"))
        elif kind == "Digits" and part["individual_digits"]:
            found.append(r"\p{N}")
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            found += [GPT2] * part["use_regex"]
        else:
            return None
    return tuple(found)


def pre_tokenizer(name: str) -> dict[str, Any]:
    """Returns the pre-tokenizer of tokenizer.json with this name.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={json.dumps(name)}: must be one of {', '.join(SPLITS)}"
        )
    parts: list[dict[str, Any]] = [
        dict(type="Split", pattern={"Regex": x}, behavior="Isolated", invert=False)
        for x in SPLITS[name]
    ]
    parts.append(dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False))
    return dict(type="Sequence", pretokenizers=parts)
