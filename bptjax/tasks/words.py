"""Text that tasks are made of: names, coined words, filler sentences, documents of the user."""

import math
import re
from collections.abc import Callable

import numpy as np

from bptjax.data.sample import random_order
from bptjax.data.stream import Stream
from bptjax.data.text import Subset, open_documents

# Returns `count` pieces of text, each with the white space after it. The first pieces do not depend
# on the count.
Filler = Callable[[np.random.Generator, int], list[str]]

ADJECTIVES = (
    "amber ancient azure basic bitter blunt brave brief bright bronze calm careful cheap civil "
    "clean clever cold common coral crisp curious dark deep distant double dry eager early eastern "
    "empty even faint fair famous fancy fast final firm flat fresh gentle giant golden grand gray "
    "great green happy heavy hidden high hollow honest humble icy idle inner jolly keen kind large "
    "late lazy level light little lively lonely long loud loyal lucky mellow mild modern narrow "
    "neat new noble northern odd old open orange outer pale patient plain polite proud quick quiet "
    "rapid rare raw ready"
).split()
NOUNS = (
    "acorn anchor apple arch arrow badge bakery barrel basket beacon bell bench bird blanket boat "
    "book bottle bridge broom bucket button cabin cable camera candle canyon carpet castle cellar "
    "chair cherry circle clock cloud coat comet cradle crown curtain desert diary door drum eagle "
    "engine falcon feather fence field flute forest fountain garden gate glacier glove hammer "
    "harbor hill horn island jacket jar kettle key ladder lake lamp lantern leaf lemon library "
    "magnet maple marble market meadow mill mirror needle orchard oven paddle path pencil piano "
    "pillow planet pocket quarry rabbit ribbon river rocket saddle shelf shovel"
).split()
PEOPLE = (
    "baker farmer pilot doctor tailor singer painter teacher sailor gardener lawyer miner cook "
    "clerk writer judge guard student nurse actor weaver hunter dancer porter printer banker"
).split()
ACTIONS = (
    "found sold moved drew cleaned lost bought painted carried fixed watched borrowed described "
    "remembered wanted counted noticed forgot measured praised ordered hid packed returned"
).split()
TIMES = (
    "in spring|last week|at noon|after lunch|by the road|near the sea|in the rain|at home|"
    "before dawn|with care|for a friend|without a word|on Monday|in town|once more|at last"
).split("|")
REPEATED = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again.\n",
)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def different(rng: np.random.Generator, most: int, count: int) -> list[int]:
    """Returns different numbers below `most`, which is at least twice the count. The first ones do
    not depend on the count."""
    return list(dict.fromkeys(rng.integers(most, size=2 * count).tolist()))[:count]


def names(rng: np.random.Generator, count: int) -> list[str]:
    """Returns different names of an adjective and a noun; of more adjectives for many names."""
    lists = [ADJECTIVES, NOUNS]
    while math.prod([len(words) for words in lists]) < 2 * count:
        lists.insert(0, ADJECTIVES)
    sizes = [len(words) for words in lists]
    numbers = np.unravel_index(different(rng, math.prod(sizes), count), sizes)
    return ["-".join(map(list.__getitem__, lists, each)) for each in zip(*numbers, strict=True)]


def coined_words(rng: np.random.Generator, count: int) -> list[str]:
    """Returns different words that can be pronounced, of six letters; of more for many words."""
    sizes = [len(SYLLABLES)] * 3
    while math.prod(sizes) < 2 * count:
        sizes.append(len(SYLLABLES))
    numbers = np.unravel_index(different(rng, math.prod(sizes), count), sizes)
    return ["".join(map(SYLLABLES.__getitem__, each)) for each in zip(*numbers, strict=True)]


def letters(rng: np.random.Generator, count: int, length: int, alphabet: str) -> list[str]:
    """Returns different words of random letters."""
    words: dict[str, None] = {}
    while len(words) < count:
        drawn = rng.integers(0, len(alphabet), length).tolist()
        words["".join(map(alphabet.__getitem__, drawn))] = None
    return list(words)


def essay(rng: np.random.Generator, count: int) -> list[str]:
    """Returns sentences of up to 63 characters, in paragraphs."""
    lists = ADJECTIVES, PEOPLE, ACTIONS, NOUNS, TIMES
    drawn = rng.integers(0, [*map(len, lists), 8], (count, len(lists) + 1)).tolist()
    return [
        f"The {ADJECTIVES[a]} {PEOPLE[b]} {ACTIONS[c]} the {NOUNS[d]} {TIMES[e]}."
        + (" " if end else "\n")
        for a, b, c, d, e, end in drawn
    ]


def repeated(rng: np.random.Generator, count: int) -> list[str]:
    """Returns the filler of pass keys."""
    return [REPEATED[i % len(REPEATED)] for i in range(count)]


# Sentences and lines, with the white space after them. Longer ones are divided.
PIECE = re.compile(
    r"\s*\S(?:.{0,198}?(?:[.!?]\s+|[。！？]\s*|\s*\n\s*|\Z)|.{0,198}\s+|.{1,198})", re.S
)


class Haystack:
    """Filler from documents of the user: their sentences, in order, from a random one on. After the
    last sentence follows the first.

    Args:
      paths: files as in `open_documents`.
      characters: largest number of characters read; with more, of a random choice of documents.

    Raises:
      ValueError, OSError: the files cannot be read, or hold no text.
    """

    def __init__(self, paths: list[str], text_key: str, seed: int, characters: int = 2**26):
        documents, self.pieces, total = open_documents(paths, text_key=text_key), [], 0
        if not isinstance(documents, Stream):
            documents = Subset(documents, random_order(len(documents), seed))
        for document in documents:
            if not isinstance(document, str):
                raise ValueError("--haystack: must hold text, not token ids or chats")
            found = PIECE.findall(document[: characters - total])
            if found and not found[-1][-1].isspace():
                found[-1] += "\n"
            self.pieces += found
            total += len(document)
            if total >= characters:
                break
        if not self.pieces:
            raise ValueError(f"--haystack={' '.join(paths)}: must hold text")

    def __call__(self, rng: np.random.Generator, count: int) -> list[str]:
        start = int(rng.integers(len(self.pieces)))
        turns = -(-(start + count) // len(self.pieces))
        return (self.pieces * turns)[start : start + count]
