"""Log-probabilities of answers under the model at the start of a run, by the answers' tokens."""

import hashlib
from pathlib import Path

import numpy as np

from bptjax.data.changes import ChangedRecord
from bptjax.data.examples import ANSWERS, Example

# Array of an example with the log-probability of each answer, at the answer's first token; zeros
# elsewhere. The bits of float32 as int32, the type of all arrays of an example.
REFERENCE = "reference"
FILE = "reference.npz"

CHANGED = "so the data or the tokenizer have changed; restore them, or choose another run_dir"


class References:
    """Log-probabilities of the answers of each example; float32, in nats. Empty until `fill`.

    Args:
      missing: end of the error about an example that was not scored.
    """

    def __init__(self, missing: str = CHANGED):
        self._logps: dict[bytes, np.ndarray] | None = None
        self._missing = missing

    def attach(self, example: Example) -> Example:
        """Returns the example with `REFERENCE`: zeros before `fill`.

        Raises:
          ChangedRecord: the example was not among the data when the answers were scored.
        """
        numbers = example[ANSWERS]
        values = np.zeros(len(numbers), np.float32)
        if self._logps is not None:
            logps = self._logps.get(key_of(example))
            if logps is None:
                raise ChangedRecord(f"no log-probabilities in {FILE} of this run, {self._missing}")
            for number, logp in enumerate(logps, 1):
                place = np.flatnonzero(numbers == number)[:1]
                values[place] = logp
        return example | {REFERENCE: values.view(np.int32)}

    def fill(self, logps: dict[bytes, np.ndarray]) -> None:
        """Takes the log-probabilities of the answers of each example, by `key_of` the example."""
        self._logps = logps

    def save(self, path: Path) -> None:
        """Writes the log-probabilities."""
        logps = self._logps or {}
        keys = np.frombuffer(b"".join(logps), np.uint8).reshape(len(logps), -1)
        lengths = np.array([len(x) for x in logps.values()], np.int32)
        values = np.concatenate([*logps.values(), np.zeros(0, np.float32)])
        with path.open("wb") as file:
            np.savez(file, keys=keys, lengths=lengths, logps=values)

    def load(self, path: Path) -> None:
        """Reads the log-probabilities that `save` wrote.

        Raises:
          ValueError: the file is damaged.
        """
        try:
            with np.load(path) as file:
                keys, lengths, values = (file[name] for name in ("keys", "lengths", "logps"))
            parts = np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
            self._logps = {bytes(k): x for k, x in zip(keys, parts, strict=True)}
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"{path}: must be as this run wrote it ({error})") from error


def key_of(example: Example) -> bytes:
    """Returns a hash of the tokens of an example and of its answers."""
    parts = (
        np.ascontiguousarray(example[name]).tobytes() for name in ("tokens", "labels", ANSWERS)
    )
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
