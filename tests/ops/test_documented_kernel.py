"""The kernel that docs/extending.md prints passes all that other kernels are tested with."""

import jax
import pytest
from documented import example
from parallel import test_sequence as on_meshes
from tiers import fast

from bptjax.ops.attention import KERNELS
from bptjax.parallel.sequence import STRATEGIES
from bptjax.parallel.sequence import attention as on_mesh
from ops import test_attention as on_one_device
from ops.attention_cases import CASES, refuses
from ops.comparing import close

NAME = "halves"


@pytest.fixture(scope="module", autouse=True)
def kernel():
    KERNELS[NAME] = example("An attention kernel")["Halves"]()
    yield
    del KERNELS[NAME]


@pytest.mark.parametrize(
    "case, dtype",
    fast(
        [
            *((case, "float32") for case in CASES),
            *((case, "bfloat16") for case in on_one_device.FEW),
        ],
        lambda case, dtype: case in ("gqa", "everything") and dtype == "bfloat16",
    ),
)
def test_equals_oracle(case, dtype):
    on_one_device.test_equals_oracle(case, NAME, dtype)


def test_one_key_is_refused():
    refused = [name for name, case in CASES.items() if refuses(NAME, case, case.operands())]
    assert refused == ["one token"]


@pytest.mark.thorough
def test_gradients_add_up():
    on_one_device.test_causality(NAME)
    on_one_device.test_packed_is_separate(NAME)
    on_one_device.test_every_tile_empty(NAME)
    for case in ("everything", "cross, segments"):
        on_one_device.test_key_blocks_merge(case, NAME)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "strategy, case",
    [
        *(("ring", case) for case in on_meshes.CASES),
        *((strategy, "everything") for strategy in STRATEGIES if strategy != "ring"),
    ],
)
def test_every_strategy(strategy, case):
    options, arrays = on_meshes.CASES[case], on_meshes.operands()
    with jax.set_mesh(on_meshes.mesh_of(on_meshes.MESHES["sp 4"])):
        found = on_meshes.results(on_mesh, *arrays, strategy=strategy, impl=NAME, **options)
    close(found, on_meshes.results(on_meshes.on_one, *arrays, **options), scale=2.0)
