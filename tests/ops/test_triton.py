"""Triton's kernels: their logic in the interpreter, and compiled on a GPU."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import fast

from bptjax.ops import grouped_triton, triton_call
from bptjax.ops.attention import attend, reference, triton_flash, visits
from bptjax.ops.attention.contract import QKV, AttentionSpec
from bptjax.ops.mask import Mask
from bptjax.ops.position import alibi_slopes
from ops.attention_cases import CASES, FEATURES, oracle
from ops.comparing import TOLERANCE, error, quick

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "installed, reason",
    [
        ("0.3.1", None),
        ("0.4.1", r"jax-triton 0.4.1 is too new; pip install .*\[gpu\]"),
        (None, "jax-triton is not installed"),
    ],
)
def test_versions_of_jax_triton(installed, reason, monkeypatch):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(triton_call, "version", version)
    for kernel in (triton_flash, grouped_triton):
        monkeypatch.setattr(kernel, "platform", lambda: "gpu")
    x = jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    found = triton_flash.unsupported(QKV(x, x, x), AttentionSpec(Mask(), 1.0))
    if reason is None:
        assert found is None and grouped_triton.available()
        return
    assert re.match(reason, found)
    with pytest.raises(NotImplementedError, match=f"mixture of experts needs .*: {reason}"):
        grouped_triton.available()


# The interpreter is slow, and other features contain these.
CONTAINED = "mqa", "segments", "dropout", "alibi, 6 heads"
INTERPRETED = [name for name in FEATURES if name not in CONTAINED]
INTERPRETED += ["experts", "over", "stack", "delta rule", "states"]
SOME = ["everything", "experts"]


@pytest.mark.parametrize(
    "names",
    fast([SOME, [name for name in INTERPRETED if name not in SOME]], [SOME]),
    ids=["some", "others"],
)
def test_kernels_in_the_interpreter(names):
    for module in ("torch", "triton"):
        pytest.importorskip(module, reason="the interpreter works on torch's tensors")
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, str(TESTS / "ops" / "interpreted.py"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = dict(line.split("\t") for line in done.stdout.splitlines())
    assert errors.keys() == set(names)
    assert max(map(float, errors.values())) < TOLERANCE["float32"], errors


@pytest.mark.thorough
def test_kernels_compile():
    """Down to machine code, and into the shared memory of an H100, an A100 and an RTX 4090."""
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, str(TESTS / "ops" / "compiled.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    sizes = {of: [int(size) for _, each, size in lines if each == of] for _, of, _ in lines}
    assert {of: len(each) for of, each in sizes.items()} == {"9.0": 50, "8.0": 24, "8.9": 24}
    for of, limit in (("9.0", 227), ("8.0", 163), ("8.9", 99)):
        assert max(sizes[of]) <= limit * 1024, sizes


@pytest.mark.parametrize("by_key_block", [False, True])
@pytest.mark.parametrize("name", fast(CASES, lambda name: "," in name or "both ways" in name))
def test_visits_hold_every_allowed_pair_and_full_tiles_no_other(name, by_key_block):
    """Against the mask itself, pair by pair."""
    case = CASES[name]
    T, S = case.T, case.S or case.T
    mask = case.mask.resolve(T, S)
    fields = jax.tree.map(jnp.asarray, (mask.of_queries, mask.of_keys))
    seen = quick(mask.allowed)(*fields)
    seen = np.ones((1, T, S), bool) if seen is None else np.asarray(seen)
    bq, bk = 2, 4
    own, other = (bk, bq) if by_key_block else (bq, bk)
    n = -(-(T if by_key_block else S) // other)
    listed = mask.block_mask, mask.global_tokens, mask.ends
    if any(x is not None for x in listed):
        ranges, lists = map(
            np.asarray, visits.block_lists(mask, T, S, bq, bk, by_key_block=by_key_block)
        )
    else:
        ranges = np.asarray(visits.block_ranges(mask, T, S, bq, bk, by_key_block=by_key_block))
        lists = np.broadcast_to(np.arange(n), (*ranges.shape[:2], n))
    for b in range(max(len(seen), len(ranges))):
        pairs = seen[min(b, len(seen) - 1)]
        row = min(b, len(ranges) - 1)
        for i, (first, begin, end, last) in enumerate(ranges[row]):
            assert 0 <= first <= begin <= end <= last <= len(lists[row, i])
            visited, full = lists[row, i, first:last], lists[row, i, begin:end]
            assert len(set(visited)) == last - first
            rows = (pairs.T if by_key_block else pairs)[i * own :][:own]
            for j in range(n):
                tile = rows[:, j * other :][:, :other]
                assert j in visited or not tile.any()
                assert j not in full or (tile.all() and tile.shape == (own, other))


def test_narrow_windows_change_no_tiles_of_other_calls(monkeypatch):
    """As in a model whose layers alternate."""
    tiles, x = [], jnp.zeros((1, 512, 2, 64), jnp.bfloat16)

    def call(name, inputs, shapes, grid, warps, stages, constants, aliases):
        tiles.append((constants.BQ, constants.BK, warps, stages))
        return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)

    monkeypatch.setattr(triton_flash, "CALL", call)
    for window in (None, 128, None):
        spec = AttentionSpec(mask=Mask(causal=True, window=window), scale=1.0)
        triton_flash.forward(QKV(x, x, x), spec)
    of_full, of_window = triton_flash.BLOCKS["forward"], triton_flash.NARROW_BLOCKS["forward"]
    assert tiles == [of_full[64], of_window[64], of_full[64]] and tiles[0] != tiles[1]


def test_the_program_reduces_no_constant_positions():
    """XLA would fold these reductions, in seconds each at 512K tokens."""
    T = 1024

    def ranges(segments):
        mask = Mask(causal=True, segments=segments).resolve(T, T)
        return visits.block_ranges(mask, T, T, 128, 64, by_key_block=False)

    constants = jax.make_jaxpr(ranges)(jnp.ones((1, T), jnp.int32)).consts
    assert max((np.size(x) for x in constants), default=0) <= T // 64


@pytest.mark.parametrize(
    "positions, paired",
    [
        (np.arange(37), True),
        (np.concatenate([np.arange(64, 96), np.arange(32)]), True),
        (np.stack([np.arange(32), np.arange(32) + 32]), True),
        (np.arange(32) + 8, False),
        (np.arange(32)[::-1], False),
        (np.concatenate([np.arange(64, 88), np.arange(24)]), False),
        (jnp.arange(32), False),
    ],
)
def test_pairs_of_keys(positions, paired):
    """Both keys of a pair are in one tile, as far as is known at trace time."""
    assert triton_flash._paired(positions) == paired


EIGHTH = np.random.default_rng(0).random((32, 32)) < 1 / 8


@pytest.mark.parametrize("by_key_block", [False, True])
@pytest.mark.parametrize(
    "mask",
    fast(
        [
            Mask(block_mask=EIGHTH, block_size=8),
            Mask(causal=True, block_mask=EIGHTH, block_size=8),
            Mask(window=17, global_tokens=np.arange(256) < 8),
            Mask(causal=True, window=17, global_tokens=np.arange(256) % 64 == 5),
        ],
        lambda mask: mask.causal,
    ),
)
def test_lists_hold_no_empty_tile(mask, by_key_block):
    """With 256 tokens in tiles of 4 × 8, exactly the non-empty tiles are visited, and exactly the
    full tiles are marked full."""
    T, bq, bk = 256, 4, 8
    full = mask.resolve(T, T)
    fields = jax.tree.map(jnp.asarray, (full.of_queries, full.of_keys))
    seen = np.asarray(quick(full.allowed)(*fields))[0].reshape(T // bq, bq, T // bk, bk)

    def lists(mask):
        return visits.block_lists(mask.resolve(T, T), T, T, bq, bk, by_key_block=by_key_block)

    ranges, tiles = lists(mask)
    assert ranges[..., 3].sum() == seen.any((1, 3)).sum() < seen.shape[0] * seen.shape[2] / 3
    assert ranges[..., 2].sum() == seen.all((1, 3)).sum()
    assert tiles.shape[-1] == ranges[..., 3].max()
    traced_ranges, traced_tiles = jax.jit(lists)(mask)
    assert (traced_ranges == ranges).all()
    for i in range(ranges.shape[1]):
        n = ranges[0, i, 3]
        assert (traced_tiles[0, i, :n] == tiles[0, i, :n]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_oracle(name, dtype):
    case = CASES[name]
    got = compiled(case.operands(dtype), case.spec(), case.sinks)
    for what, a, b in zip(("out", "dq", "dk", "dv"), got, oracle(name)[:4], strict=True):
        assert a.dtype == dtype and error(a, b) <= TOLERANCE[dtype], (what, error(a, b))


def compiled(operands, spec, sinks=None):
    @jax.jit
    def run(q, k, v, dout):
        x = QKV(q, k, v)
        state = attend(triton_flash, x, spec, None if sinks is None else jnp.asarray(sinks))
        return state.out, *triton_flash.backward(x, state, dout, spec)

    return run(*operands)


DOCUMENTS = np.repeat([[1, 2, 3, 4]], 256, 1).astype(np.int32)
CAUSAL = Mask(causal=True)
BLOCK_MASK = EIGHTH[:9, :9] | EIGHTH[9:18, :9]
LARGE = {
    "64": (64, 777, 4, 2, AttentionSpec(Mask(causal=True), 0.125)),
    "128, window, soft cap": (
        128,
        1111,
        4,
        1,
        AttentionSpec(replace(CAUSAL, window=300), 0.1, 20.0),
    ),
    "64, narrow window": (64, 777, 16, 2, AttentionSpec(replace(CAUSAL, window=100), 0.125)),
    "128, narrow window, documents": (
        128,
        1024,
        8,
        2,
        AttentionSpec(Mask(window=50, segments=DOCUMENTS), 0.1),
    ),
    "80, all keys": (80, 513, 2, 2, AttentionSpec(Mask(), 0.1)),
    "256": (256, 640, 2, 1, AttentionSpec(Mask(causal=True), 0.0625)),
    "512": (512, 640, 2, 1, AttentionSpec(Mask(causal=True), 0.04)),
    "96, documents, alibi": (
        96,
        1024,
        4,
        4,
        AttentionSpec(
            Mask(causal=True, segments=DOCUMENTS), 0.1, alibi=jnp.asarray(alibi_slopes(4))
        ),
    ),
    "128, block mask": (
        128,
        1111,
        4,
        1,
        AttentionSpec(
            Mask(causal=True, block_mask=EIGHTH[:9, :9] | EIGHTH[9:18, :9], block_size=128), 0.1
        ),
    ),
    "64, window, global tokens": (
        64,
        777,
        4,
        2,
        AttentionSpec(Mask(window=100, global_tokens=np.arange(777) % 300 == 7), 0.1),
    ),
    "32, dropout": (
        32,
        1024,
        4,
        2,
        AttentionSpec(CAUSAL, 0.2, dropout=0.2, dropout_key=jnp.array([1, 2], jnp.uint32)),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", LARGE)
def test_head_sizes(name, dtype):
    H, T, N, K, spec = LARGE[name]
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H)
    keys = jax.random.split(jax.random.key(H), 4)
    operands = [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]
    q, k, v, dout = (x.astype(jnp.float32) for x in operands)
    out, pull = jax.vjp(lambda *qkv: reference.forward(QKV(*qkv), spec).out, q, k, v)
    for a, b in zip(compiled(operands, spec), (out, *pull(dout)), strict=True):
        assert error(a, b) <= TOLERANCE[dtype]


@pytest.mark.gpu
def test_beyond_32_bits():
    """More than 2³¹ elements in q: the last queries of a long sequence, against attention over the
    few keys that their window shows them.
    """
    T, N, K, H, window = 2**19 + 256, 32, 1, 128, 200
    assert T * N * H > 2**31
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H)
    q, k, v, dout = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    spec = AttentionSpec(Mask(causal=True, window=window), H**-0.5)
    out, dq, dk, dv = compiled((q, k, v, dout), spec)
    tail = 512
    ends = [x[:, -tail:].astype(jnp.float32) for x in (q, k, v, dout)]
    true, pull = jax.vjp(lambda *qkv: reference.forward(QKV(*qkv), spec).out, *ends[:3])
    true_dq, true_dk, true_dv = pull(ends[3])
    # Leave out the tokens whose keys or queries lie before the tail.
    for a, b in ((out, true), (dq, true_dq), (dk, true_dk), (dv, true_dv)):
        a, b = a[:, -tail + window :], b[:, window:]
        assert error(a.astype(jnp.float32), b) <= TOLERANCE["bfloat16"]
