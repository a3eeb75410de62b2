"""Reads GGUF files: metadata, and tensors one at a time."""

import re
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bptjax.models.params import Index
from bptjax.weights.hf.tensors import abridged

# Most bytes of metadata and tensor names, and most levels of arrays. The largest vocabularies need
# about 20 MB.
METADATA_BYTES = 2**28
DIMENSIONS = 4
# Type codes of metadata values, with their struct codes.
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"} | {
    12: "d"
}
SPLIT_COUNT, SPLIT_NUMBER = "split.count", "split.no"


class TensorInfo(NamedTuple):
    """A tensor in a file; `shape` has the order of NumPy, `offset` is from the file's start."""

    file: Path
    type: Any
    shape: tuple[int, ...]
    offset: int


class GGUF:
    """A GGUF file, or the first of the files that it was split into.

    Attributes:
      metadata: values by key, of all files.
      tensors: tensors by name.

    Raises:
      ValueError: the file is missing, damaged or of an unknown version.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        files = [path]
        for number, file in enumerate(files):
            try:
                with file.open("rb") as stream:
                    self._read(file, stream)
            except OSError as error:
                raise ValueError(f"{file}: {error.strerror or error}") from error
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
                raise ValueError(f"{file}: is damaged or incomplete ({error})") from error
            if number == 0:
                files += _others(path, self.metadata.get(SPLIT_COUNT, 1))

    def _read(self, file: Path, stream: BinaryIO) -> None:
        size = file.stat().st_size
        reader = _Reader(stream, min(size, METADATA_BYTES))
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file}: must be a GGUF file")
        (version,) = reader.values("I", 1)
        if version not in (2, 3):
            raise ValueError(
                f"{file}: must have version 2 or 3 of the format in little-endian order, not "
                f"{version}"
            )
        tensors, keys = reader.values("Q", 2)
        for _ in range(keys):
            key = reader.string()
            # Later files of a split repeat keys such as split.no.
            self.metadata.setdefault(key, reader.value(*reader.values("I", 1)))
        infos = [self._info(file, reader) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0 or align & (align - 1):
            raise ValueError(f"{file}: general.alignment={align}: must be a power of two")
        start = -(-reader.position // align) * align
        for name, info in infos:
            info = info._replace(offset=start + info.offset)
            if name in self.tensors:
                raise ValueError(f"{file}: is damaged: holds {name} twice")
            if info.offset + nbytes(info.shape, info.type) > size:
                raise ValueError(f"{file}: is incomplete: {name} ends after the file's end")
            self.tensors[name] = info

    def _info(self, file: Path, reader: "_Reader") -> tuple[str, TensorInfo]:
        from gguf import GGMLQuantizationType

        name = reader.string()
        (dimensions,) = reader.values("I", 1)
        if dimensions > DIMENSIONS:
            raise ValueError(f"{file}: is damaged: {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(reader.values("Q", dimensions)))
        code, offset = *reader.values("I", 1), *reader.values("Q", 1)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ValueError(
                f"{file}: {name} has the type {code}, which the package gguf does not know; "
                "update it"
            ) from None
        block, _ = _sizes(kind)
        if not shape or prod(shape) == 0 or shape[-1] % block:
            raise ValueError(f"{file}: is damaged: {name} has the shape {list(shape)}")
        return name, TensorInfo(file, kind, shape, offset)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor as float32, or the slice of it at `index` into its first axes."""
        from gguf.quants import dequantize

        info = self.tensors[name]
        shape = info.shape[len(index) :]
        block, size = _sizes(info.type)
        rows, count = prod(shape[:-1]), shape[-1] // block * size
        first = int(np.ravel_multi_index(index, info.shape[: len(index)])) if index else 0
        with info.file.open("rb") as stream:
            stream.seek(info.offset + first * rows * count)
            data = np.fromfile(stream, np.uint8, rows * count).reshape(rows, count)
        try:
            return dequantize(data, info.type).reshape(shape)
        except NotImplementedError:
            raise ValueError(
                f"{info.file}: {name} has the type {info.type.name}, which the package gguf cannot "
                "dequantize; give a file of another type"
            ) from None


def nbytes(shape: tuple[int, ...], kind: Any) -> int:
    """Returns the bytes of a tensor of this type."""
    block, size = _sizes(kind)
    return prod(shape) // block * size


def _sizes(kind: Any) -> tuple[int, int]:
    """Returns the number of values and of bytes in a block."""
    from gguf import GGML_QUANT_SIZES

    return GGML_QUANT_SIZES[kind]


def _others(path: Path, count: Any) -> Iterator[Path]:
    """Yields the other files of a split."""
    if count in (0, 1):
        return
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if match is None or count != int(match[2]):
        raise ValueError(
            f"{path}: must be the first of {count} files, with a name that ends in "
            f"-00001-of-{count:05}.gguf"
        )
    files = [path.with_name(f"{match[1]}-{i:05}-of-{match[2]}.gguf") for i in range(2, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path}: the other files must be next to it: {abridged(missing)}")
    yield from files


class _Reader:
    """Reader of the file's head, which fails at `limit` bytes."""

    def __init__(self, stream: BinaryIO, limit: int):
        self._stream, self._limit = stream, limit

    @property
    def position(self) -> int:
        return self._stream.tell()

    def bytes(self, count: int) -> bytes:
        if self.position + count > self._limit:
            raise struct.error("its head ends after the file's end, or is too long")
        return self._stream.read(count)

    def values(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self.bytes(count * size))

    def string(self) -> str:
        return self.bytes(*self.values("Q", 1)).decode()

    def value(self, kind: int) -> Any:
        """Reads a value. An array of numbers is a NumPy array; an array of arrays is refused."""
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            (value,) = self.values(SCALARS[kind], 1)
            # The shortest decimal number that rounds to the same float32.
            return float(str(np.float32(value))) if SCALARS[kind] == "f" else value
        if kind != ARRAY:
            raise struct.error(f"has a value of the unknown type {kind}")
        (kind,), (count,) = self.values("I", 1), self.values("Q", 1)
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind not in SCALARS:
            raise struct.error(f"has an array of the unknown type {kind}")
        code = np.dtype(SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.bytes(count * code.itemsize), code)
