"""Rotary overrides: transformers computes the same from what is exported, or the run is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import rope_exports
from rope_exports import FAMILIES, MORE, OVERRIDES, TOKENS, TRAINED
from tiers import fast

from bptjax.models.config import ModelConfig
from bptjax.models.layers import rotary
from bptjax.ops.position import rope
from bptjax.run.json_files import read_json
from bptjax.training.checks import check_model
from bptjax.weights.hf.config import merge, read_config
from bptjax.weights.hf.config_export import exported, same_rope

REFUSED = {
    "dynamic, max": "must stay 32 with rope_type=dynamic",
    "dynamic, original": "reads no other length; leave it out",
    "yarn without factor": "rope_type=yarn needs a factor",
}
# transformers has no other scaling in this family.
PHI3 = ("theta", "theta, max", "extend_to", "longrope")


def refusal(family: str, override: str) -> str | None:
    if family == "phi3" and not override.startswith(PHI3) and override not in REFUSED:
        return "transformers refuses it: .*must be one of|transformers refuses it: .*Missing"
    return REFUSED.get(override)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """The name of a family, and a directory with its config.json."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("base")
    name, keys = FAMILIES[request.param]
    keys = keys | MORE.get(request.param, {}) | dict(max_position_embeddings=TRAINED)
    getattr(transformers, name)(**keys).save_pretrained(directory)
    return request.param, directory


def theirs(raw: dict, length: int) -> list[np.ndarray]:
    """cos and sin of `length` positions in transformers' own module, for each layer type."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    model = transformers.AutoModelForCausalLM.from_config(config)
    (module,) = (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    kinds = [None]
    if raw["model_type"] == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]

    def turned(kind):
        more = {} if kind is None else {"layer_type": kind}
        with torch.no_grad():
            found = module(torch.zeros(1), torch.arange(length)[None], **more)
        return np.stack([x.numpy() for x in found])

    return [turned(kind) for kind in kinds]


def ours(config: ModelConfig, length: int) -> list[np.ndarray]:
    """The same of each kind of layer, from what `rope` makes of unit vectors."""
    positions, found = jnp.arange(length)[None], []
    for parameters in config.ropes:
        lengths = jnp.full_like(positions, length)
        frequencies, factor = rotary(config, parameters, lengths)
        R = frequencies.shape[-1]
        ones = np.zeros((1, length, 1, 2 * R), np.float32)
        ones[..., :R] = 1
        turned = np.asarray(rope(jnp.asarray(ones), positions, frequencies, factor))[:, :, 0]
        cos, sin = turned[..., :R], turned[..., R:]
        found.append(np.stack([np.concatenate([x, x], -1) for x in (cos, sin)]))
    return found


@pytest.mark.parametrize("override", fast(OVERRIDES, ["yarn, original"]))
def test_transformers_rotates_alike(family, override, tmp_path):
    pytest.importorskip("torch")
    name, directory = family
    _, read = read_config(directory)
    raw = read_json(directory / "config.json")
    wanted = ModelConfig(name_or_path=str(directory), **OVERRIDES[override])
    if message := refusal(name, override):
        with pytest.raises(ValueError, match=message):
            now = merge(read, wanted)
            check_model(now, None)
            exported(raw, read, now)
        return
    now = merge(read, wanted)
    check_model(now, None)
    new = exported(raw, read, now)
    # On either side of the original lengths.
    for length in (10, TOKENS):
        each, parts = ours(now, length), theirs(new, length)
        # Gemma 2 has two kinds of layers that rotate alike.
        for got, true in zip(each, parts * (len(each) // len(parts)), strict=True):
            np.testing.assert_allclose(got, true, rtol=0, atol=2e-5)
    (tmp_path / "config.json").write_text(json.dumps(new))
    _, back = read_config(tmp_path)
    assert same_rope(back, now) and back.max_position_embeddings == now.max_position_embeddings


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("phi3", "longrope, original, max"),
        ("llama", "yarn without factor, max"),
        ("gemma3_text", "dynamic"),
    ],
)
def test_logits_of_exports(name, override, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    tokens = np.random.default_rng(0).integers(3, 61, (2, TOKENS))
    rope_exports.base(name, tmp_path / "base")
    tokenizer = {"model_max_length": TRAINED, "kept": "é"}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    wanted = rope_exports.export(tmp_path / "base", OVERRIDES[override], tmp_path / "out", tokens)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        got = model(torch.tensor(tokens)).logits.numpy()
    assert rope_exports.off(got, wanted) < 1e-4
    assert rope_exports.off(rope_exports.read_back(tmp_path / "out", tokens), wanted) < 1e-6
    length = model.config.max_position_embeddings
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said == {"model_max_length": length, "kept": "é"}


def test_older_readers_get_their_own_keys(tmp_path):
    """transformers 4, and what reads like it, knows rope_theta and rope_scaling alone."""
    transformers = pytest.importorskip("transformers")

    def keys(name, **override):
        directory = tmp_path / name
        kind, sizes = FAMILIES[name]
        getattr(transformers, kind)(**sizes | MORE.get(name, {})).save_pretrained(directory)
        _, read = read_config(directory)
        raw = read_json(directory / "config.json") | {"transformers_version": "4.1.0"}
        return exported(raw, read, merge(read, ModelConfig(name_or_path=name, **override)))

    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    llama = keys("llama", rope_parameters=yarn | {"rope_theta": 5e5}, max_position_embeddings=64)
    assert llama["rope_theta"] == 5e5 and llama["rope_scaling"] == yarn
    assert llama["max_position_embeddings"] == 64
    assert llama["transformers_version"] == transformers.__version__
    neox = keys("gpt_neox", rope_parameters={"rope_theta": 5e5})
    assert neox["rotary_emb_base"] == 5e5 and neox["rotary_pct"] == 1.0
    assert neox["rope_scaling"] is None
    gemma3 = keys("gemma3_text", rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert gemma3["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (gemma3["rope_theta"], gemma3["rope_local_base_freq"]) == (1e6, 1e4)
    longrope = rope_exports.LONGROPE | rope_exports.ORIGINAL
    phi3 = keys("phi3", rope_parameters=longrope, max_position_embeddings=64)
    assert phi3["rope_scaling"] == {"type": "longrope"} | rope_exports.LISTS
    assert phi3["original_max_position_embeddings"] == 16


def test_more_positions_without_a_scaling_keep_the_original_length(tmp_path):
    """A file that leaves the original length out means its number of positions, which changes."""
    transformers = pytest.importorskip("transformers")
    name, keys = FAMILIES["llama"]
    raw = getattr(transformers, name)(**keys).to_dict()
    raw |= dict(rope_parameters=None, rope_theta=1e4, max_position_embeddings=TRAINED)
    raw |= dict(rope_scaling=dict(rope_type="yarn", factor=4.0), model_type="llama")
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    _, read = read_config(tmp_path)
    now = merge(read, ModelConfig(name_or_path="it", max_position_embeddings=128))
    (tmp_path / "config.json").write_text(json.dumps(exported(raw, read, now), default=str))
    assert same_rope(read_config(tmp_path)[1], now)
