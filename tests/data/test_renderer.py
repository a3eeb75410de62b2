"""Limits of chat templates: time, memory, text; and what templates must not reach."""

import json
import os
import re
import signal
import threading

import pytest
from chats import CHATML, TALK, loaded, raw_tokenizer
from tiers import fast

from bptjax.cli import preview, train
from bptjax.data import renderer, templates
from bptjax.data.renderer import Renderer, TemplateFault
from bptjax.data.templates import chat_prompt, opening, render
from bptjax.data.tokenizer import ByteTokenizer

LARGE = "{{ 'a' * 99999999999 }}"
NESTED = (
    "{% set at = namespace(x=['a']) %}{% for i in range(40) %}"
    "{% set at.x = [at.x, at.x] %}{% endfor %}{{ at.x }}"
)


@pytest.fixture(scope="module")
def half_a_second():
    return Renderer(seconds=0.5)


@pytest.mark.parametrize(
    ("template", "message"),
    fast(
        [
            (LARGE, "GiB of memory"),
            ("{{ 'a' * 9999999 }}", "writes more than 1,0"),
            ("{{ '%1999999999d' % 1 }}", "GiB of memory"),
            (NESTED, "(GiB of memory|more than 0.5 s)"),
            ("{{ 9 ** (9 ** 9) }}", "more than 0.5 s"),
            (
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                "more than 0.5 s",
            ),
        ],
        lambda template, _: "'a' *" in template or "9 **" in template,
    ),
)
def test_a_template_has_limits_and_the_next_one_renders(half_a_second, tmp_path, template, message):
    tokenizer = ByteTokenizer()
    tokenizer.template_file = tmp_path / "chat_template.jinja"
    with pytest.raises(TemplateFault, match=f"chat_template.jinja: the chat template .*{message}"):
        render(TALK, template, tokenizer, renderer=half_a_second)
    found, _ = render(TALK[:1], CHATML, tokenizer, renderer=half_a_second)
    assert found == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ range(10 ** 9) | length }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for x in y %}" * 3000,
    ],
)
def test_a_template_is_refused_by_the_sandbox(template):
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        render(TALK, template, ByteTokenizer())


def test_the_limit_of_time_holds_if_the_parent_ignores_its_signal():
    # As libtpu does. Stays ignored, or libtpu's timer would end the tests.
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    with pytest.raises(TemplateFault, match="more than 0.5 s"):
        render(TALK, "{{ 9 ** (9 ** 9) }}", ByteTokenizer(), renderer=Renderer(seconds=0.5))


def test_threads_share_the_process_and_signals_do_not_end_it():
    tokenizer = ByteTokenizer()
    texts: dict[int, str] = {}

    def one(number):
        for _ in range(20):
            message = {"role": "user", "content": str(number) * 50_000}
            texts[number] = render([message], "{{ messages[0].content }}", tokenizer)[0]

    render(TALK, CHATML, tokenizer)
    process = templates._RENDERER._process
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: str(n) * 50_000 for n in range(4)}
    assert templates._RENDERER._process is process and process.poll() is None


@pytest.mark.parametrize("command", [preview, train])
@pytest.mark.parametrize(
    ("template", "message"),
    [(LARGE, "takes"), ("{% if x %}\n{{ a b }}{% endif %}", "is invalid: line 2: expected token")],
)
@pytest.mark.parametrize("bad_records", fast(["error", "skip"], ["skip"]))
def test_a_faulty_template_ends_the_command(
    tmp_path, capsys, command, template, message, bad_records
):
    loaded(raw_tokenizer("bytes")).with_chat(template, []).save(tmp_path / "tokenizer")
    rows = [{"messages": TALK}] * 4
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [f"--data.path={tmp_path / 'a.jsonl'}", f"--data.tokenizer={tmp_path / 'tokenizer'}"]
    argv += [f"--data.bad_records={bad_records}", "--train.seq_len=64"]
    capsys.readouterr()  # Without torch, transformers writes a line when it is first imported.
    assert command.main([*argv, f"--run_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    start = f"error: {tmp_path}/tokenizer/chat_template.jinja: the chat template {message}"
    assert error.startswith(start) and error.count("\n") == 1 and "bad_records" not in error


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages }", "line 1: unexpected '}'"),
        ("{{ messages | nofilter }}", "line 1: No filter named 'nofilter'"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_an_invalid_template_is_no_fault_of_the_messages(tmp_path, template, message):
    tokenizer = ByteTokenizer().with_chat(template, [])
    tokenizer.template_file = tmp_path / "chat_template.jinja"
    start = f"{tokenizer.template_file}: the chat template is invalid: "
    with pytest.raises(TemplateFault, match=re.escape(start + message)):
        chat_prompt(opening("Hi"), tokenizer)


def test_a_forked_process_has_a_renderer_of_its_own():
    tokenizer = ByteTokenizer()
    render(TALK, CHATML, tokenizer)
    inherited = templates._RENDERER
    assert inherited._process is not None
    inherited._owner = -1  # As in a child of this process.
    before = inherited._process
    render(TALK, CHATML, tokenizer)
    assert inherited._process is not before and inherited._owner == os.getpid()
    with before:
        before.stdin.close()
        assert before.wait(timeout=60) == 0


def test_an_interrupted_request_does_not_answer_the_next_one(monkeypatch):
    tokenizer = ByteTokenizer()
    render(TALK, "{{ 'warm' }}", tokenizer)

    def interrupted(pipe):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(renderer, "read", interrupted)
        render(TALK, "{{ 'first' }}", tokenizer)
    assert render(TALK, "{{ 'second' }}", tokenizer)[0] == "second"
