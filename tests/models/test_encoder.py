"""The encoder on a mesh."""

import jax
import numpy as np
import pytest
from ops.comparing import close, quick

from bptjax.models.config import ModelConfig
from bptjax.models.encoder import Encoder
from bptjax.models.execution import Execution
from bptjax.models.groups.encoder import EncoderConfig
from bptjax.ops.patches import cut_patches
from bptjax.parallel.mesh import ParallelConfig, make_mesh

SIZES = dict(
    causal=False,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    position_embedding="learned",
    max_position_embeddings=10,
)
TEXT = ModelConfig(**SIZES, vocab_size=50, encoder=EncoderConfig(masked_head=True), head_bias=True)
CLASSIFIER = EncoderConfig(image_size=(8, 12), patch_size=(4, 4), classes=3)
IMAGES = ModelConfig(**SIZES, encoder=CLASSIFIER)


@pytest.mark.thorough
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


def test_patches_in_any_order_give_what_images_give():
    model, images = (
        Encoder(IMAGES, jax.random.key(0)),
        np.random.default_rng(0).normal(size=(2, 3, 8, 12)),
    )
    images = images.astype(np.float32)
    order = np.array([3, 1, 0, 6, 2, 5, 4])
    # Nothing of the blank token counts.
    tokens = np.pad(cut_patches(images, (4, 4)), ((0, 0), (1, 0), (0, 0)), constant_values=np.nan)
    wanted, _ = model(images)
    got, _ = model(
        tokens[:, order],
        positions=order[None].repeat(2, 0),
        segments=np.ones((2, 7), np.int32),
        order=order,
    )
    close(got, wanted[:, order])
