"""Read the kernels of each computation of a compiled GPU program, and the bytes that they read and write (S file).

These are counts from the text of the optimised HLO, not times; data that is in a cache counts each time it is read.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxbench.measure import hlo

NUM_GROUPS = 16  # rows of the table of groups

# Opcodes that start no kernel: they name, bundle, wait, or run computations that are counted separately
FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call", "after-all",
    "opt-barrier", "partition-id", "replica-id", "add-dependency", "async-start", "async-update", "async-done",
    "copy-done", "fusion-done", "custom-call-done",
}  # fmt: skip
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> index of the operand with all data that is written
RUN = re.compile(r"(body|condition|branch|true|false)(?:_computations?)?=(?:\{([^}]*)\}|%?([\w.\-]+))")
PARTS = ("dynamic-slice", "slice", "gather")  # read no more of their first operand than they return


class Group(NamedTuple):
    """Kernels of one kind and one origin in a computation."""

    kind: str  # a fusion's name without its number, a custom call's target, else the opcode
    op_name: str  # origin in the traced function; empty if the compiler added it
    count: int
    bytes_read: int
    bytes_written: int
    largest: str  # shape of the largest result


class Computation(NamedTuple):
    """Counts of one run of a computation: the entry, a loop's body or condition, or a branch."""

    name: str
    role: str  # entry, body, condition or branch
    runs: int | None  # iterations of its loop per run of the enclosing computation; None = unknown to the compiler
    kernels: int
    bytes_read: int
    bytes_written: int
    kinds: dict[str, int]  # kernels by kind, the most frequent first
    groups: tuple[Group, ...]  # the most bytes first


def read(text: str) -> list[Computation]:
    """Return the computations that a program runs, from its optimised HLO text; most bytes moved per run first.

    Plain calls count as part of the calling computation; loops and branches are separate computations. A kernel reads
    each operand once and writes its result once. Of an operand that it slices it reads only the slice; of an array that
    it updates in place it writes only the update.

    Raises:
      ValueError: the text has no entry computation.
    """
    program, entry = hlo._parse(text)
    found: dict[str, Computation] = {}
    waiting: list[tuple[str, str, int | None]] = [(entry, "entry", 1)]
    while waiting:
        name, role, runs = waiting.pop()
        if name not in found and name in program:
            found[name] = _summary(program, name, role, runs)
            waiting += _run_by(program, name)
    return sorted(found.values(), key=lambda each: -(each.bytes_read + each.bytes_written))


def _run_by(program: dict[str, list], name: str) -> Iterator[tuple[str, str, int | None]]:
    """Yield loops and branches of a computation: name, role, runs."""
    for each in _inlined(program, name):
        runs = hlo._trip_count(program, each.line) if each.opcode == "while" else None
        for role, several, single in RUN.findall(each.line) if each.opcode in ("while", "conditional") else ():
            for called in re.findall(r"[\w.\-]+", several or single):
                yield called, role if each.opcode == "while" else "branch", runs


def _inlined(program: dict[str, list], name: str) -> Iterator[Any]:
    """Yield the instructions of a computation, with calls replaced by the instructions of the called computation."""
    for each in program[name]:
        called = re.search(r"(?:to_apply|calls|called_computations)=\{?%?([\w.\-]+)", each.line)
        if each.opcode in ("call", "async-start") and called and called.group(1) in program:
            yield from _inlined(program, called.group(1))
        else:
            yield each


def _summary(program: dict[str, list], name: str, role: str, runs: int | None) -> Computation:
    shapes: dict[str, str] = {}  # by name
    groups: dict[tuple[str, str], Group] = {}
    kinds: collections.Counter[str] = collections.Counter()
    for each in _inlined(program, name):
        shapes[_name(each)] = each.shape
        if each.opcode in FREE or not each.opcode:
            continue
        origin = re.search(r'op_name="([^"]*)"', each.line)
        key = _kind(each), origin.group(1) if origin else ""
        old = groups.get(key, Group(*key, 0, 0, 0, ""))
        taken, written = _moved(program, each, shapes)
        shape = re.sub(r"\{[^}]*\}|/\*[^*]*\*/", "", each.shape)  # without layouts
        largest = max(old.largest, shape, key=_size)
        groups[key] = Group(*key, old.count + 1, old.bytes_read + taken, old.bytes_written + written, largest)
        kinds[key[0]] += 1
    ordered = sorted(groups.values(), key=lambda group: -(group.bytes_read + group.bytes_written))
    moved = sum(group.bytes_read for group in ordered), sum(group.bytes_written for group in ordered)
    return Computation(name, role, runs, kinds.total(), *moved, dict(kinds.most_common()), tuple(ordered))


def _moved(program: dict[str, list], kernel: Any, shapes: dict[str, str]) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes; shapes: shapes of preceding instructions by name."""
    operands, root = _operands(kernel), kernel
    called = re.search(r"calls=%?([\w.\-]+)", kernel.line)
    if called is not None and called.group(1) in program:
        inside = {_name(each): each for each in program[called.group(1)]}
        root = next(each for each in inside.values() if each.line.lstrip().startswith("ROOT "))
        numbers = {_arguments(each): name for name, each in inside.items() if each.opcode == "parameter"}
    else:  # treat it as a fusion of one instruction
        inside = {name: hlo._Instruction("parameter", shapes.get(name, ""), "") for name in operands}
        inside, numbers = inside | {_name(kernel): kernel}, {f"{n}": name for n, name in enumerate(operands)}
    uses: dict[str, list] = {}
    for each in inside.values():
        for name in dict.fromkeys(_operands(each)):
            uses.setdefault(name, []).append(each)
    shares: dict[str, float] = {}
    for number, name in enumerate(operands):  # the same array may be several operands
        shares[name] = min(1.0, shares.get(name, 0.0) + _share(numbers[f"{number}"], inside, uses))
    taken = sum(_size(shapes.get(name, "")) * share for name, share in shares.items())
    return round(taken), _written(inside, root)


def _share(name: str, inside: dict[str, Any], uses: dict[str, list]) -> float:
    """Return the share of a value that the kernel reads, 0 to 1, judged by its uses."""
    total = 0.0 if name in uses else 1.0  # a value without uses is the result
    for each in uses.get(name, []):
        is_first = _operands(each)[0] == name
        if each.opcode in ("bitcast", "convert"):
            total += _share(_name(each), inside, uses)
        elif each.opcode in PARTS and is_first:
            total += _size(each.shape) / max(1, _size(inside[name].shape))
        elif not (each.opcode in IN_PLACE and is_first):
            return 1.0
    return min(total, 1.0)


def _written(inside: dict[str, Any], root: Any) -> int:
    """Return the bytes that a kernel writes, judged by the root of its computation."""
    total = 0
    for name in _operands(root) if root.opcode == "tuple" else [_name(root)]:
        while inside[name].opcode == "bitcast":
            name = _operands(inside[name])[0]
        each = inside[name]
        kept = inside[_operands(each)[IN_PLACE[each.opcode]]] if each.opcode in IN_PLACE else each
        shape = re.sub(r", [su]8\[\d*\](\{0\})?\)$", "", kept.shape)  # without a custom call's workspace
        total += hlo._result_bytes(kept._replace(shape=shape))
    return total


def _size(shape: str) -> int:
    return sum(hlo.shape_bytes(shape))


def _name(instruction: Any) -> str:
    return hlo._INSTRUCTION.match(instruction.line).group(1)


def _operands(instruction: Any) -> list[str]:
    return re.findall(r"%([\w.\-]+)", _arguments(instruction))


def _arguments(instruction: Any) -> str:
    """Return the text between the brackets of an instruction."""
    found = re.search(rf" {re.escape(instruction.opcode)}\(([^)]*)\)", instruction.line)
    return found.group(1) if found else ""


def _kind(kernel: Any) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', kernel.line)
    named = kernel.opcode.startswith("fusion")
    return target.group(1) if target else re.sub(r"(\.(\d+|clone))+$", "", _name(kernel) if named else kernel.opcode)


def tables(found: list[Computation], bytes_per_s: float) -> list[Any]:
    """Return tables of `read`'s result: the computations, and the groups of the largest one (rich.table.Table).

    bytes_per_s: peak bandwidth of the device's memory.
    """
    from rich.markup import escape
    from rich.table import Table

    titles = "computation", "role", "runs", "kernels", "GB read", "GB written", "ms at peak"
    overview = Table(*titles, title="computations, one run of each")
    for each in found:
        moved = each.bytes_read / 1e9, each.bytes_written / 1e9
        figures = (f"{figure:9.3f}" for figure in (*moved, 1e12 * sum(moved) / bytes_per_s))
        overview.add_row(each.name, each.role, f"{each.runs or '?'}", f"{each.kernels:6,}", *figures)
    titles = "kernels", "MB read", "MB written", "kind", "largest result", "from"
    groups = Table(*titles, title=f"largest groups of {found[0].name}")
    for group in found[0].groups[:NUM_GROUPS]:
        figures = f"{group.count:6}", f"{group.bytes_read / 1e6:9,.1f}", f"{group.bytes_written / 1e6:9,.1f}"
        groups.add_row(*figures, group.kind, group.largest, escape(group.op_name))
    return [overview, groups]
