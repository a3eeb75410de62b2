"""Questions about documents of the user, each asked among other documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bptjax.data.rows import Compound, RecordFormat
from bptjax.data.sample import random_order
from bptjax.data.stream import Stream
from bptjax.data.text import Subset, open_documents
from bptjax.tasks.sample import Drawn
from bptjax.tasks.words import PIECE, Filler, essay

DOCUMENT, SQUAD_DOCUMENT, QUESTION = "document", "context", "question"
ANSWER, ANSWERS = "answer", "answers"


@dataclass(frozen=True)
class Question(Compound):
    """A record of `--questions`: a document, a question about it, and its correct answers."""

    document: str
    question: str
    answers: tuple[str, ...]


def read_question(fields: Mapping[str, Any], text_key: str, where: str) -> Question:
    """Reads a record with a document, a question, and an answer or a list of answers, or one of
    SQuAD.

    Raises:
      ValueError: a field is missing or empty, or is no text.
    """
    document = DOCUMENT if DOCUMENT in fields else SQUAD_DOCUMENT
    answers = fields.get(ANSWER, fields.get(ANSWERS))
    if isinstance(answers, Mapping):
        answers = answers.get("text")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, Sequence | np.ndarray):
        answers = []
    for name, texts in (
        (DOCUMENT, [fields.get(document)]),
        (QUESTION, [fields.get(QUESTION)]),
        (ANSWER, answers),
    ):
        if not len(texts) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{where}: {name!r} must be text")
    # SQuAD repeats an answer that several people gave.
    distinct = tuple(dict.fromkeys(text.strip() for text in answers))
    return Question(where, fields[document], fields[QUESTION].strip(), distinct)


FORMAT = RecordFormat(
    "questions",
    read_question,
    fields=(DOCUMENT, SQUAD_DOCUMENT, QUESTION, ANSWER, ANSWERS),
)


def pieces(document: str) -> list[str]:
    """Returns the sentences and lines of a document, which ends with an empty line."""
    return PIECE.findall(document.strip() + "\n\n")


class Questions:
    """The records of `--questions`, in random order.

    Args:
      paths: files as in `open_documents`.
      filler: text after the documents in long prompts; None for made sentences.
      characters: largest number of characters of documents read.

    Raises:
      ValueError, OSError: the files cannot be read, or a record is not of the format.
    """

    def __init__(
        self, paths: list[str], seed: int, filler: Filler | None = None, characters: int = 2**26
    ):
        documents = open_documents(paths, format=FORMAT)
        if not isinstance(documents, Stream):
            documents = Subset(documents, random_order(len(documents), seed))
        self.filler = filler or essay
        self.questions: list[Question] = []
        # Several questions may be about one document.
        self.documents: dict[str, list[str]] = {}
        total = 0
        for question in documents:
            assert isinstance(question, Question)
            self.questions.append(question)
            if question.document not in self.documents:
                self.documents[question.document] = pieces(question.document)
                total += len(question.document)
            if total >= characters:
                break

    def others(
        self, rng: np.random.Generator, units: int, question: Question
    ) -> tuple[list[str], list[int]]:
        """Returns `units` pieces of the other documents in random order, then of the filler, and
        the places between documents. The first ones do not depend on `units`."""
        texts = list(self.documents)
        found: list[str] = []
        places = [0]
        for i in rng.permutation(len(texts)).tolist():
            if texts[i] == question.document:
                continue
            if len(found) >= units:
                break
            found += self.documents[texts[i]]
            places.append(len(found))
        if (missing := units - len(found)) > 0:
            found += self.filler(rng, missing)
            places.append(units)
        return found[:units], [place for place in places if place < units] + [units]


def questions(rng: np.random.Generator, units: int, index: int, source: Questions) -> Drawn:
    """Asks about a document among others, each of which may be at any place. Hsieh et al. 2024,
    RULER, arXiv 2404.06654, section 3.4."""
    question = source.questions[index]
    share = rng.random()
    found, places = source.others(rng, units, question)
    at = places[int(share * len(places))]
    own = source.documents[question.document]
    if found[:at] and not found[at - 1].endswith("\n\n"):
        own = ["\n\n", *own]
    context = "".join([*found[:at], *own, *found[at:]])
    return Drawn(context, question.question, question.answers)
