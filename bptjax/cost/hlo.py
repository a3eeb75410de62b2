"""Instructions of a compiled program, parsed from its HLO text, and their least cost."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bptjax.ops.float8 import SCOPE

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "c128": 16} | {
    f"{letter}{bits}": bits // 8 for letter in "suf" for bits in (8, 16, 32, 64)
}
_NAME = r"[\w.\-]+"
_CALLED = re.compile(
    rf"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)="
    rf"(?:\{{([^}}]*)\}}|%?({_NAME}))"
)
# Instructions that move no data. Of an asynchronous operation, only the start counts.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all|.*-done"
)
# XLA's name of cuBLAS's product with float8 operands.
FLOAT8_PRODUCT = "__cublas$lt$matmul$f8"
_SLICES = {"dynamic-slice", "slice", "gather", "dynamic-update-slice"}

# Bytes that a device receives per byte of its operands, by the size of its group, in a ring.
_RECEIVED: dict[str, Callable[[int], float]] = {
    "all-gather": lambda group: group - 1,
    "all-reduce": lambda group: 2 * (group - 1) / group,
    "reduce-scatter": lambda group: (group - 1) / group,
    "all-to-all": lambda group: (group - 1) / group,
    "collective-permute": lambda group: 1,
}


class Cost(NamedTuple):
    """Arithmetic and memory traffic of one execution.

    Attributes:
      flops: FLOPs of matrix products and fused attention. Products with 8-bit operands count half,
        because devices run them at twice the rate.
      bytes: bytes read from and written to device memory.
    """

    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Instruction:
    """An instruction of a program.

    Attributes:
      shape: text of its result, such as `f32[2,3]`; several results are in parentheses.
      operands: names.
      rest: the text after the operands.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def op_name(self) -> str:
        """JAX transformations and named scopes of the operation; empty if XLA added it."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    @cached_property
    def called(self) -> list[str]:
        """Names of the computations that it calls."""
        texts = [several or single for several, single in _CALLED.findall(self.rest)]
        return [name for text in texts for name in re.findall(_NAME, text)]

    @property
    def target(self) -> str:
        """Name of the function that a custom call calls; empty for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def is_matmul(self) -> bool:
        return self.opcode == "dot" or '"dot_dimension_numbers"' in self.rest

    @cached_property
    def arrays(self) -> list[tuple[float, tuple[int, ...]]]:
        """Bytes per element and sizes of each result."""
        arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", self.shape)
        return [(_BYTES.get(d, 1), tuple(int(n) for n in s.split(",") if n)) for d, s in arrays]

    @property
    def bytes(self) -> float:
        return sum(size * math.prod(dims) for size, dims in self.arrays)


class Program:
    """A compiled program.

    Attributes:
      instructions: by name.
      computations: names of each computation's instructions, in order.
    """

    def __init__(self, text: str):
        """Parses `jax.stages.Compiled.as_text()`."""
        self.instructions: dict[str, Instruction] = {}
        self.computations: dict[str, list[str]] = {}
        self._costs: dict[str, Cost] = {}
        names: list[str] = []
        for line in text.splitlines():
            if line.endswith("{") and (head := re.match(rf"(ENTRY )?%?({_NAME}) ", line)):
                names = self.computations.setdefault(head[2], [])
                if head[1]:
                    self.entry = head[2]
            elif match := re.match(rf"  (?:ROOT )?%?({_NAME}) = ", line):
                instruction = _parse(match[1], re.sub(r"/\*index=\d+\*/", "", line[match.end() :]))
                self.instructions[instruction.name] = instruction
                names.append(instruction.name)

    def inside(self, name: str) -> list[Instruction]:
        """Returns the instruction, and the instructions of the computations that it calls."""
        instructions = [self.instructions[name]]
        for computation in instructions[0].called:
            for inner in self.computations.get(computation, []):
                instructions += self.inside(inner)
        return instructions

    def opcode(self, name: str) -> str:
        """Returns the opcode; empty if the program has no such instruction."""
        return self.instructions[name].opcode if name in self.instructions else ""

    def is_free(self, name: str) -> bool:
        """Returns whether an instruction moves no data itself, such as a loop."""
        return _FREE.fullmatch(self.opcode(name)) is not None

    def op_name(self, name: str) -> str:
        """Returns the JAX transformations and named scopes of an operation, or of the first matrix
        product, or else first operation, inside; empty if XLA added it."""
        inside = self.inside(name) if name in self.instructions else []
        ordered = [*inside[:1], *(x for x in inside if x.is_matmul), *inside]
        return next((x.op_name for x in ordered if x.op_name), "")

    def executions(self) -> dict[str, float]:
        """Returns the number of executions of each instruction in a run of the program. Branches of
        a condition count as equally likely, and a loop of unknown length as one iteration."""
        counts: dict[str, float] = {}

        def visit(computation: str, times: float) -> None:
            for name in self.computations.get(computation, []):
                counts[name] = counts.get(name, 0.0) + times
                instruction = self.instructions[name]
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest)
                each = times * (int(trips[1]) if trips else 1)
                if instruction.opcode == "conditional":
                    each /= len(instruction.called)
                if instruction.opcode in ("while", "conditional", "call"):
                    for inner in instruction.called:
                        visit(inner, each)

        visit(self.entry, 1.0)
        return counts

    def link_bytes(self) -> float:
        """Returns the bytes that a device receives from other devices in a run of the program."""
        return sum(times * self.received(name) for name, times in self.executions().items())

    def received(self, name: str) -> float:
        """Returns the bytes that an execution receives from other devices."""
        opcode, total = self.opcode(name), 0.0
        own = [self.instructions[name]] if opcode else []
        for instruction in self.inside(name) if opcode == "async-start" else own:
            share = _RECEIVED.get(instruction.opcode.removesuffix("-start"))
            if share and (group := _group_size(instruction)) > 1:
                total += sum(self.instructions[y].bytes for y in instruction.operands) * share(
                    group
                )
        return total

    def copied(self, name: str) -> float:
        """Returns the bytes that an execution copies from one memory to another."""
        if self.opcode(name) == "copy-start":
            return sum(self.instructions[y].bytes for y in self.instructions[name].operands)
        return self.cost(name).bytes / 2  # `bytes` counts reads and writes.

    def cost(self, name: str) -> Cost:
        """Returns the least cost of an execution: each operand is read once, and each result is
        written once. Slices count only the elements that they read or write.

        Fused attention counts as causal and without a window.
        """
        if name not in self.instructions:
            return Cost()
        if name not in self._costs:
            instruction = self.instructions[name]
            free = _FREE.fullmatch(instruction.opcode) is not None
            flops = 0.0 if free else sum(self._flops(x) for x in self.inside(name))
            self._costs[name] = Cost(flops, 0.0 if free else self._traffic(instruction))
        return self._costs[name]

    def _flops(self, instruction: Instruction) -> float:
        if instruction.is_matmul:
            dims = re.search(
                r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)', instruction.rest
            )
            size, lhs = self.instructions[instruction.operands[0]].arrays[0]
            contracted = [lhs[int(n)] for n in re.findall(r"\d+", dims[1] if dims else "")]
            each = 1.0 if size == 1 else 2.0
            return each * math.prod(instruction.arrays[0][1]) * math.prod(contracted)
        if instruction.opcode != "custom-call" or len(instruction.operands) < 3:
            return 0.0
        # q [B, T, N, H], k [B, S, K, H] and v [B, S, K, H], with half of the pairs allowed. Packed
        # documents may have no B; they count as one document.
        q, k, v = (self.instructions[x].arrays[0][1] for x in instruction.operands[:3])
        y = instruction.arrays[0][1]
        if (len(q), len(k), len(y)) in ((2, 3, 2), (2, 2, 3)):
            # `grouped_matmul`: x [M, I] by w [X, I, O], or its gradient from x and dy [M, O].
            return 2.0 * math.prod(q) * y[-1]
        if len(q) not in (3, 4) or k != v or (*q[:-3], q[-1]) != (*k[:-3], k[-1]):
            return 0.0
        # Some backward kernels return gradients as sums in another shape.
        backward = (
            len([x for x in instruction.arrays if len(x[1]) == len(q)]) >= 3
            or "bwd" in instruction.target
        )
        return (5 if backward else 2) * float(math.prod(q)) * k[-3]

    def _traffic(self, instruction: Instruction) -> float:
        body = (
            self.computations.get(instruction.called[0], [])
            if instruction.opcode.startswith("fusion")
            else []
        )
        if not body:
            operands = [
                self.instructions[x] for x in instruction.operands if x in self.instructions
            ]
            return _touched(instruction, operands) + sum(
                x.bytes if not _is_sliced(instruction, i) else 0 for i, x in enumerate(operands)
            )
        inner = [self.instructions[x] for x in body]
        total = 0.0
        for x in inner:
            if x.opcode != "parameter":
                continue
            uses = [(y, i) for y in inner for i, name in enumerate(y.operands) if name == x.name]
            if all(_is_sliced(y, i) for y, i in uses):
                total += sum(y.bytes for y, i in uses if y.opcode != "dynamic-update-slice")
            else:
                total += x.bytes
        written = [x for x in inner if x.opcode == "dynamic-update-slice"]
        if written:
            return total + sum(self.instructions[x.operands[1]].bytes for x in written)
        return total + instruction.bytes


def check_float8_products(text: str) -> None:
    """Checks that the matrix products of float8 linear layers still have 8-bit operands in the
    compiled program `text`, and that XLA calls cuBLAS's float8 product at least once.

    Raises:
      RuntimeError: XLA did not recognize a product, so it has other operands, or none calls cuBLAS.
    """
    program = Program(text)
    found = [
        all(program.instructions[y].shape.startswith("f8") for y in x.operands[:2])
        for x in program.instructions.values()
        if x.is_matmul and SCOPE in re.split(r"[/()]", x.op_name)
    ]
    if not all(found) or FLOAT8_PRODUCT not in text:
        raise RuntimeError(
            f"train.linear=float8: XLA turned {sum(found)} of {len(found)} matrix products into "
            f"products of 8 bits, and {text.count(FLOAT8_PRODUCT)} into {FLOAT8_PRODUCT}; leave "
            "train.linear out, or try another version of jax"
        )


def _group_size(collective: Instruction) -> int:
    """Returns the number of devices in a group of a collective operation."""
    if "source_target_pairs" in collective.rest:
        return 2
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", collective.rest):
        # Axes of a mesh, or factors of axes: mesh['dp'=2,'fsdp'=8] {'dp','fsdp':(1)4}.
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", collective.rest):
        return int(groups[1])
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", collective.rest)
    return len(groups[1].split(",")) if groups else 1


def _touched(instruction: Instruction, operands: list[Instruction]) -> float:
    """Returns the bytes that an instruction writes, plus those read from its sliced operand."""
    if instruction.opcode == "dynamic-update-slice":
        return operands[1].bytes
    return instruction.bytes * (2 if _is_sliced(instruction, 0) else 1)


def _is_sliced(user: Instruction, index: int) -> bool:
    """Returns whether an instruction accesses only a slice of its operand at `index`."""
    return index == 0 and user.opcode in _SLICES


def _parse(name: str, text: str) -> Instruction:
    """Parses the text after `=`."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    opcode, _, text = text.partition("(")
    end = _closing("(" + text) - 2
    operands = tuple(re.findall(rf"%({_NAME})", text[:end]))
    return Instruction(name, shape, opcode, operands, text[end + 1 :])


def _closing(text: str) -> int:
    """Returns the index after the parenthesis that closes the first one."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index + 1
    return len(text)
