"""The text model of a multimodal checkpoint: its names in files, and the tensors beside it."""

import json
import shutil
import tracemalloc

import jax
import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bptjax.cli import convert
from bptjax.cli.evaluate import main as evaluate
from bptjax.cli.generate import main as generate
from bptjax.cli.plan import main as plan
from bptjax.cli.train import main as train
from bptjax.models.config import ModelConfig
from bptjax.models.params import stacked
from bptjax.run.json_files import read_json
from bptjax.weights import conversion
from bptjax.weights.hf.checkpoint import SIDECARS
from bptjax.weights.hf.config import merge, read_config
from bptjax.weights.hf.config_export import exported
from bptjax.weights.hf.families.multimodal import LAYOUTS
from bptjax.weights.hf.other_tensors import OTHERS
from bptjax.weights.hf.peft import WEIGHTS
from bptjax.weights.pretrained import open_config, open_pretrained
from weights.hf.cases import config
from weights.hf.loading import contents, tensors

# Not read, whatever their names and dtypes.
BESIDE = {
    "vision_tower.layers.0.self_attn.q_proj.weight": np.ones((3, 2), "bfloat16"),
    "multi_modal_projector.norm.weight": np.arange(5, dtype=np.float32),
    "mtp.layers.0.rotary_emb.inv_freq": np.ones(2, np.float64),
    "visual.position_ids": np.arange(3),
    "visual.mask": np.ones((2, 2), bool),
}
FILES = {
    "preprocessor_config.json": '{"size": 8}',
    "processor_config.json": '{"image_seq_length": 4}',
    "video_preprocessor_config.json": "{}",
    "chat_template.json": '{"chat_template": "{{ messages }}"}',
}


def checkpoint(directory, name="mistral3", layout=LAYOUTS[1], beside=BESIDE, **keys):
    """A checkpoint with text of bytes, random and in float32, made without torch."""
    directory.mkdir()
    raw = config(name).to_dict() | dict(dtype="float32")
    own = {"vocab_size", "vocab_size_per_layer_input"} & raw["text_config"].keys()
    raw["text_config"] |= dict.fromkeys(own, 257)
    (directory / "config.json").write_text(json.dumps(raw | keys, default=str))
    for file, text in FILES.items():
        (directory / file).write_text(text)
    family, model = read_config(directory)
    rng = np.random.default_rng(0)
    arrays = {
        tensor: (0.1 * rng.normal(size=rule.shape)).astype(np.float32)
        for rule, names in family.names(model, layout).items()
        for tensor in names.values()
    }
    save_file(arrays | beside, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.body)
def test_every_layout_is_read_and_written_again(tmp_path, layout):
    directory = checkpoint(tmp_path / "hf", layout=layout)
    model = open_pretrained(ModelConfig(name_or_path=str(directory)))
    assert model.others.names == tuple(sorted(BESIDE))
    assert "kept 5 tensors for exports, which are not trained: m" in model.left_out
    other = open_pretrained(ModelConfig(name_or_path=str(checkpoint(tmp_path / "same"))))
    for (path, a), (same, b) in zip(stacked(model.source), stacked(other.source), strict=True):
        assert path == same and np.array_equal(a, b)
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="9KB")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    assert tensors(tmp_path / "back") == tensors(directory)
    before, after = contents(directory), contents(tmp_path / "back")
    assert all(after[file] == before[file] for file in FILES)
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])


def test_nothing_beside_the_text_model(tmp_path):
    """A checkpoint from which the vision model was removed."""
    directory = checkpoint(tmp_path / "hf", beside={})
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    assert open_pretrained(ModelConfig(name_or_path=str(tmp_path / "ours"))).others.names == ()
    arguments = ["bptjax-to-hf", str(tmp_path / "ours"), str(tmp_path / "out")]
    assert convert.main(arguments) == 0
    files = [load_file(d / "model.safetensors") for d in (directory, tmp_path / "out")]
    assert files[0].keys() == files[1].keys()


def test_a_dtype_is_of_the_text_model_alone(tmp_path):
    conversion.to_bptjax(str(checkpoint(tmp_path / "hf")), tmp_path / "ours")
    shutil.rmtree(tmp_path / "hf")
    arguments = ["bptjax-to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]
    assert convert.main([*arguments, "--dtype", "bfloat16"]) == 0
    found = tensors(tmp_path / "back")
    assert found.pop("language_model.lm_head.weight")[0].dtype == "bfloat16"
    for name, array in BESIDE.items():
        spec, content = found.pop(name)
        assert spec == (array.dtype.name, array.shape) and content == array.tobytes()
    assert {spec.dtype for spec, _ in found.values()} == {"bfloat16"}
    assert read_json(tmp_path / "back" / "config.json")["dtype"] == "bfloat16"
    shutil.rmtree(tmp_path / "ours" / SIDECARS / OTHERS)
    with pytest.raises(ValueError, match="must hold the tensors outside its text model in hf/oth"):
        conversion.to_hf(str(tmp_path / "ours"), tmp_path / "no", dtype=None, max_shard_size="5GB")


def test_conversion_holds_one_other_tensor_in_memory(tmp_path):
    one = np.ones((1 << 20, 4), np.float32)
    beside = {f"visual.{i}": one for i in range(6)}
    directory = str(checkpoint(tmp_path / "hf", beside=beside))
    tracemalloc.start()
    try:
        conversion.to_bptjax(directory, tmp_path / "ours")
        conversion.to_hf(
            str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB"
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * one.nbytes


def test_a_head_in_the_file_is_not_tied(tmp_path):
    """As in transformers, whose default for the outer key ties the head of every Mistral 3."""
    directory = checkpoint(tmp_path / "hf")
    raw = read_json(directory / "config.json") | dict(tie_word_embeddings=True)
    (directory / "config.json").write_text(json.dumps(raw))
    wanted = ModelConfig(name_or_path=str(directory))
    assert open_config(wanted).config.tied_head and not open_pretrained(wanted).config.tied_head
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    model = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "ours")))
    assert not model.config.tied_head and "head" in model.source.specs
    # Without the outer key, the text model's counts.
    del raw["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(raw))
    assert not open_config(wanted).config.tied_head
    raw["text_config"]["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(raw))
    assert open_config(wanted).config.tied_head


@pytest.mark.parametrize("flat", [False, True])
def test_changed_keys_are_written_where_the_text_model_reads_them(tmp_path, flat):
    """Old configs of Qwen 2.5 VL have the keys of the text model beside the others."""
    directory = checkpoint(tmp_path / "hf", "qwen2_5_vl")
    raw = read_json(directory / "config.json")
    if flat:
        text = raw.pop("text_config")
        raw |= {k: v for k, v in text.items() if k not in ("model_type", "rope_parameters")}
        raw["rope_theta"] = 1e4
        raw["rope_scaling"] = dict(type="mrope", mrope_section=[2, 1, 1])
        (directory / "config.json").write_text(json.dumps(raw))
    _, read = read_config(directory)
    yarn = dict(rope_type="yarn", factor=2.0)
    now = merge(
        read, ModelConfig(name_or_path="it", rope_parameters=yarn, max_position_embeddings=65536)
    )
    new = exported(raw, read, now)
    own = new if flat else new["text_config"]
    assert own["max_position_embeddings"] == 65536
    assert own["rope_parameters"]["factor"] == own["rope_scaling"]["factor"] == 2.0
    assert own["rope_parameters"]["mrope_section"] == [2, 1, 1]
    assert own["rope_scaling"]["mrope_section"] == [2, 1, 1]
    assert flat or new == raw | dict(
        text_config=own, transformers_version=new["transformers_version"]
    )
    (directory / "config.json").write_text(json.dumps(new))
    assert read_config(directory)[1].rope_parameters == now.rope_parameters


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(model_type="llama4"), "model_type='llama4' .with the text model 'mistral'.: must be"),
        (dict(text_config=dict(model_type="gemma2")), "text_config.model_type='gemma2': must be"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config: must not be"),
        (dict(text_config=dict(model_type="mistral", hidden_act="x")), "activation 'x': must be"),
    ],
)
def test_refused(tmp_path, keys, message):
    raw = config("mistral3").to_dict() | keys
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    (tmp_path / "text.txt").write_text("".join(f"{i} plus 3 is {i + 3}. " for i in range(200)))
    base = checkpoint(tmp_path / "base")
    options = {
        "device": "cpu",
        "model.name_or_path": base,
        "data.path": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "train.max_steps": 2,
        "train.seq_len": 24,
        "train.per_device_train_batch_size": 1,
        "optimizer.learning_rate": 0.01,
        "execution.remat": "none",
        "execution.q_chunk": 24,
        "execution.k_chunk": 24,
    }
    return [f"--{key}={value}" for key, value in options.items()]


@pytest.mark.thorough
def test_a_run_keeps_the_tensors_beside_the_text_model(tmp_path, arguments, capsys):
    """Planned, trained, opened again, exported when the base model is gone, used."""
    run, base, out = tmp_path / "run", tmp_path / "base", tmp_path / "out"
    assert plan(arguments) == 0
    assert train([*arguments, f"--run_dir={run}"]) == 0
    assert train([*arguments, f"--run_dir={run}"]) == 0
    before = tensors(base)
    shutil.rmtree(base)
    assert convert.main(["bptjax-to-hf", str(run), str(out)]) == 0
    after = tensors(out)
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    assert same == BESIDE.keys()
    assert all(
        (out / file).read_text() == text for file, text in FILES.items() if "chat" not in file
    )
    assert read_json(out / "config.json")["vision_config"]
    assert generate(["--model", str(run), "--prompt", "1 plus", "--max-new-tokens=3"]) == 0
    options = ["--data", str(tmp_path / "text.txt"), "--perplexity=24", "--device=cpu"]
    options.append(f"--out={tmp_path / 'evaluation'}")
    assert evaluate(["--model", str(out), *options]) == 0
    one, other = (
        dict(stacked(open_pretrained(ModelConfig(name_or_path=str(d))).source)) for d in (run, out)
    )
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[path], other[path]) for path in one)


@pytest.mark.thorough
def test_an_adapter_is_of_the_text_model_alone(tmp_path, arguments):
    run, adapter = tmp_path / "run", tmp_path / "run" / "adapter"
    assert train([*arguments, f"--run_dir={run}", "--adapter.type=qlora"]) == 0
    assert not (run / SIDECARS / OTHERS).exists()
    pattern = read_json(adapter / "adapter_config.json")["target_modules"]
    assert pattern.startswith(r"model\.language_model\.layers\.\d+\.(mlp\.down_proj|")
    found = load_file(adapter / WEIGHTS)
    assert all(".model.language_model.layers." in name for name in found)
    # Earlier versions of transformers had other names of the same modules.
    wanted = open_pretrained(ModelConfig(name_or_path=str(adapter))).adapters
    for layout in LAYOUTS[1:]:
        old = {n.replace("model.language_model.", layout.body): x for n, x in found.items()}
        save_file(old, adapter / WEIGHTS)
        got = open_pretrained(ModelConfig(name_or_path=str(adapter))).adapters
        for path, values in wanted.values.items():
            assert all(map(np.array_equal, values, got.values[path])), path
    assert convert.main(["merge-adapter", str(adapter), str(tmp_path / "merged")]) == 0
    merged, base = tensors(tmp_path / "merged"), tensors(tmp_path / "base")
    assert all(merged[name] == base[name] for name in BESIDE)
    assert merged.keys() == base.keys() and merged != base
    # An adapter of the vision model cannot be merged, and is refused.
    name = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(found | {name.format(x): np.ones((2, 2)) for x in "AB"}, adapter / WEIGHTS)
    with pytest.raises(ValueError, match="adapters of linear layers of the model only, not base_"):
        open_pretrained(ModelConfig(name_or_path=str(adapter)))
