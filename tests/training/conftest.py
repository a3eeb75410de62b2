"""The tiny run, once a session, and one device for all runs of these tests."""

import jax
import pytest

from bptjax.train import main
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
