"""Documents as examples: token ids, and the labels that are in the loss."""

from dataclasses import replace
from typing import Any

import numpy as np

from bptjax.data.chat import Chat
from bptjax.data.files import Document, TokenIds
from bptjax.data.packing import Example
from bptjax.data.templates import Rendered, conversations, render, template_of
from bptjax.data.tokenizer import Tokenizer

IGNORED = -100


def encode(
    document: Document,
    tokenizer: Tokenizer,
    *,
    source_max_len: int | None = None,
    target_max_len: int | None = None,
    train_on_source: bool = False,
) -> list[Example]:
    """Returns the examples of a document: dicts of `tokens` and `labels`, the next tokens or -100,
    each int32 and one shorter than the text.

    Text starts with what the tokenizer puts in front and ends with EOS if there is one. Token ids
    are used as they are. A chat is one example, or several if its template changes earlier turns;
    see `templates.conversations`. It is tokenized once, and a token that holds a character of an
    answer is in the loss, as in transformers' `return_assistant_tokens_mask`. The labels are
    shifted before packing, so that no label crosses a document.

    Args:
      source_max_len, target_max_len: see `shorten`.
      train_on_source: prompts of chats are in the loss too.

    Raises:
      ValueError: ids that the tokenizer does not have, or a chat that its template refuses.
    """
    if isinstance(document, Chat):
        chat = shorten(document, tokenizer, source_max_len, target_max_len)
        written = conversations(chat, tokenizer, split=not train_on_source)
        return [_example(one, tokenizer, train_on_source) for one in written]
    if isinstance(document, str):
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        ids = np.concatenate([tokenizer.encode_prompt(document), np.array(end, np.int32)])
        return [{"tokens": ids[:-1], "labels": ids[1:]}]
    whole = document if isinstance(document, TokenIds) else TokenIds(document, document)
    check_ids(whole.ids, tokenizer)
    check_ids(whole.labels[whole.labels != IGNORED], tokenizer, "labels")
    return [{"tokens": whole.ids[:-1], "labels": whole.labels[1:]}]


def check_ids(ids: np.ndarray, tokenizer: Tokenizer, field: str = "input_ids") -> None:
    """
    Raises:
      ValueError: token ids that the tokenizer does not have.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ValueError(
            f"{field} from {ids.min()} to {ids.max()} do not fit "
            f"vocab_size={tokenizer.vocab_size}; set data.tokenizer to the one that made them"
        )


def tokenize(rendered: Rendered, tokenizer: Tokenizer) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Returns the token ids, and the token range [start, stop) of each answer."""
    edges = [0, *(edge for span in rendered.answers for edge in span), len(rendered.text)]
    parts = [rendered.text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    ids, ranges = tokenizer.encode_parts(parts)
    return ids, ranges[1::2]


def _example(rendered: Rendered, tokenizer: Tokenizer, train_on_source: bool) -> Example:
    ids, answers = tokenize(rendered, tokenizer)
    learned = np.full(len(ids), train_on_source)
    for start, stop in answers:
        learned[start:stop] = True
    labels = np.where(learned, ids, np.int32(IGNORED))
    return {"tokens": ids[:-1], "labels": labels[1:]}


def question(
    chat: Chat, tokenizer: Tokenizer, source_max_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (prompt, answer): the token ids up to the first answer, and those of the answer.

    Raises:
      ValueError: there is none.
    """
    first = conversations(shorten(chat, tokenizer, source_max_len, None), tokenizer)[0]
    ids, answers = tokenize(first, tokenizer)
    start, stop = next(((a, b) for a, b in answers if a < b), (0, 0))
    if start == stop:
        raise ValueError(f"{chat.where}: no token is an answer")
    return ids[:start], ids[start:stop]


def shorten(
    chat: Chat, tokenizer: Tokenizer, source_max_len: int | None, target_max_len: int | None
) -> Chat:
    """Shortens what people wrote in a chat, and nothing that the template wrote around it.

    The source, all before the first answer, is at most `source_max_len` tokens: its longest content
    is cut at the end until it fits. The target, the rest, is at most `target_max_len`: the chat
    ends with the answer in which the limit falls, whose content is cut so that the end of the
    answer, such as EOS, stays. Special tokens count. Tool definitions, tool calls and reasoning are
    not cut, so a source of them alone may stay longer.

    Raises:
      ValueError: the first answer has no room in `target_max_len`.
    """
    first = chat.answers[0]
    if source_max_len is not None:
        chat = _shorten_source(chat, first, tokenizer, source_max_len)
    if target_max_len is not None:
        chat = _shorten_target(chat, first, tokenizer, target_max_len)
    return chat


def _length(chat: Chat, count: int, tokenizer: Tokenizer, answer: bool = False) -> int:
    """Returns the tokens of the first `count` messages."""
    template = template_of(chat, tokenizer)
    try:
        text, _ = render(chat.messages[:count], template, tokenizer, chat.variables, answer=answer)
    except ValueError as error:
        raise ValueError(f"{chat.where}: {error}") from error
    return len(tokenizer.encode_parts([text])[0])


def _shorten_source(chat: Chat, first: int, tokenizer: Tokenizer, limit: int) -> Chat:
    while (over := _length(chat, first, tokenizer, answer=True) - limit) > 0:
        texts = {
            (i, key): message[key]
            for i, message in enumerate(chat.messages[:first])
            for key in ("content", "input")
            if message.get(key)
        }
        if not texts:
            break
        (i, key), text = max(texts.items(), key=lambda item: len(item[1]))
        chat = _replaced(chat, i, key, _without_last(text, over, tokenizer))
    return chat


def _shorten_target(chat: Chat, first: int, tokenizer: Tokenizer, limit: int) -> Chat:
    source = _length(chat, first, tokenizer, answer=True)
    kept = 0
    for i in chat.answers:
        while (over := _length(chat, i + 1, tokenizer) - source - limit) > 0:
            text = _without_last(chat.messages[i].get("content", ""), over, tokenizer)
            if not text and not kept:
                raise ValueError(
                    f"{chat.where}: data.target_max_len={limit}: must be at least {limit + over} "
                    "for what the chat template writes around the first answer"
                )
            if not text:
                return replace(chat, messages=chat.messages[:kept])
            shorter = _replaced(chat, i, "content", text)
            chat = replace(shorter, messages=shorter.messages[: i + 1])
        kept = i + 1
        if kept == len(chat.messages):
            break
    return replace(chat, messages=chat.messages[:kept])


def _without_last(text: str, count: int, tokenizer: Tokenizer) -> str:
    length = len(tokenizer.encode_parts([text])[0])
    found = tokenizer.shorten(text, length - count)
    # Always shorter, even if one character has several tokens.
    return found if len(found) < len(text) else text[:-1]


def _replaced(chat: Chat, index: int, key: str, text: str) -> Chat:
    messages: list[Any] = list(chat.messages)
    messages[index] = {**messages[index], key: text}
    return replace(chat, messages=tuple(messages))
