"""The dtype of exported weights: the checkpoint's, and what rounding to it costs an adapter."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.cli import convert
from bptjax.cli.train import main
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.weights.lora import product_dot, product_square
from weights.hf.loading import tensors


@pytest.fixture
def trained(llama, tmp_path, one_device):
    """A function that trains a tiny llama whose files have this dtype, and returns the run."""
    (tmp_path / "text.txt").write_text("".join(f"{i} plus one is {i + 1}. " for i in range(99)))

    def train(dtype, **more):
        base = llama(dtype, dtype, vocab_size=ByteTokenizer.vocab_size)
        raw = json.loads((base / "config.json").read_text()) | {"dtype": dtype}
        (base / "config.json").write_text(json.dumps(raw))
        ByteTokenizer().save(base)
        options = {
            "run_dir": tmp_path / "run",
            "device": "cpu",
            "model.name_or_path": base,
            "data.path": tmp_path / "text.txt",
            "train.max_steps": 1,
            "train.seq_len": 16,
        } | more
        assert main([f"--{key}={value}" for key, value in options.items()]) == 0
        return tmp_path / "run"

    return train


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "run_dtype", "flags", "wanted"),
    [
        ("bfloat16", "float32", [], "bfloat16"),
        ("float16", "float32", [], "float16"),
        ("bfloat16", "float32", ["--dtype=float32"], "float32"),
        ("float32", "float32", [], "float32"),
        ("float32", "bfloat16", [], "bfloat16"),
        ("float16", "bfloat16", [], "bfloat16"),
    ],
)
def test_a_run_is_exported_in_the_dtype_of_its_checkpoint(
    dtype, run_dtype, flags, wanted, trained, tmp_path, capsys
):
    run, out = trained(dtype, **{"train.param_dtype": run_dtype}), tmp_path / "out"
    capsys.readouterr()
    assert convert.main(["bptjax-to-hf", str(run), str(out), *flags]) == 0
    told = f"weights in {wanted}, as in the checkpoint; --dtype float32 keeps the run's"
    narrowed = run_dtype == "float32" != wanted
    assert (told in capsys.readouterr().out) == narrowed
    assert {spec.dtype for spec, _ in tensors(out).values()} == {wanted}
    assert json.loads((out / "config.json").read_text())["dtype"] == wanted


@pytest.mark.thorough
def test_a_run_from_scratch_is_exported_in_its_own_dtype(tmp_path, one_device):
    (tmp_path / "text.txt").write_text("".join(f"{i} plus one is {i + 1}. " for i in range(99)))
    command = ["--model.hidden_size=16", "--model.num_layers=1", "--device=cpu"]
    command += ["--train.max_steps=1", "--train.seq_len=16", f"--data.path={tmp_path / 'text.txt'}"]
    assert main([*command, f"--run_dir={tmp_path / 'run'}"]) == 0
    assert convert.main(["bptjax-to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert {spec.dtype for spec, _ in tensors(tmp_path / "out").values()} == {"float32"}


@pytest.mark.thorough
def test_merging_says_what_rounding_takes_from_the_adapter(trained, tmp_path, capsys):
    more = {"adapter.type": "lora", "optimizer.learning_rate": 0.1, "optimizer.warmup_ratio": 0}
    run, kernels, taken, noise = trained("bfloat16", **more), {}, 0.0, 0.0
    for dtype in ("bfloat16", "float32"):
        capsys.readouterr()
        flags = [f"--dtype={dtype}"] * (dtype == "float32")
        out = tmp_path / f"merged-{dtype}"
        assert convert.main(["merge-adapter", str(run), str(out), *flags]) == 0
        told = capsys.readouterr().err
        if dtype == "float32":
            assert not told
        else:
            assert "--dtype float32 does not round" in told
            taken = float(re.findall(r"loses ([\d.]+)% of the adapter", told)[0]) / 100
            noise = float(re.findall(r"errors are ([\d.]+) times", told)[0])
    for name in ("bfloat16", "merged-bfloat16", "merged-float32"):
        kernels[name] = np.concatenate(
            [
                np.frombuffer(data, jnp.dtype(spec.dtype)).astype(np.float64)
                for tensor, (spec, data) in sorted(tensors(tmp_path / name).items())
                if "proj" in tensor
            ]
        )
    base, rounded, exact = kernels.values()
    error, change = rounded - exact, exact - base
    ratio = (np.square(error).sum() / np.square(change).sum()) ** 0.5
    assert noise > 0.001 and noise == pytest.approx(ratio, rel=0.01)
    share = -(error @ change) / (change @ change)
    assert taken == pytest.approx(max(share, 0), abs=0.001)


def test_the_square_of_a_product_needs_no_product():
    rng = np.random.default_rng(0)
    a, b, scale = (rng.normal(size=s) for s in ((3, 2, 4, 5), (3, 2, 5, 6, 2), (3, 2)))
    wanted = np.einsum("lxir,lxron,lx->lxion", a, b, scale)
    assert product_square((a, b, scale)) == pytest.approx(np.square(wanted).sum(), rel=1e-5)
    w = rng.normal(size=wanted.shape).astype(np.float32)
    assert product_dot((a, b, scale), w) == pytest.approx((w * wanted).sum(), rel=1e-4, abs=1e-3)
