"""Log-likelihoods in batches, and the model as lm-evaluation-harness calls it."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.cli import evaluate
from bptjax.data.tokenizer import SEPARATOR, ByteTokenizer, CharTokenizer
from bptjax.evaluation import likelihoods
from bptjax.evaluation.lm_eval import task_rows
from bptjax.evaluation.served import Served, serve
from bptjax.models.config import ModelConfig
from bptjax.models.decoder import Decoder

BYTES = ByteTokenizer()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SIZES = dict(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, init_std=0.3)
harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")


@jax.jit
def logits(model, tokens):
    return model.logits(model(tokens)[0])


@pytest.fixture(scope="module")
def model():
    return Decoder(ModelConfig(**SIZES), jax.random.key(0))


def expected(model, context, continuation):
    """The log-likelihood from the logits of the text alone, and whether it is greedy."""
    ids = np.array([*context, *continuation])
    # One length, which is compiled once, unless results depend on it.
    read = ids[:-1] if "longrope" in model.config.rope_types else np.pad(ids, (0, 80 - len(ids)))
    logs = jax.nn.log_softmax(logits(model, read[None]))[0]
    logs = np.asarray(logs)[len(context) - 1 : len(ids) - 1]
    each = logs[np.arange(len(continuation)), continuation]
    return each.sum(), bool((logs.argmax(-1) == continuation).all())


def check(model, pairs):
    counts = []
    how = dict(dtype=jnp.float32, advance=counts.append)
    found = likelihoods.log_likelihoods(model, pairs, **how)
    assert sum(counts) == len(pairs)
    for (total, greedy), pair in zip(found, pairs, strict=True):
        wanted = expected(model, *pair)
        assert total == pytest.approx(wanted[0], rel=1e-5) and greedy == wanted[1]
    return found


def test_log_likelihoods_do_not_depend_on_the_batch(model):
    rng = np.random.default_rng(0)
    lengths = [(1, 1), (3, 5), (30, 1), (30, 4), (40, 2), (1, 70)]
    pairs = [tuple(rng.integers(0, 256, n).tolist() for n in each) for each in lengths]
    # Two last tokens of the same text, one of them the most likely.
    context = pairs[3][0]
    best = int(logits(model, np.pad([context], ((0, 0), (0, 50))))[0, 29].argmax())
    pairs += [(context, [best]), (context, [(best + 1) % 256])]
    found = check(model, pairs)
    assert [greedy for _, greedy in found[-2:]] == [True, False]


@pytest.mark.thorough
def test_log_likelihoods_of_rotary_scalings_that_depend_on_the_length():
    """A text within the original length is padded beyond it."""
    rope = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[9.0] * 8)
    rope |= dict(original_max_position_embeddings=20, rope_theta=1e4)
    config = ModelConfig(**SIZES, rope_parameters=rope, max_position_embeddings=80)
    ids = np.random.default_rng(0).integers(0, 256, 40).tolist()
    check(Decoder(config, jax.random.key(0)), [(ids[:15], ids[15:18]), (ids[:15], ids[15:30])])


def test_batches_hold_texts_of_one_padded_length():
    lengths = [1, 33, 40, 5000, 5100, *[7] * 600]
    found = list(likelihoods.batches(lengths))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        padded = {likelihoods.padded_length(lengths[i]) for i in batch}
        assert len(padded) == 1 and len(batch) * padded.pop() <= likelihoods.TOKENS
    assert found[0] == [3, 4] and len(found[-1]) == 601 - 512
    most = [likelihoods.padded_length(n) / max(1.25 * n, n + 31) for n in range(1, 9000)]
    assert max(most) <= 1


def test_tokens_follow_the_prefix_and_the_chat_template(model):
    served = Served(model, BYTES.with_chat(TEMPLATE, []), max_length=64)
    assert served.prefix_token_id == served.eot_token_id == 256
    assert served.tok_encode("ab") == [256, 97, 98]
    assert served.tok_encode("ab", add_special_tokens=False) == [97, 98]
    chat = [dict(role="user", content="hi"), dict(role="assistant", content=" so ")]
    text = served.apply_chat_template(chat[:1])
    assert text == f"{SEPARATOR}[user]hi\n[assistant]"
    # One separator, which the template writes.
    assert served.tok_encode(text).count(256) == 1
    ending = served.apply_chat_template(chat, add_generation_prompt=False)
    assert ending == f"{SEPARATOR}[user]hi\n[assistant]so"
    with pytest.raises(ValueError, match="must have a BOS or EOS token"):
        _ = Served(model, CharTokenizer("ab"), max_length=64).prefix_token_id


def test_long_contexts_lose_their_beginning(model, caplog):
    served, ids = Served(model, BYTES, max_length=8), list(range(20))
    found = served._loglikelihood_tokens([(None, ids[:17], ids[17:])])
    assert found[0][0] == pytest.approx(expected(model, ids[11:17], ids[17:])[0], rel=1e-5)
    assert "1 prompt of more than 8 tokens: shortened at the start" in caplog.text
    with pytest.raises(ValueError, match="an answer of 9 tokens: must be at most 8"):
        served._loglikelihood_tokens([(None, ids[:2], ids[:9])])


def test_rows_are_metrics_of_tasks_and_groups():
    results = {
        "results": {"a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 3}},
        "groups": {"g": {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "g"}},
        "higher_is_better": {"a": {"acc": True}},
        "n-shot": {"a": 2},
        "n-samples": {"a": {"original": 9, "effective": 3}},
        "versions": {"a": 1.0},
    }
    first, second = task_rows(results)
    assert first == dict(
        task="a", metric="acc", filter="none", value=0.5, stderr=0.1, higher_is_better=True
    ) | dict(num_fewshot=2, samples=3, version=1.0)
    assert (second["task"], second["value"], second["stderr"]) == ("g", 0.5, None)


@harness
def test_windows_predict_every_token_once(model):
    served = serve(model, BYTES, max_length=8)
    text = "a text of more than two windows"
    (found,) = served.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    ids = [256, *BYTES.encode_prompt(text).tolist()]
    first = expected(model, ids[:1], ids[1:9])[0]
    others = [
        expected(model, ids[max(end - 8, 0) : start], ids[start : end + 1])[0]
        for start, end in ((9, 16), (17, 24), (25, 32))
    ]
    assert len(ids) == 33 and found == pytest.approx(first + sum(others), rel=1e-5)


@harness
def test_answers_end_at_stop_strings(model):
    """Each prompt is continued as if it were alone."""
    served, prompts = serve(model, BYTES, max_length=64), ["one", "a longer prompt", "two"]

    def ask(prompts, **settings):
        requests = [SimpleNamespace(args=(prompt, settings)) for prompt in prompts]
        return served.generate_until(requests)

    alone = [ask([prompt], until=[], max_gen_toks=6)[0] for prompt in prompts]
    assert ask(prompts, until=[], max_gen_toks=6) == alone and all(alone)
    stop = alone[0][2]
    assert ask(prompts[:1], until=[stop], max_gen_toks=6)[0] == alone[0].split(stop)[0]
    with pytest.raises(ValueError, match="answers of 64 tokens: must be shorter than 64"):
        ask(prompts, max_gen_toks=64)


@harness
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # Of lm_eval and of what it imports.
def test_command_line(tmp_path, capsys, model, monkeypatch):
    """Offline, with a task in a file."""
    data = tmp_path / "data.jsonl"
    items = [dict(text="one", choices=["a", "bc"], answer=0), dict(text="x", choices=["d"] * 2)]
    data.write_text("".join(json.dumps(dict(answer=1) | item) + "\n" for item in items))
    task = dict(task="mine", dataset_path="json", test_split="test", doc_to_text="{{text}}")
    task |= dict(dataset_kwargs=dict(data_files=dict(test=str(data))))
    task |= dict(output_type="multiple_choice", doc_to_choice="{{choices}}")
    task |= dict(doc_to_target="{{answer}}", metric_list=[dict(metric="acc")])
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(evaluate, "open_decoder", lambda *a, **k: (model, BYTES))
    monkeypatch.setattr(evaluate, "load_opened", lambda found, *a, **k: found)
    out = tmp_path / "out"
    command = ["--model", "it", f"--out={out}", "--seq_len=64", "--save_prompts", "--lm_eval"]
    assert evaluate.main([*command, str(tmp_path / "mine.yaml")]) == 0
    (row,) = json.loads((out / "lm_eval.json").read_text())
    assert (row["task"], row["metric"], row["samples"]) == ("mine", "acc", 2)
    assert row["max_length"] == 64 and not row["chat"]
    results = json.loads((out / "lm_eval_results.json").read_text())
    assert results["results"]["mine"]["acc,none"] == row["value"]
    samples = (out / "prompts" / "lm_eval_mine.jsonl").read_text().splitlines()
    assert len(samples) == 2 and json.loads(samples[0])["doc"]["text"] == "one"
    capsys.readouterr()
    assert evaluate.main([*command, "no_such_task"]) == 2
    error = capsys.readouterr().err
    assert "--lm_eval=no_such_task: must be a task of lm_eval" in error
