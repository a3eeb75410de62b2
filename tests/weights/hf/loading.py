import re

import jax
import numpy as np

from bptjax.models.config import ModelConfig
from bptjax.weights.hf.checkpoint import write_hf
from bptjax.weights.hf.config import read_config
from bptjax.weights.hf.tensors import Tensors
from bptjax.weights.pretrained import open_pretrained


def load(directory, **wanted):
    model = open_pretrained(ModelConfig(name_or_path=str(directory), **wanted))
    return model.load(jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def random_base(directory, raw):
    """Random weights of transformers' config, without torch."""
    directory.mkdir()
    raw.architectures = [type(raw).__name__.replace("Config", "ForCausalLM")]
    (directory / "config.json").write_text(raw.to_json_string())
    random_weights(directory, *read_config(directory))
    return directory


def random_weights(directory, family, model):
    """A file of random weights, for a config of ours."""
    rng = np.random.default_rng(0)
    names = family.names(model)
    shapes = {
        p: x.shape for r in names for p, x in zip(r.ours, r.split(np.zeros(r.shape)), strict=True)
    }

    def read(path, index):
        x = 0.1 * rng.normal(size=shapes[path])
        return (x + 1.0 * path.endswith("scale")).astype(np.float32)

    write_hf(directory, names, read, lambda path: "float32", "5GB")


def contents(directory):
    """Returns the bytes of each file, without the title of a model card, which is the name of the
    export."""
    return {
        str(path.relative_to(directory)): re.sub(rb"\n# .*\n", b"\n", path.read_bytes(), count=1)
        if path.name == "README.md"
        else path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def tensors(directory):
    """Dtype, shape and bytes of every tensor, by name."""
    found = Tensors(directory)
    return {name: (found.specs[name], found.read(name).tobytes()) for name in found.specs}
