"""Generation: greedy tokens as transformers', chunked prefill, sampling, the command line."""

import functools
import itertools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast
from weights.hf.cases import CASES
from weights.hf.conftest import theirs  # noqa: F401 (a fixture)
from weights.hf.loading import load

from bptjax.cli import generate as command
from bptjax.models import prefill
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder
from bptjax.models.execution import Execution
from bptjax.models.generation import continuations, generate
from bptjax.models.sampling import Sampling
from bptjax.weights import loading

SMALL = Execution(q_chunk=8, k_chunk=8, ffn_chunk=10)
GREEDY = Sampling(temperature=0.0)
KEY = jax.random.key(0)
# Families' first case, and all whose options decoding has to know of.
WORDS = "window,", "dynamic", "longrope, long", "6 heads, par"
# Decoding needs a cache, positions and windows. These families handle them as "llama" or a case of
# another family does. The rest of their layers reads one token at a time, as test_parity.py checks.
ALIKE = {
    *("mistral", "mistral: no window, tied", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmoe"),
    *("gemma", "phi", "phi3", "seed_oss", "stablelm", "starcoder2", "ernie4_5", "granite"),
    *("olmo2", "glm4", "glm4_moe", "gpt_neox", "falcon", "gemma3", "olmo3", "qwen3_5", "mistral3"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "gemma4_text with experts", "gemma4"),
    *("gemma4 with experts", "gemma4_unified", "gemma4_unified_text", "starcoder2: window, untied"),
    *("qwen3_moe: window, yarn, every expert", "phi3: window, partial rotary", "ministral3"),
}
DECODED = [
    name
    for name in CASES
    if (":" not in name or any(word in name for word in WORDS)) and name not in ALIKE
]


@pytest.mark.parametrize("name", fast(DECODED, ["gemma4_text"]))
def test_greedy_tokens_match_transformers(theirs, name, monkeypatch):  # noqa: F811
    """Prompts of three lengths at once, beyond every window and threshold of the cases."""
    torch = pytest.importorskip("torch")
    model, directory = theirs(name)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 61, n) for n in (5, 13, 9)]
    # Frequencies that depend on the length follow the longest prompt of a batch in transformers.
    alone = "dynamic" in name or "longrope" in name
    # While it generates, the router's loss of transformers fails on the mask.
    config = model.config.get_text_config()
    monkeypatch.setattr(config, "output_router_logits", False, raising=False)
    wanted = []
    for batch in [[p] for p in prompts] if alone else [prompts]:
        longest = max(map(len, batch))
        tokens, mask = np.zeros((2, len(batch), longest), int)
        for i, prompt in enumerate(batch):
            tokens[i, longest - len(prompt) :], mask[i, longest - len(prompt) :] = prompt, 1
        written = model.generate(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        wanted.append(written[:, longest:].numpy())
    got = generate(
        load(directory),
        prompts,
        new_tokens=12,
        sampling=GREEDY,
        execution=SMALL,
    )
    assert np.array_equal(np.stack(list(got), 1), np.concatenate(wanted))


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, init_std=0.3)
    return Decoder(config, jax.random.key(0))


def run(model, prompts, **options):
    how = dict(new_tokens=8, sampling=GREEDY, execution=SMALL) | options
    return np.stack(list(generate(model, prompts, **how)), 1)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_and_other_prompts_change_nothing(model, chunk):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n) for n in (1, 19)]
    wanted = np.concatenate([run(model, [prompt]) for prompt in prompts])
    assert np.array_equal(run(model, prompts, prefill_chunk=chunk), wanted)


@functools.cache
def scaled(kind):
    """A model whose frequencies follow the length of the text, beyond 18 tokens."""
    lists = dict(short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 8.0])
    longrope = lists | dict(original_max_position_embeddings=18)
    parameters = dict(rope_theta=1e4, rope_type=kind, factor=4.0)
    config = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        init_std=0.3,
        max_position_embeddings=18,
        rope_parameters=parameters | (longrope if kind == "longrope" else {}),
    )
    return Decoder(config, jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_prompts_of_different_lengths_are_independent(kind):
    """Two of them pass the original length, each at a step of its own."""
    rng, model = np.random.default_rng(0), scaled(kind)
    prompts = [rng.integers(0, 61, n) for n in (3, 13, 16)]
    wanted = np.concatenate([run(model, [prompt]) for prompt in prompts])
    for chunk in (5, 100):
        assert np.array_equal(run(model, prompts, prefill_chunk=chunk), wanted)


@pytest.mark.thorough
def test_longrope_writes_what_a_forward_pass_over_all_of_the_text_predicts():
    model = scaled("longrope")
    prompt, new = np.random.default_rng(0).integers(0, 61, 13), 8
    (written,) = run(model, [prompt], new_tokens=new)
    text = np.concatenate([prompt, written])
    lengths = len(prompt) + np.arange(new)[:, None]
    positions = np.arange(len(text))[None].repeat(new, 0)
    hidden, _ = model(
        jnp.asarray(np.where(positions < lengths, text, 0)),
        positions=jnp.asarray(positions),
        segments=jnp.asarray((positions < lengths).astype(np.int32)),
    )
    last = jnp.take_along_axis(hidden, jnp.asarray(lengths)[..., None] - 1, 1)
    assert np.array_equal(model.logits(last)[:, 0].argmax(-1), written)


def test_a_row_ends_at_its_stop_token(model):
    prompts = [[1, 2, 3], [4, 5]]
    free = run(model, prompts)
    stop = int(free[0, 2])
    got = run(model, prompts, stop=[stop])
    for row, whole in zip(got, free, strict=True):
        at = [*np.flatnonzero(whole == stop), len(whole)][0]
        assert np.array_equal(row[: at + 1], whole[: len(row)][: at + 1])
        assert (row[at + 1 :] == -1).all()


def test_same_seed_same_text(model):
    hot = dict(sampling=Sampling(temperature=2.0))
    one, again, other = (run(model, [[1, 2]], seed=s, **hot) for s in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        (dict(top_k=5), "TopKLogitsWarper"),
        (dict(top_p=0.6), "TopPLogitsWarper"),
        (dict(min_p=0.2), "MinPLogitsWarper"),
        (dict(temperature=0.7), "TemperatureLogitsWarper"),
        (dict(repetition_penalty=1.7), "RepetitionPenaltyLogitsProcessor"),
    ],
)
def test_sampling_draws_from_the_distribution_of_transformers(options, warpers):
    torch = pytest.importorskip("torch")
    import transformers

    logits = np.random.default_rng(0).normal(size=(1, 12)).astype(np.float32) * 2
    past = np.array([[1, 4, 4, 7]])
    warper = getattr(transformers, warpers)(*options.values())
    wanted = torch.softmax(warper(torch.tensor(past), torch.tensor(logits)), -1).numpy()[0]
    seen = jnp.zeros((1, 12), bool).at[0, past[0]].set(True)
    draws = 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    drawn = jax.vmap(lambda key: Sampling(**options).draw(jnp.asarray(logits), seen, key)[0])(keys)
    share = np.bincount(np.asarray(drawn), minlength=12) / draws
    assert set(np.flatnonzero(share)) <= set(np.flatnonzero(wanted))
    assert np.abs(share - wanted).max() < 4 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "temperature=-1.0: must be 0 or in"),
        (dict(top_p=0.0), r"top_p=0.0: must be in \(0, 1\]"),
        (dict(min_p=1.5), r"min_p=1.5: must be in \[0, 1\]"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0: must be in"),
        (dict(temperature=float("nan")), "temperature=nan: must be 0 or in"),
    ],
)
def test_impossible_sampling_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: must not be empty"),
        ([[1], []], {}, "prompts: must not be empty"),
        ([[1, 61]], {}, r"prompts: must be token ids in \[0, 61\), not 61"),
        ([[1], [2, -3]], {}, r"prompts: must be token ids in \[0, 61\), not -3"),
        ([[1, 2]], dict(prefill_chunk=0), "prefill_chunk=0: must be at least 1 token"),
        ([[1, 2]], dict(new_tokens=-1), "new_tokens=-1: must not be negative"),
    ],
)
def test_impossible_prompts_and_options_are_refused(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        run(model, prompts, **options)


def test_prefill_memory_does_not_grow_with_the_prompt():
    """Beside the cache and the model."""
    from bptjax.models.cache import Cache
    from bptjax.models.prefill import read

    config = ModelConfig(vocab_size=61, hidden_size=64, num_layers=2, num_heads=4)
    model = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))

    def temp(size):
        cache = jax.eval_shape(lambda: Cache.empty(config, 1, size, jnp.float32))
        tokens, length = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 128), (1,)))
        lowered = read.lower(
            model, tokens, cache, length, dtype=jnp.float32, execution=Execution(k_chunk=128)
        )
        held = lowered.compile().memory_analysis()
        cached = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        return held.temp_size_in_bytes, cached

    (small, _), (large, cached) = temp(1024), temp(8192)
    # One layer's keys and values, in blocks.
    assert large - small < 2 * cached / config.num_layers, (small, large, cached)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A byte model trained for a few steps, so that the command has something to load."""
    from bptjax.cli.train import main

    directory = tmp_path_factory.mktemp("generate")
    (directory / "text.txt").write_text("the cat sat on the mat. " * 200)
    options = {
        "run_dir": directory / "run",
        "device": "cpu",
        "data.path": directory / "text.txt",
        "model.hidden_size": 32,
        "model.num_layers": 1,
        "train.max_steps": 200,
        "train.seq_len": 48,
        "train.per_device_train_batch_size": 4,
        "optimizer.learning_rate": 0.02,
        "parallel.fsdp": 1,
        "parallel.dp": 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:2])
        assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    return directory / "run"


def test_command_line(run_directory, capsys):
    base = ["--model", str(run_directory), "--device", "cpu", "--max-new-tokens", "40"]
    assert command.main([*base, "--prompt", "the cat ", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert len(text) > 20 and "the" in text
    word = text.split()[1]
    assert command.main([*base, "--prompt", "the cat ", "--temperature", "0", "--stop", word]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text[: text.index(word)]
    two = ["--prompt", "the cat ", "--prompt", "on", "--temperature", "0"]
    assert command.main([*base, *two]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"== the cat \n{text}") and "== on\n" in said


@pytest.mark.thorough
def test_gpus_take_the_dtype_that_a_run_computes_in(run_directory, tmp_path):
    """Parameters of a run are float32. Fine-tuning's default, bfloat16, is not in its config."""
    run = shutil.copytree(run_directory, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    assert "compute_dtype: float32" in config
    for written, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("null", "bfloat16")):
        text = config.replace("compute_dtype: float32", f"compute_dtype: {written}")
        (run / "config.yaml").write_text(text)
        found, _ = loading.open_decoder(str(run), None, pytest.fail)
        assert loading._default_dtype(found, "gpu", 1, (1, 8), pytest.fail) == dtype
        assert loading._default_dtype(found, "cpu", 1, (1, 8), pytest.fail) == jnp.float32


@pytest.mark.thorough
def test_text_beyond_the_positions_of_the_model_warns(run_directory, tmp_path, capsys):
    from bptjax.cli import evaluate

    base = ["--model", str(run_directory), "--device", "cpu"]
    for new, told in ((39, ""), (40, "warning: 49 tokens are beyond the 48 positions")):
        assert command.main([*base, "--prompt", "the cat ", "--max-new-tokens", str(new)]) == 0
        error = capsys.readouterr().err
        assert told in error and error.count("warning: ") == bool(told)
    text = ["--data", str(run_directory.parent / "text.txt"), "--buckets", "2"]
    assert evaluate.main([*base, *text, "--perplexity", "49", "--out", str(tmp_path / "out")]) == 0
    error = capsys.readouterr().err
    assert "49 tokens are beyond the 48 positions" in error and error.count("\n") == 1


def test_a_run_from_scratch_is_exported_with_its_tokenizer(run_directory, tmp_path, capsys):
    from bptjax.cli import convert

    assert convert.main(["bptjax-to-hf", str(run_directory), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    texts = []
    for directory in (run_directory, tmp_path / "out"):
        base = ["--model", str(directory), "--device", "cpu", "--max-new-tokens", "10"]
        assert command.main([*base, "--prompt", "the cat ", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x", "--chat"], "must have a chat template"),
        ([], "--prompt or --prompt_file must be given"),
        (["--prompt-file", "/nowhere"], "/nowhere"),
        (["--prompt", "x", "--stop", ""], "--stop: must not be empty"),
        (["--prompt", "x", "--seed", "-1"], "--seed=-1: must be in"),
        (["--prompt", "x", "--top-p", "2"], "top_p=2.0: must be in"),
        (["--prompt", "x", "--model", "/nowhere"], "/nowhere: must be a directory"),
        (["--prompt", "x", "--tokenizer", "no"], "error: --tokenizer='no': must be byte, a local"),
        (["--prompt", "x", "--tokenizer", "char"], "error: --tokenizer='char': must be byte, a"),
        (["--prompt", "x", "--tokenizer", "/"], "error: --tokenizer='/': must hold a Hugging"),
    ],
)
def test_bad_input_is_one_line(run_directory, capsys, options, message):
    base = ["--device", "cpu"]
    base += [] if "--model" in options else ["--model", str(run_directory)]
    assert command.main([*base, *options]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error
    assert progress[:1] == ["starting: loading libraries"] and "error" not in "".join(progress)


def test_bad_tokenizers_and_models_give_one_line(run_directory, tmp_path, capsys):
    from bptjax.cli import evaluate
    from bptjax.data.tokenizer import CharTokenizer

    base = ["--model", str(run_directory), "--device", "cpu"]
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert command.main([*base, "--prompt-file", str(tmp_path / "latin.txt")]) == 2
    assert "latin.txt: " in capsys.readouterr().err
    CharTokenizer(map(chr, range(65, 365))).save(tmp_path / "letters")
    assert command.main([*base, "--prompt", "A", "--tokenizer", str(tmp_path / "letters")]) == 2
    assert "vocabulary of 300: must be at most" in capsys.readouterr().err
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3000]}\n')
    options = ["--data", str(tmp_path / "ids.jsonl"), "--perplexity", "2", "--buckets", "1"]
    assert evaluate.main([*base, *options, "--out", str(tmp_path / "out")]) == 2
    assert "input_ids from 1 to 3000" in capsys.readouterr().err
    # Before anything else is evaluated.
    text = ["--data", "python-stdlib", "--tasks", "passkey", "--lengths", "600", "10"]
    assert evaluate.main([*base, *text, "--out", str(tmp_path / "out")]) == 2
    assert (
        "--lengths=10: must be at least" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


def test_chat_template_and_stop_tokens(tmp_path, caplog):
    """A tokenizer directory with a template; several end-of-text tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<end>", "user", "assistant", "hello", ":", "?"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role + ' : ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    fast.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    from bptjax.data.templates import chat_prompt, opening
    from bptjax.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tmp_path)
    ids = chat_prompt(opening("hello"), tokenizer).tolist()
    assert ids == [words.index(w) for w in ("user", ":", "hello", "assistant", ":")]
    assert tokenizer.stop_ids == [1, 2] and not caplog.messages
    # Ids that no token has were ignored in silence.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 2, 8]}))
    load_tokenizer(tmp_path)
    assert "eos_token_id=-1, 8 of generation_config.json or config.json: ignored" in caplog.text


def test_stop_strings_may_span_tokens(model):
    from bptjax.data.tokenizer import CharTokenizer

    letters = CharTokenizer([chr(65 + i) for i in range(61)])
    options = dict(new_tokens=8, sampling=GREEDY, execution=SMALL)
    prompts = [np.array([1, 2, 3])]
    *_, (whole,) = continuations(model, letters, prompts, **options)
    stop = whole[3:5]
    texts = list(continuations(model, letters, prompts, stop_strings=[stop], **options))
    assert texts[-1] == [whole[: whole.index(stop)]]
    assert all(len(b[0]) <= len(a[0]) + 1 for b, a in itertools.pairwise(texts[::-1]))


@pytest.mark.thorough
@pytest.mark.parametrize("kind, turns", [("full", 3), ("full", 5), ("windows", 5)])
def test_a_held_cache_changes_no_token(model, kind, turns, monkeypatch):
    """Turns of a chat that go on, that change an earlier token, that outgrow the cache, and that
    start anew. Only tokens after the common start are read, in chunks."""
    if kind == "windows":
        layers = "sliding_attention", "full_attention"
        model = Decoder(replace(model.config, sliding_window=16, layer_types=layers), KEY)
    read = []
    step = prefill.read

    def counted(model, tokens, *args, **how):
        read.append(tokens.shape[1])
        return step(model, tokens, *args, **how)

    monkeypatch.setattr(prefill, "read", counted)
    held, rng = prefill.HeldCache(), np.random.default_rng(2)
    assert prefill.HeldCache.saves_work(model.config)
    first = rng.integers(0, 61, 200).tolist()
    changed = [*first[:100], (first[100] + 1) % 61, *first[101:]]
    prompts = [
        (first, [128, 128]),
        ([*first, 5, 6, 7], [64]),
        (changed, [128]),
        ([*changed, *first], [128, 128, 128, 64]),
        ([1, 2, 3], [64]),
    ]
    for prompt, chunks in prompts[:turns]:
        read.clear()
        got = run(model, [prompt], held=held, prefill_chunk=128)
        assert read == chunks
        assert np.array_equal(got, run(model, [prompt]))
