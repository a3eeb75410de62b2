"""The peer of scripts/extension.py trains like a run."""

import json
import random
import subprocess
import sys
from pathlib import Path

import extension_peer
import jax
import numpy as np
import pytest
from chats import CHATML, raw_tokenizer
from weights.hf.loading import random_base

from bptjax.cli.train import main
from bptjax.run.metrics import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2_64k.yaml"
T = 128
# In a process without JAX.
TRAIN = "import sys; sys.modules.update(jax=None, bptjax=None); import extension_peer as peer; "


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A random Llama, the keys of a run on it, and the run's batches."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig

    folder, rng = tmp_path_factory.mktemp("peer"), random.Random(0)
    sizes = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64)
    special = dict(bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
    random_base(folder / "base", LlamaConfig(vocab_size=288, **sizes, **special))
    raw_tokenizer("bytes", CHATML).save_pretrained(folder / "base")
    texts = (" ".join(rng.choices("abc", k=rng.randrange(5, 120))) for _ in range(200))
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps({'text': x})}\n" for x in texts))
    keys = [f"--config={CONFIG}", "--device=cpu", f"--train.seq_len={T}"]
    keys += [f"--model.name_or_path={folder / 'base'}", f"--data.path={folder / 'texts.jsonl'}"]
    keys += [f"--model.extend_to={T}", "--train.max_steps=5", "--train.eval_steps=2"]
    keys += ["--train.compute_dtype=float32", "--train.per_device_train_batch_size=1"]
    keys += [
        "--optimizer.warmup_steps=2",
        "--optimizer.weight_decay=0.1",
        "--data.eval_fraction=0.1",
    ]
    keys += ["--optimizer.learning_rate=1e-2", "--execution.q_chunk=64", "--execution.k_chunk=64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
        extension_peer.main([f"--dump={folder / 'batches.npz'}", *keys])
    return folder, keys


@pytest.mark.thorough
def test_losses_are_those_of_the_run(made, one_device):
    folder, keys = made
    assert main([*keys, f"--run_dir={folder / 'run'}"]) == 0
    out = folder / "rows.jsonl"
    words = ["--train", folder / "batches.npz", "--model", folder / "base", "--out", out]
    call = f"peer.main({[*map(str, words), '--no_liger', '--checkpointing']})"
    scripts = Path(extension_peer.__file__).parent
    subprocess.run([sys.executable, "-c", TRAIN + call], check=True, cwd=scripts)
    *rows, last = map(json.loads, out.read_text().splitlines())
    records = list(read_metrics(folder / "run" / "metrics.jsonl"))
    for ours, theirs, count in (("train/loss", "loss", 5), ("eval/loss", "held_out_loss", 4)):
        wanted = {record["step"]: record[ours] for record in records if ours in record}
        found = {row["step"]: row[theirs] for row in rows if theirs in row}
        assert found == pytest.approx(wanted, rel=1e-5) and len(found) == count
    assert (last["status"], last["steps"]) == ("ok", 5) and last["tokens_per_second"] > 0
    assert str(folder) not in out.read_text()


def test_the_peer_sees_no_other_document(made):
    torch = pytest.importorskip("torch")
    folder, _ = made
    with np.load(folder / "batches.npz") as arrays:
        settings, batches = (
            json.loads(str(arrays["settings"])),
            extension_peer.read(arrays, "train"),
        )
    peer = extension_peer.Peer(folder / "base", settings, "sdpa", liger=False)
    batch = {name: x[0] for name, x in batches.items()}
    alone, documents = 0.0, 0
    with torch.no_grad():
        for b, segments in enumerate(batch["segments"]):
            for segment in range(1, segments.max() + 1):
                own = {name: x[b : b + 1, segments == segment] for name, x in batch.items()}
                alone, documents = alone + peer.loss(own, 1).item(), documents + 1
        assert documents > len(batch["segments"])
        assert peer.loss(batch, 1).item() == pytest.approx(alone, rel=1e-5)


def test_a_setting_that_the_peer_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="optimizer.type=lion: must be adamw"):
        extension_peer.main([f"--dump={tmp_path / 'x.npz'}", "--optimizer.type=lion"])
