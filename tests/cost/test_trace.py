"""Time by part: the least cost of instructions, and the division of a trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from bptjax.cost.devices import DeviceKind
from bptjax.cost.hlo import Cost, Program
from bptjax.cost.trace import Event, read_events, time_by_part
from bptjax.parallel.mesh import ParallelConfig, make_mesh

# The parts of a compiled step in small: a loop over 4 layers, whose body is a slice of the stacked
# weights, a matrix product of cuBLAS and a fused attention kernel; and the update.
HLO = """HloModule jit_train_step, is_scheduled=true

%slice_weights (p0: bf16[4,8,8], p1: s32[]) -> bf16[1,8,8] {
  %p0 = bf16[4,8,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,8,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,8}
}

%inner (q0: bf16[8,8]) -> bf16[8,8] {
  %q0 = bf16[8,8]{1,0} parameter(0)
  ROOT %product = bf16[8,8]{1,0} dot(%q0, %q0), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/transpose(jvp())/while/body/checkpoint/jvp(feed_forward)/dot_general"}
}

%body (state: (s32[], bf16[4,8,8], bf16[1,16,2,4])) -> (s32[], bf16[4,8,8], bf16[1,16,2,4]) {
  %state = (s32[], bf16[4,8,8]{2,1,0}, bf16[1,16,2,4]{3,2,1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %stacked = bf16[4,8,8]{2,1,0} get-tuple-element(%state), index=1
  %q = bf16[1,16,2,4]{3,2,1,0} get-tuple-element(%state), index=2
  %weights = bf16[1,8,8]{2,1,0} fusion(%stacked, %count), kind=kLoop, calls=%slice_weights, metadata={op_name="jit(f)/jvp()/while/body/dynamic_slice"}
  %flat = bf16[8,8]{1,0} bitcast(%weights)
  %gemm = (bf16[8,8]{1,0}, s8[64]{0}) custom-call(%flat, %flat), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/jvp()/while/body/attention/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %again = bf16[8,8]{1,0} fusion(%flat), kind=kCustom, calls=%inner
  %flash = (bf16[1,16,2,4]{3,2,1,0}, f32[1,16,2]{2,1,0}) custom-call(%q, %q, %q), custom_call_target="x", metadata={op_name="jit(f)/jvp()/while/body/attention_kernel/f"}, backend_config={"cudnn_fmha_backend_config":{"bmm1_dot_dimension_numbers":{"lhs_contracting_dimensions":["3"]}}}
  %out = bf16[1,16,2,4]{3,2,1,0} get-tuple-element(%flash), index=0
  %offload = (bf16[8,8]{1,0:S(5)}, bf16[8,8]{1,0}, u32[]) copy-start(%flat)
  ROOT %next = (s32[], bf16[4,8,8]{2,1,0}, bf16[1,16,2,4]{3,2,1,0}) tuple(%count, %stacked, /*index=2*/%out)
}

ENTRY %main (a: (s32[], bf16[4,8,8], bf16[1,16,2,4])) -> bf16[4,8,8] {
  %a = (s32[], bf16[4,8,8]{2,1,0}, bf16[1,16,2,4]{3,2,1,0}) parameter(0)
  %loop = (s32[], bf16[4,8,8]{2,1,0}, bf16[1,16,2,4]{3,2,1,0}) while(%a), condition=%never, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %sums = bf16[4,8,8]{2,1,0} get-tuple-element(%loop), index=1
  %total = bf16[4,8,8]{2,1,0} all-reduce(%sums), replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="jit(f)/transpose(jvp())/psum"}
  ROOT %new = bf16[4,8,8]{2,1,0} add(%total, %total), metadata={op_name="jit(f)/optimizer/add"}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
    return Program(HLO)


def test_costs(program):
    square = 8 * 8 * 2
    # The fusion reads the index and one layer of the stacked weights.
    assert program.cost("weights") == Cost(0, 2 * square + 4)
    assert program.cost("gemm") == Cost(2 * 8**3, 2 * square + square + 64)
    assert program.cost("again") == Cost(2 * 8**3, 2 * square)
    # Two products of half of the pairs of 16 tokens, 2 heads of size 4.
    assert program.cost("flash").flops == 2 * 2 * (16 * 16 / 2) * 2 * 4
    assert program.cost("loop") == program.cost("flat") == program.cost("unknown") == Cost()
    executions = program.executions()
    assert executions["gemm"] == 4 and executions["new"] == 1


def test_time_is_divided(program):
    """Each pass and part; overlapping communication does not count, and all seconds are counted."""
    layer = [
        ("weights", 10), ("gemm", 20), ("splitk", 5), ("cudnn", 30), ("MemcpyD2H", 2), ("fused", 8)
    ]  # fmt: skip
    of = dict(splitk="gemm", cudnn="flash", fused="again", MemcpyD2H="offload")
    events, now = [], 100.0
    for _ in range(4):
        for kernel, duration in layer:
            events.append(Event(kernel, of.get(kernel, kernel), now, now + duration))
            now += duration
    # The all-reduce starts under the last kernel, and a pause follows.
    events.append(Event("ncclKernel", "total", now - 4, now + 6))
    events.append(Event("add", "new", now + 16, now + 20))
    # The rates make a FLOP or a byte a second.
    found = time_by_part(program, events, DeviceKind("x", 1, 1.0, 1.0, peers=1.0, host=1.0))
    rows = {(row["part"], row["pass"]): (row["seconds"] * 1e9, row["floor"]) for row in found}
    expected = {
        ("attention", "forward"): (120, 4 * 4096),
        ("matrix products", "forward"): (100, 4 * 1024),
        ("matrix products", "recomputation"): (32, 4 * 1024),
        ("norms and pointwise", "forward"): (40, 4 * 260),
        ("optimizer", "update"): (4, 3 * 512),
        # In a ring of four, three quarters of the sums come in twice.
        ("communication", "backward"): (6, 2 * 3 / 4 * 512),
        ("host copies", "forward"): (8, 4 * 128),
        ("idle", "other"): (10, None),
    }
    assert {key: (pytest.approx(t), floor) for key, (t, floor) in rows.items()} == expected
    assert sum(seconds for seconds, _ in rows.values()) == pytest.approx(now + 20 - 100)
    assert {row["floor"] for row in time_by_part(program, events, None)} == {None}


PLANE = """planes {
  name: "%s"
  lines { timestamp_ns: 5 events { metadata_id: 1 duration_ps: 3000 stats { metadata_id: 1 str_value: "dot" } } }
  event_metadata { key: 1 value { id: 1 name: "%s" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
"""  # noqa: E501


def planes(*names):
    return "".join(PLANE % (name, name) for name in names)


@pytest.mark.parametrize(
    "profile, device",
    [
        (planes("/host:CPU"), "/host:CPU"),
        # libtpu adds an empty plane on a machine without TPUs.
        ('planes { name: "/device:CUSTOM:x" }' + planes("/host:CPU"), "/host:CPU"),
        (planes("/host:CPU", "/device:GPU:1", "/device:GPU:0"), "/device:GPU:0"),
        ('planes { name: "/device:GPU:0" }', None),
    ],
)
def test_operations_of_the_first_device_that_has_any(profile, device, tmp_path):
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(profile)
    (tmp_path / "host.xplane.pb").write_bytes(data)
    assert read_events(tmp_path) == ([] if device is None else [Event(device, "dot", 5, 8)])


@pytest.mark.parametrize(
    "results, target, products",
    [
        ("(bf16[16,2,4], f32[2,16])", "fa4_fwd_lse", 2),
        ("(f32[2,64], f32[1,64], f32[1,64])", "fa4_bwd_gqa_varlen", 5),
        ("(bf16[16,2,4], bf16[16,1,4], bf16[16,1,4])", "x", 5),
    ],
)
def test_attention_of_packed_documents_counts_as_one_document(results, target, products):
    program = Program(f"""HloModule m

ENTRY %main (q: bf16[16,2,4], k: bf16[16,1,4]) -> {results} {{
  %q = bf16[16,2,4]{{2,1,0}} parameter(0)
  %k = bf16[16,1,4]{{2,1,0}} parameter(1)
  ROOT %flash = {results} custom-call(%q, %k, %k, %q), custom_call_target="{target}"
}}
""")
    assert program.cost("flash").flops == products * (16 * 16 * 2 * 4)


def test_bytes_from_other_devices():
    """Collective operations in a loop of three, over groups of four of eight devices."""
    mesh = make_mesh(ParallelConfig(dp=2, fsdp=4))

    def step(x, _):
        whole = jax.lax.all_gather(x, "fsdp")
        x = jax.lax.psum_scatter(whole, "fsdp")
        return jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]), None

    def loop(x):
        return jax.lax.psum(jax.lax.scan(step, x, length=3)[0], "fsdp")

    spec = PartitionSpec("fsdp")
    function = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    compiled = jax.jit(function).lower(jnp.zeros(4096)).compile()
    piece = 4 * 1024
    each = 3 * piece + 4 * piece * 3 / 4 + piece
    got = Program(compiled.as_text()).link_bytes()
    assert got == pytest.approx(3 * each + 2 * piece * 3 / 4)
