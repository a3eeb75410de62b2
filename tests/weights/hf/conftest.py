import json

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors.numpy import save_file

from bptjax.weights.hf.config import read_config
from weights.hf.cases import ENCODERS, auto_model, config


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """A function from a case's name to transformers' model, random and in float32, and the
    directory it was saved in.
    """
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            # transformers adds Falcon's ALiBi twice when it computes attention eagerly.
            how = "sdpa" if name.startswith("falcon") else "eager"
            if name in ENCODERS:
                model = getattr(transformers, ENCODERS[name][0])(config(name))
            else:
                model = auto_model(name).from_config(config(name), attn_implementation=how)
            with torch.no_grad():
                for parameter in model.parameters():
                    # Biases and norms too are to matter.
                    parameter.add_(0.1 * torch.randn_like(parameter))
                for key, buffer in model.named_buffers():
                    if key.endswith(("e_score_correction_bias", "layer_scalar")):
                        buffer.add_(0.1 * torch.randn_like(buffer))
            directory = tmp_path_factory.mktemp("theirs")
            model.eval().save_pretrained(directory)
            made[name] = model, directory
        return made[name]

    return make


@pytest.fixture(scope="session")
def tokens():
    # From 3 on: torch gives the embedding of padding, id 0 or 1, no gradient.
    return np.random.default_rng(0).integers(3, 61, (2, 21))


@pytest.fixture
def llama(tmp_path):
    """A tiny checkpoint in bfloat16, made without torch."""

    def make(name="hf", dtype="bfloat16", change=None, **keys):
        directory = tmp_path / name
        directory.mkdir()
        raw = config("llama").to_dict() | dict(architectures=["LlamaForCausalLM"]) | keys
        (directory / "config.json").write_text(json.dumps(raw, default=str))
        family, model = read_config(directory)
        rng = np.random.default_rng(0)
        arrays = {
            tensor: rng.normal(size=rule.shape).astype(dtype)
            for rule, names in family.names(model).items()
            for tensor in names.values()
        }
        save_file(change(arrays) if change else arrays, directory / "model.safetensors")
        return directory

    return make
