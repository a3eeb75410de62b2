"""A model of each family is the same after a GGUF file, and what such a file cannot hold is
refused."""

import numpy as np
import pytest
from chats import CHATML, raw_tokenizer
from tiers import fast

from bptjax.cli import convert
from bptjax.weights.gguf.families import ROWS
from bptjax.weights.hf.tensors import Tensors
from weights.hf.cases import CASES, config
from weights.hf.loading import random_base


def kind(name):
    found = config(name)
    return getattr(found, "text_config", found).model_type


# Families whose values are rounded when 1 is added to norms.
ROUNDED = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Starts of the lines about what llama.cpp does not compute, by case.
REFUSED = {
    "llama: linear, gelu": "model.activation=gelu",
    "llama: dynamic, beyond its positions": "rope_type=dynamic",
    "qwen2: window in upper layers": "model.sliding_window=6",
    "qwen3: mixed windows, yarn": "model.sliding_window=4",
    "mixtral: one of three, gelu": "model.activation=gelu",
}
PLAIN = [n for n in CASES if kind(n) in ROWS and "vision_config" not in CASES[n][1]]


@pytest.fixture
def base(tmp_path):
    """A function from a case to a directory with random weights and a tokenizer."""

    def make(name):
        own = config(name)
        tokenizer = raw_tokenizer("bytes", CHATML)
        directory = random_base(tmp_path / "base", own)
        tokenizer.save_pretrained(directory)
        return directory

    return make


def trip(directory, tmp_path, *flags, back=()):
    file, out = tmp_path / "model.gguf", tmp_path / "back"
    assert convert.main(["to-gguf", str(directory), str(file), "--pre", "gpt-2", *flags]) == 0
    assert convert.main(["from-gguf", str(file), str(out), *back]) == 0
    return file, out


@pytest.mark.parametrize("name", fast(PLAIN, ["llama: 3.1, tied, biases, wide heads, MQA"]))
def test_a_model_is_the_same_after_a_gguf_file(base, tmp_path, capsys, name):
    directory = base(name)
    if name in REFUSED:
        command = ["to-gguf", str(directory), str(tmp_path / "x.gguf"), "--pre", "gpt-2"]
        assert convert.main(command) == 2
        assert REFUSED[name] in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"base"}
        return
    _, out = trip(directory, tmp_path, "--type", "f32")
    before, after = Tensors(directory), Tensors(out)
    assert before.specs == after.specs
    for tensor in before.specs:
        a, b = before.read(tensor), after.read(tensor)
        if kind(name) in ROUNDED:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        else:
            assert a.tobytes() == b.tobytes(), tensor
