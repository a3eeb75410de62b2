"""Training examples: arrays of tokens and labels, and their layout in a sequence."""

import numpy as np

from bptjax.ops.labels import IGNORED

# int32 arrays [n]: `tokens`, `labels`, and others that an objective reads, such as `token_types`. A
# packed sequence also has `segments` and `positions`; an example of several documents has its own.
# An example that is a tree of tokens has `positions` and `ends`; see `trees.tree`. The `tokens` of
# an image are patches, float32 [n, P].
Example = dict[str, np.ndarray]
FIELDS = "tokens", "labels"
# Arrays that number documents or answers from 1, in an example and in a sequence; 0 is none.
ANSWERS = "answers"
NUMBERED = "segments", ANSWERS
# Float32 factors on the loss of each token.
WEIGHTS = "weights"


def padding(name: str) -> int:
    """Returns the value of padding in an array of this name."""
    return IGNORED if name.endswith("labels") else 0


def is_masked(example: Example) -> bool:
    """Returns whether the example has a token that does not count in the loss, or answers that
    belong together, or is a tree. A packer never splits such an example."""
    return not {ANSWERS, "ends"}.isdisjoint(example) or bool((example["labels"] == IGNORED).any())


def sequence(examples: list[Example], seq_len: int) -> Example:
    """Lays out examples one after the other in a padded sequence; see `packing.pack`."""
    numbers = dict.fromkeys(("segments", "positions"), np.zeros(0, np.int32))
    arrays = {
        name: np.full((seq_len, *x.shape[1:]), padding(name), x.dtype)
        for name, x in (examples[0] | numbers).items()
    }
    end, last = 0, dict.fromkeys(NUMBERED, 0)
    for example in examples:
        start, end = end, end + len(example["tokens"])
        own = dict(segments=np.ones(end - start, np.int32), positions=np.arange(end - start))
        for name, value in (own | example).items():
            if name in last:
                value = np.where(value == 0, 0, value + last[name])
                last[name] = int(value.max(initial=last[name]))
            # Ends count the tokens of the sequence.
            arrays[name][start:end] = value + start if name == "ends" else value
    return arrays


def documents(example: Example) -> list[Example]:
    """Returns the documents of an example; without segments of its own, the example is one."""
    if "segments" not in example:
        return [example]
    own = example["segments"]
    return [
        {name: value[own == number] for name, value in example.items()}
        for number in np.unique(own[own != 0])
    ]


def blank(example: Example) -> Example:
    """Returns an example without tokens that has the arrays of `example`."""
    return {name: value[:0] for name, value in example.items()}
