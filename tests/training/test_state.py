"""Shapes, shardings and contents of the state."""

from bptjax.config import Config, TrainConfig
from bptjax.models.config import ModelConfig
from bptjax.parallel.mesh import ParallelConfig, make_mesh
from bptjax.training.spec import TrainSpec
from bptjax.training.state import abstract_state

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4)


def test_both_axes_of_a_matrix_are_sharded():
    """Tensor parallelism in two dimensions is fsdp and tp together."""
    parallel = ParallelConfig(dp=1, fsdp=4, tp=2)
    spec = TrainSpec(Config(train=TrainConfig(max_steps=20)), MODEL, make_mesh(parallel))
    kernel = abstract_state(spec).model.layers.mlp.up.kernel.get_value()
    L, D, F = kernel.shape
    assert kernel.sharding.shard_shape((L, D, F)) == (L, D // 4, F // 2)
