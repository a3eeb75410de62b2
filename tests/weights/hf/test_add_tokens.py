"""Added tokens: a larger tokenizer and embedding, trained in full or beside adapters."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiers import fast

from bptjax.cli import convert
from bptjax.cli.generate import main as generate
from bptjax.cli.preview import main as preview
from bptjax.cli.train import main
from bptjax.data.tokenizer import ByteTokenizer, add_tokens, load_tokenizer
from bptjax.models.config import ModelConfig
from bptjax.models.params import resize_param
from bptjax.weights.adapter_export import remedy_for_peft, write_adapter
from bptjax.weights.hf.peft import WEIGHTS
from bptjax.weights.hf.peft_config import ADAPTER_CONFIG
from bptjax.weights.pretrained import open_pretrained
from weights.hf.cases import config
from weights.hf.loading import contents, random_base
from weights.hf.test_peft import adapted, close, logits, ours, peft, pretrained  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
    # PEFT's, where input and output embedding are tied.
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*embedding layer.*:UserWarning"),
]
# Names of the embeddings; the output embedding's too where the model ties them.
ENDS = {
    "llama": ["embed_tokens", "lm_head"],
    "qwen2: yarn, tied": ["embed_tokens", "lm_head"],
    "gpt2": ["wte", "lm_head"],
    "gpt_neox": ["embed_in", "lm_head"],
    "bloom": ["word_embeddings", "lm_head"],
    "opt": ["embed_tokens", "lm_head"],
}


def randomized(made, tied):
    """Random embeddings beside PEFT's adapters; of a tied model, the same at both ends."""
    import torch

    torch.manual_seed(2)
    with torch.no_grad():
        names = [n for n, _ in made.named_parameters() if "modules_to_save" in n]
        made_of = dict(made.named_parameters())
        for name in names:
            made_of[name].add_(0.1 * torch.randn_like(made_of[name]))
        if tied:
            for name in names[1:]:
                made_of[name].copy_(made_of[names[0]])
    return names


@pytest.mark.parametrize(
    ("name", "added"),
    fast([("llama", 0), ("gpt2", 0), *((n, 3) for n in ENDS)], [("llama", 3), ("gpt2", 0)]),
)
def test_embeddings_of_peft_there_and_back(peft, pretrained, tmp_path, tokens, name, added):  # noqa: F811
    model, base = pretrained(name)
    V, tied = model.config.vocab_size, model.config.tie_word_embeddings
    if added:
        model.resize_token_embeddings(V + added)
    settings = dict(r=4, lora_alpha=6, target_modules="all-linear", modules_to_save=ENDS[name])
    made = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    assert len(randomized(made, tied)) == 2
    made.save_pretrained(tmp_path / "theirs")
    tokens = np.concatenate([tokens, np.full((2, 1), V + added - 1)], 1)
    wanted = logits(made, tokens)
    close(ours(tmp_path / "theirs", tokens), wanted)

    read = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "theirs")))
    assert read.config.vocab_size == V + added
    assert read.adapters.modules.keys() == ({"embedding"} if tied else {"embedding", "head"})
    (tmp_path / "back").mkdir()
    write_adapter(read, tmp_path / "back")
    if name == "gpt_neox":
        # As versions of transformers before 5 name the head.
        arrays = load_file(tmp_path / "theirs" / WEIGHTS)
        old = {n.replace("lm_head", "embed_out"): x for n, x in arrays.items()}
        save_file(old, tmp_path / "theirs" / WEIGHTS)
        raw = (tmp_path / "theirs" / ADAPTER_CONFIG).read_text().replace("lm_head", "embed_out")
        (tmp_path / "theirs" / ADAPTER_CONFIG).write_text(raw)
        close(ours(tmp_path / "theirs", tokens), wanted)
    text = remedy_for_peft(read, tmp_path / "back")
    assert (f"resize_token_embeddings({V + added})" in text) == bool(added)
    model, _ = pretrained(name)
    if added:
        model.resize_token_embeddings(V + added)
    again = peft.PeftModel.from_pretrained(model, tmp_path / "back").eval()
    close(logits(again, tokens), wanted)

    assert convert.main(["merge-adapter", str(tmp_path / "theirs"), str(tmp_path / "merged")]) == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == V + added
    close(ours(tmp_path / "merged", tokens), wanted)


def test_a_tied_head_that_is_not_the_embedding_is_refused(peft, pretrained, tmp_path):  # noqa: F811
    model, _ = pretrained("gpt2")
    settings = dict(target_modules=["c_fc"], fan_in_fan_out=True, modules_to_save=["wte"])
    made = peft.get_peft_model(model, peft.LoraConfig(**settings))
    randomized(made, False)
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ties its output embedding .* ensure_weight_tying"):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("listed", "arrays", "message"),
    [
        (["norm"], {}, "modules_to_save=norm: must be one of embed_tokens, lm_head"),
        (["lm_head"], {}, "must hold lm_head"),
        (["lm_head"], {"lm_head": (61, 31)}, r"head is \(61, 31\): must be \(61, 32\)"),
        (["lm_head"], {"lm_head": (64, 32)}, r"head is \(64, 32\): must be"),
        (["lm_head"], {"lm_head": (60, 32)}, r"head is \(60, 32\): must be"),
        (
            ["embed_tokens", "lm_head"],
            {"lm_head": (63, 32), "model.embed_tokens": (62, 32)},
            "must be .* as in the base model",
        ),
    ],
)
def test_refused(tmp_path, listed, arrays, message):
    base = random_base(tmp_path / "base", config("llama"))
    raw = dict(peft_type="LORA", r=2, lora_alpha=2, bias="none", base_model_name_or_path=str(base))
    raw |= dict(target_modules=["q_proj"], layers_to_transform=[0], modules_to_save=listed)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(raw))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    low = {name.format(x): np.ones(s, np.float32) for x, s in (("A", (2, 32)), ("B", (32, 2)))}
    whole = {f"base_model.model.{n}.weight": np.ones(s, np.float32) for n, s in arrays.items()}
    save_file(low | whole, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        open_pretrained(ModelConfig(name_or_path=str(tmp_path)))


def test_new_rows_are_the_mean_of_the_others():
    model = ModelConfig(vocab_size=5, hidden_size=4, num_heads=1)
    table = np.arange(12, dtype=np.float16).reshape(3, 4)
    grown = resize_param("embedding", table, model)
    assert grown.dtype == table.dtype and np.array_equal(grown[:3], table)
    assert np.array_equal(grown[3:], np.stack([table.mean(0)] * 2))
    assert np.array_equal(resize_param("head", table, model), grown)


WORDS = "one two three four plus is the a of and".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny llama with a Hugging Face tokenizer, and text with a word that it has no token for."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("words")
    words = {word: i for i, word in enumerate(["<s>", "</s>", "?", *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    raw = config("llama")
    raw.vocab_size = len(words)
    random_base(folder / "base", raw)
    fast.save_pretrained(folder / "base")
    (folder / "text.txt").write_text("one plus two is three <tool> four <tool> " * 60)
    return folder


def command(base, run, **more):
    options = {
        "run_dir": run,
        "device": "cpu",
        "model.name_or_path": base / "base",
        "model.add_tokens": "[<tool>,one,<tool>]",
        "data.path": base / "text.txt",
        "train.max_steps": 4,
        "train.seq_len": 24,
        "optimizer.learning_rate": 0.02,
        "checkpoint.save_steps": 2,
    } | more
    return [f"--{key}={value}" for key, value in options.items()]


@pytest.mark.thorough
def test_a_run_of_adapters_trains_the_new_rows(base, tmp_path, tokens, monkeypatch, capsys):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    run = tmp_path / "run"
    options = {"adapter.type": "lora", "adapter.target_modules": "[q_proj]"}
    assert main(command(base, run, **options)) == 0
    log = (run / "log.txt").read_text()
    assert "model.add_tokens: 1 new, the vocabulary has 14; in it already: 'one'" in log
    assert "model.resize_token_embeddings(14)" in log
    model = open_pretrained(ModelConfig(name_or_path=str(run)))
    assert model.config.vocab_size == 14
    table, old = model.adapters.modules["embedding"], load_file(base / "base/model.safetensors")
    start = resize_param("embedding", old["model.embed_tokens.weight"], model.config)
    assert np.abs(table[13] - start[13]).max() > 0.01
    assert model.adapters.modules["head"].shape == (14, 32)

    # Resumed, it is the same run.
    import shutil

    lines = (run / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(run / "checkpoints" / "4")
    assert main(command(base, run, **options)) == 0
    again = (run / "metrics.jsonl").read_text().splitlines()
    losses = [[json.loads(x).get("train/loss") for x in each] for each in (lines, again)]
    assert losses[0] == losses[1]

    # Its exports hold the larger tokenizer, and compute the same.
    tokens = np.concatenate([tokens % 13, np.full((2, 1), 13)], 1)
    got = ours(run, tokens)
    assert convert.main(["export-adapter", str(run), str(tmp_path / "adapter")]) == 0
    assert contents(run / "adapter") == contents(tmp_path / "adapter")
    assert convert.main(["merge-adapter", str(run), str(tmp_path / "merged")]) == 0
    for name in ("adapter", "merged"):
        close(ours(tmp_path / name, tokens), got)
        tokenizer = load_tokenizer(tmp_path / name)
        assert tokenizer.vocab_size == 14 and list(tokenizer.encode("two <tool>")) == [4, 13]
        prompt = ["--prompt", "one <tool>", "--max-new-tokens", "2"]
        assert generate(["--model", str(tmp_path / name), *prompt]) == 0

    # More tokens, on top of them.
    more = options | {"model.name_or_path": tmp_path / "adapter", "model.add_tokens": "[<more>]"}
    del more["adapter.target_modules"]
    assert main(command(base, tmp_path / "more", **more)) == 0
    assert list(load_tokenizer(tmp_path / "more").encode("<tool> <more>")) == [13, 14]
    later = open_pretrained(ModelConfig(name_or_path=str(tmp_path / "more")))
    assert later.config.add_tokens == ["<tool>", "one", "<more>"]
    assert later.adapters.modules["embedding"].shape == (15, 32)


@pytest.mark.thorough
def test_peft_has_the_logits_of_a_run(base, peft, tmp_path, tokens, monkeypatch):  # noqa: F811
    import transformers

    # One of two devices has half of the rows of the embeddings and of their moments.
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:2])
    options = {"adapter.type": "lora", "train.max_steps": 2, "train.compute_dtype": "bfloat16"}
    assert main(command(base, tmp_path / "run", **options)) == 0
    tokens = np.concatenate([tokens % 13, np.full((2, 1), 13)], 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "base")
    model.resize_token_embeddings(14)
    made = peft.PeftModel.from_pretrained(model, tmp_path / "run" / "adapter").eval()
    close(logits(made, tokens), ours(tmp_path / "run", tokens))


@pytest.mark.thorough
def test_a_full_fine_tune_trains_the_new_rows(base, tmp_path, tokens):
    run = tmp_path / "run"
    assert main(command(base, run)) == 0
    assert convert.main(["bptjax-to-hf", str(run), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 14
    assert list(load_tokenizer(tmp_path / "out").encode("two <tool>")) == [4, 13]
    tokens = np.concatenate([tokens % 13, np.full((2, 1), 13)], 1)
    close(ours(tmp_path / "out", tokens), ours(run, tokens))
    assert generate(["--model", str(run), "--prompt", "<tool>", "--max-new-tokens", "2"]) == 0


def landmark(token):
    pattern = {"type": "landmark", "block_size": 8, "token": token}
    return {"model.attention_pattern": json.dumps(pattern)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data.tokenizer": "byte"}, "requires a Hugging Face tokenizer"),
        ({"model.add_tokens": "['']"}, "must not hold an empty string"),
        (landmark("snow"), "'snow': must be in the vocabulary, but the tokenizer reads it as '?'"),
        (landmark("<new>"), "'<new>': must be one token, not 3; choose another, or add it"),
        (landmark("</s>"), "token=1: must not be a token that ends a text"),
        (
            {"adapter.type": "lora", "adapter.modules_to_save": "[norm]"},
            "adapter.modules_to_save=norm: must be one of embed_tokens, lm_head",
        ),
        ({"adapter.modules_to_save": "[lm_head]"}, "adapter.modules_to_save"),
    ],
)
def test_impossible_options_are_refused(base, tmp_path, capsys, options, message):
    assert main(command(base, tmp_path / "run", **options)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_preview_shows_landmarks(base, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one plus two is three and four plus the one is two")
    options = {"model.add_tokens": "[<l>]", "data.path": tmp_path / "text.txt"} | landmark("<l>")
    options |= {"data.eval_path": base / "text.txt", "train.seq_len": 16}
    assert preview(command(base, tmp_path / "run", **options)) == 0
    first, *sequences = capsys.readouterr().out.split("as trained on")[1].split("sequence ")[:2]
    # 12 words in 2 blocks, whose last landmarks follow the end of the text.
    assert "16 tokens" in first and "four]] <l>[[ plus the one is two </s>]] <l> <l>" in first
    assert "four]] <l>[[ plus" in sequences[0]


def test_byte_tokenizers_take_no_tokens():
    assert add_tokens(ByteTokenizer(), []) == []
