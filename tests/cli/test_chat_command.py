"""`bptjax chat`: turns over a pipe, the commands, the context's end, interrupts."""

import io
import json
from pathlib import Path

import pytest
from weights.hf.cases import config as hf_config
from weights.hf.loading import random_base

import bptjax
from bptjax.cli import chat
from bptjax.cli.main import main
from bptjax.data.templates import chat_prompt
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.generation import continuations
from bptjax.models.sampling import Sampling
from bptjax.run.metrics import printable

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and 'no system' in m.content %}"
    "{{ raise_exception('no system role') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    raw = hf_config("llama")
    raw.vocab_size, raw.max_position_embeddings = ByteTokenizer.vocab_size, 128
    directory = random_base(tmp_path_factory.mktemp("chat") / "base", raw)
    ByteTokenizer().with_chat(TEMPLATE, ()).save(directory)
    return directory


def talk(base, text, monkeypatch, capsys, *flags):
    """Returns the exit code, the answers' lines, and the lines on stderr after the start."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    flags = ["--model", str(base), "--device", "cpu", "--temperature", "0", *flags]
    if "--max_new_tokens" not in flags:
        flags += ["--max_new_tokens", "6"]
    code = main(["chat", *flags])
    out, err = capsys.readouterr()
    return code, out, err.partition(f"{chat.HELP}\n")[2].splitlines() or err.splitlines()


def test_turns_over_a_pipe(base, tmp_path, monkeypatch, capsys):
    """Each answer is that of a model that reads the whole chat anew."""
    file = tmp_path / "chat.jsonl"
    text = f"one\n\ntwo\n/save {file}\n/save {file}\n/nothing\n/reset\n/save x\none"
    code, out, err = talk(base, text, monkeypatch, capsys, "--system", "Be kind")
    assert code == 0
    messages = json.loads(file.read_text())["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    model, tokenizer, _ = bptjax.load(base, device="cpu")
    for end in (2, 4):
        prompt = chat_prompt(messages[:end], tokenizer)
        options = dict(new_tokens=6, sampling=Sampling(temperature=0.0))
        *_, (answer,) = continuations(model, tokenizer, [prompt], **options)
        assert messages[end]["content"] == answer and answer
    first, second = (printable(messages[i]["content"]) for i in (2, 4))
    assert out == f"{first}\n{second}\n{first}\n"
    first_length = len("<system>Be kind<user>one<assistant>") + 6
    assert err[0].startswith(f"[1 turn, {first_length} of 128 tokens, ")
    assert err[0].endswith(" tokens/s; ended by --max_new_tokens=6]")
    assert err[1].startswith("[2 turns, ") and err[2] == f"written: {file}"
    assert err[3] == f"error: /save {file}: must name a new file"
    assert err[4].startswith("unknown command /nothing: /reset")
    assert err[5] == "new chat" and err[6].startswith("error: /save x: must follow an answer")
    assert err[7].startswith(f"[1 turn, {first_length} of 128 tokens")


@pytest.mark.thorough
def test_generate_takes_a_system_message(base, tmp_path, capsys):
    flags = ["--model", str(base), "--device", "cpu", "--temperature", "0", "--prompt", "one"]
    flags += ["--max_new_tokens", "6", "--system", "Be kind"]
    assert main(["generate", *flags]) == 2
    assert "error: system: must have chat=true; only chats" in capsys.readouterr().err
    assert main(["generate", *flags, "--chat"]) == 0
    model, tokenizer, _ = bptjax.load(base, device="cpu")
    options = dict(max_new_tokens=6, temperature=0.0)
    kind = bptjax.generate(model, tokenizer, "one", chat=True, system="Be kind", **options)
    assert capsys.readouterr().out == f"{printable(kind)}\n"
    assert kind != bptjax.generate(model, tokenizer, "one", chat=True, **options)


def test_the_end_of_the_context(base, monkeypatch, capsys):
    """An answer ends there; a message that leaves no room is refused and forgotten."""
    length = len("<user><assistant>")
    text = f"{'a' * (125 - length)}\nb\n/reset\nb\n"
    code, out, err = talk(base, text, monkeypatch, capsys)
    assert code == 0 and len(out.splitlines()) == 2
    assert err[0].startswith("[1 turn, 128 of 128 tokens") and "context is full" in err[0]
    assert err[1].startswith(
        "error: the chat and this message: must have fewer than 128 tokens, the model's context, "
    )
    assert err[1].endswith("; shorten the message, or /save and /reset")
    assert err[2] == "new chat" and err[3].startswith("[1 turn, ")


@pytest.mark.thorough
def test_an_interrupt_ends_an_answer(base, monkeypatch, capsys):
    """The chat goes on with the part that was said."""
    whole = chat.continuations

    def interrupted(*args, **options):
        for number, texts in enumerate(whole(*args, **options)):
            if number == 2:
                raise KeyboardInterrupt
            yield texts

    monkeypatch.setattr(chat, "continuations", interrupted)
    code, out, err = talk(base, "one\ntwo\n", monkeypatch, capsys)
    assert code == 0 and len(out.splitlines()) == 2
    assert [line.split(",")[0] for line in err] == ["stopped", "[1 turn", "stopped", "[2 turns"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_new_tokens", "0"], "--max_new_tokens=0: must be at least 1"),
        (["--system", "no system"], "the chat template refuses the messages: no system role"),
    ],
)
def test_bad_flags_are_one_line(base, monkeypatch, capsys, flags, message):
    code, out, err = talk(base, "", monkeypatch, capsys, *flags)
    assert code == 2 and not out and err[-1] == f"error: {message}"


def test_a_model_without_a_template_is_refused(base, tmp_path, monkeypatch, capsys):
    ByteTokenizer().save(tmp_path / "bytes")
    flags = ["--tokenizer", str(tmp_path / "bytes")]
    code, _, err = talk(base, "", monkeypatch, capsys, *flags)
    assert code == 2 and err[-1].startswith(f"error: --model={base}: must have a chat template; ")


@pytest.mark.thorough
def test_the_recipe_trains_a_model_that_chats(base, tmp_path, monkeypatch, capsys, one_device):
    """configs/chat_24gb.yaml on a tiny model: QLoRA, answers in evaluations, an export."""
    chat_of = {"messages": [{"role": "user", "content": "Hi"}]}
    chat_of["messages"].append({"role": "assistant", "content": "Ahoy!"})
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat_of) + "\n") * 12)
    run, config = tmp_path / "run", Path(__file__).parents[2] / "configs" / "chat_24gb.yaml"
    flags = [f"--config={config}", f"--model.name_or_path={base}", f"--run_dir={run}"]
    flags += [f"--data.path={tmp_path / 'chats.jsonl'}", "--device=cpu", "--train.seq_len=64"]
    flags += ["--train.gradient_accumulation_steps=1", "--train.compute_dtype=float32"]
    assert main(["train", *flags]) == 0
    assert "by QLoRA" in config.read_text() and (run / "adapter" / "README.md").exists()
    answers = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert answers and {answer["question"] for answer in answers} == {"Hi"}
    capsys.readouterr()
    code, out, _ = talk(run, "Hi\n", monkeypatch, capsys)
    assert code == 0 and out.strip()
