"""Instruction data: converts records of several formats to messages."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

ANSWER = "assistant"
# Roles by ShareGPT's names for them. Function calls are answers too; see `_function_call`.
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ANSWER,
    "assistant": ANSWER,
    "function_call": ANSWER,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

# Fields of records with data other than text.
MEDIA = "image", "images", "video", "videos", "audio", "audios"

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """A record of instruction data.

    Attributes:
      messages: each has `role` and the record's other keys of the message: `content`, `tool_calls`,
        `reasoning_content` and so on. The assistant's messages are answers, except in the prompt.
      where: file and record, for errors.
      form: name in `templates.FORMS` of the template that the record's format prescribes; None for
        the tokenizer's chat template.
      variables: the record's other fields, such as `tools`, as variables of the template.
      prompt: number of messages in the prompt, none of which counts in the loss.
      format: name of the record's format and the fields that it was read from, for messages.
    """

    messages: tuple[Message, ...]
    where: str
    form: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: int = 0
    format: str = ""

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that are answers."""
        return [
            i
            for i, message in enumerate(self.messages)
            if i >= self.prompt and message["role"] == ANSWER
        ]

    @property
    def question(self) -> str:
        """The last user message before the first answer; empty if there is none."""
        before = self.messages[: self.answers[0]] if self.answers else self.messages
        texts = [message.get("content") for message in before if message["role"] == "user"]
        return str(texts[-1] or "") if texts else ""


def check_text_alone(row: Mapping[str, Any], where: str) -> None:
    """Checks that a record has no images, videos or sound, which training would ignore.

    Raises:
      ValueError: the record has a field of this kind, which the error names.
    """
    if media := [name for name in MEDIA if row.get(name)]:
        raise ValueError(
            f"{where}: {media[0]!r} must be empty, because models are trained on text alone"
        )


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise ValueError(f"{key!r} must be text")
    return row[key]


def _pair(row: Mapping[str, Any], source: str, target: str) -> list[Message]:
    return [
        {"role": "user", "content": _text(row, source)},
        {"role": ANSWER, "content": _text(row, target)},
    ]


def _instruction(row: Mapping[str, Any], target: str, more: str) -> list[Message]:
    """Returns the messages of an instruction. `more` is the field with its input, if any."""
    user, answer = _pair(row, "instruction", target)
    text = {"input": _text(row, more)} if row.get(more) else {}
    return [{**user, **text}, answer]


def _question(row: Mapping[str, Any]) -> list[Message]:
    user, answer = _pair(row, "question", "answer")
    if row.get("context"):
        user = {**user, "content": f"{_text(row, 'context')}\n\n{user['content']}"}
    return [*_system(row), user, answer]


def _system(row: Mapping[str, Any]) -> list[Message]:
    """Returns the message of a record's field `system`, if any."""
    if isinstance(row.get("system"), str) and row["system"]:
        return [{"role": "system", "content": row["system"]}]
    return []


def hh_rlhf_messages(row: Mapping[str, Any], key: str = "chosen") -> list[Message]:
    """Returns the messages of a text of hh-rlhf.

    Raises:
      ValueError: the text has another form.
    """
    before, *pieces = re.split(r"\n\n(Human|Assistant):", _text(row, key))
    if before.strip() or "Assistant" not in pieces:
        raise ValueError(f"{key!r} must consist of '\\n\\nHuman: …' and '\\n\\nAssistant: …'")
    roles = {"Human": "user", "Assistant": ANSWER}
    # Remove one space after the colon, because the template writes it.
    return [
        {"role": roles[name], "content": text.removeprefix(" ")}
        for name, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _chosen_messages(row: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of the better answer of hh-rlhf.

    Raises:
      ValueError: the text has another form.
    """
    try:
        return hh_rlhf_messages(row)
    except ValueError as error:
        raise ValueError(f"{error}; objective.type=dpo reads other pairs of answers") from error


def listed_messages(row: Mapping[str, Any], *keys: str) -> list[Message]:
    """Returns the messages in the lists of these fields.

    Raises:
      ValueError: a field is not a list of messages.
    """
    for key in keys:
        if not isinstance(row.get(key), list):
            raise ValueError(f"{key!r} must be a list of messages")
    messages = itertools.chain.from_iterable(row[key] for key in keys)
    return [_numbered(_message, *each) for each in enumerate(messages, 1)]


def _sharegpt(row: Mapping[str, Any]) -> list[Message]:
    turns = row["conversations"] if isinstance(row.get("conversations"), list) else []
    return [*_system(row), *(_numbered(_sharegpt_message, *each) for each in enumerate(turns, 1))]


def _numbered(read: Callable[[Message], Message], number: int, turn: object) -> Message:
    """Converts a turn to a message. Errors start with the turn's number."""
    try:
        if not isinstance(turn, dict):
            raise ValueError(f"must be a record, not {type(turn).__name__}")
        return read(turn)
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from error


def _message(turn: Message) -> Message:
    """Returns the message without null values, and with its content joined to one text."""
    message = {key: value for key, value in turn.items() if value is not None}
    _text(message, "role")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(map(_part, content))
    elif not isinstance(content, str) and (content is not None or set(message) <= {"role"}):
        raise ValueError("'content' must be text")
    return message


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"'content' has a part of type {kind!r}: must be text")
    return part["text"]


def _sharegpt_message(turn: Message) -> Message:
    if "from" not in turn:
        return _message(turn)
    name = _text(turn, "from")
    if name not in SHAREGPT_ROLES:
        raise ValueError(f"from={name!r}: must be one of {', '.join(SHAREGPT_ROLES)}")
    others = {k: v for k, v in turn.items() if k not in ("from", "value") and v is not None}
    content = {"content": _text(turn, "value")} if name != "function_call" else _function_call(turn)
    return {"role": SHAREGPT_ROLES[name], **content, **others}


def _function_call(turn: Message) -> dict[str, Any]:
    """Parses the call, or list of calls, of a ShareGPT turn from JSON."""
    try:
        calls = json.loads(_text(turn, "value"))
    except json.JSONDecodeError as error:
        raise ValueError(f"'value' of a function_call must be JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError("'value' of a function_call must hold 'name' and 'arguments'")
    return {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


@dataclass(frozen=True)
class Format:
    """A record format of instruction data.

    Attributes:
      name: value of data.format.
      fields: the fields that identify a record of the format.
      messages: returns the messages of a record; raises ValueError if there are none.
      form: name in `templates.FORMS`, or None; see `Chat`.
      optional: other fields that `messages` reads.
      prompt: the field whose messages are `Chat.prompt`; a record of the format has a list in it.
      after_text: `auto` takes records that also hold text or token ids as these.
    """

    name: str
    fields: tuple[str, ...]
    messages: Callable[[Mapping[str, Any]], list[Message]]
    form: str | None = None
    optional: tuple[str, ...] = ()
    prompt: str | None = None
    after_text: bool = False

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Returns whether `auto` can take a row with these fields as a record of the format."""
        listed = self.prompt is None or isinstance(row.get(self.prompt), list)
        return set(self.fields) <= row.keys() and listed


# With `auto`, the format of a record is the first that fits.
FORMATS = {
    row.name: row
    for row in (
        Format("messages", ("messages",), lambda row: listed_messages(row, "messages")),
        Format("sharegpt", ("conversations",), _sharegpt, optional=("system",)),
        Format(
            "alpaca",
            ("instruction", "output"),
            partial(_instruction, target="output", more="input"),
            "alpaca",
            ("input",),
        ),
        Format(
            "prompt_completion",
            ("prompt", "completion"),
            lambda row: listed_messages(row, "prompt", "completion"),
            prompt="prompt",
        ),
        Format(
            "self_instruct",
            ("prompt", "completion"),
            partial(_pair, source="prompt", target="completion"),
            "bare",
        ),
        Format(
            "prompt_answer",
            ("prompt", "answer"),
            partial(_pair, source="prompt", target="answer"),
            "bare",
        ),
        Format("hh_rlhf", ("chosen",), _chosen_messages, "hh_rlhf"),
        Format(
            "dolly",
            ("instruction", "response"),
            partial(_instruction, target="response", more="context"),
            "alpaca",
            ("context",),
            after_text=True,
        ),
        Format(
            "question_answer",
            ("question", "answer"),
            _question,
            optional=("context", "system"),
            after_text=True,
        ),
    )
}


def read_chat(
    row: Mapping[str, Any],
    format: Format,
    where: str,
    sources: Mapping[str, str],
) -> Chat:
    """Reads a record of the format.

    Its other fields become variables of the chat template; see `template_variables`.

    Args:
      sources: data.fields, which the row was mapped by.

    Raises:
      ValueError: the row is not of the format; the error names the field.
    """
    missing = [name for name in format.fields if name not in row]
    if missing:
        raise ValueError(
            f"{where}: must have {missing[0]!r}, not only {sorted(row)}; see data.format and "
            "data.fields"
        )
    used = {*format.fields, *format.optional}
    try:
        variables = template_variables(row, where, [name for name in row if name not in used])
        messages = tuple(format.messages(row))
        prompt = len(row[format.prompt]) if format.prompt else 0
        if ANSWER not in (message["role"] for message in messages[prompt:]):
            raise ValueError(f"{format.fields[-1]!r} must have a message with the role {ANSWER!r}")
        own = [name for name in (*format.fields, *format.optional) if row.get(name) is not None]
        read = [f"{name} from {sources[name]}" if name in sources else name for name in own]
        name = f"{format.name} ({', '.join(read)})"
        return Chat(messages, where, format.form, variables, prompt, name)
    except ValueError as error:
        text = str(error).removeprefix(f"{where}: ")
        raise ValueError(f"{where}: {text}") from error


def template_variables(row: Mapping[str, Any], where: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of a record with these names as variables of a chat template, with each
    item of `chat_template_kwargs`. A string in `tools` is parsed as JSON, as TRL stores it.

    Raises:
      ValueError: the record has images, or one of the fields is of another kind.
    """
    check_text_alone(row, where)
    variables = {k: row[k] for k in names if row.get(k) is not None}
    more = variables.pop("chat_template_kwargs", None) or {}
    if not isinstance(more, dict):
        raise ValueError("'chat_template_kwargs' must be a record of template variables")
    if isinstance(variables.get("tools"), str):
        try:
            variables["tools"] = json.loads(variables["tools"] or "null")
        except json.JSONDecodeError as error:
            raise ValueError(f"'tools' must be JSON: {error}") from error
    return variables | more


def from_arrow(value: Any) -> Any:
    """Returns a cell without the nulls that Arrow writes for missing fields of a struct. Parses the
    arguments of tool calls from JSON, because Arrow can only store them as text."""
    if isinstance(value, list):
        return [from_arrow(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: from_arrow(item) for key, item in value.items() if item is not None}
    if "name" in found and isinstance(found.get("arguments"), str):
        try:
            arguments = json.loads(found["arguments"])
        except ValueError:
            return found
        found["arguments"] = arguments if isinstance(arguments, dict) else found["arguments"]
    return found
