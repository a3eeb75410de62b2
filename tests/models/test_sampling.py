"""The sampling and the dtype of generation: flags, generation_config.json, defaults."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights.hf.cases import config as hf_config
from weights.hf.loading import random_base

import bptjax
from bptjax.cli import generate as command
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.sampling import Sampling, choose_sampling
from bptjax.weights import conversion, loading
from bptjax.weights.lora import AdapterConfig, Adapters

FILE = "generation_config.json"


@pytest.mark.parametrize(
    ("config", "chosen", "sampling", "line"),
    [
        ({}, {}, Sampling(), "temperature=1 (default of text)"),
        ({}, {"chat": True}, Sampling(0.7), "temperature=0.7 (default of chats)"),
        (
            {"repetition_penalty": 1.1},
            {"chat": True},
            Sampling(0.7, repetition_penalty=1.1),
            f"temperature=0.7 (default of chats), repetition_penalty=1.1 ({FILE})",
        ),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"chat": True},
            Sampling(0.6, 50, 0.9),
            f"temperature=0.6, top_p=0.9 ({FILE}), top_k=50 (default of transformers)",
        ),
        (
            {"do_sample": True, "temperature": 0.3, "min_p": 0.15, "top_k": 0},
            {"temperature": 0.5},
            Sampling(0.5, 0, min_p=0.15),
            f"temperature=0.5 (chosen), top_k=0, min_p=0.15 ({FILE})",
        ),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {},
            Sampling(0.0, repetition_penalty=1.1),
            f"temperature=0 ({FILE} without do_sample), repetition_penalty=1.1 ({FILE})",
        ),
        ({"temperature": 0.6}, {}, Sampling(0.0), f"temperature=0 ({FILE} without do_sample)"),
        (
            {"do_sample": False, "temperature": 0.6},
            {"top_p": 0.5},
            Sampling(0.6, 50, 0.5),
            f"temperature=0.6 ({FILE}), top_k=50 (default of transformers), top_p=0.5 (chosen)",
        ),
        ({"do_sample": True}, {"temperature": 0.0}, Sampling(0.0, 50), "temperature=0 (chosen)"),
        (
            {},
            {"top_k": 1234567},
            Sampling(1.0, 1234567),
            "temperature=1 (default of text), top_k=1234567 (chosen)",
        ),
        (
            {},
            {"top_k": 10**400},
            Sampling(1.0, 10**400),
            f"temperature=1 (default of text), top_k={10**400} (chosen)",
        ),
    ],
)
def test_flags_precede_the_file_and_the_file_the_defaults(config, chosen, sampling, line):
    found, text = choose_sampling(config, pytest.fail, **{"chat": False} | chosen)
    assert found == sampling
    assert sorted(text.removeprefix("sampling: ").split(", ")) == sorted(line.split(", "))


@pytest.mark.parametrize("fields", [{}, {"do_sample": True}, {"temperature": 0.5}])
def test_the_rules_are_those_of_transformers(fields):
    """With and without do_sample, and transformers' own defaults."""
    from transformers import GenerationConfig

    theirs = GenerationConfig(**fields)
    defaults = GenerationConfig._get_default_generation_params()
    wanted = {name: getattr(theirs, name) for name in ("do_sample", "temperature", "top_k")}
    wanted = {name: defaults[name] if x is None else x for name, x in wanted.items()}
    ours, _ = choose_sampling({"do_sample": False} | fields, pytest.fail, chat=True)
    if not wanted["do_sample"]:
        assert ours == Sampling(temperature=0.0)
    else:
        assert (ours.temperature, ours.top_k) == (wanted["temperature"], wanted["top_k"])


def test_fields_without_support_are_named():
    config = {"num_beams": 4, "typical_p": 1.0, "bad_words_ids": [[3]], "min_length": 0}
    lines = []
    choose_sampling(config, lines.append, chat=False)
    assert lines == [f"warning: {FILE}: not supported, left out: num_beams=4, bad_words_ids=[[3]]"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": "yes"}, "do_sample='yes': must be true or false"),
        ({"temperature": "hot"}, "temperature='hot': must be a number; correct the file, or"),
        ({"temperature": True}, "temperature=True: must be a number"),
        ({"top_k": 1.5}, "top_k=1.5: must be an integer"),
        # float32 rounds the first to 0 and the second to infinity; no float holds the third.
        ({"temperature": 1e-50}, "temperature=1e-50: must be 0 or in"),
        ({"temperature": 1e300}, r"temperature=1e\+300: must be 0 or in"),
        ({"temperature": 10**400}, "temperature=10+: must be 0 or in"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty=1e-50: must be in"),
        ({"top_p": 2}, r"top_p=2: must be in \(0, 1\]; correct the file, or choose top_p"),
    ],
)
def test_bad_fields_are_refused_unless_a_flag_replaces_them(config, message):
    with pytest.raises(ValueError, match=f"^{FILE}: {message}"):
        choose_sampling(config, pytest.fail, chat=False)
    (name,) = config
    if name != "do_sample":
        choose_sampling(config, pytest.fail, chat=False, **{name: 1})


@pytest.fixture
def base(tmp_path):
    """A Hugging Face directory in bfloat16, with a tokenizer of bytes and a generation config."""
    raw = hf_config("llama")
    raw.vocab_size = 257
    directory = random_base(tmp_path / "base", raw)
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    how = dict(dtype="bfloat16", max_shard_size="5GB")
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "hf", **how)
    ByteTokenizer().with_chat("{{ messages[0].content }}", []).save(tmp_path / "hf")
    fields = {"do_sample": True, "temperature": 0.25, "eos_token_id": 3, "num_beams": 2}
    (tmp_path / "hf" / FILE).write_text(json.dumps(fields))
    return tmp_path / "hf"


def flags(base, *more):
    return ["--model", str(base), "--device", "cpu", "--prompt", "ab", "--max_new_tokens=8", *more]


def test_generate_takes_the_generation_config_of_the_model(base, capsys):
    assert command.main(flags(base)) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "starting: loading libraries",
        f"warning: {FILE}: not supported, left out: num_beams=2",
        f"sampling: temperature=0.25 ({FILE}), top_k=50 (default of transformers)",
        f"loading {base}",
        "compiling, then reading 3 tokens of prompts, in float32",
    ]
    # The same in Python, and with flags.
    model, tokenizer, _ = bptjax.load(base, device="cpu")
    texts = [bptjax.generate(model, tokenizer, "ab", max_new_tokens=8)]
    assert command.main(flags(base, "--temperature", "0.25", "--top_k", "50")) == 0
    texts.append(capsys.readouterr().out.removesuffix("\n"))
    assert [command.printable(text) for text in texts] == [said.out.removesuffix("\n")] * 2
    # Another tokenizer does not change the model's sampling.
    assert command.main(flags(base, "--tokenizer", "byte")) == 0
    assert "temperature=0.25" in capsys.readouterr().err


def test_exports_keep_the_generation_config(base, tmp_path):
    """With the tokenizer of the checkpoint, and with the tokenizer of a run, whose ids differ."""
    conversion.to_bptjax(str(base), tmp_path / "again")
    for tokenizer, kept in ((None, {"eos_token_id": 3}), (ByteTokenizer(), {})):
        if tokenizer is not None:
            tokenizer.save(tmp_path / "again")
        out = tmp_path / f"out{tokenizer is None}"
        conversion.to_hf(str(tmp_path / "again"), out, dtype=None, max_shard_size="5GB")
        fields = {"do_sample": True, "temperature": 0.25, "num_beams": 2}
        assert json.loads((out / FILE).read_text()) == fields | kept


def test_a_bad_template_is_met_before_the_weights(base, capsys, monkeypatch):
    ByteTokenizer().with_chat("{% if %}", []).save(base)
    monkeypatch.setattr(command, "load_opened", partial(pytest.fail, "weights were loaded"))
    assert command.main(flags(base, "--chat")) == 2
    assert "the chat template" in capsys.readouterr().err.splitlines()[-1]


def test_cpus_take_float32_if_it_fits(base, monkeypatch):
    lines = []
    model, _, config = bptjax.load(base, device="cpu", warn=lines.append)
    assert model.head_matrix.dtype == jnp.float32 and not lines
    chosen = bptjax.load(base, device="cpu", dtype="bfloat16")[0]
    assert chosen.head_matrix.dtype == jnp.bfloat16
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    monkeypatch.setattr(loading, "available_memory", lambda: int(size / loading.FITS) + 8)
    assert bptjax.load(base, device="cpu", warn=lines.append)[0].head_matrix.dtype == jnp.float32
    assert not lines
    # A second copy of the parameters, and a cache, do not fit.
    found, _ = loading.open_decoder(str(base), None, lines.append)
    for more in ({"sp": 2}, {"cached": (2, 100)}):
        small = loading.load_opened(found, None, "cpu", lines.append, **more)
        assert small.head_matrix.dtype == jnp.bfloat16
        line = lines.pop()
        assert "parameters and cache in float32 need 0.0 GiB" in line and "using bfloat16" in line
    monkeypatch.setattr(loading, "available_memory", lambda: size)
    bptjax.load(base, device="cpu", warn=lines.append)
    assert len(lines) == 1
    # The base model of QLoRA has linear layers in few bits.
    adapters = Adapters(AdapterConfig(type="qlora"), {}, {})
    quantized = replace(found, adapters=adapters)
    assert loading._default_dtype(quantized, "cpu", 1, (0, 0), pytest.fail) == jnp.float32


def test_other_devices_take_the_dtype_of_the_checkpoint(base):
    found, _ = loading.open_decoder(str(base), None, pytest.fail)
    assert loading._default_dtype(found, "gpu", 1, (1, 8), pytest.fail) == jnp.bfloat16
    assert loading._default_dtype(found, "cpu", 1, (1, 8), pytest.fail) == jnp.float32


def test_a_prompt_without_tokens_is_met_before_the_weights():
    tokenizer = ByteTokenizer()
    tokenizer.encode_prompt = lambda text: np.frombuffer(text.encode(), np.uint8)
    with pytest.raises(ValueError, match="^prompt 2: must not be empty"):
        command._encode(["x", ""], tokenizer, False, None, pytest.fail)
