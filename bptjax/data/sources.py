"""From a data configuration to training and held-out documents, of one source or several."""

from collections.abc import Sequence

from bptjax.data.config import DataConfig, SourceConfig
from bptjax.data.files import Document
from bptjax.data.text import Documents, open_documents, split_documents


class Mixture(Documents):
    """The training documents of several sources.

    Attributes:
      files: the documents of each source.
      names: the path of each.
      weights: of each, of any sum.
    """

    def __init__(
        self, sources: Sequence[Sequence[Document]], names: list[str], weights: list[float]
    ):
        super().__init__(sources)
        self.names, self.weights = names, weights


def open_split(config: DataConfig) -> tuple[Sequence[Document], Sequence[Document]]:
    """Opens the (training, held-out) documents; a `Mixture` where there are `data.sources`.

    Without `data.eval_path`, `data.eval_fraction` of each source is held out, all evaluated
    together. Held-out is empty if that is 0.

    Raises:
      ValueError: no path, or documents that cannot be opened.
    """
    if config.path is None and not config.sources:
        raise ValueError("data.path is not set; give a file, directory, glob or python-stdlib")
    sources = {f"sources[{i}].path": source for i, source in enumerate(config.sources)}
    sources = sources or {"path": SourceConfig(config.path or "")}
    opened = [_open(config, key, source) for key, source in sources.items()]
    if config.eval_path is not None:
        train, held_out = opened, [_open(config, "eval_path", SourceConfig(config.eval_path))]
    else:
        split = [split_documents(documents, config.eval_fraction) for documents in opened]
        train, held_out = map(list, zip(*split, strict=True))
    if not config.sources:
        return train[0], held_out[0]
    weights = [source.weight for source in config.sources]
    names = [source.name for source in config.sources]
    return Mixture(train, names, weights), Documents(held_out)


def _open(config: DataConfig, key: str, source: SourceConfig) -> Documents:
    try:
        return open_documents(
            source.path,
            sample_by=source.sample_by or config.sample_by,
            text_key=source.text_key or config.text_key,
            format=source.format or config.format,
            check_first=config.bad_records == "error",
        )
    except ValueError as error:
        raise ValueError(f"data.{key}: {error}") from error
