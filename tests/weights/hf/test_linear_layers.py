"""Adapters and weight decay apply to the linear layers of every family, whatever their names: those
of PEFT's all-linear, and torch's."""

import copy
import re

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiers import fast

from bptjax.cli import convert
from bptjax.cli.train import main
from bptjax.data.tokenizer import ByteTokenizer
from bptjax.models.architecture import new_model
from bptjax.models.config import ModelConfig
from bptjax.models.params import param_path
from bptjax.optim.optimizer import is_decayed
from bptjax.weights.float8_kernels import float8_kernels
from bptjax.weights.hf.families.family import field_values
from bptjax.weights.hf.peft import WEIGHTS
from bptjax.weights.hf.peft_experts import expert_parameters
from bptjax.weights.hf.peft_modules import linears, modules
from bptjax.weights.pretrained import open_pretrained
from bptjax.weights.quantized_kernels import linear_kernels
from weights.hf.cases import DIFFERENT, FAMILIES, config
from weights.hf.loading import load, random_base
from weights.hf.test_peft import ours

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*alpha_pattern keys did not match.*:RuntimeWarning"),
]
DECODERS = [name for name in FAMILIES.values() if name not in ("bert", "vit")]
# The linear layers that only PEFT's all-linear adapts: routers, and a projection for all layers,
# before them.
OF_PEFT = r".*\.(router\.proj|mlp\.gate|per_layer_model_projection)|.*(vision|visual|projector).*"
BESIDE_EXPERTS = r"mlp\.(shared_experts?\.)?(gate|up|down)_proj$"


def opened(theirs, name):
    model, directory = theirs(name)
    pretrained = open_pretrained(ModelConfig(name_or_path=str(directory)))
    made = jax.eval_shape(lambda: new_model(pretrained.config, jax.random.key(0)))
    return model, pretrained, made


@pytest.mark.parametrize("name", fast(DECODERS, DIFFERENT))
def test_all_linear_is_that_of_peft(theirs, name):
    model, pretrained, made = opened(theirs, name)
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules="all-linear")
    names = peft.get_peft_model(copy.deepcopy(model), settings).targeted_module_names
    theirs = {module for module in names if not re.fullmatch(OF_PEFT, module)}
    family, model_config = pretrained.family, pretrained.config
    # Transformers holds experts in parameters, which all-linear leaves out there.
    experts = {path for each in expert_parameters(family, model_config) for path in each.paths}
    layers = (x for x in linears(family, model_config) if x.parts[0].path not in experts)
    found = {module for linear in layers for module in linear.names.values()}
    if experts and not family.peft_keeps_mlps:  # See `remedy_for_peft`.
        found = {module for module in found if not re.search(BESIDE_EXPERTS, module)}
    assert found == theirs
    # All of them are kernels that QLoRA quantizes, and no others are but the experts'.
    paths = {path for each in modules(model_config, family).values() for path in each}
    assert paths == linear_kernels(made).keys()


@pytest.mark.parametrize("name", fast(DECODERS, DIFFERENT))
def test_weights_of_linear_layers_decay(theirs, name):
    model, pretrained, made = opened(theirs, name)
    import torch
    import transformers

    family, model_config = pretrained.family, pretrained.config
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    linears = {f"{name}.weight" for name, m in linears if m is not model.get_output_embeddings()}
    wanted = {path for each in expert_parameters(family, model_config) for path in each.paths}
    wanted |= {"layers.mlp.router.kernel"} if model_config.experts.count else set()
    for rule in family.tensor_rules(model_config):
        if linears.issuperset(rule.names(field_values(model_config)).values()):
            wanted |= {*rule.ours}
    found = {
        param_path(at)
        for at, v in jax.tree.leaves_with_path(made, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if isinstance(v, nnx.Param) and is_decayed(v)
    }
    assert found == wanted


@pytest.mark.thorough
def test_the_gate_of_a_shared_expert_trains_in_4_bits(tmp_path, monkeypatch):
    """It has one output, which no device shares and no product of 8-bit floats can have."""
    monkeypatch.setattr("bptjax.training.setup.select_devices", lambda device: jax.devices()[:2])
    raw = config("qwen3_next")
    raw.vocab_size = ByteTokenizer.vocab_size
    ByteTokenizer().save(random_base(tmp_path / "base", raw))
    (tmp_path / "text.txt").write_text("".join(f"{i} plus one is {i + 1}. " for i in range(99)))
    run, merged = tmp_path / "run", tmp_path / "merged"
    options = {
        "run_dir": run,
        "device": "cpu",
        "parallel.tp": 2,
        "model.name_or_path": tmp_path / "base",
        "data.path": tmp_path / "text.txt",
        "train.max_steps": 2,
        "train.seq_len": 16,
        "optimizer.learning_rate": 0.05,
        "adapter.type": "qlora",
        "adapter.target_modules": "[shared_expert_gate]",
    }
    assert main([f"--{key}={value}" for key, value in options.items()]) == 0
    tensors = load_file(run / "adapter" / WEIGHTS)
    low = {
        name: x for name, x in tensors.items() if name.endswith("shared_expert_gate.lora_B.weight")
    }
    assert low.keys() and all(x.shape == (1, 8) and np.abs(x).max() > 0 for x in low.values())
    assert convert.main(["merge-adapter", str(run), str(merged)]) == 0
    tokens = np.arange(16)[None]
    assert np.abs(ours(run, tokens) - ours(merged, tokens)).max() < 1e-4
    kernels = float8_kernels(jax.eval_shape(lambda: load(merged)))
    assert "layers.mlp.shared.up.kernel" in kernels
    assert "layers.mlp.shared_gate.kernel" not in kernels
