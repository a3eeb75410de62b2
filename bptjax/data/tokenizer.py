"""Tokenisers: bytes, characters, or a Hugging Face directory."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FILE = "bptjax_tokenizer.json"


class Tokenizer(Protocol):
    """Text to int32 token ids and back.

    Attributes:
      bos_id, eos_id: stand around a document, if any.
      stop_ids: end a text that is being written.
      has_template: of chats.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def stop_ids(self) -> list[int]: ...
    @property
    def has_template(self) -> bool: ...
    def encode(self, text: str) -> np.ndarray: ...
    def encode_prompt(self, text: str) -> np.ndarray:
        """The start of a document, to be gone on with."""
        ...

    def encode_chat(self, text: str) -> np.ndarray:
        """A user's turn, and the start of the answer; ValueError where there is no template."""
        ...

    def render(self, turns: Sequence[tuple[str, str]], answer: bool) -> str:
        """(role, text) of each turn in the chat template, and with `answer` the start of an answer.

        Raises:
          ValueError: there is no template, or it refuses them.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str: ...
    def save(self, directory: str | Path) -> None: ...


class _Plain:
    """What tokenisers without a vocabulary of their own share."""

    bos_id: int | None = None
    eos_id: int | None = None
    has_template = False

    @property
    def stop_ids(self) -> list[int]:
        return [] if self.eos_id is None else [self.eos_id]

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def encode_prompt(self, text: str) -> np.ndarray:
        first = [] if self.bos_id is None else [self.bos_id]
        return np.concatenate([np.array(first, np.int32), self.encode(text)])

    def render(self, turns: Sequence[tuple[str, str]], answer: bool) -> str:
        raise ValueError(f"{type(self).__name__} has no chat template")

    def encode_chat(self, text: str) -> np.ndarray:
        return self.encode(self.render([("user", text)], True))


class ByteTokenizer(_Plain):
    """UTF-8 bytes 0..255, and a separator 256 that begins and ends documents."""

    vocab_size, bos_id, eos_id = 257, 256, 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")

    def save(self, directory: str | Path) -> None:
        _save(directory, {"type": "byte"})


class CharTokenizer(_Plain):
    """One id per character of a fixed vocabulary, in code point order; no separator."""

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
                f"character {chr(unknown[0])!r} is not among the {self.vocab_size} of the training "
                "text; leave it out, or use data.tokenizer=byte"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def save(self, directory: str | Path) -> None:
        _save(directory, {"type": "char", "characters": self.characters})


class HFTokenizer:
    """A Hugging Face tokeniser from a local directory.

    Args:
      limit: rows of the model's embedding. Some tokenisers have tokens beyond, of images for one.
    """

    def __init__(self, directory: str | Path, limit: int | None = None):
        tokenizers = transformers().AutoTokenizer
        try:
            found: Any = tokenizers.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.tokenizer={str(directory)!r} holds no tokenizer") from error
        self._tokenizer: Any = found
        # `len` counts added tokens; the tokeniser's own `vocab_size` does not.
        self.vocab_size = min(len(found), limit or len(found))
        self.bos_id, self.eos_id = found.bos_token_id, found.eos_token_id
        self.stop_ids = _stop_ids(Path(directory), self.eos_id)
        self.has_template = bool(found.chat_template)

    def encode(self, text: str) -> np.ndarray:
        return self._ids(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> np.ndarray:
        return self._ids(text)

    def _ids(self, text: str, **how: bool) -> np.ndarray:
        # It takes no lone surrogates, which JSON can hold.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = np.array(self._tokenizer.encode(text, verbose=False, **how), np.int32)
        if ids.max(initial=0) >= self.vocab_size:
            token = self._tokenizer.decode([ids.max()])
            raise ValueError(f"the model's vocabulary of {self.vocab_size} has no {token!r}")
        return ids

    def render(self, turns: Sequence[tuple[str, str]], answer: bool) -> str:
        from jinja2 import TemplateError

        if not self.has_template:
            raise ValueError("the tokenizer has no chat template")
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    def encode_chat(self, text: str) -> np.ndarray:
        return self.encode(self.render([("user", text)], True))

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids])

    def save(self, directory: str | Path) -> None:
        self._tokenizer.save_pretrained(str(directory))


def transformers() -> Any:
    """The library, which takes seconds to import, and need not say that there is no torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def _stop_ids(directory: Path, eos_id: int | None) -> list[int]:
    """Those of generation_config.json, or else config.json, where there are such files."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return [] if eos_id is None else [eos_id]


def make_tokenizer(
    name: str, documents: Iterable[object] = (), limit: int | None = None
) -> Tokenizer:
    """`byte`, `char` with the vocabulary of `documents`, or a directory for `load_tokenizer`."""
    if name == "byte":
        return ByteTokenizer()
    if name != "char":
        return load_tokenizer(name, limit)
    characters: set[str] = set()
    for text in documents:
        if not isinstance(text, str):
            raise ValueError("data.tokenizer=char needs text; the rows hold token ids or chats")
        characters.update(text)
    if not characters:
        raise ValueError("data.tokenizer=char takes its vocabulary from the text; it is empty")
    return CharTokenizer(characters)


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """Adds tokens to a Hugging Face tokenizer's vocabulary, and returns those that were new.

    Raises:
      ValueError: the tokenizer is of another kind.
    """
    if not tokens:
        return []
    if not isinstance(tokenizer, HFTokenizer):
        raise ValueError(f"model.add_tokens={list(tokens)}: must go with a Hugging Face tokenizer")
    if "" in tokens:
        raise ValueError("model.add_tokens: must not hold an empty string")
    known = tokenizer._tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    if new:
        tokenizer._tokenizer.add_tokens(new)
        tokenizer.vocab_size = len(tokenizer._tokenizer)
    return new


def load_tokenizer(directory: str | Path, limit: int | None = None) -> Tokenizer:
    """The tokeniser that `save` wrote, or a Hugging Face one, of a model with `limit` tokens. Never
    looks on a network.
    """
    directory = Path(os.path.expanduser(directory))
    if not directory.is_dir():
        raise ValueError(
            f"data.tokenizer={str(directory)!r} is no directory; use byte, char, or a local "
            "directory with a Hugging Face tokenizer"
        )
    if not (directory / FILE).exists():
        return HFTokenizer(directory, limit)
    saved = json.loads((directory / FILE).read_text())
    return ByteTokenizer() if saved["type"] == "byte" else CharTokenizer(saved["characters"])


def _save(directory: str | Path, content: dict[str, str]) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / FILE).write_text(json.dumps(content))


def utf8(text: str) -> bytes:
    """UTF-8; the lone surrogates that JSON can hold pass through."""
    return text.encode("utf-8", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
