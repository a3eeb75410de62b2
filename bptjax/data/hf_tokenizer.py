"""Hugging Face tokenizers."""

import contextlib
import copy
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from bptjax.run.json_files import read_json
from bptjax.run.lazy_imports import transformers

log = logging.getLogger("bptjax")
GENERATION = "generation_config.json"
# Class name of a Rust panic, which cannot be imported from any module.
PANIC = "PanicException"
# A tokenizer of SentencePiece, or of tiktoken, of checkpoints without a tokenizer.json.
SENTENCEPIECE = "tokenizer.model"
CANNOT_ENCODE = "the tokenizer cannot encode the text"


class HFTokenizer:
    """A Hugging Face tokenizer from a local directory.

    Args:
      limit: number of token embeddings of the model. Some tokenizers have more tokens, such as
        image tokens.
      prefix: put in front of the directory in errors.
    """

    def __init__(self, directory: str | Path, limit: int | None = None, prefix: str = ""):
        tokenizers = transformers().AutoTokenizer
        refusal = f"{prefix}{str(directory)!r}: must hold a Hugging Face tokenizer"
        names = [path.name for path in Path(directory).glob("tokenizer.*")]
        if names == [SENTENCEPIECE] and find_spec("sentencepiece") is None:
            refusal += f"; reading its {SENTENCEPIECE} may need pip install sentencepiece protobuf"
        # Invalid files can raise any exception, such as KeyError.
        with _without_report(), _faults(refusal):
            tokenizer: Any = tokenizers.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            bare, around = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
            self.eos_id, self.sep_id = tokenizer.eos_token_id, tokenizer.sep_token_id
            self.mask_id, self.special_ids = tokenizer.mask_token_id, tokenizer.all_special_ids
        self._tokenizer: Any = tokenizer
        self.now: str | None = None
        self.unadapted: Any = None
        files = Path(directory) / "chat_template.jinja", Path(directory) / "tokenizer_config.json"
        self.template_file: Path | None = files[0] if files[0].exists() else files[1]
        # `len` counts added tokens; the tokenizer's own `vocab_size` does not.
        self.vocab_size = min(len(tokenizer), limit or len(tokenizer))
        self.special_tokens: Mapping[str, Any] = dict(tokenizer.special_tokens_map)
        self.generation_config = read_generation_config(Path(directory))
        self._token_ids = _token_ids(Path(directory)) or {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        ends = self._token_ids.get("eos_token_id", self.eos_id)
        self.stop_ids: Sequence[int] = (
            [] if ends is None else ends if isinstance(ends, list) else [ends]
        )
        if any(type(i) is not int for i in self.stop_ids):
            raise ValueError(
                f"{directory}: eos_token_id={ends!r} of {GENERATION} or config.json: must be an "
                "integer or a list of integers"
            )
        if none := [i for i in self.stop_ids if not 0 <= i < (limit or self.vocab_size)]:
            text = "%s: eos_token_id=%s of %s or config.json: ignored, because no token has this id"
            log.warning(text, directory, ", ".join(map(str, none)), GENERATION)
        starts = (i for i in range(len(around)) if around[i : i + len(bare)] == bare)
        if max(around, default=0) >= 2**31:
            raise ValueError(f"{directory}: token ids must be less than 2^31, not {max(around)}")
        self.prefix = np.array(around[: next(starts, 0)], np.int32)
        with _without_report(), _faults(refusal):
            start = "".join(tokenizer.convert_ids_to_tokens(self.prefix.tolist()))
            # Some tokenizers put a space before a text's first word, but not after special tokens.
            joined = tokenizer.encode(f"{start} a", add_special_tokens=False)
            plain = tokenizer.encode(f"{start}a", add_special_tokens=False)
        wanted = [*self.prefix.tolist(), *bare]
        self.start_text = f"{start} " if start and joined == wanted != plain else start

    @property
    def transformers(self) -> Any:
        """transformers' tokenizer."""
        return self._tokenizer

    @property
    def chat_template(self) -> str | None:
        return self.template_for(tools=False)

    def template_for(self, tools: bool) -> str | None:
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            return None
        return tokenizer.get_chat_template(None, tools=[{}] if tools else None)

    def with_chat(self, template: str | None, stop_ids: Sequence[int]) -> Self:
        copied = copy.copy(self)
        if template is not None:
            copied._tokenizer = copy.copy(self._tokenizer)
            copied._tokenizer.chat_template = template
        copied.stop_ids = list(dict.fromkeys([*self.stop_ids, *stop_ids]))
        return copied

    def encode(self, text: str) -> np.ndarray:
        text = _scalar_values(text)
        with _faults(CANNOT_ENCODE, cause=True):
            if self._tokenizer.is_fast:
                # Without offsets, which take as much time as the tokens.
                backend = self._tokenizer.backend_tokenizer
                (encoded,) = backend.encode_batch_fast([text], add_special_tokens=False)
                ids = encoded.ids
            else:
                ids = self._tokenizer.encode(text, verbose=False, add_special_tokens=False)
        return self._checked(ids)

    def encode_rendered(self, text: str) -> np.ndarray:
        return self.encode(text)

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.concatenate([self.prefix, self.encode(text)])

    def encode_pair(self, text: str, pair: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._check_fast("the text of each token of a pair")
        with _faults(CANNOT_ENCODE, cause=True):
            encoded = self._tokenizer(_scalar_values(text), _scalar_values(pair), verbose=False)
        ids = self._checked(encoded["input_ids"])
        # Tokenizers of models without type embeddings return no types.
        types = np.array(encoded.get("token_type_ids", np.zeros(len(ids))), np.int32)
        texts = [-1 if part is None else part for part in encoded.sequence_ids()]
        return ids, types, np.array(texts)

    def _check_fast(self, given: str) -> None:
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"{self._tokenizer.name_or_path}: must be a fast tokenizer, because other "
                f"tokenizers do not give {given}; give a directory with a tokenizer.json"
            )

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        array = np.array(ids, np.int64)  # Damaged files may hold ids of more than 31 bits.
        if array.max(initial=0) >= self.vocab_size:
            token = self.decode([array.max()])
            raise ValueError(
                f"token {token!r}: must be in the model's vocabulary of {self.vocab_size}"
            )
        return array.astype(np.int32)

    def _offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids, and the start and end of each token in characters."""
        self._check_fast("the characters of each token")
        with _faults(CANNOT_ENCODE, cause=True):
            encoded = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        starts, stops = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        return self._checked(encoded["input_ids"]), starts, stops

    def encode_parts(self, parts: Sequence[str]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        parts = [_scalar_values(part) for part in parts]
        ids, starts, stops = self._offsets("".join(parts))
        edges = np.cumsum([0, *map(len, parts)]).tolist()
        ranges = []
        for start, stop in itertools.pairwise(edges):
            inside = np.flatnonzero((starts < stop) & (stops > start))
            ranges.append((int(inside[0]), int(inside[-1]) + 1) if inside.size else (0, 0))
        return ids, ranges

    def shorten(self, text: str, count: int) -> str:
        text = _scalar_values(text)
        _, starts, _ = self._offsets(text)
        return text if len(starts) <= count else text[: int(starts[max(count, 0)])]

    def ending(self, ids: np.ndarray, start: int, stop: int) -> int | None:
        added = self._tokenizer.added_tokens_decoder
        special = {i for i, token in added.items() if token.special}
        special |= set(self._tokenizer.all_special_ids)
        # `<|im_end|>` is a special token, but a `</tool_call>` before it often is not.
        for known in (special, set(added)):
            inside = [i for i in range(start, stop) if int(ids[i]) in known]
            if inside and not self.decode(ids[inside[-1] + 1 : stop]).strip():
                return int(ids[inside[-1]])
            after = next((i for i in range(stop, len(ids)) if int(ids[i]) in known), None)
            if after is not None and not self.decode(ids[stop:after]).strip():
                return int(ids[after])
        return None

    def vocabulary(self) -> Mapping[int, str]:
        return {i: token for token, i in self._tokenizer.get_vocab().items()}

    def decode(self, ids: Iterable[int]) -> str:
        with _faults("the tokenizer cannot decode the tokens", cause=True):
            return self._tokenizer.decode([int(i) for i in ids])

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer with its chat template, and generation_config.json with the stop
        ids."""
        self._tokenizer.save_pretrained(str(directory))
        ends = self.stop_ids[0] if len(self.stop_ids) == 1 else self.stop_ids
        ids = {k: v for k, v in self._token_ids.items() if v is not None}
        ids |= {"eos_token_id": ends} if self.stop_ids else {}
        write_generation_config(Path(directory), self.generation_config | ids)


@contextlib.contextmanager
def _faults(message: str, cause: bool = False) -> Iterator[None]:
    """Raises a ValueError with this message for any error of the tokenizers library.

    Rust panics are not an `Exception`, and other errors are a bare `Exception`.

    Args:
      cause: add the library's message.
    """
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        text = f": {' '.join(str(error).split())}" if cause else ""
        raise ValueError(message + text) from error


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Hides the report of a panic, which Rust writes to stderr's file descriptor. Not for encoding,
    because meanwhile a crash of the process could not report its cause."""
    try:
        stderr = os.dup(2)
    except OSError:  # There is no stderr.
        yield
        return
    held, panicked = os.memfd_create("stderr"), False
    sys.stderr.flush()
    os.dup2(held, 2)
    try:
        yield
    except ValueError as error:
        panicked = type(error.__cause__).__name__ == PANIC
        raise
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        with os.fdopen(stderr, "wb"), os.fdopen(held, "rb") as file:
            file.seek(0)
            if not panicked and (text := file.read()):
                os.write(2, text)


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Reads generation_config.json without token ids; empty if there is no such file."""
    file = directory / GENERATION
    config = read_json(file) if file.exists() else {}
    return {key: value for key, value in config.items() if not key.endswith("_token_id")}


def write_generation_config(directory: Path, fields: Mapping[str, Any]) -> None:
    """Writes generation_config.json, unless it would be empty."""
    if fields:
        (directory / GENERATION).write_text(json.dumps(fields, indent=2) + "\n")


def _token_ids(directory: Path) -> dict[str, Any] | None:
    """Reads the token ids of generation_config.json, or else of config.json; None if neither has
    eos_token_id."""
    for name, keys in ((GENERATION, ".*_token_id"), ("config.json", "(bos|eos|pad)_token_id")):
        file = directory / name
        config = read_json(file) if file.exists() else {}
        if config.get("eos_token_id") is None:
            # A multimodal model has a separate config for its text model.
            inner = config.get("text_config")
            config = inner if isinstance(inner, dict) else {}
        if config.get("eos_token_id") is not None:
            return {key: value for key, value in config.items() if re.fullmatch(keys, key)}
    return None


def _scalar_values(text: str) -> str:
    """Replaces lone surrogates, which JSON can hold and Hugging Face's tokenizers refuse."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
