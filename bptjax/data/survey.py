"""Inspects chats before a run starts: fields that templates ignore, and ends of answers."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bptjax.data.chat import Chat
from bptjax.data.encode import tokenize
from bptjax.data.records import Readable, reads
from bptjax.data.rows import Compound, Document
from bptjax.data.templates import (
    conversations,
    describe_clock_and_chance,
    form_template,
    render,
    template_of,
)
from bptjax.data.tokenizer import Tokenizer

# Counting the fields of a record takes microseconds; rendering and tokenizing it, milliseconds.
RECORDS = 10_000
SAMPLES = 32
TRIALS = 4
# Format of texts in `Survey.formats`.
TEXT = "text"


@dataclass(frozen=True)
class Survey:
    """Common properties of the chats of a run.

    Attributes:
      formats: number of records inspected by their format and its fields, of each source.
      records: number of chats inspected.
      forms: number of chats by name in `templates.FORMS`; None is the tokenizer's chat template.
      endings: number of sampled answers by the special token at their end, or None.
      unread: number of chats by field that their template ignores.
    """

    formats: list[Counter[str]]
    records: int
    forms: Counter[str | None]
    endings: Counter[int | None]
    unread: Counter[str]

    @property
    def form(self) -> str | None:
        """Name of the template that the run's tokenizer gets: that of chats whose format prescribes
        none, so that evaluations and users write chats as in training; else the most frequent.
        None is the tokenizer's own."""
        free = [form for form in (None, "plain") if self.forms[form]]
        return (*free, *(form for form, _ in self.forms.most_common()), None)[0]

    def adapt(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer with the template `form`, and with the tokens at the end of the
        chats' answers as stop tokens."""
        template = None if self.form is None else form_template(self.form, tokenizer)
        adapted = tokenizer.with_chat(template, [i for i in self.endings if i is not None])
        # Chats may follow the records inspected.
        adapted.unadapted = tokenizer
        return adapted

    def notes(self, tokenizer: Tokenizer) -> list[str]:
        """Returns notes for the log of a run, one line each."""
        notes = describe_clock_and_chance(tokenizer) if self.forms[None] else []
        if self.unread:
            fields = ", ".join(f"{name} ({n})" for name, n in sorted(self.unread.items()))
            notes.append(
                f"chats: the chat template does not read {fields}, of {self.records} records"
            )
        ends = [i for i in self.endings if i is not None]
        if ends:
            # Some tokenizers decode EOS to an empty string.
            names = ", ".join(repr(tokenizer.decode([i]) or f"token {i}") for i in ends)
            notes.append(f"chats: answers end with {names}, which stops generation")
        if self.endings[None]:
            notes.append(
                f"chats: no special token ends {self.endings[None]} of "
                f"{self.endings.total()} answers inspected, so generation does not stop by itself "
                "after such an answer"
            )
        if len(self.forms) > 1:
            names = ", ".join(f"{form or 'template'} ({n})" for form, n in self.forms.items())
            notes.append(
                f"chats: records have several templates: {names}; the tokenizer gets "
                f"{self.form or 'none of them, but keeps its own'}"
            )
        return notes


def survey(sources: Sequence[Sequence[Document] | Readable], tokenizer: Tokenizer) -> Survey:
    """Inspects the chats among the first `RECORDS` documents, an equal number from each source.

    Skips bad records, which the loader reports. A field counts as read if some record renders
    differently without it; up to `TRIALS` records are tried. Endings are counted over the first
    `SAMPLES` chats.
    """
    forms: Counter[str | None] = Counter()
    endings: Counter[int | None] = Counter()
    counts: Counter[str] = Counter()
    trials: Counter[str] = Counter()
    read: set[str] = set()
    limit = RECORDS // max(1, len(sources))
    formats: list[Counter[str]] = [Counter() for _ in sources]
    each = (_chats(*own, limit) for own in zip(sources, formats, strict=True))
    for document in itertools.chain(*each):
        form = document.form
        if form is None and tokenizer.template_for("tools" in document.variables) is None:
            form = "plain"
        forms[form] += 1
        if forms.total() <= SAMPLES:
            with contextlib.suppress(ValueError):
                endings.update(_endings(document, tokenizer))
        changed: dict[str, Chat] = {}
        for name, without in _without_each_field(document):
            changed.setdefault(name, without)
        counts.update(changed.keys())
        for name, without in changed.items():
            if name not in read and trials[name] < TRIALS:
                trials[name] += 1
                if _text(document, tokenizer, len(without.messages)) != _text(without, tokenizer):
                    read.add(name)
    unread = Counter({name: count for name, count in counts.items() if name not in read})
    return Survey(formats, forms.total(), forms, endings, unread)


def _chats(
    documents: Sequence[Document] | Readable, formats: Counter[str], limit: int
) -> Iterator[Chat]:
    """Yields the chats among the first `limit` documents, and counts the documents by format.

    Stops after `SAMPLES` documents without a chat, because documents may be long.
    """
    chats = 0
    for i, read in enumerate(itertools.islice(reads(documents), limit)):
        if i == SAMPLES and not chats:
            return
        try:
            document = read()
        except ValueError:
            continue
        formats[_format(document)] += 1
        own = document.chats if isinstance(document, Compound) else [document]
        examined = [each for each in own if isinstance(each, Chat)]
        chats += len(examined)
        yield from examined


def _format(document: Document) -> str:
    """Returns the format of a document for messages; empty if only one objective reads it."""
    if isinstance(document, Chat):
        return document.format
    if isinstance(document, Compound):
        return ""
    return TEXT if isinstance(document, str) else "token ids (input_ids)"


def _endings(chat: Chat, tokenizer: Tokenizer) -> Iterator[int | None]:
    for conversation in conversations(chat, tokenizer):
        ids, answers = tokenize(conversation, tokenizer)
        for start, stop in answers:
            if start < stop:
                yield tokenizer.ending(ids, start, stop)


def _without_each_field(chat: Chat) -> Iterator[tuple[str, Chat]]:
    """Yields the name of each field of the chat, and a chat without the field.

    For a field of a message, the chat ends with this message, because some templates write the
    reasoning of the last answer only.
    """
    for key, value in chat.variables.items():
        if value not in ("", [], {}):
            yield key, replace(chat, variables=_without(chat.variables, key))
    for i, message in enumerate(chat.messages):
        for key, value in message.items():
            if key != "role" and value not in ("", [], {}):
                shorter = (*chat.messages[:i], _without(message, key))
                yield f"{key} of {message['role']} messages", replace(chat, messages=shorter)


def _without(values: Any, key: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != key}


def _text(chat: Chat, tokenizer: Tokenizer, count: int | None = None) -> str | None:
    """Returns the first messages as text; None if the template refuses them."""
    try:
        template = template_of(chat, tokenizer)
        return render(chat.messages[:count], template, tokenizer, chat.variables)[0]
    except ValueError:
        return None
