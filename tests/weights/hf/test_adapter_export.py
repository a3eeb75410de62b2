"""What PEFT needs to compute the same with an exported adapter."""

from dataclasses import replace

import numpy as np
import pytest

from bptjax.models.config import ModelConfig
from bptjax.weights.adapter_export import remedy_for_peft
from bptjax.weights.lora import AdapterConfig, Adapters
from bptjax.weights.pretrained import open_pretrained


@pytest.mark.parametrize(("name", "kept"), [("glm4_moe", False), ("qwen3_5_moe_text", True)])
def test_peft_leaves_out_mlps_beside_experts(theirs, tmp_path, name, kept):
    """An export says so: PEFT takes the names of their linear layers for the experts' in some
    families."""
    model = open_pretrained(ModelConfig(name_or_path=str(theirs(name)[1])))
    for path in ("layers.dense.up.kernel", "layers.mlp.shared.up.kernel", "layers.mlp.up.kernel"):
        adapters = Adapters(AdapterConfig("lora", r=1), {path: (np.zeros(1),) * 3}, {})
        said = remedy_for_peft(replace(model, adapters=adapters), tmp_path)
        assert ("merge-adapter" in said) == (path != "layers.mlp.up.kernel" and not kept)
