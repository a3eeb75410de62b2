"""Tasks that hide facts in filler text or among each other."""

import uuid
from collections.abc import Sequence

import numpy as np

from bptjax.tasks.sample import Drawn
from bptjax.tasks.words import (
    ADJECTIVES,
    NOUNS,
    Filler,
    different,
    essay,
    letters,
    names,
    repeated,
)

NEEDLE = "The secret {kind} of {name} is {value}. "
KEY = "The pass key is {0}. Remember it. {0} is the pass key. "
# Depths at which facts may be hidden.
DEPTHS = np.linspace(0, 1, 40)
# Step from the depth of a pass key to the next one's, modulo 1: the golden ratio, with which any
# number of samples covers all depths evenly.
KEY_STEP = (5**0.5 - 1) / 2
UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def hide(filler: list[str], lines: Sequence[str], depths: Sequence[float]) -> str:
    """Returns the filler with lines at increasing depths, 0 at the start and 1 at the end."""
    for line, depth in reversed([*zip(lines, depths, strict=True)]):
        filler.insert(round(depth * len(filler)), line)
    return "".join(filler)


def _depths(rng: np.random.Generator, count: int) -> list[float]:
    return sorted(rng.choice(DEPTHS, count, replace=False).tolist())


def _values(rng: np.random.Generator, count: int, kind: str) -> list[str]:
    if kind == "id":
        return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]
    return [str(n) for n in rng.integers(1_000_000, 10_000_000, count).tolist()]


def needles(
    rng: np.random.Generator,
    units: int,
    index: int,
    filler: Filler | None,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    kind: str = "number",
) -> Drawn:
    """Hides `values` facts about each of `keys` names; asks for `queries` names."""
    named = names(rng, keys)
    facts = [(name, value) for name in named for value in _values(rng, values, kind)]
    lines = [NEEDLE.format(kind=kind, name=name, value=value) for name, value in facts]
    asked = named[:queries]
    order = rng.permutation(len(lines))
    context = hide(
        (filler or essay)(rng, units), [lines[i] for i in order], _depths(rng, len(lines))
    )
    references = tuple(value for name, value in facts if name in asked)
    return Drawn(context, " and ".join(asked), references)


def among_needles(rng: np.random.Generator, units: int, index: int, filler: Filler | None) -> Drawn:
    """Asks for one of many facts without other text."""
    depth = rng.random()
    named = names(rng, units)
    facts = [*zip(named, _values(rng, units, "number"), strict=True)]
    context = "".join(NEEDLE.format(kind="number", name=name, value=value) for name, value in facts)
    name, value = facts[int(depth * units)]
    return Drawn(context, name, (value,))


def passkey(rng: np.random.Generator, units: int, index: int, filler: Filler | None) -> Drawn:
    """Hides a number of five digits. Each sample has another depth, because a model answers nearly
    all samples of one depth alike. Mohtashami & Jaggi 2023, arXiv 2305.16300, section 4.2."""
    key, depth = int(rng.integers(10_000, 100_000)), index * KEY_STEP % 1
    context = hide((filler or repeated)(rng, units), [KEY.format(key)], [depth])
    return Drawn(context, "", (str(key),), depth)


def variables(
    rng: np.random.Generator, units: int, index: int, filler: Filler | None, *, hops: int = 4
) -> Drawn:
    """Hides a chain of assignments; asks for all variables with the value."""
    value = str(rng.integers(10_000, 100_000))
    named = letters(rng, hops + 1, 5, UPPER)
    lines = [f"VAR {named[0]} = {value}. "]
    lines += [f"VAR {b} = VAR {a}. " for a, b in zip(named, named[1:], strict=False)]
    depths = _depths(rng, len(lines))
    return Drawn(hide((filler or repeated)(rng, units), lines, depths), value, tuple(named))


def records(rng: np.random.Generator, units: int, index: int, filler: Filler | None) -> Drawn:
    """Asks for the words of one of many numbered records."""
    at = int(rng.random() * units)
    words = ADJECTIVES + NOUNS
    drawn = rng.integers(0, len(words), (units, 5)).tolist()
    texts = [" ".join(map(words.__getitem__, each)) for each in drawn]
    numbers = different(rng, max(900_000, 2 * units), units)
    lines = [f"Record {100_000 + n}: {text}\n" for n, text in zip(numbers, texts, strict=True)]
    return Drawn("".join(lines), str(100_000 + numbers[at]), (texts[at],))
