"""Runs on chats from a base model: stop tokens and chat template, and their exports."""

import json

import jax
import pytest
from chats import CHATML, raw_tokenizer
from tiers import fast
from weights.hf.loading import random_base

from bptjax.cli import convert
from bptjax.cli.train import main
from bptjax.data.templates import chat_prompt, opening
from bptjax.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random Llama whose tokenizer has a chat template but stops at </s> alone."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("chats")
    raw = LlamaConfig(
        vocab_size=288,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    random_base(folder / "base", raw)
    raw_tokenizer("bytes", CHATML).save_pretrained(folder / "base")
    return folder


def train(base, run, row, **more):
    (base / f"{run}.jsonl").write_text(f"{json.dumps(row)}\n" * 24)
    options = {
        "run_dir": base / run,
        "device": "cpu",
        "model.name_or_path": base / "base",
        "data.path": base / f"{run}.jsonl",
        "data.eval_fraction": 0.25,
        "train.max_steps": 1,
        "train.seq_len": 64,
        "train.per_device_train_batch_size": 1,
        "train.num_eval_generations": 1,
        "execution.q_chunk": 64,
        "execution.k_chunk": 64,
    }
    return main([f"--{key}={value}" for key, value in (options | more).items()])


@pytest.mark.parametrize("adapter", fast(["none", "lora"], ["lora"]))
@pytest.mark.parametrize("form", fast(["template", "bare"], ["template"]))
def test_exports_stop_and_ask_as_trained(base, tmp_path, monkeypatch, capsys, form, adapter):
    from transformers import AutoTokenizer, GenerationConfig

    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One"}]
    row = {"messages": messages} if form == "template" else {"prompt": "Hi", "completion": " One"}
    name = f"{form}-{adapter}"
    assert train(base, name, row, **{"adapter.type": adapter}) == 0
    noted = capsys.readouterr().out
    end = "<|im_end|>" if form == "template" else "</s>"
    assert f"chats: answers end with {end!r}, which stops generation" in noted
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    asked = asked if form == "template" else "<s>Hi"
    run, out = base / name, tmp_path / "out"
    way = "bptjax-to-hf" if adapter == "none" else "merge-adapter"
    assert convert.main([way, str(run), str(out)]) == 0
    places = [run, out]
    if adapter == "lora":
        assert convert.main(["export-adapter", str(run), str(tmp_path / "adapter")]) == 0
        assert convert.main(["merge-adapter", str(run / "adapter"), str(tmp_path / "merged")]) == 0
        places += [run / "adapter", tmp_path / "adapter", tmp_path / "merged"]
    for place in places:
        tokenizer = load_tokenizer(place)
        prompt = chat_prompt(opening("Hi"), tokenizer).tolist()
        assert tokenizer.decode(prompt) == asked, place
        assert tokenizer.stop_ids == ([2, 4] if form == "template" else [2]), place
        theirs = AutoTokenizer.from_pretrained(place)
        found = theirs.apply_chat_template(messages[:1], add_generation_prompt=True)
        assert found["input_ids"] == prompt
        config = GenerationConfig.from_pretrained(place)
        assert config.eos_token_id == ([2, 4] if form == "template" else 2)


@pytest.mark.thorough
def test_other_vocabularies_are_named(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    row = {"text": "Hello there, be brief. " * 30}
    raw_tokenizer("metaspace").save_pretrained(tmp_path / "other")
    more = {"train.num_eval_generations": 0, "data.tokenizer": tmp_path / "other"}
    assert train(base, "other", row, **more) == 0
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and "of the 284 token ids of the tokenizer in" in said
    more["data.tokenizer"] = base / "base"
    assert train(base, "own", row, **more) == 0
    assert "warning: " not in capsys.readouterr().out
