"""Tokenizers: bytes, characters, or a Hugging Face tokenizer."""

import copy
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from bptjax.data.hf_tokenizer import (
    HFTokenizer,
    read_generation_config,
    write_generation_config,
)
from bptjax.run.json_files import read_json
from bptjax.run.links import check_links

FILE = "bptjax_tokenizer.json"
# A Unicode noncharacter, reserved for internal use. It represents the byte tokenizer's separator in
# the text of chat templates.
SEPARATOR = "\ufdd0"


@runtime_checkable
class Tokenizer(Protocol):
    """Conversion of text to int32 token ids and back.

    Every text starts with `prefix`, in training and in prompts; a training document ends with
    `eos_id` unless it is None. Chat templates write their own special tokens instead.

    Attributes:
      prefix: ids that the tokenizer puts in front of a text, such as BOS; often empty.
      start_text: text that represents `prefix` in a chat template.
      eos_id: id that ends a training document, or None.
      sep_id: id that ends a text of an encoder if there is no EOS, or None.
      stop_ids: ids that end generated text.
      mask_id: id of the mask token, or None.
      special_ids: ids of special tokens, which are never masked.
      chat_template: Jinja source, or None.
      unadapted: the tokenizer before it got a chat template of a run's records, or None.
      template_file: file with the chat template, or None.
      special_tokens: variables of chat templates, such as `eos_token`.
      now: date and time that chat templates read, in ISO 8601; None for the present.
      generation_config: fields of the model's generation_config.json, other than token ids.
    """

    vocab_size: int
    prefix: np.ndarray
    start_text: str
    eos_id: int | None
    sep_id: int | None
    stop_ids: Sequence[int]
    mask_id: int | None
    special_ids: Sequence[int]
    unadapted: "Tokenizer | None"
    template_file: Path | None
    special_tokens: Mapping[str, Any]
    now: str | None
    generation_config: dict[str, Any]

    @property
    def chat_template(self) -> str | None: ...

    def template_for(self, tools: bool) -> str | None:
        """Returns the chat template, or with `tools` the tokenizer's separate one if there is
        one."""
        ...

    def with_chat(self, template: str | None, stop_ids: Sequence[int]) -> Self:
        """Returns a copy with another chat template, unless it is None, and additional stop ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns token ids without `prefix`."""
        ...

    def encode_prompt(self, text: str) -> np.ndarray:
        """Returns token ids with `prefix`, the start of a document that generation continues."""
        ...

    def encode_rendered(self, text: str) -> np.ndarray:
        """Returns token ids of the text of a chat template, including special tokens in it."""
        ...

    def encode_pair(self, text: str, pair: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokenizes a pair of texts with the special tokens around them.

        Returns:
          The ids; their types, int32, for a model with type embeddings; and the text of each token:
          0, 1, or -1 for a special token.
        """
        ...

    def encode_parts(self, parts: Sequence[str]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Tokenizes the concatenated parts, including special tokens in them.

        Returns:
          The ids, and for each part the range [start, stop) of the tokens that contain a character
          of the part, or (0, 0). A token that spans two parts is in both ranges.

        Raises:
          ValueError: the tokenizer returns no character offsets.
        """
        ...

    def shorten(self, text: str, count: int) -> str:
        """Returns the longest prefix of the text with about `count` tokens or fewer."""
        ...

    def ending(self, ids: np.ndarray, start: int, stop: int) -> int | None:
        """Returns the special token that ends the answer ids[start:stop], or None.

        It is the answer's last special token if only white space follows it, or else the first
        special token after the answer if only white space precedes it.
        """
        ...

    def vocabulary(self) -> Mapping[int, str]:
        """Returns the token string of each id."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...
    def save(self, directory: str | Path) -> None: ...


class _Plain:
    """Base of tokenizers without a vocabulary file: each character has its own tokens."""

    type: str
    prefix = np.zeros(0, np.int32)
    start_text = ""
    eos_id: int | None = None
    sep_id: int | None = None
    stop_ids: Sequence[int] = ()
    mask_id: int | None = None
    special_ids: Sequence[int] = ()
    chat_template: str | None = None
    unadapted: "Tokenizer | None" = None
    template_file: Path | None = None
    special_tokens: Mapping[str, Any] = {}
    now: str | None = None
    generation_config: dict[str, Any] = {}

    def template_for(self, tools: bool) -> str | None:
        return self.chat_template

    def with_chat(self, template: str | None, stop_ids: Sequence[int]) -> Self:
        """Returns a copy with another chat template. `eos_id` stays the only stop id."""
        copied = copy.copy(self)
        copied.chat_template = template or self.chat_template
        return copied

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.concatenate([self.prefix, self.encode(text)])

    def encode_pair(self, text: str, pair: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Follows BERT: each text is followed by a separator, whose type is the text's."""
        end = np.array([] if self.eos_id is None else [self.eos_id], np.int32)
        parts = self.prefix, self.encode(text), end, self.encode(pair), end
        sizes = [len(part) for part in parts]
        types = np.repeat(np.array([0, 0, 0, 1, 1], np.int32), sizes)
        return np.concatenate(parts), types, np.repeat([-1, 0, -1, 1, -1], sizes)

    def encode_parts(self, parts: Sequence[str]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        each = [self.encode_rendered(part) for part in parts]
        edges = np.cumsum([0, *map(len, each)]).tolist()
        ids = np.concatenate([np.zeros(0, np.int32), *each])
        return ids, list(itertools.pairwise(edges))

    def encode_rendered(self, text: str) -> np.ndarray:
        first, *others = text.split(SEPARATOR) if self.eos_id is not None else [text]
        parts = [self.encode(first)]
        for other in others:
            parts += [np.array([self.eos_id], np.int32), self.encode(other)]
        return np.concatenate(parts)

    def shorten(self, text: str, count: int) -> str:
        ends = np.cumsum([len(self.encode(character)) for character in text])
        return text[: int(np.searchsorted(ends, count, "right"))]

    def ending(self, ids: np.ndarray, start: int, stop: int) -> int | None:
        return self.eos_id if self.eos_id in ids[start : stop + 1] else None

    def vocabulary(self) -> Mapping[int, str]:
        return {}

    def _save(self, directory: str | Path, **content: str) -> None:
        if self.chat_template is not None:
            content["chat_template"] = self.chat_template
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / FILE).write_text(json.dumps({"type": self.type} | content))
        write_generation_config(Path(directory), self.generation_config)


class ByteTokenizer(_Plain):
    """UTF-8 bytes 0..255, and a separator 256 that starts and ends documents. The mask token is
    byte 255, which UTF-8 never uses."""

    type = "byte"
    vocab_size, eos_id, mask_id = 257, 256, 255
    stop_ids, special_ids = (256,), (255, 256)
    prefix = np.array([256], np.int32)
    start_text = SEPARATOR
    special_tokens = {"bos_token": SEPARATOR, "eos_token": SEPARATOR}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def vocabulary(self) -> Mapping[int, str]:
        return {i: f"<0x{i:02X}>" for i in range(256)}

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        self._save(directory)


class CharTokenizer(_Plain):
    """One id per character of a fixed vocabulary, in code point order; no separator."""

    type = "char"

    def __init__(self, characters: Iterable[str]):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        self._codes = _code_points(self.characters)

    def encode(self, text: str) -> np.ndarray:
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes).clip(max=self.vocab_size - 1)
        unknown = codes[self._codes[ids] != codes]
        if unknown.size:
            raise ValueError(
                f"character {chr(unknown[0])!r}: must be one of the {self.vocab_size} characters "
                "of the training text; remove it, or use data.tokenizer=byte"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def vocabulary(self) -> Mapping[int, str]:
        return dict(enumerate(self.characters))

    def save(self, directory: str | Path) -> None:
        self._save(directory, characters=self.characters)


def vocabulary_warning(tokenizer: Tokenizer, checkpoint: Path) -> str | None:
    """Returns a warning if the vocabulary differs from that in the checkpoint's tokenizer; None if
    it does not, or if the checkpoint has no tokenizer."""
    try:
        wanted = load_tokenizer(checkpoint).vocabulary()
    except ValueError:
        return None
    own = tokenizer.vocabulary()
    differ = sum(own.get(i) != token for i, token in wanted.items())
    if not differ:
        return None
    return (
        f"warning: {differ / len(wanted):.1%} of the {len(wanted)} token ids of the tokenizer in "
        f"{checkpoint} are other tokens in the chosen tokenizer; the checkpoint was not trained "
        "with them"
    )


def has_tokenizer(directory: Path) -> bool:
    """Returns whether the directory holds a saved tokenizer."""
    return any((directory / name).exists() for name in (FILE, "tokenizer_config.json"))


def make_tokenizer(
    name: str, documents: Iterable[object] = (), limit: int | None = None
) -> Tokenizer:
    """Returns the tokenizer `byte`, the tokenizer `char` with the characters of `documents` as its
    vocabulary, or loads the tokenizer in the directory `name`."""
    if name == "byte":
        return ByteTokenizer()
    if name != "char":
        return load_tokenizer(name, limit, "data.tokenizer=")
    characters: set[str] = set()
    for text in documents:
        if not isinstance(text, str):
            raise ValueError("data.tokenizer=char: must have text, not token ids or chats")
        characters.update(text)
    if not characters:
        raise ValueError(
            "data.tokenizer=char: must have text that is not empty, to determine the vocabulary"
        )
    return CharTokenizer(characters)


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """Adds tokens to a Hugging Face tokenizer's vocabulary, and returns the new ones.

    Raises:
      ValueError: the tokenizer is not a Hugging Face tokenizer, or a token is empty.
    """
    if not tokens:
        return []
    if not isinstance(tokenizer, HFTokenizer):
        raise ValueError(f"model.add_tokens={list(tokens)}: requires a Hugging Face tokenizer")
    if "" in tokens:
        raise ValueError("model.add_tokens: must not hold an empty string")
    known = tokenizer._tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    if new:
        tokenizer._tokenizer.add_tokens(new)
        tokenizer.vocab_size = len(tokenizer._tokenizer)
    return new


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Returns the id of the token with this text.

    Raises:
      ValueError: the text is several tokens, or its token also stands for other text, such as
        unknown words.
    """
    known = [i for i, token in tokenizer.vocabulary().items() if token == text]
    ids = known or tokenizer.encode_parts([text])[0].tolist()
    if len(ids) != 1:
        raise ValueError(
            f"model.attention_pattern: {text!r}: must be one token, not {len(ids)}; choose "
            "another, or add it by model.add_tokens"
        )
    if not known and (read := tokenizer.decode(ids)).strip() != text.strip():
        raise ValueError(
            f"model.attention_pattern: {text!r}: must be in the vocabulary, but the tokenizer "
            f"reads it as {read!r}; choose another, or add it by model.add_tokens"
        )
    return ids[0]


def load_tokenizer(directory: str | Path, limit: int | None = None, prefix: str = "") -> Tokenizer:
    """Loads a tokenizer written by `save`, or a Hugging Face tokenizer for a model with `limit`
    tokens, from a local directory. Never uses the network. Errors put `prefix` in front of the
    directory.

    Raises:
      ValueError: the directory holds no tokenizer, or a link leads out of it.
    """
    directory = Path(os.path.expanduser(directory))
    if not directory.is_dir():
        raise ValueError(
            f"{prefix}{str(directory)!r}: must be byte, a local directory with a Hugging Face "
            "tokenizer, or, for training, char"
        )
    check_links(directory)
    if not (directory / FILE).exists():
        return HFTokenizer(directory, limit, prefix)
    saved = read_json(directory / FILE)
    tokenizer, characters = ByteTokenizer(), saved.get("characters")
    template = saved.get("chat_template")
    if saved.get("type") == "char" and isinstance(characters, str) and characters:
        tokenizer = CharTokenizer(characters)
    elif saved.get("type") != "byte":
        raise ValueError(f"{directory / FILE} is damaged: it holds no tokenizer of bptjax")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{directory / FILE} is damaged: its chat_template is not a text")
    tokenizer = tokenizer.with_chat(template, [])
    tokenizer.template_file = directory / FILE
    tokenizer.generation_config = read_generation_config(directory)
    return tokenizer


def utf8(text: str) -> bytes:
    """Encodes text as UTF-8, including lone surrogates, which JSON can hold."""
    return text.encode("utf-8", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
