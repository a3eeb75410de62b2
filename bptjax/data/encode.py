"""Converts documents to examples: token ids, and the labels that count in the loss."""

from dataclasses import replace
from typing import Any

import numpy as np

from bptjax.data.chat import Chat
from bptjax.data.examples import Example
from bptjax.data.rows import Compound, Document, TokenIds
from bptjax.data.templates import Rendered, conversations, render, template_of
from bptjax.data.tokenizer import Tokenizer
from bptjax.ops.labels import IGNORED


def encode(
    document: Document,
    tokenizer: Tokenizer,
    *,
    source_max_len: int | None = None,
    target_max_len: int | None = None,
    train_on_source: bool = False,
) -> list[Example]:
    """Returns the examples of a document: dicts of `tokens` and `labels`, int32, each one token
    shorter than the text. A label is the next token, or -100.

    Text starts with the tokenizer's `prefix` and ends with EOS if the tokenizer has one. Token ids
    are used unchanged. A chat is one example, or several if its template changes earlier turns; see
    `templates.conversations`. A conversation is tokenized as one text, and a token that contains a
    character of an answer counts in the loss, as in transformers' `return_assistant_tokens_mask`.
    Labels are shifted before packing, so no label crosses a document boundary.

    Args:
      source_max_len, target_max_len: see `shorten`.
      train_on_source: count the prompts of chats in the loss too.

    Raises:
      ValueError: ids outside the tokenizer's vocabulary, or a chat that its template refuses.
    """
    if isinstance(document, Chat):
        chat = shorten(document, tokenizer, source_max_len, target_max_len)
        rendered = conversations(chat, tokenizer, split=not train_on_source)
        return [_example(conversation, tokenizer, train_on_source) for conversation in rendered]
    return [_shifted(token_ids(document, tokenizer))]


def _shifted(record: TokenIds) -> Example:
    """Returns the example in which each token predicts the next one."""
    return {"tokens": record.ids[:-1], "labels": record.labels[1:]}


def end_of_text(tokenizer: Tokenizer, sep: bool = False) -> list[int]:
    """Returns the ids that end a text: EOS, or SEP if `sep` and there is no EOS; may be empty."""
    last = tokenizer.sep_id if sep and tokenizer.eos_id is None else tokenizer.eos_id
    return [] if last is None else [last]


def token_ids(document: Document, tokenizer: Tokenizer, sep: bool = False) -> TokenIds:
    """Returns the tokens of a text, from `prefix` to `end_of_text`, or of a tokenized record.

    Raises:
      ValueError: ids outside the tokenizer's vocabulary, or a record of several parts.
    """
    if isinstance(document, str):
        end = np.array(end_of_text(tokenizer, sep), np.int32)
        ids = np.concatenate([tokenizer.encode_prompt(document), end])
        return TokenIds(ids, ids)
    if isinstance(document, Chat | Compound):
        raise ValueError(f"{document.where}: must have text or token ids; see data.format")
    record = document if isinstance(document, TokenIds) else TokenIds(document, document)
    check_ids(record.ids, tokenizer)
    check_ids(record.labels[record.labels != IGNORED], tokenizer, "labels")
    return record


def check_ids(ids: np.ndarray, tokenizer: Tokenizer, field: str = "input_ids") -> None:
    """Checks the range of token ids.

    Raises:
      ValueError: ids outside the tokenizer's vocabulary.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ValueError(
            f"{field} from {ids.min()} to {ids.max()}: must be in [0, {tokenizer.vocab_size}), the "
            "tokenizer's vocabulary; set data.tokenizer to the tokenizer of these ids"
        )


def tokenize(rendered: Rendered, tokenizer: Tokenizer) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Returns the token ids, and the token range [start, stop) of each answer."""
    edges = [0, *(edge for span in rendered.answers for edge in span), len(rendered.text)]
    parts = [rendered.text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    ids, ranges = tokenizer.encode_parts(parts)
    return ids, ranges[1::2]


def _example(rendered: Rendered, tokenizer: Tokenizer, train_on_source: bool) -> Example:
    ids, answers = tokenize(rendered, tokenizer)
    in_loss = np.full(len(ids), train_on_source)
    for start, stop in answers:
        in_loss[start:stop] = True
    return _shifted(TokenIds(ids, np.where(in_loss, ids, np.int32(IGNORED))))


def prompt_and_answer(
    chat: Chat, tokenizer: Tokenizer, source_max_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids before the first answer, and the token ids of the answer.

    Raises:
      ValueError: the chat has no answer with a token.
    """
    first = conversations(shorten(chat, tokenizer, source_max_len, None), tokenizer)[0]
    ids, answers = tokenize(first, tokenizer)
    start, stop = next(((a, b) for a, b in answers if a < b), (0, 0))
    if start == stop:
        raise ValueError(f"{chat.where}: must have an answer of at least one token")
    return ids[:start], ids[start:stop]


def shorten(
    chat: Chat, tokenizer: Tokenizer, source_max_len: int | None, target_max_len: int | None
) -> Chat:
    """Truncates the contents of a chat's messages, but never the text that its template adds.

    The source is everything before the first answer. If it exceeds `source_max_len` tokens, its
    longest content is truncated at the end until the source fits. The target is the rest. If it
    exceeds `target_max_len` tokens, the chat ends with the answer in which the limit falls: the
    answer's content is truncated, and its end, such as EOS, stays. Special tokens count. Tool
    definitions, tool calls and reasoning are not truncated, so a source that consists of them may
    remain too long.

    Raises:
      ValueError: the template's text around the first answer exceeds `target_max_len`.
    """
    first = chat.answers[0]
    if source_max_len is not None:
        chat = _shorten_source(chat, first, tokenizer, source_max_len)
    if target_max_len is not None:
        chat = _shorten_target(chat, first, tokenizer, target_max_len)
    return chat


def _length(chat: Chat, count: int, tokenizer: Tokenizer, answer: bool = False) -> int:
    """Returns the number of tokens of the first `count` messages; with `answer`, plus the start of
    an answer."""
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
        chat = _replace_text(chat, i, key, _without_last(text, over, tokenizer))
    return chat


def _shorten_target(chat: Chat, first: int, tokenizer: Tokenizer, limit: int) -> Chat:
    source = _length(chat, first, tokenizer, answer=True)
    complete = 0
    for i in chat.answers:
        while (over := _length(chat, i + 1, tokenizer) - source - limit) > 0:
            text = _without_last(chat.messages[i].get("content", ""), over, tokenizer)
            if not text and not complete:
                raise ValueError(
                    f"{chat.where}: data.target_max_len={limit}: must be at least {limit + over}, "
                    "the length of the chat template's text around the first answer"
                )
            if not text:
                return replace(chat, messages=chat.messages[:complete])
            shorter = _replace_text(chat, i, "content", text)
            chat = replace(shorter, messages=shorter.messages[: i + 1])
        complete = i + 1
        if complete == len(chat.messages):
            break
    return replace(chat, messages=chat.messages[:complete])


def _without_last(text: str, count: int, tokenizer: Tokenizer) -> str:
    length = len(tokenizer.encode_parts([text])[0])
    shortened = tokenizer.shorten(text, length - count)
    # Remove at least one character, even if the character has several tokens.
    return shortened if len(shortened) < len(text) else text[:-1]


def _replace_text(chat: Chat, index: int, key: str, text: str) -> Chat:
    messages: list[Any] = list(chat.messages)
    messages[index] = {**messages[index], key: text}
    return replace(chat, messages=tuple(messages))
