"""The peer of preference steps has the decoder of scripts/step.py, and finds its longest prompt."""

import pairs_peer
import pytest
from step import LLAMA_8B

from bptjax.weights.lora import AdapterConfig


def test_peer_has_the_decoder_and_adapters_of_the_steps():
    sizes = pairs_peer.LLAMA_8B
    assert sizes == dict(
        vocab_size=LLAMA_8B.vocab_size,
        hidden_size=LLAMA_8B.hidden_size,
        intermediate_size=LLAMA_8B.intermediate_size,
        num_hidden_layers=LLAMA_8B.num_layers,
        num_attention_heads=LLAMA_8B.num_heads,
        num_key_value_heads=LLAMA_8B.num_kv_heads,
        head_dim=LLAMA_8B.head_dim,
    )
    assert {"rope_theta": pairs_peer.ROPE_THETA} == LLAMA_8B.rope_parameters
    assert not LLAMA_8B.tied_head
    assert AdapterConfig().r == pairs_peer.ADAPTER_RANK


@pytest.mark.parametrize("waste", [0.95, 1.0, 1.05])
def test_longest_prompt_is_between_one_that_fits_and_one_that_does_not(waste):
    """The memory that is free at the end is less or more than the peaks of short prompts tell."""
    limit, tried = 100_000, []

    def peak(prompt: int) -> float | None:
        tried.append(prompt)
        return 16.0 + 1e-3 * prompt if prompt <= limit else None

    memory = 16.0 + 1e-3 * limit * waste
    fits, too_long = pairs_peer.longest(peak, 7169, memory)
    assert too_long is not None and fits <= limit < too_long
    assert too_long - fits <= 0.04 * limit
    assert len(tried) <= 8
