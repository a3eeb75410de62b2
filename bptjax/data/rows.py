"""Reads a row of a record file: finds its format, and converts its fields to a document."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bptjax.data.chat import FORMATS, MEDIA, Chat, Format, check_text_alone, read_chat
from bptjax.ops.labels import IGNORED

# An answer, and whether it is good. Only objective.type=kto reads the label.
COMPLETION, LABEL = "completion", "label"
# Number of a row's fields, and depth of its nested fields, that errors name.
SHOWN, DEPTH = 24, 3


class UnfitData(ValueError):
    """The records do not fit the run. None of them is bad, so `data.bad_records=skip` must not skip
    them."""


@dataclass(frozen=True)
class TokenIds:
    """A pre-tokenized record with labels.

    Attributes:
      ids: int32 [n].
      labels: int32 [n], not shifted, as in transformers; -100 does not count in the loss.
    """

    ids: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "TokenIds":
        return TokenIds(self.ids[part], self.labels[part])


@dataclass(frozen=True)
class Compound:
    """A record with several parts, which only one objective reads; see `RecordFormat`.

    Attributes:
      where: file and record, for errors.
    """

    where: str

    @property
    def chats(self) -> Sequence[Chat]:
        """The chats among the parts, which are used to inspect the tokenizer's template."""
        return ()

    @property
    def good(self) -> Chat | None:
        """The chat whose last answer a model should give, if there is one."""
        return None

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each part, for previews."""
        raise NotImplementedError


Document = str | np.ndarray | TokenIds | Chat | Compound


@dataclass(frozen=True)
class RecordFormat:
    """A record format that only one objective reads.

    Attributes:
      name: value of data.format.
      read: returns the document of a row, from its fields, data.text_key and the row's location;
        raises ValueError if the row is not of the format.
      fields: a record has the field data.text_key or one of these.
      optional: other fields that `read` reads.
    """

    name: str
    read: Callable[[dict[str, Any], str, str], Compound]
    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


# The field of a second text, which only classifiers read.
PAIR = "text_pair"

# Fields of chats that data.fields may map in addition to the fields of formats.
OTHERS = "tools", "chat_template_kwargs"
# Fields that a row may lack although data.fields maps them.
OPTIONAL = {
    *OTHERS,
    "labels",
    PAIR,
    *(name for format in FORMATS.values() for name in format.optional),
}


@dataclass(frozen=True)
class RowReader:
    """Converts rows to documents.

    Attributes:
      text_key: field that holds the text.
      format: a name in `chat.FORMATS`, `text`, or `auto`; or a `RecordFormat`.
      fields: field of the row, with dots for nested fields, by the name that formats have for it.
    """

    text_key: str = "text"
    format: str | RecordFormat = "text"
    fields: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, row: object, where: str) -> Document:
        """Returns the row's chat if it is in the format (`auto`: has the fields of one), else its
        text, else its int32 token ids, with labels if there are any. A `RecordFormat` reads the row
        itself.

        Raises:
          ValueError: the row holds none of these; the error names the fields of the row.
          UnfitData: with `auto`, the row is an answer that may be a bad one.
        """
        own = row if isinstance(row, dict) else {}
        if not self.fields:
            return self._document(own, where)
        own = self._mapped(own, where)
        try:
            return self._document(own, where)
        except ValueError as error:
            text = str(error)
            for name, source in self.fields.items():
                text = text.replace(repr(name), f"{name!r} (data.fields: {source})")
            raise (UnfitData if isinstance(error, UnfitData) else ValueError)(text) from error

    def _document(self, row: dict[str, Any], where: str) -> Document:
        if isinstance(self.format, RecordFormat):
            return self.format.read(row, self.text_key, where)
        if chat := self._format(row):
            labeled = COMPLETION in chat.fields and isinstance(row.get(LABEL), bool)
            if labeled and self.format == "auto":
                raise UnfitData(
                    f"{where}: {LABEL!r} marks good and bad answers: set objective.type=kto, which "
                    f"reads it, or data.format={chat.name} to take bad answers as good"
                )
            return read_chat(row, chat, where, self.fields)
        if self.format == "auto":
            self._check_mapped(row, where)
        if isinstance(row.get(self.text_key), str):
            check_text_alone(row, where)
            if row.get(PAIR) is not None:
                raise ValueError(f"{where}: {PAIR!r} must be left out; only classifiers read pairs")
            return row[self.text_key]
        if "input_ids" in row and (ids := _integers(row["input_ids"])) is not None:
            return _token_ids(ids, row.get("labels"), where)
        for name, kind in ((self.text_key, "text"), ("input_ids", "a list of integers")):
            if name in row:
                raise ValueError(
                    f"{where}: {name!r} must be {kind}, or set data.text_key to the field with the "
                    "text"
                )
        raise ValueError(
            f"{where}: must have text in {self.text_key!r} or token ids in 'input_ids', not only "
            f"{sorted(row)}; set data.text_key to the field with the text, or see data.format and "
            "data.fields"
        )

    def _format(self, row: Mapping[str, Any]) -> Format | None:
        """Returns the format of a row; None for text and token ids. With data.fields, a format must
        have one of the mapped fields."""
        if self.format != "auto":
            return FORMATS.get(str(self.format))
        has_text = self.text_key in row or "input_ids" in row
        for format in FORMATS.values():
            mapped = not self.fields.keys().isdisjoint((*format.fields, *format.optional))
            named = not self.fields.keys().isdisjoint(format.fields)
            if (
                format.fits(row)
                and (mapped or not self.fields)
                and (named or not has_text or not format.after_text)
            ):
                return format
        return None

    def _check_mapped(self, row: Mapping[str, Any], where: str) -> None:
        """Checks that the row has text or token ids if data.fields maps fields of chats.

        Raises:
          ValueError: the row lacks the other fields of each format with a mapped field.
        """
        mapped = self.fields.keys()
        others = [set(x.fields) - row.keys() for x in FORMATS.values() if mapped & set(x.fields)]
        if others and mapped.isdisjoint((self.text_key, "input_ids")):
            texts = dict.fromkeys(" and ".join(sorted(names)) for names in others if names)
            raise ValueError(
                f"{where}: data.fields: must also map {' or '.join(texts)}; the record has "
                f"{', '.join(islice(row, SHOWN))}"
            )

    def _mapped(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns the row with fields under the names that formats have for them.

        Raises:
          ValueError: the row lacks a field.
        """
        used = {*self.fields.values()}
        mapped = {name: value for name, value in row.items() if name not in used}
        for name, source in self.fields.items():
            try:
                mapped[name] = _nested(row, source)
            except LookupError as error:
                if name not in OPTIONAL:
                    raise ValueError(f"{where}: {self._missing(name, _names(row))}") from error
        return mapped

    def _missing(self, name: str, names: Iterator[str]) -> str:
        return (
            f"data.fields.{name}={self.fields[name]}: must be a field of the record, which has "
            f"{_listed(names)}"
        )

    def columns(self, names: list[str], path: Path) -> tuple[str, ...]:
        """Returns the names of the table columns that a row is read from.

        Raises:
          ValueError: the table has no such column, or two with the same name.
        """
        roots = {
            name: source if source in names else source.partition(".")[0]
            for name, source in self.fields.items()
        }
        for name, root in roots.items():
            if root not in names:
                raise ValueError(f"{path}: {self._missing(name, iter(names))}")
        read_as = dict.fromkeys([n for n in names if n not in roots.values()] + [*roots])
        own = self.format if isinstance(self.format, RecordFormat) else None
        chat = None if own else self._format(read_as)
        # Read all columns of a chat, because its template may use any field.
        text = (self.text_key, PAIR, *MEDIA)
        text = text if self.text_key in read_as else ("input_ids", "labels")
        needed = chat.fields if chat else text[:1]
        if own is not None:
            needed = self.text_key, *own.fields
            text = *needed, *own.optional, *MEDIA
        used = names if chat else [roots.get(name, name) for name in text if name in read_as]
        columns = tuple(dict.fromkeys(used))
        if repeated := [name for name in columns if names.count(name) > 1]:
            raise ValueError(
                f"{path}: {repeated[0]!r}: must be the name of one column; rename others"
            )
        if set(needed).isdisjoint(read_as):
            self._document(read_as, str(path))
        return columns


def check_has(fields: Mapping[str, Any], *names: str) -> None:
    """Checks that a record has these fields.

    Raises:
      ValueError: the record lacks some; the error lists them and the fields of the record.
    """
    if lacking := [repr(name) for name in names if name not in fields]:
        raise ValueError(f"{' and '.join(lacking)} must be set; {describe_fields(fields)}")


def describe_fields(fields: Mapping[str, Any]) -> str:
    """Formats the names of a record's fields, for errors about a missing one."""
    return f"the record has {_listed(_names(fields))}; data.fields maps other names"


def _listed(names: Iterator[str]) -> str:
    """Formats the first names of a record's fields."""
    shown = ", ".join(islice(names, SHOWN)) + ", …" * (next(names, None) is not None)
    return shown or "none"


def _nested(row: dict[str, Any], name: str) -> Any:
    """Returns the field with this name or, part by part at its dots, the nested field.

    Raises:
      LookupError: the row lacks the field.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value[part]
        else:
            raise KeyError(part)
    return value


def _names(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the names of the fields, with dots for nested fields up to `DEPTH`."""
    for name, value in row.items():
        if isinstance(value, dict) and value and prefix.count(".") < DEPTH - 1:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _integers(value: Any) -> np.ndarray | None:
    """Returns the integers as an array; None if the value is not a list of integers."""
    try:
        integers = np.asarray(value)
    except ValueError:  # Lists of different lengths.
        return None
    return (
        integers
        if integers.ndim == 1 and (integers.dtype.kind in "iu" or not integers.size)
        else None
    )


def _token_ids(ids: np.ndarray, labels: Any, where: str) -> np.ndarray | TokenIds:
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(
            f"{where}: input_ids from {ids.min()} to {ids.max()}: must be in [0, 2^31)"
        )
    ids = ids.astype(np.int32)
    if labels is None:
        return ids
    integers = _integers(labels)
    if integers is None or integers.shape != ids.shape:
        raise ValueError(
            f"{where}: labels must be a list of {len(ids)} integers, one for each of the input_ids"
        )
    bad = integers[(integers != IGNORED) & ((integers < 0) | (integers >= 2**31))]
    if bad.size:
        raise ValueError(f"{where}: labels={bad[0]}: must be token ids, or {IGNORED} for no loss")
    return TokenIds(ids, integers.astype(np.int32))
