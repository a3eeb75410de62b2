"""Learning rate and loss scale over the steps of a run."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from bptjax.optim.loss_scale import LossScale
from bptjax.optim.optimizer import OptimizerConfig
from bptjax.optim.schedule import learning_rate


def test_loss_scale_doubles_after_good_steps():
    scale = replace(LossScale.start(), good_steps=jnp.int32(LossScale.INTERVAL - 2))
    scale = scale.update(jnp.bool(True))
    assert float(scale.value) == 1.0
    scale = scale.update(jnp.bool(True))
    assert float(scale.value) == 2.0 and int(scale.good_steps) == 0


def test_learning_rate_rises_and_falls():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rate = learning_rate(config, 14)
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose(rate(14), 0.1, rtol=1e-6)
    linear = learning_rate(replace(config, lr_scheduler_type="linear"), 14)
    np.testing.assert_allclose([linear(9), linear(20)], [0.55, 0.1], rtol=1e-6)
    constant = learning_rate(replace(config, lr_scheduler_type="constant"), 14)
    assert float(constant(14)) == 1.0
    wsd = learning_rate(replace(config, lr_scheduler_type="wsd", decay_ratio=0.25), 20)
    wanted = [0.25, 1.0, 1.0, 1.0, 0.82, 0.1, 0.1]
    np.testing.assert_allclose([wsd(i) for i in (0, 3, 4, 15, 16, 20, 30)], wanted, rtol=1e-6)
    ratio = learning_rate(replace(config, warmup_steps=None, warmup_ratio=0.07), 100)
    np.testing.assert_allclose([ratio(0), ratio(6)], [1 / 7, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(warmup_steps=11), "warmup_steps=11: the warm-up must end within the 10 steps"),
        (
            dict(warmup_steps=6, lr_scheduler_type="wsd", decay_ratio=0.5),
            "decay_ratio=0.5: 6 steps of warm-up and 5 of decay must fit into the 10 steps",
        ),
        (dict(warmup_steps=1, warmup_ratio=0.1), "warmup_ratio=0.1: must not be set together with"),
        (dict(decay_ratio=0.5), "decay_ratio=0.5: must not be set with lr_scheduler_type=cosine"),
        (dict(warmup_ratio=1.5), r"warmup_ratio=1.5: must be in \[0, 1\]"),
        (dict(learning_rate=None), "optimizer.learning_rate: must be set"),
        (dict(learning_rate=math.inf), "learning_rate=inf: must be finite and positive"),
        (dict(adam_epsilon=math.inf), "adam_epsilon=inf: must be finite and positive"),
        (dict(weight_decay=math.nan), "weight_decay=nan: must be finite and not negative"),
        (dict(weight_decay=math.inf), "weight_decay=inf: must be finite and not negative"),
        (dict(max_grad_norm=math.nan), "max_grad_norm=nan: must be finite and not negative"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        learning_rate(OptimizerConfig(**{"learning_rate": 1.0} | changes), 10)
