"""gpt-oss as OpenAI publishes it: experts in MXFP4 are read as transformers reads them, and are
exported in bfloat16, or in MXFP4 again."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.models.config import ModelConfig
from bptjax.weights.adapter_export import write_adapter
from bptjax.weights.conversion import QUANTIZATION
from bptjax.weights.hf import mxfp4
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.lora import AdapterConfig, Adapters
from bptjax.weights.pretrained import open_pretrained
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
    said = "decoded 4 tensors from MXFP4 to bfloat16, in which exports hold them without "
    said += "--experts mxfp4"
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


def test_encoding_keeps_values_of_mxfp4():
    """Every code and scale, and blocks of small codes only, which leave the scale open."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (1, 122, 8, 16), np.uint8)
    for i, largest in enumerate((0, 1, 2, 3, 4, 5, 6, 7)):
        small = rng.integers(0, largest + 1, (1, 122, 32), np.uint8)
        small |= rng.integers(0, 2, small.shape, np.uint8) << 3
        blocks[:, :, i] = small[..., 0::2] | small[..., 1::2] << 4
    scales = np.broadcast_to(np.arange(0, 244, 2, dtype=np.uint8)[None, :, None], blocks.shape[:-1])
    w = mxfp4.decode(blocks, scales)
    assert mxfp4.blocks_shape(w.shape) == blocks.shape
    assert mxfp4.rounded(w).tobytes() == w.tobytes()


def test_encoding_is_nearest():
    """No code of either neighboring scale is nearer."""
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(64, 40)) * np.exp(rng.normal(size=(64, 40)))).astype(np.float32)
    got = mxfp4.rounded(w).astype(np.float32)
    inputs = w.T.reshape(40, 2, 32)
    errors = []
    for shift in (-2, -1, 0, 1):
        scale = np.exp2(np.floor(np.log2(np.abs(inputs).max(-1))) - 2 + shift)[..., None, None]
        errors.append((np.abs(inputs[..., None] - scale * mxfp4.VALUES).min(-1) ** 2).sum(-1))
    best = np.min(errors, 0)
    np.testing.assert_allclose(((got - w).T.reshape(40, 2, 32) ** 2).sum(-1), best, rtol=1e-5)
    # Both of the scales that are tried are needed.
    assert {*np.argmin(errors, 0).ravel()} == {2, 3}
    with pytest.raises(ValueError, match="must be finite"):
        mxfp4.encode(np.full((32, 1), np.inf, np.float32))
    with pytest.raises(ValueError, match="inputs=48: must be a multiple of 32"):
        mxfp4.encode(np.zeros((48, 1), np.float32))


def test_unchanged_experts_are_exported_exactly(checkpoint, packed, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    ours, back = tmp_path / "ours", tmp_path / "back"
    assert convert.main(["hf-to-bptjax", str(checkpoint), str(ours)]) == 0
    assert convert.main(["bptjax-to-hf", str(ours), str(back), "--experts", "mxfp4"]) == 0
    assert "MXFP4 changes the experts' weights by 0.00%" in capsys.readouterr().err
    before, after = Tensors(checkpoint), Tensors(back)
    assert set(after.decoded) == set(packed) and before.specs == after.specs
    for name in after.specs:
        assert before.read(name).tobytes() == after.read(name).tobytes()
    keys = [json.loads((d / "config.json").read_text()) for d in (checkpoint, back)]
    assert keys[0]["quantization_config"] == keys[1]["quantization_config"]
    model = AutoModelForCausalLM.from_pretrained(
        back, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    for name, x in model.state_dict().items():
        if name in packed:
            assert np.array_equal(x.float().numpy(), after.read(name).astype(np.float32))


def test_changed_experts_are_quantized(tmp_path, capsys):
    """A float32 model: experts take a quarter of bfloat16, and are the nearest values."""
    raw = config("gpt_oss")
    raw.hidden_size, raw.intermediate_size = D, F
    base, ours, back = random_base(tmp_path / "hf", raw), tmp_path / "ours", tmp_path / "back"
    assert convert.main(["hf-to-bptjax", str(base), str(ours)]) == 0
    assert convert.main(["bptjax-to-hf", str(ours), str(back), "--experts", "mxfp4"]) == 0
    text = capsys.readouterr().err
    share = float(text.partition("weights by ")[2].partition("%")[0])
    assert 5 < share < 15 and "bptjax evaluate" in text
    assert json.loads((back / "config.json").read_text())["quantization_config"] == QUANTIZATION
    before, after = Tensors(base), Tensors(back)
    assert len(after.decoded) == 2 * raw.num_hidden_layers
    for name in before.specs:
        x, y = before.read(name), after.read(name)
        wanted = mxfp4.rounded(x) if name in after.decoded else x
        assert y.tobytes() == wanted.tobytes()


def test_an_adapter_is_merged_into_mxfp4(checkpoint, packed, tmp_path, capsys):
    model = open_pretrained(ModelConfig(name_or_path=str(checkpoint)))
    rng, path = np.random.default_rng(0), "layers.mlp.up.kernel"
    shapes = (L, X, D, 2), (L, X, 2, F)
    a, b = (0.1 * rng.normal(size=shape).astype(np.float32) for shape in shapes)
    adapters = Adapters(AdapterConfig("lora", r=2), {path: (a, b, np.ones((L, X), np.float32))})
    (tmp_path / "adapter").mkdir()
    write_adapter(model.adapted(adapters), tmp_path / "adapter")
    out = tmp_path / "out"
    assert (
        convert.main(["merge-adapter", str(tmp_path / "adapter"), str(out), "--experts", "mxfp4"])
        == 0
    )
    assert "dtype and MXFP4 loses" in capsys.readouterr().err
    merged = open_pretrained(ModelConfig(name_or_path=str(out))).source
    wanted = model.source.read(path).astype(np.float32) + a @ b
    for i in np.ndindex(L, X):
        assert merged.read(path, i).tobytes() == mxfp4.rounded(wanted[i]).tobytes()
    other = "layers.mlp.down.kernel"
    assert merged.read(other).tobytes() == model.source.read(other).tobytes()


def test_other_families_have_no_mxfp4(tmp_path, capsys):
    base, ours = random_base(tmp_path / "hf", config("mixtral")), tmp_path / "ours"
    assert convert.main(["hf-to-bptjax", str(base), str(ours)]) == 0
    command = ["bptjax-to-hf", str(ours), str(tmp_path / "out"), "--experts", "mxfp4"]
    assert convert.main(command) == 2
    assert "--experts=mxfp4: must not be set; only files of gpt_oss" in capsys.readouterr().err


def test_gguf_reads_our_values():
    """GGUF stores the same values in MXFP4, with another order of codes and perhaps another scale
    beside smaller codes."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    w = mxfp4.rounded(rng.normal(size=(64, 8)).astype(np.float32)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.MXFP4
    theirs = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(w.T), kind), kind)
    assert np.array_equal(theirs, w.T)
