"""FLOPs, bytes and scope of every instruction of a compiled program, from its HLO text (S file).

An instruction is the unit that the profile times: a fusion counts everything fused into it. One multiply-add is two
FLOPs; an elementwise operation is one per element of its result, a reduction one per element that it reads. Bytes are
those of operands and results, each once, as if nothing were cached; if a fusion reads a slice of an operand or updates
it in place, only that part counts. FLOPs of custom calls are unknown (None), except for the libraries' matrix products
on GPUs.

Source: the rules of XLA's HloCostAnalysis (xla/service/hlo_cost_analysis.cc), without its cost of transcendentals,
which are one FLOP here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxbench.measure import hlo
from jaxbench.profiling import operations

ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential exponential-minus-one floor log
    log-plus-one logistic maximum minimum multiply negate not or power remainder round-nearest-afz round-nearest-even
    rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor""".split()
)
ID_FIELD = 5
SLICES = frozenset(("dynamic-slice", "slice", "gather"))
UPDATES = frozenset(("dynamic-update-slice", "scatter"))  # in place
HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
DIMENSIONS = re.compile(r"\[([\d,]*)\]")
OPERAND = re.compile(r"%([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
PRODUCT = re.compile(r"\$matmul|gemm")  # in the names of libraries' matrix products, such as __cublas$lt$matmul
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions"?:\[)([^}\]]*)[}\]]')
STRUCTURE = frozenset(("while", "body", "cond", "closed_call", "branch_0_fun", "branch_1_fun"))  # parts of op_name


class Cost(NamedTuple):
    """Cost of one run of an instruction."""

    flops: int | None  # None: unknown
    bytes: int
    dtype: str = "f32"  # HLO's name of the type that a matrix product reads


class Instruction(NamedTuple):
    """One line of a program."""

    opcode: str
    shape: str
    operands: tuple[str, ...]
    line: str


class Costed(NamedTuple):
    """A program with the costs and scopes of its instructions."""

    program: operations.Program
    costs: dict[str, Cost]  # instruction -> cost
    scopes: dict[str, tuple[str, ...]]  # instruction -> named scopes and functions of jaxbench, the outermost first
    named: dict[str, tuple[str, ...]]  # instruction -> those of its scopes that are in its op_name
    number: int = 0  # XLA's program id, by which events.assign finds it; 0 = unknown


def read(text: str, number: int = 0) -> Costed:
    """Read costs and scopes of a program's instructions from its HLO text; number: the result of `number_of`."""
    computations, tables = _computations(text), operations.source_tables(text)
    costs, scopes, named = {}, {}, {}
    for instructions in computations.values():
        for name, each in instructions.items():
            if each.opcode in operations.FREE | operations.HOLDERS:
                continue
            costs[name] = Cost(
                _flops(each, instructions, computations), _bytes(each, instructions, computations),
                _product_type(each, instructions, computations),
            )  # fmt: skip
            named[name] = _named(each.line)
            scopes[name] = (*named[name], *_functions(each.line, tables))
    return Costed(operations.read_program(text), costs, scopes, named, number)


def number_of(module: bytes) -> int:
    """Return XLA's id of a serialised program, 0 if unset: field `id` of HloModuleProto (xla/service/hlo.proto).

    The message is decoded field by field in the wire format of protocol buffers: a key of field number and wire type,
    then the value.
    """
    place, number = 0, 0
    while place < len(module):
        key, place = _varint(module, place)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(module, place)
            number = value if field == ID_FIELD else number
        elif kind == 2:
            size, place = _varint(module, place)
            place += size
        else:
            place += 8 if kind == 1 else 4
    return number


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Decode a varint (seven bits per byte, the lowest first); return it and the offset after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def _computations(text: str) -> dict[str, dict[str, Instruction]]:
    """Return each computation's instructions by name."""
    found: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if (made := operations.INSTRUCTION.match(line)) is not None:
            inside = line[made.end() :]
            operands = tuple(OPERAND.findall(inside[: _closing(inside)]))
            current[made["name"]] = Instruction(made["opcode"], made["shape"], operands, line)
        elif (head := HEAD.match(line)) is not None:
            current = found.setdefault(head["name"], {})
    return found


def _closing(text: str) -> int:
    """Return the index of the bracket that closes one opened before the text."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return len(text)


def _sizes(shape: str) -> list[int]:
    """Return the dimensions of a shape's first array."""
    found = DIMENSIONS.search(shape)
    return [int(each) for each in found[1].split(",") if each] if found else []


def _called(line: str) -> str:
    found = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
    return found[1] if found else ""


def _flops(
    each: Instruction, around: Mapping[str, Instruction], computations: Mapping[str, Mapping[str, Instruction]]
) -> int | None:
    """Count the FLOPs of one run; None if unknown."""
    result = math.prod(_sizes(each.shape))
    if each.opcode in ELEMENTWISE:
        return result
    first = _sizes(around[each.operands[0]].shape) if each.operands and each.operands[0] in around else []
    if each.opcode == "dot":
        return 2 * result * _contracted(each.line, first)
    if each.opcode == "convolution":
        kernel = _sizes(around[each.operands[1]].shape)
        labels = re.search(r"dim_labels=\w+_(\w+)->", each.line)
        outputs = kernel[labels[1].index("o")] if labels else 1
        return 2 * result * math.prod(kernel) // max(outputs, 1)
    if each.opcode == "reduce":
        return math.prod(first)
    if each.opcode == "reduce-window":  # each result element reads its whole window, as XLA's CPU backend computes it
        window = re.search(r"window=\{size=([\dx]+)", each.line)
        return result * math.prod(map(int, window[1].split("x"))) if window else result
    if each.opcode == "fusion":
        inside = computations.get(_called(each.line), {})
        parts = [_flops(one, inside, computations) for one in inside.values() if one.opcode not in operations.FREE]
        return None if None in parts else sum(parts)
    if each.opcode == "custom-call":
        target = TARGET.search(each.line)  # alone: scopes and functions of the line may have any name
        is_product = target is not None and PRODUCT.search(target[1]) and CONTRACTED.search(each.line)
        return 2 * result * _contracted(each.line, first) if is_product else None
    return 0


def _product_type(
    each: Instruction, around: Mapping[str, Instruction], computations: Mapping[str, Mapping[str, Instruction]]
) -> str:
    """Return the type that an instruction's matrix product reads, f32 if it has none."""
    if each.opcode in ("dot", "convolution", "custom-call") and each.operands and each.operands[0] in around:
        return around[each.operands[0]].shape.partition("[")[0]
    inside = computations.get(_called(each.line), {}) if each.opcode == "fusion" else {}
    product = next((one for one in inside.values() if one.opcode in ("dot", "convolution")), None)
    return "f32" if product is None else _product_type(product, inside, computations)


def _contracted(line: str, left: list[int]) -> int:
    """Return the product of a matrix product's contracted dimensions."""
    found = CONTRACTED.search(line)
    places = [int(place) for place in re.findall(r"\d+", found[1])] if found else []
    return math.prod(left[place] for place in places if place < len(left))


def _bytes(
    each: Instruction, around: Mapping[str, Instruction], computations: Mapping[str, Mapping[str, Instruction]]
) -> int:
    """Count the bytes that one run reads and writes."""
    written = sum(hlo.shape_bytes(each.shape))
    named = [name for name in each.operands if name in around]
    sizes = [sum(hlo.shape_bytes(around[name].shape)) for name in named]
    if each.opcode in SLICES:
        return 2 * written + sum(sizes[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * sum(sizes[1:2])
    if each.opcode == "scatter":  # it reads what it changes, and the indices
        return 3 * _updated(each, around) + sizes[len(sizes) // 2]
    if each.opcode == "fusion":
        inside = computations.get(_called(each.line), {})
        sizes = [min(size, _read_of(place, size, inside)) for place, size in enumerate(sizes)]
        written = _written_of(inside, written)
    read: dict[str, int] = {}  # an operand that is named twice is read once
    for name, size in zip(named, sizes, strict=True):
        read[name] = max(size, read.get(name, 0))
    return written + sum(read.values())


def _read_of(place: int, size: int, inside: Mapping[str, Instruction]) -> int:
    """Count the bytes that a fusion reads of the operand at `place`: only the parts if it reads nothing else."""
    own = [name for name, one in inside.items() if one.opcode == "parameter" and f"parameter({place})" in one.line]
    seen, read, is_used = set(own), 0, False  # the operand, also in other shapes
    for name, one in inside.items():
        if not seen.intersection(one.operands):
            continue
        is_root, is_used = one.line.lstrip().startswith("ROOT"), True
        if one.opcode == "bitcast" and not is_root:
            seen.add(name)
        elif one.operands[0] not in seen or seen.intersection(one.operands[1:]):
            return size
        elif one.opcode in SLICES:
            read += sum(hlo.shape_bytes(one.shape))
        elif one.opcode == "scatter":
            read += _updated(one, inside)
        elif one.opcode != "dynamic-update-slice":  # which writes in place, and reads nothing
            return size
    return read if is_used else size


def _written_of(inside: Mapping[str, Instruction], written: int) -> int:
    """Count the bytes that a fusion writes: of an operand that it updates in place only the update."""
    root = next((name for name, one in inside.items() if one.line.lstrip().startswith("ROOT")), None)
    return written if root is None else _written(root, inside)


def _written(name: str, inside: Mapping[str, Instruction]) -> int:
    one, source = inside.get(name), _behind(name, inside)
    if one is None or source is None:
        return 0
    if one.opcode == "tuple":
        return sum(_written(each, inside) for each in one.operands)
    target = _behind(source.operands[0], inside) if source.opcode in UPDATES else None
    if target is not None and target.opcode == "parameter":
        return _updated(source, inside)
    return sum(hlo.shape_bytes(one.shape))


def _behind(name: str, inside: Mapping[str, Instruction]) -> Instruction | None:
    """Return the instruction whose result an instruction is, in whatever shape."""
    one = inside.get(name)
    while one is not None and one.opcode == "bitcast":
        one = inside.get(one.operands[0])
    return one


def _updated(one: Instruction, around: Mapping[str, Instruction]) -> int:
    """Bytes of what a dynamic-update-slice or a scatter puts into its first operands."""
    updates = one.operands[1:2] if one.opcode == "dynamic-update-slice" else one.operands[len(one.operands) // 2 + 1 :]
    return sum(sum(hlo.shape_bytes(around[name].shape)) for name in updates if name in around)


def _named(line: str) -> tuple[str, ...]:
    """Return the named scopes of an instruction, the outermost first."""
    where = re.search(r'op_name="([^"]*)"', line)
    parts = where[1].split("/")[:-1] if where else []
    return tuple(part for part in parts if part not in STRUCTURE and not part.startswith("jit("))


def _functions(line: str, tables: Mapping[str, Mapping[int, str]]) -> list[str]:
    """Return the functions of jaxbench that called for an instruction, the outermost first."""
    frame = re.search(r"stack_frame_id=(\d+)", line)
    return operations.functions_of(int(frame[1]), tables) if frame else []
