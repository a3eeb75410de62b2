"""A GGUF file of an adapter holds the difference between the merged model's file and the base's."""

from dataclasses import replace

import llamacpp
import numpy as np
import pytest
from gguf import GGUFReader
from tiers import fast

from bptjax.cli.convert import main
from bptjax.models.config import ModelConfig
from bptjax.weights.gguf.export import to_gguf
from bptjax.weights.gguf.families import ROWS
from bptjax.weights.gguf.lora import lora_to_gguf, matrices
from bptjax.weights.gguf.row import tensors
from bptjax.weights.hf.peft import write_peft
from bptjax.weights.pretrained import open_pretrained


def arrays(file):
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {t.name: np.array(t.data) for t in reader.tensors}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function from a case to its random model and adapter."""
    found = {}

    def make(case):
        if case not in found:
            directory = tmp_path_factory.mktemp("case") / "model"
            llamacpp.random_model(directory, case)
            found[case] = directory, llamacpp.random_adapter(directory)
        return found[case]

    return make


@pytest.mark.parametrize("case", fast(["llama", "mixtral", "qwen2"], ["llama"]))
def test_the_product_is_the_difference_of_the_merged_model(model, case, tmp_path):
    """Also for rotated pairs and for experts."""
    directory, adapter = model(case)
    base, merged, lora = (tmp_path / name for name in ("base.gguf", "merged.gguf", "lora.gguf"))
    for source, file in ((directory, base), (adapter, merged)):
        to_gguf(str(source), file, type="f32", pre="gpt-2", warn=print)
    lora_to_gguf(str(adapter), lora, type="f32", warn=print)
    fields, pairs = arrays(lora)
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == arrays(base)[0]["general.architecture"]
    assert fields["adapter.lora.alpha"] == 6.0
    (_, before), (_, after) = arrays(base), arrays(merged)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert pairs.keys() == {f"{name}.lora_{part}" for name in changed for part in "ab"}
    for name in changed:
        a, b = pairs[f"{name}.lora_a"], pairs[f"{name}.lora_b"]
        product = 6.0 / a.shape[-2] * b @ a
        np.testing.assert_allclose(product, after[name] - before[name], atol=1e-5)


def test_scales_that_differ_are_in_the_matrices(model):
    """llama.cpp multiplies every product by alpha / rank with one alpha."""
    directory, adapter = model("llama")
    opened = open_pretrained(ModelConfig(name_or_path=str(adapter)))
    assert opened.family is not None and opened.adapters is not None
    found = tensors(ROWS["llama"], opened.family, opened.config)
    values = dict(opened.adapters.values)
    path = "layers.value.kernel"
    a, b, scale = values[path]
    values[path] = a, b, scale * np.float32(0.25)
    pairs, alpha = matrices(opened.adapters, found, "")
    scaled, same = matrices(replace(opened.adapters, values=values), found, "")
    assert alpha == same == 6.0
    for name, array in pairs.items():
        share = 0.25 if "attn_v" in name and name.endswith("_b") else 1.0
        np.testing.assert_allclose(scaled[name], share * array)


def test_what_a_gguf_adapter_cannot_hold_is_refused(model, tmp_path, capsys):
    directory, adapter = model("llama")
    out = tmp_path / "lora.gguf"

    def refused(source, *flags):
        assert main(["to-gguf", str(source), str(out), "--lora", *flags]) == 2
        assert not list(tmp_path.glob("*.gguf"))
        return capsys.readouterr().err

    assert "--type=q8_0: must be one of f32, f16, bf16 with --lora" in refused(
        adapter, "--type", "q8_0"
    )
    assert "must be an adapter" in refused(directory)
    opened = open_pretrained(ModelConfig(name_or_path=str(adapter)))
    assert opened.family is not None and opened.adapters is not None
    embedding = {"embedding": opened.source.read("embedding")}
    trained = replace(opened.adapters, modules=embedding)
    (tmp_path / "trained").mkdir()
    write_peft(tmp_path / "trained", trained, opened.family, opened.config, str(directory))
    assert "embedding: must not be trained in full" in refused(tmp_path / "trained")
