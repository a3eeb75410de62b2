"""Texts and files on which the tokenizers library panics."""

import json
from unittest.mock import Mock

import pytest
from tiers import fast

from bptjax.cli import preview, train
from bptjax.data.tokenizer import make_tokenizer


@pytest.fixture
def panicking(tmp_path):
    """A tokenizer on which Rust panics for a long run of `a` that another letter ends."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {letter: n for n, letter in enumerate(["</s>", *map(chr, range(32, 127))])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    model.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("(a+)+$"), "b")
    fast = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


PANICS = "a" * 40 + "!"


def test_a_panic_of_the_tokenizer_is_a_value_error(panicking, monkeypatch):
    tokenizer = make_tokenizer(str(panicking))
    for failing in (
        lambda: tokenizer.encode(PANICS),
        lambda: tokenizer.encode_prompt(PANICS),
        lambda: tokenizer.encode_parts(["b", PANICS]),
        lambda: tokenizer.encode_pair("b", PANICS),
        lambda: tokenizer.shorten(PANICS, 3),
    ):
        with pytest.raises(ValueError, match="cannot encode the text: Onig: Regex search error"):
            failing()
    assert tokenizer.decode(tokenizer.encode("b!")) == "b !"

    class PanicException(BaseException):
        pass

    def panic(*_, **__):
        raise PanicException("index out of\nrange")

    monkeypatch.setattr(type(tokenizer._tokenizer), "decode", panic)
    with pytest.raises(ValueError, match="cannot decode the tokens: index out of range"):
        tokenizer.decode([1])
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        interrupted = property(Mock(side_effect=KeyboardInterrupt))
        patch.setattr(type(tokenizer._tokenizer), "backend_tokenizer", interrupted)
        tokenizer.encode("b")


@pytest.mark.parametrize("kind", fast(["text", "chat"], ["chat"]))
@pytest.mark.parametrize("command", fast([preview, train], [preview]))
def test_a_record_on_which_the_tokenizer_panics_is_bad(panicking, tmp_path, capsys, kind, command):
    def record(text):
        chat = [{"role": "user", "content": "b"}, {"role": "assistant", "content": text}]
        return {"text": text} if kind == "text" else {"messages": chat}

    file = tmp_path / "data.jsonl"
    good = json.dumps(record("some good text, long enough")) + "\n"
    file.write_text(good * 20 + json.dumps(record(PANICS)) + "\n" + good * 9)
    argv = ["--device=cpu", f"--data.path={file}", f"--data.tokenizer={panicking}"]
    argv += ["--train.seq_len=16", "--train.max_steps=1", "--model.hidden_size=16"]
    argv += ["--model.num_layers=1", "--model.num_heads=2", "--data.eval_fraction=0"]
    argv += ["--data.too_long=truncate_right", f"--run_dir={tmp_path / 'run'}"]
    reason = "the tokenizer cannot encode the text: Onig: Regex search error"
    if command is train:
        assert train.main(argv) == 2
        assert f"error: {file}, record 21: {reason}" in capsys.readouterr().err
    assert command.main([*argv, "--data.bad_records=skip"]) == 0
    out = capsys.readouterr().out
    assert "1 bad record left out" in out
    if command is train:
        (bad,) = (tmp_path / "run" / "bad_records.jsonl").read_text().splitlines()
        assert json.loads(bad)["record"] == "record 21" and reason in json.loads(bad)["reason"]


def test_a_tokenizer_that_panics_when_it_is_loaded_is_refused_in_one_line(panicking, capfd):
    file = panicking / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="must hold a Hugging Face tokenizer"):
        make_tokenizer(str(panicking))
    assert capfd.readouterr().err == ""
