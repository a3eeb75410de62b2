"""PEFT's adapters: read and written, they give PEFT's logits, alone and merged."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiers import fast

from bptjax.cli import convert
from bptjax.cli.generate import main as generate
from bptjax.cli.train import main
from bptjax.config import Config
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.run import progress
from bptjax.training.checks import check_adapter
from bptjax.training.spec import TrainSpec
from bptjax.weights.adapter_export import remedy_for_peft, write_adapter
from bptjax.weights.hf.peft import WEIGHTS, read_peft, write_peft
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG, BASE_CONFIG
from bptjax.weights.lora import AdapterConfig
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import FAMILIES, LONG, SHORT, auto_model, config
from weights.hf.loading import contents, load, random_base

# Of PEFT with this transformers, and where it corrects a default.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
    # It looks for these keys among the modules alone, not among the parameters.
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*alpha_pattern keys did not match.*:RuntimeWarning"),
]
# PEFT's all-linear would adapt some routers too.
EXPERTS = dict(
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
)
DECODERS = [name for name in FAMILIES.values() if name not in ("bert", "vit")]


@pytest.fixture(scope="module")
def peft():
    pytest.importorskip("torch", reason="PEFT needs torch")
    return pytest.importorskip("peft")


def adapted(peft, model, directory, **settings):
    """PEFT's model, all of its matrices random, saved in `directory`."""
    import torch

    # A multimodal model has adapters in its text model only.
    wrapped = hasattr(model.config, "text_config")
    targets = r".*language_model.*_proj" if wrapped else "all-linear"
    made = peft.get_peft_model(
        model, peft.LoraConfig(**dict(r=4, lora_alpha=6, target_modules=targets) | settings)
    ).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    return made


def logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def ours(directory, tokens, **wanted):
    model = load(directory, **wanted)

    @jax.jit
    def run(model):
        return model.logits(model(jnp.asarray(tokens))[0])

    return np.asarray(run(model))


def close(got, wanted):
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.fixture
def pretrained(theirs):
    """A fresh copy of transformers' model, which PEFT changes, and its directory."""

    def make(name):
        _, directory = theirs(name)
        how = "sdpa" if name.startswith("falcon") else "eager"
        return auto_model(name).from_pretrained(directory, attn_implementation=how), directory

    return make


@pytest.mark.parametrize("name", fast(DECODERS, ["llama", "mixtral"]))
def test_there_and_back(peft, pretrained, tmp_path, tokens, name):
    """Theirs read here; written again and read by them; merged here, and by them."""
    model, base = pretrained(name)
    plain = logits(model, tokens)
    text = model.config.get_text_config()
    experts = any(getattr(text, key, 0) for key in ("num_experts", "n_routed_experts"))
    # A map for all layers at once, which takes no adapter here.
    settings = EXPERTS if experts else {}
    if getattr(text, "hidden_size_per_layer_input", 0):
        settings = settings | dict(exclude_modules=["per_layer_model_projection"])
    made = adapted(peft, model, tmp_path / "theirs", **settings)
    wanted = logits(made, tokens)
    assert np.abs(wanted - plain).max() > 0.01 * np.abs(plain).max()
    close(ours(tmp_path / "theirs", tokens), wanted)

    read = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "theirs")))
    (tmp_path / "back").mkdir()
    write_peft(tmp_path / "back", read.adapters, read.family, read.config, str(base))
    again = peft.PeftModel.from_pretrained(pretrained(name)[0], tmp_path / "back").eval()
    close(logits(again, tokens), wanted)
    adapters = ({n for n, _ in m.named_parameters() if "lora_" in n} for m in (made, again))
    assert next(adapters) == next(adapters)
    same = read_peft(tmp_path / "back", read.family, read.config)
    for path, values in read.adapters.values.items():
        for x, y in zip(values, same.values[path], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)

    assert convert.main(["merge-adapter", str(tmp_path / "theirs"), str(tmp_path / "merged")]) == 0
    merged = auto_model(name).from_pretrained(tmp_path / "merged").eval()
    for key, x in made.merge_and_unload().state_dict().items():
        y = merged.state_dict()[key]
        assert (x - y).abs().max() <= 1e-6 * x.abs().max(), key


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
LONGROPE = dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG)
# What a training config may set beside a checkpoint, and whether PEFT needs the changed config.
CHANGED = {
    "llama": (dict(rope_parameters=YARN), True),
    "qwen2": (dict(rope_parameters=dict(rope_theta=50.0)), True),
    "llama: dynamic, beyond its positions": (
        dict(rope_parameters=dict(rope_type="dynamic", factor=50.0)),
        True,
    ),
    "gemma3": (dict(rope_parameters=dict(rope_type="linear", factor=8.0)), True),
    "gpt_neox": (dict(rope_parameters=dict(rope_type="linear", factor=8.0)), True),
    "qwen3_vl": (dict(rope_parameters=YARN, max_position_embeddings=64), True),
    "phi3": (dict(rope_parameters=LONGROPE), True),
    "phi3: another original length": (
        dict(rope_parameters=LONGROPE | dict(original_max_position_embeddings=8)),
        True,
    ),
    "gpt2": (dict(max_position_embeddings=100), False),
    "opt": (dict(max_position_embeddings=100, residual_dropout=0.3), False),
    "bloom": (dict(attention_dropout=0.1, embedding_dropout=0.2, init_std=0.1), False),
}


@pytest.mark.parametrize("name", fast(CHANGED, ["llama"]))
def test_a_base_with_a_changed_config(peft, pretrained, tmp_path, tokens, name):
    """The export holds the changed config: PEFT with it, and our own reading, give our logits."""
    import transformers

    model, base = pretrained(name.removesuffix(": another original length"))
    changed, needed = CHANGED[name]
    plain = adapted(peft, model, tmp_path / "plain")
    wanted = ModelConfig(name_or_path=str(tmp_path / "plain"), **changed)
    trained = open_pretrained(wanted)
    (tmp_path / "adapter").mkdir()
    write_adapter(trained, tmp_path / "adapter")
    right = ours(tmp_path / "plain", tokens, **changed)
    again = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "adapter")))
    assert again.config == trained.config
    assert np.array_equal(ours(tmp_path / "adapter", tokens), right)
    # What a training config sets holds before what the adapter was trained with.
    other = ModelConfig(name_or_path=str(tmp_path / "adapter"), residual_dropout=0.4)
    assert open_pretrained(other).config == replace(trained.config, residual_dropout=0.4)

    kind, text = auto_model(name.partition(":")[0]), remedy_for_peft(trained, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "config.json").exists() == needed
    if needed:
        call = f"{str(base)!r}, config=AutoConfig.from_pretrained({str(tmp_path / 'adapter')!r})"
        assert f"{kind.__name__}.from_pretrained({call})" in text
        assert np.abs(right - logits(plain, tokens)).max() > 0.01 * np.abs(right).max()
        raw = transformers.AutoConfig.from_pretrained(tmp_path / "adapter")
        raw._attn_implementation = "eager"
        model = kind.from_pretrained(base, config=raw)
    else:
        assert ("merge-adapter" in text) == ("max_position_embeddings" in changed)
        model = kind.from_pretrained(base, attn_implementation="eager")
    made = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    close(logits(made, tokens), right)

    # And merged, on all positions.
    rng = np.random.default_rng(1)
    long = rng.integers(3, 61, (1, changed.get("max_position_embeddings", 21)))
    assert convert.main(["merge-adapter", str(tmp_path / "adapter"), str(tmp_path / "m")]) == 0
    merged = kind.from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    close(logits(merged, long), ours(tmp_path / "adapter", long))


def test_an_unchanged_base_needs_no_config(peft, pretrained, tmp_path):
    model, _ = pretrained("llama")
    adapted(peft, model, tmp_path / "plain")
    trained = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "plain")))
    write_adapter(trained, tmp_path)
    assert not remedy_for_peft(trained, tmp_path)
    assert not (tmp_path / BASE_CONFIG).exists() and not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object"),
        ('{"rope_param', "is damaged"),
        ('{"rope_parameters": 3}', "is damaged: rope_parameters=3"),
        ('{"max_position_embeddings": "x"}', "is damaged"),
        ('{"something": 1}', "is damaged"),
        ('{"hidden_size": 64}', r"model.hidden_size=64.*determines it"),
    ],
)
def test_a_damaged_config_of_the_base_is_named(tmp_path, content, message):
    base = random_base(tmp_path / "base", of_bytes("llama"))
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(dict(base_model_name_or_path=str(base))))
    (tmp_path / BASE_CONFIG).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))


def test_patterns(peft, pretrained, tmp_path, tokens):
    """Ranks and scales of one layer's module, of every layer's, and layers without an adapter."""
    settings = dict(
        rank_pattern={"q_proj": 8, "layers.1.mlp.up_proj": 2},
        alpha_pattern={"layers.0.self_attn.o_proj": 3, "up_proj": 5},
        target_modules=["q_proj", "o_proj", "up_proj"],
        use_rslora=True,
    )
    made = adapted(peft, pretrained("llama")[0], tmp_path / "a", **settings)
    close(ours(tmp_path / "a", tokens), logits(made, tokens))
    merge = ["merge-adapter", str(tmp_path / "a"), str(tmp_path / "few"), "--dtype", "bfloat16"]
    assert convert.main([*merge, "--verify"]) == 0
    some = dict(target_modules=["v_proj", "down_proj"], layers_to_transform=0)
    made = adapted(peft, pretrained("llama")[0], tmp_path / "b", **some)
    close(ours(tmp_path / "b", tokens), logits(made, tokens))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    text = "".join(f"{i} plus {i % 7} is {i + i % 7}. " for i in range(200))
    (folder / "text.txt").write_text(text)
    options = {
        "device": "cpu",
        "data.path": folder / "text.txt",
        "data.tokenizer": "byte",
        "data.packing": "none",
        "train.max_steps": 6,
        "train.seq_len": 48,
        "train.per_device_train_batch_size": 2,
        "optimizer.learning_rate": 0.02,
        "checkpoint.save_steps": 3,
        "execution.q_chunk": 48,
        "execution.k_chunk": 48,
    }
    return [f"--{key}={value}" for key, value in options.items()]


def of_bytes(name):
    raw = config(name)
    raw.vocab_size = ByteTokenizer.vocab_size
    return raw


@pytest.mark.thorough
def test_a_run_resumes_generates_merges_and_exports(
    arguments, tmp_path, tokens, monkeypatch, capsys
):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    monkeypatch.setenv("HOME", str(tmp_path))
    clock = itertools.count(0.0, progress.EVERY)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    base = random_base(tmp_path / "base", of_bytes("llama"))
    command = [*arguments, f"--model.name_or_path={base}", "--adapter.type=qlora"]
    command += ['--model.rope_parameters={"rope_type": "linear", "factor": 4.0}']
    run = tmp_path / "run"
    command += ["--run_dir=~/run", "--adapter.target_modules=[query_key_value]"]
    assert main(command) == 2
    assert "adapter.target_modules=query_key_value: must be one of" in capsys.readouterr().err
    command[-1] = "--adapter.target_modules=[q_proj,up_proj]"
    assert main(command) == 0
    log = (run / "log.txt").read_text()
    assert " of them trained (" in log
    out = capsys.readouterr().out
    assert "\nloading weights: " in out and "\nevaluating: " in out
    assert log.count("the adapter was trained with a changed base model") == 1
    saved = [p.name for p in (run / "checkpoints" / "6" / "state").iterdir()]
    assert not any("embedding" in name or "codes" in name for name in saved)
    losses = (run / "metrics.jsonl").read_text().splitlines()

    import shutil

    wanted = [json.loads(line) for line in losses]
    shutil.rmtree(run / "checkpoints" / "6")
    assert main(command) == 0
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(wanted, again, strict=True):
        assert all(a[k] == b[k] for k in a if k.endswith("/loss"))

    assert generate(["--model", str(run), "--prompt", "1 plus", "--max-new-tokens", "3"]) == 0
    got = ours(run, tokens)
    assert convert.main(["merge-adapter", str(run), str(tmp_path / "merged")]) == 0
    close(got, ours(tmp_path / "merged", tokens))
    assert convert.main(["bptjax-to-hf", str(run), str(tmp_path / "x")]) == 2
    assert "merge-adapter or export-adapter" in capsys.readouterr().err

    # PEFT's files are for the base as it is in the directory, not in few bits.
    capsys.readouterr()
    assert convert.main(["export-adapter", str(run), str(tmp_path / "adapter")]) == 0
    assert "the adapter was trained with a changed base model" in capsys.readouterr().out
    assert contents(run / "adapter") == contents(tmp_path / "adapter")
    more = [f"--run_dir={tmp_path / 'more'}", f"--model.name_or_path={tmp_path / 'adapter'}"]
    assert main([*arguments, *more]) == 2
    assert "set adapter.type" in capsys.readouterr().err
    assert main([*arguments, *more, "--adapter.type=qlora", "--adapter.r=3"]) == 2
    assert "adapter.r=3" in capsys.readouterr().err
    assert main([*arguments, *more, "--adapter.type=qlora"]) == 0
    last = [json.loads(x) for x in (tmp_path / "more" / "metrics.jsonl").read_text().splitlines()]
    assert convert.main(["export-adapter", str(tmp_path / "more"), str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "more" / "adapter") == contents(tmp_path / "again")
    first, final = last[0]["eval/loss"], wanted[-1]["eval/loss"]
    assert abs(first - final) < 1e-4 * final

    # Another base is refused.
    array = load_file(base / "model.safetensors")
    save_file({k: v + 1e-3 for k, v in array.items()}, base / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "6")
    assert main(command) == 2
    assert "must have the weights" in capsys.readouterr().err
    assert convert.main(["merge-adapter", str(run), str(tmp_path / "x")]) == 2
    assert "must have the weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_an_encoder_gets_no_adapter(theirs, arguments, tmp_path, capsys, name):
    base = theirs(name)[1]
    run = tmp_path / "run"
    flags = [f"--model.name_or_path={base}", f"--run_dir={run}", "--adapter.type=lora"]
    assert main([*arguments, *flags]) == 2
    assert "adapter.type=lora: must be none for an encoder" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(use_dora=True), "use_dora=True is not supported"),
        (dict(modules_to_save=["norm"]), "modules_to_save=norm"),
        (dict(encoder_hidden_size=40, peft_type="P_TUNING"), "peft_type='P_TUNING'"),
        (dict(bias="all"), "bias='all'"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (dict(something_new=[1]), "something_new="),
        (dict(r="2"), "r='2' is not supported"),
        (dict(r=0), "r=0 is not supported"),
        (dict(lora_alpha=None), "lora_alpha=None is not supported"),
        (dict(alpha_pattern=dict(q_proj="1")), "alpha_pattern="),
        (dict(rank_pattern={"(": 1}), "rank_pattern="),
        (
            dict(base_model_name_or_path="adapter"),
            "base_model_name_or_path=adapter: must be a checkpoint of a supported family",
        ),
        (dict(r=3), "must be .*, not .*; check r=3 and base_model_name_or_path='.*base'"),
        (
            dict(layers_to_transform=None),
            "adapters of model.layers.1.self_attn.q_proj; check base_model_name_or_path='.*base'",
        ),
        (dict(base_model_name_or_path=None), "must have base_model_name_or_path"),
        ("lm_head", "lm_head.lora_A.weight.*; the model is base_model_name_or_path='.*base'"),
    ],
    ids=str,
)
def test_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_small_adapter(tmp_path, change)


def open_small_adapter(tmp_path, change):
    """Opens an adapter of a llama's first query projection, with changed keys of its config, or, if
    `change` is "lm_head", with low-rank matrices of the head too."""
    base = random_base(tmp_path / "base", of_bytes("llama"))
    raw = dict(peft_type="LORA", r=2, lora_alpha=2, bias="none", base_model_name_or_path=str(base))
    raw |= dict(target_modules=["q_proj"], layers_to_transform=[0])
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    arrays = {name.format(x): np.ones(s, np.float32) for x, s in (("A", (2, 32)), ("B", (32, 2)))}
    if change == "lm_head":
        arrays |= {f"base_model.model.lm_head.lora_{x}.weight": np.ones((2, 2)) for x in "AB"}
    else:
        raw |= change
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text(json.dumps(raw, sort_keys=True))
    save_file(arrays, tmp_path / "adapter" / WEIGHTS)
    return open_pretrained(ModelConfig(name_or_path=str(tmp_path / "adapter")))


def test_an_adapter_decides_its_settings(tmp_path):
    """Settings left at their defaults are accepted, and so is the alpha of scale 1 that saved
    configs of earlier versions name."""
    pretrained = open_small_adapter(tmp_path, {})

    def check(**settings):
        config = Config(adapter=AdapterConfig(type="lora", **settings))
        mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
        check_adapter(TrainSpec(config, pretrained.config, mesh, pretrained))

    check()
    check(alpha=8.0)
    for settings in (
        dict(r=2),
        dict(alpha=2.0),
        dict(use_rslora=True),
        dict(target_modules=["q_proj"]),
        dict(modules_to_save=["embed_tokens"]),
    ):
        with pytest.raises(ValueError, match=f"adapter.{[*settings][0]}=.*: must not be set"):
            check(**settings)
