"""Renders chats with chat templates, and finds the answers in the text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bptjax.data.chat import SHAREGPT_ROLES, Chat, Message
from bptjax.data.renderer import (
    CHANCE,
    CLOCK,
    PARTS,
    Part,
    Renderer,
    TemplateFault,
    TemplateRefusal,
    Text,
)
from bptjax.data.tokenizer import Tokenizer

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
# Arguments of transformers' renderer, which fields of a record must not set.
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
    """Returns a template of turns `Human: …`, `Assistant: …`, with `first` before the first turn
    and `others` before every other turn."""
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
    """Returns a template that writes each prompt followed by its answer."""
    return (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        f"{{% else %}}{prompt}{{% endif %}}{{% endfor %}}"
    )


# Built-in chat templates, without the tokens that start a text. Line breaks next to a tag are
# written as `{{ … }}`, because Jinja would strip them.
FORMS = {
    "plain": _labeled("### ", "{{ '\\n' }}### "),
    "hh_rlhf": _labeled("{{ '\\n\\n' }}", "{{ '\\n\\n' }}"),
    "alpaca": _turns(f"{{% if message.input %}}{ALPACA_INPUT}{{% else %}}{ALPACA}{{% endif %}}"),
    "bare": _turns("{{ message.content }}"),
}


@dataclass(frozen=True)
class Rendered:
    """A conversation, or its beginning, rendered by a chat template.

    Attributes:
      text: the rendered text.
      answers: character ranges [start, stop) that count in the loss, in order.
      messages: indices of the messages in these ranges; empty with `{% generation %}` marks.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    messages: tuple[int, ...] = ()


def form_template(form: str, tokenizer: Tokenizer) -> str:
    """Returns one of `FORMS` as a chat template, preceded by the tokenizer's `start_text`."""
    start = tokenizer.start_text.replace("\\", "\\\\").replace("'", "\\'")
    return (f"{{{{ '{start}' }}}}" if start else "") + FORMS[form]


def template_of(chat: Chat, tokenizer: Tokenizer) -> str:
    """Returns the template that the chat's format prescribes, or else the tokenizer's before it got
    one of the records', or else `plain`."""
    own = tokenizer.unadapted or tokenizer
    if chat.form is None and (template := own.template_for("tools" in chat.variables)):
        return template
    return form_template(chat.form or "plain", tokenizer)


_RENDERER = Renderer()


def render(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None = None,
    *,
    answer: bool = False,
    renderer: Renderer = _RENDERER,
) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text, and the character ranges that the template marks with `{% generation %}`.

    Args:
      answer: append the start of an answer (the generation prompt).
      renderer: the process that renders.

    Raises:
      ValueError: the template refuses the messages.
      TemplateFault: the template cannot be parsed, or takes too much time or memory; see
        `renderer`.
    """
    parts = [(len(messages), answer)]
    (rendered,) = renderings(messages, template, tokenizer, variables, parts, renderer)
    return rendered


def renderings(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None,
    parts: Sequence[Part],
    renderer: Renderer = _RENDERER,
) -> Iterator[Text]:
    """Yields the results of `render` for several parts of the messages, in fewer requests to the
    renderer's process."""
    given = {k: v for k, v in (variables or {}).items() if k not in _RESERVED}
    given = {**tokenizer.special_tokens, **given}
    for start in range(0, len(parts), PARTS):
        batch = parts[start : start + PARTS]
        try:
            marks, now = has_marks(template), tokenizer.now
            yield from renderer.render(template, messages, given, batch, marks, now)
        except TemplateRefusal as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        except TemplateFault as error:
            file = tokenizer.template_file
            name = f"{file}: the chat template" if file else "the chat template"
            raise TemplateFault(f"{name} {error}; correct or replace the template") from error


def has_marks(template: str) -> bool:
    """Returns whether the template marks the tokens that the assistant writes."""
    return _GENERATION.search(template) is not None


def reads(tokenizer: Tokenizer, pattern: re.Pattern[str]) -> bool:
    """Returns whether a chat template of the tokenizer contains `CLOCK` or `CHANCE`."""
    return any(pattern.search(tokenizer.template_for(tools) or "") for tools in (False, True))


def describe_clock_and_chance(tokenizer: Tokenizer) -> list[str]:
    """Formats notes about chat templates that read the date or draw random values."""
    lines = []
    if reads(tokenizer, CLOCK):
        date = (
            f"{tokenizer.now.replace('T', ' ')}, the start of the run" if tokenizer.now else "now"
        )
        lines.append(f"chats: the chat template reads the date: {date}")
    if reads(tokenizer, CHANCE):
        lines.append("chats: the chat template draws random values, the same for equal chats")
    return lines


def conversations(chat: Chat, tokenizer: Tokenizer, *, split: bool = True) -> list[Rendered]:
    """Renders the chat once, or several times if an answer needs another context.

    A template with `{% generation %}` marks the tokens in the loss itself, so the chat is rendered
    once; marks in the chat's prompt are left out. With any other template, answer i starts at the
    end of render(messages[:i]) plus the generation prompt, and ends at the end of
    render(messages[:i+1]). If the rendered chat starts with render(messages[:i+1]), answer i counts
    in the loss of the rendered chat. Otherwise the template changes earlier turns, for example by
    leaving out their reasoning, and render(messages[:i+1]) becomes a separate conversation in which
    only answer i counts in the loss.

    Args:
      split: find the answers. If False, the chat is rendered once, without them.

    Raises:
      ValueError: the template refuses the chat, a built-in template lacks a role of the chat, or an
        answer does not start with the template's generation prompt.
    """
    template = template_of(chat, tokenizer)

    # The complete chat; then each answer's prompt, and the chat up to the end of the answer.
    parts: list[Part] = [(len(chat.messages), False)]
    marked = has_marks(template)
    if split and not marked:
        parts += [part for i in chat.answers for part in ((i, True), (i + 1, False))]
    elif split and chat.prompt:
        parts.append((chat.prompt, False))
    try:
        _check_roles(chat, template)
        texts = renderings(chat.messages, template, tokenizer, chat.variables, parts)
        full, marks = next(texts)
        if marked or not split:
            in_prompt = len(next(texts)[1]) if len(parts) > 1 else 0
            return [Rendered(full, tuple(marks[in_prompt:]))]
        inside, separate = [], []
        for i in chat.answers:
            (before, _), (upto, _) = next(texts), next(texts)
            if not upto.startswith(before):
                raise ValueError(
                    f"message {i + 1}: the chat template does not write the answer after its own "
                    "generation prompt; use a template with {% generation %} marks, or set "
                    "data.train_on_source=true"
                )
            span = len(before), len(upto)
            if full.startswith(upto):
                inside.append((i, span))
            else:
                separate.append(Rendered(upto, (span,), (i,)))
    except ValueError as error:
        raise ValueError(f"{chat.where}: {error}") from error
    if inside:
        numbers, spans = zip(*inside, strict=True)
        separate.append(Rendered(full, spans, numbers))
    return sorted(separate, key=lambda conversation: conversation.messages)


def _check_roles(chat: Chat, template: str) -> None:
    """Checks the roles of a chat, because a built-in template would write a mistyped one as text.

    Raises:
      ValueError: a role is unknown.
    """
    roles = dict.fromkeys(SHAREGPT_ROLES.values())
    for number, message in enumerate(chat.messages, 1):
        if message["role"] not in roles and template.endswith(tuple(FORMS.values())):
            raise ValueError(
                f"message {number}: role={message['role']!r}: must be one of {', '.join(roles)}, "
                "because the tokenizer has no chat template"
            )


def chat_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> np.ndarray:
    """Returns the int32 token ids of the messages and the generation prompt.

    Raises:
      ValueError: the tokenizer has no chat template, or the template refuses the messages.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ValueError("tokenizer: must have a chat template")
    return tokenizer.encode_rendered(render(messages, template, tokenizer, answer=True)[0])


def opening(text: str, system: str | None = None) -> list[Message]:
    """Returns the messages of a chat with one user message, after a system message if given."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]
