import numpy as np
import pytest

from hf.cases import ENCODERS, config


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
                model = transformers.AutoModelForCausalLM.from_config(
                    config(name), attn_implementation=how
                )
            with torch.no_grad():
                for parameter in model.parameters():
                    # Biases and norms too are to matter.
                    parameter.add_(0.1 * torch.randn_like(parameter))
            directory = tmp_path_factory.mktemp("theirs")
            model.eval().save_pretrained(directory)
            made[name] = model, directory
        return made[name]

    return make


@pytest.fixture(scope="session")
def tokens():
    # From 3 on: torch gives the embedding of padding, id 0 or 1, no gradient.
    return np.random.default_rng(0).integers(3, 61, (2, 21))
