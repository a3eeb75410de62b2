"""Parameters in bptjax's own files: converted checkpoints, and checkpoints of runs."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from bptjax.models.params import ArraySpec, Index
from bptjax.run.checkpoint import Checkpoints
from bptjax.run.checkpoint_files import MANIFEST
from bptjax.weights.hf.tensors import Tensors


class ConvertedCheckpoint:
    """The parameters in a directory written by `bptjax convert`; a `ParameterSource`."""

    def __init__(self, directory: Path):
        self._tensors = Tensors(directory)
        self.specs, self.files = self._tensors.specs, tuple(self._tensors.files)

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        return self._tensors.read(path, index)

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        for path in self.specs:
            yield path, (), self.read(path)


class RunCheckpoint:
    """The model's arrays in a run's newest finished checkpoint; a `ParameterSource`. For a run that
    trains adapters, the adapters' arrays.

    Attributes:
      extra: values that the run saved with its arrays.

    Raises:
      ValueError: the run has no finished checkpoint.
    """

    def __init__(self, directory: Path):
        checkpoints = Checkpoints(directory)
        step = checkpoints.newest()
        if step is None:
            raise ValueError(f"{checkpoints.directory} has no finished checkpoint")
        saved = checkpoints.specs(step)
        names = {
            name.split("/", 1)[1].removesuffix("/value").replace("/", "."): name
            for name in saved
            if name.startswith("model/")
        }
        self.specs = {path: ArraySpec(*saved[name]) for path, name in names.items()}
        self.files: tuple[Path, ...] = (checkpoints.directory / str(step) / MANIFEST,)
        self.extra = checkpoints.extra(step)
        # Cached, because the slices of a parameter are read one after another.
        self._array = lru_cache(maxsize=3)(lambda path: checkpoints.read(step, names[path]))

    def read(self, path: str, index: Index = ()) -> np.ndarray:
        return self._array(path)[index]

    def slices(self) -> Iterator[tuple[str, Index, np.ndarray]]:
        for path in self.specs:
            yield path, (), self.read(path)
