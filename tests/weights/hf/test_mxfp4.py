"""gpt-oss as OpenAI publishes it: experts in MXFP4 are read as transformers reads them, and are
exported in bfloat16."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.weights.hf import mxfp4
from bptjax.weights.hf.tensors import Tensors
from weights.hf.cases import config
from weights.hf.loading import random_base

L, X, D, F = 2, 3, 32, 64


@pytest.fixture
def packed():
    """Blocks and scales of each layer's experts, by the name of the parameter."""
    rng = np.random.default_rng(0)
    found = {}
    for layer in range(L):
        for name, outputs, inputs in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
            shape = X, outputs, inputs // 32
            found[f"model.layers.{layer}.mlp.experts.{name}"] = (
                rng.integers(0, 256, (*shape, 16), np.uint8),
                rng.integers(110, 130, shape, np.uint8),
            )
    return found


@pytest.fixture
def checkpoint(tmp_path, packed):
    raw = config("gpt_oss")
    raw.num_hidden_layers, raw.layer_types = L, ["sliding_attention", "full_attention"]
    raw.hidden_size, raw.intermediate_size, raw.num_local_experts = D, F, X
    directory = random_base(tmp_path / "hf", raw)
    file = directory / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if name not in packed}
    for name, (blocks, scales) in packed.items():
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, {"format": "pt"})
    keys = json.loads((directory / "config.json").read_text())
    keys["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    (directory / "config.json").write_text(json.dumps(keys))
    return directory


def test_values_are_those_of_transformers(packed):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for blocks, scales in packed.values():
        wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        got = mxfp4.decode(blocks, scales)
        assert got.shape == mxfp4.shape(blocks.shape) and got.dtype.name == "bfloat16"
        assert np.array_equal(got.astype(np.float32), wanted.float().numpy())


def test_the_export_is_in_bfloat16(checkpoint, packed, tmp_path, capsys):
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert convert.main(["hf-to-bptjax", str(checkpoint), str(ours)]) == 0
    said = "decoded 4 tensors from MXFP4 to bfloat16, in which exports hold them"
    assert said in capsys.readouterr().out
    assert convert.main(["bptjax-to-hf", str(ours), str(back)]) == 0
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    before, after = Tensors(checkpoint), Tensors(back)
    assert before.specs == after.specs and set(before.decoded) == set(packed)
    for name, spec in after.specs.items():
        assert before.read(name).tobytes() == after.read(name).tobytes()
        assert (spec.dtype == "bfloat16") == (name in packed)


def test_other_quantizations_are_refused(checkpoint, capsys, tmp_path):
    file = checkpoint / "config.json"
    file.write_text(file.read_text().replace("mxfp4", "fp8"))
    assert convert.main(["hf-to-bptjax", str(checkpoint), str(tmp_path / "ours")]) == 2
    assert "quantization_config.quant_method=fp8: must be mxfp4" in capsys.readouterr().err
