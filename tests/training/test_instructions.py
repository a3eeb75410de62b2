"""Fine-tuning from end to end: QLoRA on a random base learns a rule, and PEFT has its answers."""

import json
import random
import shutil
import string

import jax
import numpy as np
import pytest
from weights.hf.loading import load, random_base

from bptjax.cli.train import main
from bptjax.data.tokenizer import load_tokenizer
from bptjax.models.generation import continuations
from bptjax.models.sampling import Sampling
from bptjax.run.metrics import read_metrics

STEPS, ASKED = 150, 60


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random GPT-2 of one token a letter, and three letters to be written in capitals."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import GPT2Config, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("instructions")
    words = {token: i for i, token in enumerate(["<s>", "</s>", ":", *string.ascii_letters])}
    raw = GPT2Config(
        vocab_size=len(words),
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=1,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    random_base(folder / "base", raw)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=":"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder / "base")
    rng = random.Random(0)
    rows = {"".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(4000)}
    # Not in the order of the set, which is another one in each process.
    rows = rng.sample(sorted(rows), len(rows))
    with (folder / "rows.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({"prompt": f"{row}:", "answer": row.upper()}) + "\n")
    return folder


def arguments(base, run, **more):
    options = {
        "run_dir": run,
        "device": "cpu",
        "model.name_or_path": base / "base",
        "data.path": base / "rows.jsonl",
        "data.packing": "best_fit",
        "data.eval_fraction": 0.05,
        "train.max_steps": STEPS,
        "train.seq_len": 64,
        "train.per_device_train_batch_size": 4,
        "train.eval_batches": 4,
        "train.num_eval_generations": ASKED,
        "optimizer.learning_rate": 0.005,
        "optimizer.weight_decay": 0.0,
        "optimizer.warmup_steps": 20,
        "adapter.type": "qlora",
        "adapter.r": 32,
        "adapter.alpha": 32,
        "execution.q_chunk": 64,
        "execution.k_chunk": 64,
    } | more
    return [f"--{key}={value}" for key, value in options.items()]


@pytest.fixture(scope="module")
def run(base):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
        assert main(arguments(base, base / "run")) == 0
    return base / "run"


def predictions(run, step):
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] == step]


@pytest.mark.thorough
def test_it_learns_the_rule(run):
    found = {r["step"]: r for r in read_metrics(run / "metrics.jsonl") if "eval/loss" in r}
    assert sorted(found) == [0, STEPS]
    assert found[0]["eval/exact_match"] == 0.0
    assert found[STEPS]["eval/exact_match"] >= 0.95
    rows = predictions(run, STEPS)
    assert len(rows) == len(predictions(run, 0)) == ASKED
    right = [row["prediction"] == row["reference"] for row in rows]
    assert np.mean(right) == found[STEPS]["eval/exact_match"]
    for row in rows:
        assert row["prompt"] == f"{row['reference'].lower()}:"
    assert f"step {STEPS}: eval/loss" in (run / "log.txt").read_text()


# Of PEFT with this transformers.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning")
def test_peft_gives_the_same_answers(run, base):
    """The exported adapter beside the base as it was before it was put in few bits."""
    torch = pytest.importorskip("torch", reason="PEFT needs torch")
    peft = pytest.importorskip("peft")
    import transformers

    tokenizer = load_tokenizer(base / "base")
    rows = predictions(run, STEPS)[:20]
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
    *_, ours = continuations(
        load(run / "adapter"),
        tokenizer,
        prompts,
        new_tokens=5,
        sampling=Sampling(temperature=0.0),
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base / "base")
    model = peft.PeftModel.from_pretrained(model, run / "adapter").eval()
    theirs = []
    for prompt in prompts:
        ids = torch.tensor(prompt[None])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=1,
        )
        new = out[0, len(prompt) :].tolist()
        theirs.append(tokenizer.decode(new[: new.index(1)] if 1 in new else new))
    assert theirs == ours
    assert np.mean([a == row["reference"] for a, row in zip(ours, rows, strict=True)]) >= 0.95


@pytest.mark.parametrize(
    ("row", "count", "message"),
    [
        ({"text": "abcdef"}, 60, "train.num_eval_generations=60: requires held-out chats"),
        ({"prompt": "ab", "answer": 3}, 0, "a.jsonl, record 11: 'answer' must be text"),
        ({"prompt": "ab" * 40, "answer": "A"}, 2, "of up to 82 tokens must fit into"),
        # A batch of 64 rows of 64 tokens, and no answer in it.
        (
            {"prompt": "ab" * 3000, "answer": "A"},
            0,
            "held-out documents: must have a token that counts",
        ),
    ],
    ids=["text", "bad", "long", "cut"],
)
def test_held_out_that_is_refused(base, tmp_path, capsys, row, count, message):
    # The evenly spaced records 11 and 31 are held out.
    rows = [{"prompt": "ab", "answer": "AB"}] * 40
    rows[10] = rows[30] = row
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    more = {"data.path": tmp_path / "a.jsonl", "train.num_eval_generations": count}
    more |= {"train.eval_batches": 1, "data.packing": "none", "data.eval_split": "spaced"}
    assert main(arguments(base, tmp_path / "run", **more)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_grouped_sequences_resume_exactly(base, tmp_path, monkeypatch):
    """Batches of several widths, some not met before the run goes on."""
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
    more = {
        "data.packing": "none",
        "data.group_by_length": True,
        "data.eval_fraction": 0.1,
        "train.seq_len": 16,
        "train.max_steps": 8,
        "optimizer.warmup_steps": 2,
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "train.num_eval_generations": 2,
        "train.eval_steps": 4,
        "checkpoint.save_steps": 4,
    }
    # One long record: the first batch alone is wide.
    rows = [{"prompt": "abcdefgh:", "answer": "ABCD"}, *[{"prompt": "ab:", "answer": "AB"}] * 30]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = arguments(base, tmp_path / "run", **more, **{"data.path": tmp_path / "rows.json"})
    assert main(command) == 0
    metrics, written = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "predictions.jsonl"
    wanted, answers = list(read_metrics(metrics)), written.read_text()
    assert [json.loads(line)["step"] for line in answers.splitlines()] == [0, 0, 4, 4, 8, 8]
    seen = [r["train/tokens_seen"] for r in wanted if "train/loss" in r]
    assert seen[0] == 13 + 3 * 5 and np.diff(seen).tolist() == [4 * 5] * 7
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    assert main(command) == 0
    again = list(read_metrics(metrics))
    for a, b in zip(wanted, again, strict=True):
        assert all(a[k] == b[k] for k in a if k.endswith(("/loss", "exact_match")))
    assert written.read_text() == answers
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
