"""Training examples: arrays of tokens and labels, and their layout in a sequence."""

import numpy as np

from bptjax.ops.labels import IGNORED

# int32 arrays [n]: `tokens`, `labels`, and others that an objective reads, such as `token_types`. A
# packed sequence also has `segments` and `positions`. The `tokens` of an image are patches, float32
# [n, P].
Example = dict[str, np.ndarray]
FIELDS = "tokens", "labels"


def padding(name: str) -> int:
    """Returns the value of padding in an array of this name."""
    return IGNORED if name.endswith("labels") else 0


def is_masked(example: Example) -> bool:
    """Returns whether the example has a token that does not count in the loss."""
    return bool((example["labels"] == IGNORED).any())


def sequence(examples: list[Example], seq_len: int) -> Example:
    """Lays out examples one after the other in a padded sequence; see `packing.pack`."""
    numbers = dict.fromkeys(("segments", "positions"), np.zeros(0, np.int32))
    arrays = {
        name: np.full((seq_len, *x.shape[1:]), padding(name), x.dtype)
        for name, x in (examples[0] | numbers).items()
    }
    end = 0
    for number, example in enumerate(examples, 1):
        start, end = end, end + len(example["tokens"])
        own = dict(segments=number, positions=np.arange(end - start))
        for name, value in (example | own).items():
            arrays[name][start:end] = value
    return arrays


def blank(example: Example) -> Example:
    """Returns an example without tokens that has the arrays of `example`."""
    return {name: value[:0] for name, value in example.items()}
