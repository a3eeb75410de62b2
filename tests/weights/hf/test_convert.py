"""Conversion: every tensor comes back bit for bit, and errors are one line."""

import json
import shutil
from dataclasses import replace

import jax
import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from tiers import fast

from bptjax.cli import convert
from bptjax.cli.train import main as train
from bptjax.config import Config, TrainConfig
from bptjax.config_parser import parse
from bptjax.models.config import ModelConfig
from bptjax.models.params import stacked
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.notes import describe_model
from bptjax.training.spec import TrainSpec
from bptjax.weights import conversion
from bptjax.weights.hf.checkpoint import SIDECARS, sidecar_files
from bptjax.weights.hf.config import merge, read_config
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.loading import tokenizer_directory
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import CASES, DIFFERENT, ENCODERS, FAMILIES, config, rope
from weights.hf.loading import tensors


def there_and_back(directory, tmp_path, **how):
    conversion.to_bptjax(str(directory), tmp_path / "ours")
    options = dict(dtype=None, max_shard_size="5GB") | how
    conversion.to_hf(str(tmp_path / "ours"), tmp_path / "back", **options)
    return tmp_path / "back"


@pytest.mark.parametrize("name", fast([*CASES, *ENCODERS], [*DIFFERENT, "modernbert"]))
def test_every_tensor_comes_back(theirs, tmp_path, name):
    _, directory = theirs(name)
    back = there_and_back(directory, tmp_path)
    assert tensors(back) == tensors(directory)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (directory / "config.json").read_text()
    )
    assert [f.name for f in sidecar_files(back)] == [f.name for f in sidecar_files(directory)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_shards(llama, tmp_path, dtype):
    directory = llama(dtype=dtype)
    back = there_and_back(directory, tmp_path, max_shard_size="20KB")
    assert len(list(back.glob("model-*.safetensors"))) > 2
    assert tensors(back) == tensors(directory)
    # From the shards once more.
    again = tmp_path / "again"
    again.mkdir()
    assert tensors(there_and_back(back, again)) == tensors(directory)


def test_an_invalid_shard_size_is_refused(llama, tmp_path, capsys):
    conversion.to_bptjax(str(llama()), tmp_path / "ours")
    command = ["bptjax-to-hf", str(tmp_path / "ours"), str(tmp_path / "out")]
    assert convert.main([*command, "--max_shard_size", "abc"]) == 2
    error = capsys.readouterr().err
    assert "max_shard_size=abc" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sidecar_files_are_copied(llama, tmp_path):
    directory = llama(something_new={"a": [1, 2]})
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (directory / name).write_text(f'{{"of": "{name}"}}')
    back = there_and_back(directory, tmp_path)
    assert json.loads((back / "config.json").read_text())["something_new"] == {"a": [1, 2]}
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (back / name).read_bytes() == (directory / name).read_bytes()


def test_text_is_written_with_the_tokenizer_that_came_along(llama, tmp_path):
    conversion.to_bptjax(str(llama()), tmp_path / "ours")
    name = str(tmp_path / "ours")
    model = open_pretrained(ModelConfig(name_or_path=name))
    assert tokenizer_directory(name, model) == tmp_path / "ours" / SIDECARS


def test_transformers_loads_the_exported_model(theirs, tmp_path, capfd):
    torch = pytest.importorskip("torch")
    import transformers

    model, directory = theirs("llama")
    back = there_and_back(directory, tmp_path, max_shard_size="20KB")
    capfd.readouterr()
    transformers.utils.logging.set_verbosity_warning()
    again, info = transformers.AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    transformers.utils.logging.set_verbosity_error()
    assert not any(info.values()), info
    assert not capfd.readouterr().err
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", fast(["qwen3", "qwen3_vl"], ["qwen3_vl"]))
def test_command_line(theirs, tmp_path, capsys, name):
    pytest.importorskip("torch")
    _, directory = theirs(name)
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert convert.main(["hf-to-bptjax", str(directory), out, "--verify"]) == 0
    assert convert.main(["bptjax-to-hf", out, back, "--dtype", "bfloat16", "--verify"]) == 0
    said = capsys.readouterr().out
    assert said.count("largest relative difference: logits ") == 2
    found = Tensors(tmp_path / "back").specs
    assert {kind for n, (kind, _) in found.items() if "visual" not in n} == {"bfloat16"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_bare_model_files_are_read(llama, tmp_path):
    """Files saved without the head leave out the prefix of names."""
    keys = dict(tie_word_embeddings=True)
    whole = llama(**keys)
    bare = llama(
        "bare", change=lambda a: {n.removeprefix("model."): x for n, x in a.items()}, **keys
    )
    one, other = (open_pretrained(ModelConfig(name_or_path=str(d))) for d in (whole, bare))
    for (path, a), (same, b) in zip(stacked(one.source), stacked(other.source), strict=True):
        assert path == same and a.tobytes() == b.tobytes()


def test_a_copy_of_the_tied_head_passes_and_another_does_not(llama):
    def copied(arrays):
        return arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}

    def other(arrays):
        return arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"] * 2}

    keys = dict(tie_word_embeddings=True)
    open_pretrained(ModelConfig(name_or_path=str(llama("copied", change=copied, **keys))))
    with pytest.raises(ValueError, match="unexpected: lm_head.weight"):
        open_pretrained(ModelConfig(name_or_path=str(llama("other", change=other, **keys))))


@pytest.mark.parametrize(
    "name", fast([*FAMILIES, "bert", "roberta", "modernbert", "vit"], DIFFERENT)
)
def test_an_unexpected_tensor_is_named_in_every_family(theirs, tmp_path, capsys, name):
    directory = theirs(name)[1]
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    found = Tensors(directory)
    # Beside a text model, any name may be another model's.
    extra = f"{read_config(directory)[0].find_layout(found.specs).body}extra"
    strange = {"lm_head.weight": np.zeros(3, np.float32), extra: np.zeros(3, bool)}
    arrays = {n: found.read(n) for n in found.specs} | strange
    save_file(arrays, tmp_path / "model.safetensors")
    assert convert.main(["hf-to-bptjax", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "unexpected: " in error and extra in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        ("gpt2", dict(add_cross_attention=True), "add_cross_attention"),
        ("gpt2", dict(activation_function="tanh"), "activation 'tanh': must be one of"),
        ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma3", dict(attn_logit_softcapping=30.0), "attn_logit_softcapping"),
        ("mpt", dict(attn_config=dict(qk_ln=True)), "qk_ln"),
        ("mpt", dict(attn_config=dict(alibi=False)), "alibi"),
        ("mpt", dict(logit_scale=0.5), "logit_scale"),
        ("opt", dict(layerdrop=0.1), "layerdrop"),
        ("falcon", dict(hidden_dropout=0.1), "hidden_dropout"),
        ("stablelm", dict(hidden_dropout=0.1), "hidden_dropout"),
        ("stablelm", dict(qk_layernorm=True), "qk_layernorm"),
        ("falcon", dict(num_ln_in_parallel_attn=2), "requires new_decoder_architecture"),
        ("llama", rope("default", partial_rotary_factor=0.5), "partial_rotary_factor"),
        ("llama", dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        ("bert", dict(is_decoder=True), "is_decoder"),
        ("bert", dict(architectures=["BertForPreTraining"]), "BertForPreTraining"),
        ("vit", dict(image_size=9), "must divide"),
    ],
)
def test_unsupported_keys_are_refused_by_name(tmp_path, name, change, message):
    raw = config(name).to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_keys_that_a_training_config_may_set(llama):
    _, read = read_config(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    scaled = merge(
        read, ModelConfig(name_or_path="it", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    )
    assert scaled.rope_parameters == dict(
        rope_type="yarn", factor=4.0, rope_theta=5e5, original_max_position_embeddings=2048
    )
    assert merge(read, ModelConfig(attention_dropout=0.1)).attention_dropout == 0.1
    with pytest.raises(ValueError, match=r"model.hidden_size=64.*determines it \(32\)"):
        merge(read, ModelConfig(hidden_size=64))


def test_flags_of_rotary_positions_keep_the_checkpoints_theta(llama):
    _, read = read_config(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    flags = ["--model.rope_parameters.rope_type=linear", "--model.rope_parameters.factor=4"]
    scaled = merge(read, parse(["--model.name_or_path=it", *flags]).model)
    assert scaled.rope_parameters == dict(rope_type="linear", factor=4, rope_theta=5e5)
    # The default of a new model. Earlier versions also wrote it for runs from a checkpoint.
    assert parse(flags).model.rope_parameters["rope_theta"] == 1e4
    earlier = ModelConfig(name_or_path="it", rope_parameters={"rope_theta": 1e4})
    assert merge(read, earlier).rope_parameters["rope_theta"] == 5e5


def test_extend_to_sets_positions_and_theta(llama):
    """By ProLong's rule, and to at least 25.6 million at 65,536 positions."""
    plain = dict(rope_type="default", rope_theta=5e5)
    _, read = read_config(llama(rope_parameters=plain))
    wanted = ModelConfig(name_or_path="it", extend_to=8 * 2048)
    merged = merge(read, wanted)
    assert merged.rope_parameters == plain | dict(rope_theta=8e6)
    assert merged.max_position_embeddings == 8 * 2048 and merged.extend_to is None
    smaller = replace(read, rope_parameters=plain | dict(rope_theta=1e5))
    for length, theta in ((65536, 2.56e7), (4096, 6.35e5)):
        extended = merge(smaller, replace(wanted, extend_to=length))
        assert extended.rope_parameters["rope_theta"] == theta
    smaller = replace(smaller, max_position_embeddings=8192)
    extended = merge(smaller, replace(wanted, extend_to=65536))
    assert extended.rope_parameters["rope_theta"] == 2.56e7
    extended = merge(smaller, replace(wanted, extend_to=65536, extend_theta=8e6))
    assert extended.rope_parameters["rope_theta"] == 8e6
    with pytest.raises(ValueError, match="must exceed the 16384 positions"):
        merge(merged, wanted)
    with pytest.raises(ValueError, match="sets model.rope_parameters; leave one of them out"):
        merge(read, replace(wanted, rope_parameters=plain | dict(rope_theta=1e6)))
    yarn = merge(
        read, ModelConfig(name_or_path="it", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    )
    for other, kind in ((yarn, "yarn"), (replace(read, position_embedding="alibi"), "alibi")):
        with pytest.raises(ValueError, match=f"must be left out with {kind} positions"):
            merge(other, wanted)
    learned = merge(replace(read, position_embedding="learned"), wanted)
    assert learned.max_position_embeddings == 8 * 2048
    with pytest.raises(ValueError, match="requires a checkpoint"):
        ModelConfig(extend_to=100)
    with pytest.raises(ValueError, match="model.extend_theta=8000000.0: requires model.extend_to"):
        ModelConfig(name_or_path="it", extend_theta=8e6)


@pytest.fixture
def extension(llama, tmp_path, monkeypatch, one_device):
    """Flags of any run in the current directory, and those of a run that extends a model."""
    monkeypatch.chdir(tmp_path)
    base = llama(max_position_embeddings=64, rope_parameters=dict(rope_theta=1e3), vocab_size=512)
    (tmp_path / "texts.txt").write_text("Some words. " * 400)
    flags = ["--data.path=texts.txt", "--data.tokenizer=byte", "--train.seq_len=128"]
    flags += ["--device=cpu", "--data.eval_fraction=0"]
    return flags, ["--model.extend_to=128", f"--model.name_or_path={base}"]


@pytest.mark.thorough
def test_a_run_from_an_extended_run_keeps_its_positions(extension, tmp_path):
    """Also where the first run is gone."""
    flags, extended = extension
    flags += ["--train.max_steps=1"]
    assert train([*flags, *extended, "--run_dir=first"]) == 0
    assert train([*flags, "--model.name_or_path=first", "--run_dir=second"]) == 0
    first = open_pretrained(ModelConfig(name_or_path="first")).config
    assert first.max_position_embeddings == 128 and first.rope_parameters["rope_theta"] == 6250
    shutil.rmtree("first")
    second = open_pretrained(ModelConfig(name_or_path="second")).config
    assert replace(second, name_or_path="first") == first
    conversion.to_hf("second", tmp_path / "out", dtype=None, max_shard_size="5GB")
    assert read_config(tmp_path / "out")[1].rope_parameters == first.rope_parameters


@pytest.mark.thorough
def test_an_extended_run_of_an_older_version_keeps_its_theta(extension, tmp_path):
    """Its config lacks model.extend_theta. Opening and resuming it use the old value."""
    flags, extended = extension
    command = [*flags, *extended, "--run_dir=run"]
    assert train([*command, "--train.max_steps=1", "--model.extend_theta=6.4e6"]) == 0
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("  extend_theta: 6400000.0\n", ""))
    assert "extend_theta" not in file.read_text()
    for steps in (1, 2):
        assert train([*command, f"--train.max_steps={steps}"]) == 0
        kept = open_pretrained(ModelConfig(name_or_path="run")).config
        assert kept.rope_parameters["rope_theta"] == 2520


def test_the_scaling_is_that_of_full_attention(tmp_path):
    raw = config("gemma3").to_dict() | dict(model_type="gemma3_text")
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    _, read = read_config(tmp_path)
    scaled = merge(
        read, ModelConfig(name_or_path="it", rope_parameters={"rope_type": "linear", "factor": 8.0})
    )
    assert scaled.rope_parameters["full_attention"]["factor"] == 8.0
    assert scaled.rope_parameters["sliding_attention"] == read.rope_parameters["sliding_attention"]


def test_learned_positions_are_extended(theirs, tmp_path):
    _, directory = theirs("opt")
    model = open_pretrained(ModelConfig(name_or_path=str(directory), max_position_embeddings=100))
    assert model.config.max_position_embeddings == 100

    decoder = model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    table = np.asarray(decoder.positions[...])
    old = Tensors(directory).read("model.decoder.embed_positions.weight")
    assert np.array_equal(table[:66], old) and np.array_equal(table[66:102], old[2:38])
    shutil.rmtree(tmp_path)


def test_headers_are_valid_safetensors(llama, tmp_path):
    back = there_and_back(llama(), tmp_path)
    with safe_open(back / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.thorough
def test_a_model_from_scratch_becomes_a_llama(tmp_path, capsys, one_device):
    pytest.importorskip("torch")
    from bptjax.cli.train import main

    (tmp_path / "text.txt").write_text("one two three four. " * 50)
    options = {
        "run_dir": tmp_path / "run",
        "device": "cpu",
        "data.path": tmp_path / "text.txt",
        "model.hidden_size": 32,
        "model.num_layers": 2,
        "model.num_kv_heads": 2,
        "train.max_steps": 2,
        "train.seq_len": 16,
    }
    assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    command = ["bptjax-to-hf", str(tmp_path / "run")]
    assert convert.main([*command, str(tmp_path / "out"), "--verify"]) == 0
    # And one that no family is like.
    run = ["--run_dir", str(tmp_path / "odd"), "--model.norms.type", "layer"]
    assert main([*(f"--{k}={v}" for k, v in options.items() if k != "run_dir"), *run]) == 0
    assert "cannot be exported to Hugging Face's format: no" in capsys.readouterr().out
    assert convert.main(["bptjax-to-hf", str(tmp_path / "odd"), str(tmp_path / "no")]) == 2
    assert "no Hugging Face family has model.norms.type=layer" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_files_are_read_where_torch_is(llama, tmp_path, monkeypatch, dtype):
    torch = pytest.importorskip("torch")
    directory = llama(dtype=dtype)
    old = tmp_path / "old"
    shutil.copytree(directory, old)
    found = Tensors(directory)
    state = {
        n: torch.tensor(found.read(n).astype(np.float32)).to(getattr(torch, dtype))
        for n in found.specs
    }
    (old / "model.safetensors").unlink()
    torch.save(state, old / "pytorch_model.bin")
    assert tensors(there_and_back(old, tmp_path)) == tensors(directory)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pytorch_model.bin needs torch, which is not installed"):
        Tensors(old)


def test_notes_on_lengths(llama):
    """Lengths that do not fit the positions give a warning."""
    base = str(llama(max_position_embeddings=64, rope_parameters=dict(rope_theta=1e6)))

    def warnings(seq_len, **model):
        wanted = ModelConfig(name_or_path=base, **model)
        config = replace(Config(), model=wanted, train=TrainConfig(seq_len=seq_len)).on("cpu")
        pretrained = open_pretrained(wanted)
        mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
        notes = describe_model(TrainSpec(config, pretrained.config, mesh, pretrained), None)
        return [line for line in notes if "position" in line]

    assert warnings(64) == []
    (line,) = warnings(128)
    assert line.startswith("warning: train.seq_len=128 is beyond the model's 64 positions; set ")
    line, *others = warnings(128, extend_to=128)
    assert others == [] and line.endswith("128 positions, rope_theta 2,520,000")
    _, line = warnings(96, extend_to=128)
    assert line == (
        "warning: train.seq_len=96: positions from there to model.extend_to=128 are not trained"
    )
