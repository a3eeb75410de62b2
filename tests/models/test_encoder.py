"""The encoder on a mesh."""

import jax
import pytest
from ops.comparing import close, quick

from bptjax.models.config import Execution, ModelConfig
from bptjax.models.encoder import Encoder
from bptjax.parallel.mesh import ParallelConfig, make_mesh

SIZES = dict(
    causal=False,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    position_embedding="learned",
    max_position_embeddings=10,
)
TEXT = ModelConfig(**SIZES, vocab_size=50, masked_head=True, head_bias=True)
IMAGES = ModelConfig(**SIZES, image_size=(8, 12), patch_size=(4, 4), classes=3)


@pytest.mark.parametrize("config", [TEXT, IMAGES], ids=["text", "images"])
def test_tokens_cut_unevenly_give_what_one_device_gives(config):
    """10 tokens, and a first token and 6 patches, over 4 devices."""
    model = Encoder(config, jax.random.key(0))
    inputs = jax.random.normal(jax.random.key(1), (2, 3, 8, 12))
    if config is TEXT:
        inputs = jax.random.randint(jax.random.key(1), (2, 10), 0, 50)
    execution = Execution(q_chunk=4, k_chunk=4, ffn_chunk=4)

    @quick
    def run(model, inputs):
        def loss(model):
            logits = model.logits(model(inputs, execution=execution)[0])
            return (logits**2).sum(), (logits, model.hidden_states(inputs, execution=execution))

        return jax.value_and_grad(loss, has_aux=True)(model)

    (_, wanted), gradients = run(model, inputs)
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=1, sp=4), jax.devices()[:4])):
        (_, got), found = run(model, inputs)
    jax.tree.map(close, (got, found), (wanted, gradients))
