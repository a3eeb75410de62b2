import jax

from bptjax.hf.pretrained import open_pretrained
from bptjax.models.config import ModelConfig


def load(directory, **wanted):
    model = open_pretrained(ModelConfig(name_or_path=str(directory), **wanted))
    return model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
