"""Opens the training and held-out documents of a data configuration."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.records import reads
from bptjax.data.rows import Document, RecordFormat
from bptjax.data.stream import SIZES, Stream, StreamSizes
from bptjax.data.text import Documents, open_documents, split_documents


@dataclass(frozen=True)
class Mixture:
    """The training documents of several sources.

    Attributes:
      files: documents of each source.
      names: path of each source.
      weights: weight of each source. Their sum may be any positive number.
    """

    files: Sequence[Sequence[Document] | Stream]
    names: list[str]
    weights: list[float]

    def reads(self) -> Iterator[Callable[[], Document]]:
        """Yields one function per document that reads the document."""
        return chain.from_iterable(reads(each) for each in self.files)


Training = Sequence[Document] | Stream | Mixture


class HeldOutSources(Documents):
    """The held-out documents of several sources as one sequence.

    Attributes:
      names: short name of each source.
    """

    def __init__(self, files: Sequence[Sequence[Document]], names: Sequence[str]):
        super().__init__(files)
        self.names = names


def count(documents: Training) -> str:
    """Formats the number of documents for messages."""
    if isinstance(documents, Mixture):
        return " + ".join(count(each) for each in documents.files)
    return "streamed" if isinstance(documents, Stream) else f"{len(documents):,}"


def open_split(
    config: DataConfig, record: RecordFormat | None = None, sizes: StreamSizes = SIZES
) -> tuple[Training, Sequence[Document]]:
    """Opens the training documents (a `Mixture` if `data.sources` is set) and the held-out ones.

    Without `data.eval_path`, `data.eval_fraction` of each source is held out: as `HeldOutSources`
    if there are several sources, none if the fraction is 0. For a stream, up to about
    `sizes.held_out` records near the beginning of its files are held out. Records are read by
    `record` if given, whatever data.format is.

    Raises:
      ValueError: no path, or documents that cannot be opened.
    """
    if config.path is None and not config.sources:
        raise ValueError("data.path: must be set; give a file, directory, glob or python-stdlib")
    sources = {f"sources[{i}].path": source for i, source in enumerate(config.sources)}
    sources = sources or {"path": SourceConfig(config.path or "")}
    opened = [_open(config, key, source, record, sizes) for key, source in sources.items()]
    if config.eval_path is not None:
        train, held_out = opened, [open_held_out(config, record, sizes)]
    else:
        how = config.eval_fraction, config.split_seed
        split = [split_documents(documents, *how) for documents in opened]
        train, held_out = [t for t, _ in split], [h for _, h in split]
    if not config.sources:
        return train[0], held_out[0]
    weights = [source.weight for source in config.sources]
    names = [source.name for source in config.sources]
    own = HeldOutSources(held_out, short_names(names)) if len(held_out) > 1 else held_out[0]
    return Mixture(train, names, weights), own


def open_held_out(
    config: DataConfig, record: RecordFormat | None = None, sizes: StreamSizes = SIZES
) -> Documents:
    """Opens the documents of `data.eval_path`; see `open_split`.

    Raises:
      ValueError: documents that cannot be opened, or are too large for memory.
    """
    held = _open(config, "eval_path", SourceConfig(config.eval_path or ""), record, sizes)
    if isinstance(held, Stream):
        raise ValueError("data.eval_path: compressed files must fit into memory; give fewer files")
    return held


def short_names(names: Sequence[str]) -> list[str]:
    """Shortens source names, which hold paths, for metrics: to file and directory names, with a
    number if these are equal."""
    short = [", ".join(Path(path).name for path in name.split(", ")) for name in names]
    again = Counter(short)
    return [
        f"{short_name} ({n})" if again[short_name] > 1 else short_name
        for n, short_name in enumerate(short, 1)
    ]


def _open(
    config: DataConfig,
    key: str,
    source: SourceConfig,
    record: RecordFormat | None,
    sizes: StreamSizes,
) -> Documents | Stream:
    try:
        return open_documents(
            source.path,
            sample_by=source.sample_by or config.sample_by,
            text_key=source.text_key or config.text_key,
            format=record or source.format or config.format,
            fields=config.fields if source.fields is None else source.fields,
            check_first=config.bad_records == "error",
            sizes=sizes,
        )
    except ValueError as error:
        raise ValueError(f"data.{key}: {error}") from error
