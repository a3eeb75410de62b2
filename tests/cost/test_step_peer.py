"""The peer of steps of full fine-tuning computes the same steps in all its ways."""

from argparse import Namespace

import pytest

from bptjax.models.config import ModelConfig

step_peer = pytest.importorskip("step_peer", reason="needs torch", exc_type=ImportError)
MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1)
PLAIN = dict(offload=False, tiled=False, compile=False, float8=None, save_products=False)


def test_offload_and_saved_products_change_no_losses():
    ways = {}, dict(offload=True), dict(save_products=True)
    losses = []
    for way in ways:
        made = step_peer.make(MODEL, Namespace(**PLAIN | way), "cpu")
        losses.append(step_peer.measure(made, 16, 2)["losses"])
    assert losses[0] == losses[1] == losses[2] and losses[0][2] < losses[0][0]
