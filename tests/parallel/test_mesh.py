"""The mesh, and where arrays live on it."""

import os
import warnings
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bptjax.ops import determinism
from bptjax.ops.attention import fa4
from bptjax.ops.determinism import deterministic
from bptjax.parallel import mesh as mesh_module
from bptjax.parallel.mesh import (
    AXES,
    RULES,
    STATE_AXIS,
    ParallelConfig,
    constrain,
    data_shards,
    host_memory,
    lookup,
    make_mesh,
    num_shards,
    select_devices,
    sharding,
)


def test_the_open_axis_takes_the_rest():
    mesh = make_mesh(ParallelConfig(dp=2, fsdp=-1, tp=2))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2, "sp": 1, "ep": 1}


def test_one_device_is_a_mesh_of_ones():
    mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
    assert set(mesh.shape.values()) == {1}


@pytest.mark.parametrize(
    "config, message",
    [
        (
            ParallelConfig(dp=3),
            "dp=3, fsdp=-1, tp=1, sp=1, ep=1: must multiply to 8 devices",
        ),
        (
            ParallelConfig(fsdp=4),
            "dp=1, fsdp=4, tp=1, sp=1, ep=1: must multiply to 8 devices",
        ),
        (
            ParallelConfig(dp=-1, fsdp=-1),
            "dp=-1, fsdp=-1, tp=1, sp=1, ep=1: must have at most one",
        ),
        (ParallelConfig(tp=0), "parallel.tp=0: must be at least 1, or -1 for all remaining"),
        (ParallelConfig(sp=-2), "parallel.sp=-2: must be at least 1, or -1 for all remaining"),
    ],
)
def test_a_wrong_mesh_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(config)


def test_the_table_of_axes_is_the_config():
    """A new axis is a line of AXES and a key of ParallelConfig."""
    assert list(AXES) == [f.name for f in fields(ParallelConfig)][: len(AXES)]
    assert RULES["batch"] == ("dp", "fsdp", "ep") and RULES["experts"] == ("ep",)
    assert RULES[STATE_AXIS] == ("fsdp", "sp", "ep")
    mesh = make_mesh(ParallelConfig(dp=2, sp=2, ep=2))
    assert data_shards(mesh) == 4 and num_shards(mesh, "sequence") == 2


def test_the_nearest_meshes_are_named():
    nearest = "dp=1 fsdp=1 tp=2 sp=4 ep=1 or dp=1 fsdp=1 tp=4 sp=2 ep=1"
    with pytest.raises(ValueError, match=f"nearest: {nearest}"):
        make_mesh(ParallelConfig(fsdp=1, tp=3, sp=3))


def test_an_axis_is_sharded_over_the_mesh_axes_that_divide_it():
    mesh = make_mesh(ParallelConfig(dp=1, fsdp=4, tp=2))
    assert sharding(mesh, ("vocab", "embed"), (257, 16)).spec == PartitionSpec(None, "fsdp")
    assert sharding(mesh, ("vocab", "embed"), (256, 16)).spec == PartitionSpec("tp", "fsdp")
    mesh = make_mesh(ParallelConfig(dp=1, fsdp=2, sp=4))
    assert sharding(mesh, ("embed",), (16,)).spec == PartitionSpec(("fsdp", "sp"))
    assert sharding(mesh, ("embed",), (18,)).spec == PartitionSpec("fsdp")
    mesh = make_mesh(ParallelConfig(fsdp=3, sp=2), jax.devices()[:6])
    assert sharding(mesh, ("embed",), (16,)).spec == PartitionSpec("sp")


def test_a_mesh_axis_shards_one_axis_of_an_array():
    """Experts come before the width, also if the rest of the state is replicated."""
    mesh, axes = make_mesh(ParallelConfig(fsdp=2, tp=2, ep=2)), ("experts", "embed", "mlp")
    assert sharding(mesh, axes, (3, 8, 16, 4)).spec == PartitionSpec(None, "ep", "fsdp", "tp")
    assert sharding(mesh, axes, (3, 3, 16, 4)).spec[2] == ("fsdp", "ep")
    spec = sharding(mesh, axes, (3, 8, 16, 4), (STATE_AXIS,)).spec
    assert spec == PartitionSpec(None, "ep", None, "tp")


def test_constrain_does_nothing_without_a_mesh():
    x = jnp.ones((8, 4, 2))
    assert constrain(x, "batch", "sequence", None) is x
    with jax.set_mesh(make_mesh(ParallelConfig(dp=2, fsdp=4))):
        placed = jax.jit(lambda x: constrain(x, "batch", "sequence", None))(x)
    assert placed.addressable_shards[0].data.shape == (1, 4, 2)


def test_gpu_without_a_gpu_names_the_remedy():
    with pytest.raises(ValueError, match=r"device=gpu.*pip install -e"):
        select_devices("gpu")


def test_a_cpu_run_beside_an_nvidia_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("bptjax.parallel.mesh.NVIDIA", "/")
    with pytest.raises(ValueError, match=r"NVIDIA.*device=cpu"):
        select_devices("auto")
    assert select_devices("cpu")


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("", fa4.XLA_FLAG),
        ("--xla_foo=1", f"--xla_foo=1 {fa4.XLA_FLAG}"),
        (fa4.XLA_FLAG.replace("false", "true"), fa4.XLA_FLAG.replace("false", "true")),
        ("/tmp/flags.txt", "/tmp/flags.txt"),
    ],
)
def test_fa4_gets_its_flag(flags, wanted, monkeypatch):
    monkeypatch.setattr("bptjax.parallel.mesh.NVIDIA", "/dev/null")
    monkeypatch.setattr("bptjax.parallel.mesh.find_spec", lambda name: name)
    monkeypatch.setattr("bptjax.parallel.mesh._devices", lambda device: jax.devices())
    monkeypatch.setenv("XLA_FLAGS", flags)
    for device, found in (("cpu", flags), ("auto", wanted), ("auto", wanted)):
        select_devices(device)
        assert os.environ["XLA_FLAGS"] == found


def test_host_memory_is_that_of_the_container(monkeypatch, tmp_path):
    every = host_memory()
    for text, size in (("max\n", every), (f"{2**30}\n", 2**30), (f"{2**62}\n", every)):
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(
            mesh_module, "CONTAINER_LIMITS", (tmp_path / "none", tmp_path / "limit")
        )
        assert host_memory() == size


def test_a_full_disk_of_the_compilation_cache_is_silent(monkeypatch):
    """A save names the full disk, and other errors of the cache are warnings."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    error = "Error writing persistent compilation cache entry for 'f': OSError: [Errno"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select_devices("cpu")
        warnings.warn(f"{error} 28] No space left on device", stacklevel=1)
        with pytest.raises(UserWarning, match="Permission denied"):
            warnings.warn(f"{error} 13] Permission denied", stacklevel=1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_gradient_of_an_embedding_is_a_sum_in_float32(dtype):
    """In 16 bits, a sum of ones stops growing at 256 or 2048."""
    tokens = jnp.zeros((1, 4096), jnp.int32)
    table = jnp.zeros((2, 3), dtype)
    found = jax.grad(lambda x: lookup(x, tokens).astype(jnp.float32).sum())(table)
    assert found.dtype == dtype and found.tolist() == [[4096] * 3, [0] * 3]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("rows, axis", [(6, "vocab"), (5, "vocab"), (6, None)])
def test_the_deterministic_gradient_of_an_embedding(rows, axis, devices, monkeypatch):
    """With and without a mesh, which may shard the vocabulary."""
    monkeypatch.setattr(determinism, "platform", lambda: "gpu")
    rng = np.random.default_rng(0)
    table, weights = (rng.standard_normal(shape, np.float32) for shape in ((rows, 4), (2, 1500, 4)))
    tokens = rng.integers(0, rows, (2, 1500), np.int32)
    wanted = np.zeros((rows, 4))
    np.add.at(wanted, tokens, weights)

    @jax.grad
    def gradient(table):
        return (lookup(table, jnp.asarray(tokens), axis) * weights).sum()

    sizes = ParallelConfig(tp=2, sp=2) if devices > 1 else ParallelConfig()
    with deterministic(True):
        np.testing.assert_allclose(gradient(jnp.asarray(table)), wanted, rtol=1e-5, atol=1e-5)
        with jax.set_mesh(make_mesh(sizes, jax.devices()[:devices])):
            found = jax.jit(gradient)(table)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
