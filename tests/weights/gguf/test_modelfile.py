"""A Modelfile, read by a parser of its grammar and an interpreter of Go's templates, gives the text
of the chat template."""

import re

import pytest
from chats import CHATML, HEADERS, INST, THINKING, loaded, raw_tokenizer

from bptjax.data.templates import render
from bptjax.data.tokenizer import SEPARATOR, ByteTokenizer
from bptjax.weights.gguf.modelfile import modelfile

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
)
MERGED = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
BRACES = (
    "{{ '{{{' }}{% for m in messages %}{{ '{' + m.content + '}' }}{% endfor %}{{ '{% end %}' }}"
)
# Contents with the end of a text, and with Go's and Modelfile's own signs.
SYSTEM, USERS = "Be {{ brief }}.", ("Hi", "One, two?\n\nThree", 'A """quoted""" word')
ANSWERS = ("Hello\nthere", "<b> π 🙂")


def parsed(text):
    """Returns the (command, argument, value) of each line of a Modelfile, or fails."""
    value = r'"""(?:.*?)"""|"[^"\n]*"|[^\s"][^\n]*'
    line = re.compile(rf"(FROM|TEMPLATE|PARAMETER (?:stop|num_ctx)) ({value})\n", re.S)
    found, at = [], 0
    while at < len(text):
        match = line.match(text, at)
        assert match, text[at:]
        quotes = next((q for q in ('"""', '"') if match[2].startswith(q)), "")
        found.append((match[1], match[2][len(quotes) : len(match[2]) - len(quotes)]))
        at = match.end()
    return found


def go(template, variables):
    """Renders a Go template of text, fields, strings, `if`, `else`, `eq` and `range`."""
    parts = re.split(r"\{\{ (.*?) \}\}", template)
    tokens = [(i % 2, part) for i, part in enumerate(parts)]

    def value(text, dot):
        if text.startswith('"'):
            return text.strip('"')
        if text.startswith("eq "):
            _, *both = text.split()
            return value(both[0], dot) == value(both[1], dot)
        assert text.startswith("."), text
        return dot[text[1:]]

    def run(at, dot, live):
        """Renders up to the `else` or `end` of this level; returns the text and its position."""
        text = ""
        while at < len(tokens):
            action, part = tokens[at]
            if not action:
                text += part if live else ""
            elif part == "end" or part.startswith("else"):
                return text, at
            elif part.startswith("range "):
                items = value(part[6:], dot) if live else []
                _, end = run(at + 1, dot, False)
                text += "".join(run(at + 1, item, True)[0] for item in items)
                at = end
            elif part.startswith("if "):
                more, at = branches(at, part[3:], dot, live)
                text += more
            elif live:
                text += value(part, dot)
            at += 1
        return text, at

    def branches(at, condition, dot, live):
        text, done = "", not live
        while True:
            chosen = not done and (condition == "" or bool(value(condition, dot)))
            part, at = run(at + 1, dot, chosen)
            text, done = text + part, done or chosen
            if tokens[at][1] == "end":
                return text, at
            condition = tokens[at][1].removeprefix("else").strip().removeprefix("if ").strip()

    text, at = run(0, variables, True)
    assert at == len(tokens)
    return text


def chat(system, count):
    messages = [{"role": "system", "content": system}] if system else []
    for i in range(count):
        messages.append({"role": "user", "content": USERS[i]})
        if i < count - 1:
            messages.append({"role": "assistant", "content": ANSWERS[i]})
    return messages


def template_of(text):
    return dict(parsed(text))["TEMPLATE"]


@pytest.mark.parametrize("system", ["", SYSTEM], ids=["", "system"])
@pytest.mark.parametrize(
    "template", [CHATML, DEFAULT_SYSTEM + CHATML, HEADERS, MERGED, BRACES, THINKING]
)
def test_ollama_renders_what_the_chat_template_renders(template, system):
    tokenizer = ByteTokenizer().with_chat(template, [])
    text, notes = modelfile("a.gguf", tokenizer, 4096)
    assert not notes
    for count in (1, 2, 3):
        messages = chat(system, count)
        wanted, _ = render(messages, template, tokenizer, answer=True)
        variables = {"System": system, "Messages": [
            {"Role": m["role"], "Content": m["content"]} for m in messages
        ]}  # fmt: skip
        # Ollama puts the BOS token in front, because the file says so.
        assert go(template_of(text), variables) == wanted.removeprefix(SEPARATOR)


def test_the_lines_of_a_modelfile():
    """The stop strings are the tokens that end an answer."""
    tokenizer = loaded(raw_tokenizer("bytes", CHATML))
    (end,) = tokenizer.encode_parts(["<|im_end|>"])[0].tolist()
    text, _ = modelfile("a b.gguf", tokenizer.with_chat(None, [end]), 512)
    commands = [c for c in parsed(text) if c[0] != "TEMPLATE"]
    stops = [("PARAMETER stop", "</s>"), ("PARAMETER stop", "<|im_end|>")]
    assert commands == [("FROM", "./a b.gguf"), *stops, ("PARAMETER num_ctx", "512")]
    assert parsed(modelfile("a.gguf", None, None)[0]) == [("FROM", "./a.gguf")]


@pytest.mark.parametrize(
    ("template", "kept", "note"),
    [
        (INST, True, "ignores system messages, because the chat template changes messages by"),
        (REFUSES + CHATML, True, "ignores system messages, because the chat template refuses"),
        (CHATML + "{{ strftime_now('%Y') }}", True, "has the date of this export"),
        (CHATML + '"""', False, "contains"),
        ("{{ messages[0].content }}", False, "does not write each message once, in their order"),
        ("{{ messages | length }}" + CHATML, False, "changes messages by their place"),
        ("{{ raise_exception('Never') }}", False, "Never"),
    ],
)
def test_templates_that_ollama_cannot_express_are_named(template, kept, note):
    tokenizer = ByteTokenizer().with_chat(template, [])
    text, (line,) = modelfile("a.gguf", tokenizer, None)
    assert ("TEMPLATE" in dict(parsed(text))) == kept
    assert line.startswith("TEMPLATE: ") and note in line and "\n" not in line
