"""The tiny run, once a session, one device for all runs of these tests, and a batch."""

import jax
import numpy as np
import pytest

from bptjax.cli.train import main
from training.runs import write_config


@pytest.fixture(scope="session")
def arguments(tmp_path_factory):
    """Command line of the tiny run, without its run directory."""
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])


@pytest.fixture(scope="session")
def uninterrupted(arguments, tmp_path_factory):
    """Directory of the finished tiny run."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:1])
        assert main([*arguments, "--run_dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture(scope="session")
def batch():
    """Eight sequences of 24 tokens: packed documents, with unequal numbers of labels."""
    T = 24
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, T), dtype=np.int32)
    ends = rng.integers(2, T + 1, (8, 1))
    place = np.arange(T, dtype=np.int32)[None]
    segments = np.where(place < ends, 1 + (place >= ends // 2), 0).astype(np.int32)
    positions = np.where(segments == 2, place - ends // 2, place).astype(np.int32)
    labels = np.where(segments > 0, np.roll(tokens, -1, 1), -100).astype(np.int32)
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}
