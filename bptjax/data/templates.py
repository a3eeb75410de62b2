"""Chats as text: chat templates, ours among them, and the answers in the text that they write."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bptjax.data.chat import Chat, Message
from bptjax.data.tokenizer import Tokenizer
from bptjax.lazy_imports import transformers

# Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca.
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{ message.content }}\n\n### Response:"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{ message.content }}\n\n### Input:\n{{ message.input }}\n\n### Response:"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Arguments of transformers' renderer, which a record's fields cannot set.
_RESERVED = {
    "messages",
    "conversations",
    "compiled_template",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}


def _labeled(first: str, others: str) -> str:
    """Returns a template of turns `Human: …`, `Assistant: …`, each with a text in front."""
    return (
        "{% for message in messages %}"
        f"{{% if loop.first %}}{first}{{% else %}}{others}{{% endif %}}"
        "{% if message.role == 'user' %}Human{% else %}{{ message.role | title }}{% endif %}:"
        "{% if message.role == 'assistant' %}"
        "{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %} {{ message.content }}{% endif %}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{others}Assistant:{{% endif %}}"
    )


def _turns(prompt: str) -> str:
    """Returns a template of prompts, each followed by its answer."""
    return (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        f"{{% else %}}{prompt}{{% endif %}}{{% endfor %}}"
    )


# Chat templates of our own, without what starts a text. `{{ … }}` keeps a line's end beside a tag.
FORMS = {
    "plain": _labeled("### ", "{{ '\\n' }}### "),
    "hh_rlhf": _labeled("{{ '\\n\\n' }}", "{{ '\\n\\n' }}"),
    "alpaca": _turns(f"{{% if message.input %}}{ALPACA_INPUT}{{% else %}}{ALPACA}{{% endif %}}"),
    "bare": _turns("{{ message.content }}"),
}


@dataclass(frozen=True)
class Rendered:
    """A conversation, or the start of one, as a chat template writes it.

    Attributes:
      text: the conversation.
      answers: character ranges [start, stop) in the loss, in order.
      messages: indices of the messages that the ranges hold; none with `{% generation %}` marks.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    messages: tuple[int, ...] = ()


def form_template(form: str, tokenizer: Tokenizer) -> str:
    """Returns one of `FORMS` as a chat template that starts as the tokenizer starts a text."""
    start = tokenizer.start_text.replace("\\", "\\\\").replace("'", "\\'")
    return (f"{{{{ '{start}' }}}}" if start else "") + FORMS[form]


def template_of(chat: Chat, tokenizer: Tokenizer) -> str:
    """Returns the template that writes the chat: the one that its format prescribes, or else the
    tokenizer's, or else `plain`."""
    if chat.form is None and (found := tokenizer.template_for("tools" in chat.variables)):
        return found
    return form_template(chat.form or "plain", tokenizer)


def render(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None = None,
    *,
    answer: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text, and the character ranges that the template marks with `{% generation %}`.

    Args:
      answer: end with the start of an answer.

    Raises:
      ValueError: the template refuses the messages.
    """
    transformers()
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {k: v for k, v in (variables or {}).items() if k not in _RESERVED}
    try:
        # The renderer notes the marks in the compiled template, which all threads share.
        with _LOCK:
            texts, marks = cast(Any, render_jinja_template)(
                conversations=[[dict(message) for message in messages]],
                chat_template=template,
                add_generation_prompt=answer,
                return_assistant_tokens_mask=has_marks(template),
                **{**tokenizer.special_tokens, **given},
            )
    # A template is a program: it may raise anything.
    except Exception as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
    return texts[0], marks[0] if marks else []


_LOCK = threading.Lock()


def has_marks(template: str) -> bool:
    """Returns whether the template marks the tokens that the assistant writes."""
    return _GENERATION.search(template) is not None


def conversations(chat: Chat, tokenizer: Tokenizer, *, split: bool = True) -> list[Rendered]:
    """Writes the chat, as often as needed for each answer to follow what the model reads before it.

    A template with `{% generation %}` marks says itself what is in the loss, and writes the chat
    once. For another template, answer i starts after render(messages[:i]) with the generation
    prompt and ends with render(messages[:i+1]). If the whole chat starts with the latter, the
    answer is learned there. Else the template changes earlier turns, such as by leaving out their
    reasoning, and render(messages[:i+1]) becomes a conversation of its own with answer i alone in
    the loss.

    Args:
      split: find the answers; else the whole chat is written, without them.

    Raises:
      ValueError: the template refuses the chat, or does not continue its generation prompt.
    """
    template = template_of(chat, tokenizer)

    def text(count: int, answer: bool = False) -> str:
        return render(chat.messages[:count], template, tokenizer, chat.variables, answer=answer)[0]

    try:
        whole, marks = render(chat.messages, template, tokenizer, chat.variables)
        if has_marks(template) or not split:
            return [Rendered(whole, tuple(marks))]
        inside, apart = [], []
        for i in chat.answers:
            before, upto = text(i, answer=True), text(i + 1)
            if not upto.startswith(before):
                raise ValueError(
                    f"message {i + 1}: the chat template does not write the answer after its own "
                    "generation prompt; use a template with {% generation %} marks, or set "
                    "data.train_on_source=true"
                )
            span = len(before), len(upto)
            if whole.startswith(upto):
                inside.append((i, span))
            else:
                apart.append(Rendered(upto, (span,), (i,)))
    except ValueError as error:
        raise ValueError(f"{chat.where}: {error}") from error
    if inside:
        numbers, spans = zip(*inside, strict=True)
        apart.append(Rendered(whole, spans, numbers))
    return sorted(apart, key=lambda one: one.messages)


def chat_prompt(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the token ids of a user's turn and the start of the answer, int32.

    Raises:
      ValueError: the tokenizer has no chat template.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ValueError("the tokenizer has no chat template")
    message = {"role": "user", "content": text}
    return tokenizer.encode_parts([render([message], template, tokenizer, answer=True)[0]])[0]
