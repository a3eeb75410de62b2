"""Tensors of a checkpoint that the model does not read and exports keep byte for byte, such as a
vision model or layers for multi-token prediction."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bptjax.models.params import ArraySpec
from bptjax.run.output import atomic_directory
from bptjax.weights.hf.families.family import Layout
from bptjax.weights.hf.tensors import SINGLE, Tensors, Writer

# Directory of these tensors, inside the directory of sidecar files of a run or a conversion.
OTHERS = "other_tensors"


@dataclass(frozen=True)
class OtherTensors:
    """Tensors on disk that do not belong to the model.

    Attributes:
      tensors: the files that hold them.
      names: names of the tensors.
      layout: names of the model in the checkpoint.
    """

    tensors: Tensors
    names: tuple[str, ...]
    layout: Layout

    @property
    def specs(self) -> dict[str, ArraySpec]:
        return {name: self.tensors.specs[name] for name in self.names}

    def read(self, name: str) -> np.ndarray:
        return self.tensors.read(name)

    def save(self, sidecars: Path) -> None:
        """Writes the tensors, one at a time, to the sidecar files unless they already have them."""
        out = sidecars / OTHERS
        if out.exists():
            return
        with atomic_directory(out) as directory:
            with Writer(directory, self.specs, "1000TB", self.layout._asdict()) as writer:
                for name in self.names:
                    writer.write(name, self.read(name))
            if not self.names:
                # The file's metadata records the layout.
                save_file({}, directory / SINGLE, self.layout._asdict())


def open_others(sidecars: Path) -> OtherTensors | None:
    """Opens the tensors that `OtherTensors.save` wrote; None if it wrote none."""
    if not (sidecars / OTHERS).is_dir():
        return None
    tensors = Tensors(sidecars / OTHERS)
    layout = Layout(tensors.metadata["body"], tensors.metadata["head"])
    return OtherTensors(tensors, tuple(tensors.specs), layout)
