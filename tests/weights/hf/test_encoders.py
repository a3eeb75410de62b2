"""Checkpoints of encoders: positions, old keys of config.json, training."""

import json
import shutil

import numpy as np
import pytest
from ops.comparing import quick

from bptjax.cli.convert import main as convert
from bptjax.cli.train import main
from bptjax.models.config import ModelConfig
from bptjax.run.json_files import read_json
from bptjax.weights.hf.config import read_config
from bptjax.weights.hf.config_export import exported, same_rope
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.pretrained import open_pretrained
from weights.hf.loading import load


def test_positions_follow_the_entry_of_padding(theirs):
    """Packed documents have the positions of separate ones, 0 at entry 2 of the table."""
    torch = pytest.importorskip("torch")
    model, directory = theirs("roberta")
    tokens = np.random.default_rng(1).integers(3, 61, (1, 12))
    segments = np.repeat([[1, 2, 0]], [5, 4, 3], axis=1)
    positions = np.concatenate([np.arange(5), np.arange(4), np.zeros(3, int)])[None]
    encoder = load(directory)

    @quick
    def run(encoder, tokens, **places):
        return encoder.logits(encoder(tokens, **places)[0])

    got = np.asarray(run(encoder, tokens, positions=positions, segments=segments))
    for part in slice(5), slice(5, 9):
        with torch.no_grad():
            wanted = model(torch.tensor(tokens[:, part])).logits.numpy()
        assert np.abs(got[:, part] - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.thorough
def test_more_positions_than_the_checkpoint(theirs, tmp_path, one_device):
    """A run with longer sequences: transformers reads the export with the same logits."""
    pytest.importorskip("torch")
    directory = shutil.copytree(theirs("roberta")[1], tmp_path / "base")
    (tmp_path / "text.txt").write_text("some bytes " * 40)
    raw = read_json(directory / "config.json") | dict(vocab_size=257)
    found = Tensors(directory)
    arrays = {name: found.read(name) for name in found.specs}
    rows = {n: x for n, x in arrays.items() if len(x) == 61 and n.startswith(("roberta.emb", "lm"))}
    arrays |= {n: np.concatenate([x] * 5)[:257] for n, x in rows.items()}
    from safetensors.numpy import save_file

    save_file(arrays, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    config = dict(
        run_dir=str(tmp_path / "run"),
        device="cpu",
        model=dict(name_or_path=str(directory), max_position_embeddings=80),
        data=dict(path=str(tmp_path / "text.txt"), tokenizer="byte"),
        train=dict(seq_len=80, max_steps=1, per_device_train_batch_size=8),
        execution=dict(q_chunk=40, k_chunk=40),
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([f"--config={tmp_path / 'config.json'}"]) == 0
    out = tmp_path / "out"
    assert convert(["bptjax-to-hf", str(tmp_path / "run"), str(out), "--verify"]) == 0
    assert read_json(out / "config.json")["max_position_embeddings"] == 82
    name = "roberta.embeddings.position_embeddings.weight"
    old, new = arrays[name], Tensors(out).read(name)
    assert new.shape == (82, 32)
    # Nothing looks the entries before position 0 up; weight decay is 0.
    np.testing.assert_array_equal(new[:2], old[:2])


def test_old_keys_of_a_modernbert_are_read(theirs, tmp_path):
    """As answerdotai/ModernBERT-base has them."""
    _, directory = theirs("modernbert")
    raw = read_json(directory / "config.json")
    for key in ("layer_types", "rope_parameters"):
        del raw[key]
    raw |= dict(global_attn_every_n_layers=3, global_rope_theta=160000.0, local_rope_theta=10000.0)
    raw |= dict(layer_norm_eps=1e-5, position_embedding_type="absolute", classifier_pooling="mean")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read = read_config(tmp_path)[1]
    assert read == read_config(directory)[1]
    assert [kind.window for kind in read.layer_kinds] == [None, 4, 4, None, 4]
    absent = [kind.absent for kind in read.layer_kinds]
    assert absent == [("attention_norm",), (), (), (), ()]
    assert read.layer_kinds[1].rope["rope_theta"] == 1e4


def test_longer_rotary_positions_of_a_modernbert(theirs, tmp_path):
    _, directory = theirs("modernbert")
    yarn = dict(rope_type="yarn", factor=4.0)
    wanted = dict(max_position_embeddings=256, rope_parameters=yarn)
    found = open_pretrained(ModelConfig(name_or_path=str(directory), **wanted))
    raw = exported(read_json(directory / "config.json"), found.read_as, found.config)
    assert raw["global_rope_theta"] == 160000.0 and raw["local_rope_theta"] == 10000.0
    (tmp_path / "config.json").write_text(json.dumps(raw))
    back = read_config(tmp_path)[1]
    assert same_rope(back, found.config) and "yarn" in back.rope_types


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("modernbert", dict(attention_dropout=0.1), "attention_dropout=0.1: must be 0.0"),
        ("modernbert", dict(classifier_activation="relu"), "classifier_activation='relu': must be"),
        ("roberta", dict(hidden_act="relu"), "hidden_act='relu': must be 'gelu'"),
        ("vit", dict(pooler_act="elu"), "pooler_act='elu': must be one of tanh, gelu, relu, silu"),
        ("bert", dict(is_decoder=True), "is_decoder=True: must be False"),
        ("bert", dict(type_vocab_size=0), "type_vocab_size=0: must be at least 1"),
        ("bert", dict(architectures=["BertForTokenClassification"]), "must be one of BertModel, B"),
    ],
)
def test_keys_that_change_the_result_are_refused(theirs, tmp_path, name, change, message):
    raw = read_json(theirs(name)[1] / "config.json") | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
