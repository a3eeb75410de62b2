"""Converts documents to examples: token ids, and the labels that count in the loss."""

from dataclasses import replace
from typing import Any

import numpy as np

from bptjax.data.chat import Chat
from bptjax.data.examples import Example
from bptjax.data.files import Document, Labeled, TokenIds
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
    objective: str = "next_token",
    classes: int = 0,
    limit: int | None = None,
) -> list[Example]:
    """Returns the examples of a document: dicts of `tokens` and `labels`, int32, each one token
    shorter than the text. A label is the next token, or -100. With objective="masked_tokens", the
    examples are complete, and a label is the token itself, before it is masked. With
    objective="class", the first token of a complete example has the class of the document as its
    label, no other token has one, and `token_types` are those of the tokenizer.

    Text starts with the tokenizer's `prefix` and ends with EOS if the tokenizer has one; the text
    of an encoder otherwise with SEP. A pair of texts has the special tokens that the tokenizer puts
    around a pair. Token ids are used unchanged. A chat is one example, or several if its template
    changes earlier turns; see `templates.conversations`. Each conversation is tokenized in one
    piece, and a token that contains a character of an answer counts in the loss, as in
    transformers' `return_assistant_tokens_mask`. Labels are shifted before packing, so no label
    crosses a document boundary.

    Args:
      source_max_len, target_max_len: see `shorten`.
      train_on_source: count the prompts of chats in the loss too.
      classes: number of classes of objective="class".
      limit: largest number of tokens of a text with a class. The longer text of a pair is truncated
        first, at its end, and special tokens stay, as in transformers.

    Raises:
      ValueError: ids outside the tokenizer's vocabulary, or a chat that its template refuses, or
        that is no record for the objective.
    """
    if isinstance(document, Chat) and objective != "next_token":
        raise ValueError(
            f"{document.where}: must have text or token ids, not a chat, to train an encoder; see "
            "data.format"
        )
    if isinstance(document, Chat):
        chat = shorten(document, tokenizer, source_max_len, target_max_len)
        rendered = conversations(chat, tokenizer, split=not train_on_source)
        return [_example(one, tokenizer, train_on_source) for one in rendered]
    if isinstance(document, Labeled) != (objective == "class"):
        raise ValueError("data.format: must be label for a classifier, and for no other model")
    if isinstance(document, Labeled):
        return [_classified(document, tokenizer, classes, limit)]
    if isinstance(document, str):
        ids = np.concatenate([tokenizer.encode_prompt(document), _end(tokenizer, objective)])
        return [_labeled(ids, ids, objective)]
    record = document if isinstance(document, TokenIds) else TokenIds(document, document)
    check_ids(record.ids, tokenizer)
    check_ids(record.labels[record.labels != IGNORED], tokenizer, "labels")
    return [_labeled(record.ids, record.labels, objective)]


def _labeled(ids: np.ndarray, labels: np.ndarray, objective: str) -> Example:
    """Returns the example of token ids and their labels, which are not shifted."""
    if objective == "next_token":
        ids, labels = ids[:-1], labels[1:]
    return {"tokens": ids, "labels": labels}


def _end(tokenizer: Tokenizer, objective: str) -> np.ndarray:
    """Returns the special token that ends a text, or nothing."""
    last = tokenizer.eos_id
    if last is None and objective != "next_token":
        last = tokenizer.sep_id
    return np.array([] if last is None else [last], np.int32)


def _classified(
    document: Labeled, tokenizer: Tokenizer, classes: int, limit: int | None
) -> Example:
    """Returns the example of a text, or of a pair of texts, with a class."""
    if not 0 <= document.label < classes:
        raise ValueError(
            f"{document.where}: label={document.label}: must be in [0, {classes}), the model's "
            "classes"
        )
    if document.pair is not None:
        ids, types, texts = tokenizer.encode_pair(document.text, document.pair)
    else:
        end = _end(tokenizer, "class")
        parts = tokenizer.prefix, tokenizer.encode(document.text), end
        ids, types = np.concatenate(parts), np.zeros(sum(map(len, parts)), np.int32)
        texts = np.repeat([-1, 0, -1], [len(part) for part in parts])
    labels = np.full(len(ids), IGNORED, np.int32)
    example = {"tokens": ids, "labels": labels, "token_types": types}
    if limit is not None and len(ids) > limit:
        kept = _kept(texts, limit)
        example = {name: value[kept] for name, value in example.items()}
    example["labels"][:1] = document.label
    return example


def _kept(texts: np.ndarray, limit: int) -> np.ndarray:
    """Returns the indices of the tokens that a truncated example keeps.

    Args:
      texts: 0 or 1, the text of each token; -1 for special tokens.

    Raises:
      ValueError: there are more special tokens than `limit`.
    """
    special = int((texts < 0).sum())
    if special > limit:
        raise ValueError(
            f"train.seq_len={limit}: must be at least {special}, the number of special tokens of a "
            "document"
        )
    found = [np.flatnonzero(texts == text) for text in (0, 1)]
    shorter, longer = sorted(found, key=len)
    room = limit - special
    kept = min(len(shorter), room // 2)
    parts = np.flatnonzero(texts < 0), shorter[:kept], longer[: room - kept]
    return np.sort(np.concatenate(parts))


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
    labels = np.where(in_loss, ids, np.int32(IGNORED))
    return _labeled(ids, labels, "next_token")


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
    longest content is truncated at the end until it fits. The target is the rest. If it exceeds
    `target_max_len` tokens, the chat ends with the answer in which the limit falls; the content of
    that answer is truncated, and the end of the answer, such as EOS, stays. Special tokens count.
    Tool definitions, tool calls and reasoning are not truncated, so a source that consists of them
    may remain too long.

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
    """Returns the number of tokens of the first `count` messages; with `answer`, and of the start
    of an answer."""
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
    found = tokenizer.shorten(text, length - count)
    # Remove at least one character, even if it has several tokens.
    return found if len(found) < len(text) else text[:-1]


def _replace_text(chat: Chat, index: int, key: str, text: str) -> Chat:
    messages: list[Any] = list(chat.messages)
    messages[index] = {**messages[index], key: text}
    return replace(chat, messages=tuple(messages))
