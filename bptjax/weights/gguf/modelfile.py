"""Writes Ollama's Modelfile for a GGUF file: the chat template, stop strings and context length."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bptjax.data.renderer import CHANCE, CLOCK
from bptjax.data.templates import reads, render
from bptjax.data.tokenizer import Tokenizer
from bptjax.weights.lora import Adapters

# Contents of messages that no template contains.
SYSTEM, USERS, ANSWERS = "Sy5tem", ("Us3r1", "Us3r2", "Us3r3"), ("An5wer1", "An5wer2")
QUOTES = '"""'


@dataclass(frozen=True)
class Turns:
    """A chat template as the texts around the messages.

    Attributes:
      begin: text before the first user message without a system message.
      before_system, after_system: texts around a system message, up to the first user message;
        None if the template has no system messages, or not in front.
      between: text from an answer to the next user message.
      answer: text from a user message to an answer that the chat holds.
      last: text after the last user message, where the model goes on.
    """

    begin: str
    before_system: str | None
    after_system: str | None
    between: str
    answer: str
    last: str

    def render(self, system: str | None, users: Sequence[str], answers: Sequence[str]) -> str:
        """Returns the text of a chat whose last message is the user's."""
        text = self.begin
        if system is not None:
            text = f"{self.before_system}{system}{self.after_system}"
        for user, answer in itertools.zip_longest(users, answers):
            text += user + (self.last if answer is None else self.answer + answer)
            text += self.between * (answer is not None)
        return text

    def go_template(self) -> str:
        """Returns the template in Go's language, which Ollama reads."""
        begin = _literal(self.begin)
        if self.before_system is not None:
            before, after = _literal(self.before_system), _literal(self.after_system or "")
            begin = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{begin}"
            begin += "{{ end }}"
        return (
            f"{begin}{{{{ range .Messages }}}}"
            '{{ if eq .Role "user" }}{{ .Content }}'
            f'{{{{ else if eq .Role "assistant" }}}}{_literal(self.answer)}{{{{ .Content }}}}'
            f"{_literal(self.between)}{{{{ end }}}}{{{{ end }}}}{_literal(self.last)}"
        )


def modelfile(file: str, tokenizer: Tokenizer | None, context: int | None) -> tuple[str, list[str]]:
    """Returns the text of a Modelfile, and notes about the parts of the chat template that it
    cannot express.

    Args:
      file: name of the GGUF file in the same directory.
      tokenizer: None for a model that reads token ids alone.
      context: number of tokens for which Ollama reserves memory; None for its default.
    """
    lines, notes = [f"FROM ./{file}"], []
    if tokenizer is not None and tokenizer.chat_template is not None:
        turns, notes = find_turns(tokenizer)
        if turns is not None:
            lines.append(f"TEMPLATE {QUOTES}{turns.go_template()}{QUOTES}")
    if tokenizer is not None:
        stops = dict.fromkeys(tokenizer.decode([i]) for i in tokenizer.stop_ids)
        lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops if stop]
    if context:
        lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n", notes


def find_turns(tokenizer: Tokenizer) -> tuple[Turns | None, list[str]]:
    """Returns the tokenizer's chat template as texts around the messages, or None if it is not of
    this form; and notes about system messages, dates and random values.
    """
    try:
        turns = _turns(tokenizer, None)
    except ValueError as error:
        return None, [
            f"TEMPLATE: left out of the Modelfile, because {error}; Ollama then guesses a template"
        ]
    notes = []
    try:
        turns = _turns(tokenizer, SYSTEM)
    except ValueError as error:
        notes.append(f"TEMPLATE: ignores system messages, because {error}")
    for pattern, text in ((CLOCK, "the date"), (CHANCE, "the random values")):
        if reads(tokenizer, pattern):
            notes.append(f"TEMPLATE: has {text} of this export")
    return turns, notes


def _turns(tokenizer: Tokenizer, system: str | None) -> Turns:
    """Finds the texts around the messages, and compares their chats of one to three questions with
    the chat template's.

    Raises:
      ValueError: the template is not of this form, which the error says.
    """
    first = _between(_text(tokenizer, None, 3), [USERS[0], ANSWERS[0], USERS[1]])
    *_, last = _between(_text(tokenizer, None, 3), [USERS[2]])
    begin, answer, between, _ = first
    before = after = None
    if system is not None:
        before, after, _ = _between(_text(tokenizer, system, 1), [system, USERS[0]])
    turns = Turns(begin, before, after, between, answer, last)
    for count, own in itertools.product((1, 2, 3), dict.fromkeys((None, system))):
        if turns.render(own, USERS[:count], ANSWERS[: count - 1]) != _text(tokenizer, own, count):
            raise ValueError("the chat template changes messages by their place in the chat")
    if QUOTES in turns.go_template():
        raise ValueError(f"the chat template contains {QUOTES}, which a Modelfile cannot")
    return turns


def _text(tokenizer: Tokenizer, system: str | None, count: int) -> str:
    """Renders a chat of `count` questions by the tokenizer's template, without the BOS token that
    llama.cpp and Ollama add."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for user, answer in itertools.zip_longest(USERS[:count], ANSWERS[: count - 1]):
        messages.append({"role": "user", "content": user})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    template = tokenizer.chat_template
    assert template is not None
    text, _ = render(messages, template, tokenizer, answer=True)
    return text.removeprefix(tokenizer.start_text) if len(tokenizer.prefix) else text


def _between(text: str, messages: Sequence[str]) -> list[str]:
    """Returns the texts around the messages.

    Raises:
      ValueError: a message is not in the text exactly once, or not in its place.
    """
    parts = []
    for message in messages:
        if text.count(message) != 1:
            raise ValueError("the chat template does not write each message once, in their order")
        before, _, text = text.partition(message)
        parts.append(before)
    return [*parts, text]


def _literal(text: str) -> str:
    """Returns text of a Go template that renders as `text`."""
    return re.sub(r"\{(?=\{|$)", '{{ "{" }}', text)


def _quoted(text: str) -> str:
    return f"{QUOTES}{text}{QUOTES}" if '"' in text else f'"{text}"'


def modelfile_path(file: Path) -> Path:
    """Returns the path of a GGUF file's Modelfile."""
    return file.with_suffix(".Modelfile")


def serving_lines(file: Path, adapters: Adapters | None) -> list[str]:
    """Returns the command lines that run a model of a GGUF file.

    Args:
      adapters: the adapters, if the file holds them alone.
    """
    if adapters is None:
        name = file.stem
        return [
            f"Ollama: ollama create {name} -f {modelfile_path(file)} && ollama run {name}",
            f"llama.cpp: llama-cli -m {file} -cnv",
        ]
    lines = [
        f"llama.cpp: llama-cli -m BASE.gguf --lora {file} -cnv",
        f"Ollama: add the line ADAPTER ./{file.name} to the Modelfile of BASE.gguf",
    ]
    if adapters.config.type == "qlora":
        lines.append(
            f"the adapter was trained on a base model in {adapters.config.codebook}; BASE.gguf in "
            "f16 or another type differs from it slightly; without --lora the file holds what was "
            "trained"
        )
    return lines
