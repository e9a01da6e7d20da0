"""Collectives of a compiled program, read from its HLO text (S file).

Each collective is counted with the bytes of its result and the bytes one chip must send on a ring: all-gather and
reduce-scatter (n-1)/n of the full size, all-reduce twice that, all-to-all (n-1)/n, collective-permute its size
(Chan et al. 2007, "Collective communication: theory, practice, and experience", table 2). An asynchronous pair counts
once, at its start; so does a TPU collective that is spread over several fusions (they share chain_id and channel_id).
An all-reduce inside a fusion called all-reduce-scatter is the TPU's form of reduce-scatter. The body of a `while`
counts as often as the loop runs (its `known_trip_count`, else the constant that its condition counts up to from 0),
and once where that is unknown; those are reported. Every branch of a conditional counts, so its bytes are an upper
bound.

A collective is asynchronous if the schedule separates its start from its end: a -start and its -done, or a chain of
fusions. It is overlapped if a product (dot, convolution, or a kernel of tpu_custom_call) is scheduled between the two,
or is computed in one of the chain's fusions between its first and last. These are counts of what the compiler
scheduled: how long either takes is not known, and work other than products is not counted. A pair split over a loop's
iterations is not overlapped.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_ENDS = (*(f"{kind}-done" for kind in KINDS), "async-update", "async-done")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\))?\s*(?:->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)


class Collective(NamedTuple):
    """One kind's total over a program run, per chip."""

    kind: str
    count: int  # executions
    result_bytes: int  # bytes of the results
    sent_bytes: int  # bytes one chip must send
    unknown_loops: int  # collectives inside a loop whose trip count is not known (counted once)
    asynchronous: int = 0  # executions whose start and end are separate
    overlapped: int = 0  # asynchronous executions with a product between start and end
    overlapped_bytes: int = 0  # the part of sent_bytes that overlapped executions send


class _Instruction(NamedTuple):
    opcode: str
    shape: str
    line: str

    @property
    def name(self) -> str:
        """Name that other instructions refer to it by, without the percent sign."""
        return _INSTRUCTION.match(self.line).group(1)


def collectives(text: str, num_chips: int) -> dict[str, Collective]:
    """Return the collectives of one run of the program by kind; kinds that do not occur are left out."""
    computations, entry = _parse(text)
    totals: dict[str, Collective] = {}
    chains: set[tuple[str, str]] = set()
    spans = _spans(computations)
    for instruction, times, is_unknown, parent in _walk(computations, entry, 1, False):
        kind = instruction.opcode.removesuffix("-start")
        chain = _chain(instruction.line)
        if chain in chains:
            continue
        if chain:
            chains.add(chain)
        size = _result_bytes(instruction)
        group = _group_size(instruction.line, num_chips)
        if group <= 1 and kind != "collective-permute":
            continue  # a group of one chip moves nothing
        if kind == "all-reduce" and parent.startswith("all-reduce-scatter"):
            kind, size = "reduce-scatter", size // group
        old, sent = totals.get(kind, Collective(kind, 0, 0, 0, 0)), times * int(size * _sent_factor(kind, group))
        is_overlapped = spans.get(chain or instruction.name)  # None: not asynchronous
        totals[kind] = Collective(
            kind,
            old.count + times,
            old.result_bytes + times * size,
            old.sent_bytes + sent,
            old.unknown_loops + is_unknown,
            old.asynchronous + (times if is_overlapped is not None else 0),
            old.overlapped + (times if is_overlapped else 0),
            old.overlapped_bytes + (sent if is_overlapped else 0),
        )
    return {kind: totals[kind] for kind in KINDS if kind in totals}


def shape_bytes(shape: str) -> list[int]:
    """Bytes of every array of an HLO shape; for a tuple, in order."""
    return [math.prod(int(d) for d in dims.split(",") if d) * _bits(kind) // 8 for kind, dims in _SHAPE.findall(shape)]


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Split the text into computations; return them and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _COMPUTATION.match(line) if line and not line[0].isspace() and "HloModule" not in line else None
            if head:
                current = head.group(2)
                computations[current] = []
                entry = current if head.group(1) else entry
        elif line.rstrip() == "}":  # exact: a line of a kernel's multi-line metadata may also begin with a brace
            current = None
        elif match := _INSTRUCTION.match(line):
            shape = next(_split(match.group(2), " "))
            opcode = re.match(r"\s*([a-z][a-z0-9\-]*)\(", match.group(2)[len(shape) :])
            computations[current].append(_Instruction(opcode.group(1) if opcode else "", shape, line))
    if not entry:
        raise ValueError(f"hlo: no ENTRY computation in a text of {len(text)} characters")
    return computations, entry


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the parts of a text between separators that no bracket encloses."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0 and character == separator:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _walk(
    computations: dict[str, list[_Instruction]], name: str, times: int, is_unknown: bool
) -> Iterator[tuple[_Instruction, int, bool, str]]:
    """Yield every collective reachable from a computation, how often it runs, and the computation it is in."""
    for instruction in computations.get(name, []):
        if instruction.opcode.removesuffix("-start") in KINDS:
            yield instruction, times, is_unknown, name
            continue
        if instruction.opcode in ("async-update", "async-done"):
            continue  # they name the computation that their async-start already counted
        inner_times, inner_unknown = times, is_unknown
        if instruction.opcode == "while":
            trips = _trip_count(computations, instruction.line)
            inner_times, inner_unknown = times * (1 if trips is None else trips), is_unknown or trips is None
            if not inner_times:
                continue
        for called in _called(instruction.line):
            yield from _walk(computations, called, inner_times, inner_unknown)


def _spans(computations: dict[str, list[_Instruction]]) -> dict[Any, bool]:
    """Map each asynchronous collective, by chain or else by name, to whether a product is between start and end."""
    works, found = _holding_products(computations), {}
    for instructions in computations.values():
        ends: dict[Any, list[int]] = {}
        owner: dict[str, list[Any]] = {}  # instruction -> keys of the collectives that it starts or continues
        for index, instruction in enumerate(instructions):
            for key in _keys(computations, instruction):
                ends.setdefault(key, []).append(index)
                owner.setdefault(instruction.name, []).append(key)
            if instruction.opcode in _ENDS:
                # The operand is printed as its name alone, or as its shape and name.
                line = re.sub(r"/\*index=\d+\*/", "", instruction.line)  # counts of a long tuple's shapes
                started = re.search(r"-(?:done|update)\((?:[^=%]*%)?([\w.\-]+)", line)
                for key in owner.get(started.group(1), []) if started else ():
                    ends[key].append(index)
                    owner.setdefault(instruction.name, []).append(key)
        for key, (first, *rest) in ends.items():
            is_apart = bool(rest) or isinstance(key, str)
            if is_apart:
                found[key] = any(map(works, instructions[first + 1 : rest[-1]] if rest else ()))
    return found


def _keys(computations: dict[str, list[_Instruction]], instruction: _Instruction) -> list[Any]:
    """Return keys of the collectives that an instruction starts or continues: chains of a fusion, names of a start."""
    if instruction.opcode.removesuffix("-start") in KINDS and instruction.opcode.endswith("-start"):
        return [instruction.name]
    if instruction.opcode not in ("fusion", "async-start"):
        return []
    inner = [each for name in _called(instruction.line) for each, *_ in _walk(computations, name, 1, False)]
    if instruction.opcode == "async-start":
        return [each.name for each in inner]
    return [chain for each in inner if (chain := _chain(each.line))]


def _holding_products(computations: dict[str, list[_Instruction]]) -> Callable[[_Instruction], bool]:
    """Return a test of whether an instruction computes a product, itself or in a computation that it calls."""

    @functools.cache
    def holds(name: str) -> bool:
        return any(map(works, computations.get(name, [])))

    def works(instruction: _Instruction) -> bool:
        if instruction.opcode == "custom-call":
            return 'custom_call_target="tpu_custom_call"' in instruction.line
        return instruction.opcode in ("dot", "convolution") or any(map(holds, _called(instruction.line)))

    return works


def _called(line: str) -> list[str]:
    """Names of the computations that an instruction calls."""
    parts = [part for several, single in _CALLED.findall(line) for part in re.split(r",\s*", several or single)]
    return [part.lstrip("%") for part in parts]


def _trip_count(computations: dict[str, list[_Instruction]], line: str) -> int | None:
    """Return a loop's trip count: the compiler's, else the only bound in its condition; None if unknown."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known.group(1))
    name = re.search(r"condition=%?([\w.\-]+)", line)
    condition = computations.get(name.group(1), []) if name else []
    bounds = [m.group(1) for i in condition if (m := re.search(r"= s32\[\]\S* constant\((\d+)\)", i.line))]
    is_plain = any(i.opcode == "compare" and "direction=LT" in i.line for i in condition)
    return int(bounds[0]) if is_plain and len(bounds) == 1 else None


def _chain(line: str) -> tuple[str, str] | None:
    """Return the ids that the parts of one collective spread over fusions share; None for a whole collective."""
    chain, channel = re.search(r'chain_id="(\d+)"', line), re.search(r"channel_id=(\d+)", line)
    return (chain.group(1), channel.group(1)) if chain and channel else None


def _result_bytes(instruction: _Instruction) -> int:
    """Bytes of the result; a start's tuple is (operands, results, contexts)."""
    result = instruction.shape
    # An all-reduce-start's shape is the result's alone; it is a tuple only if several arrays are reduced together.
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start" and result.startswith("("):
        parts = list(_split(result[1:-1], ","))
        result = parts[1] if len(parts) > 1 else result
    return sum(shape_bytes(result))


def _group_size(line: str, num_chips: int) -> int:
    """Number of chips that take part, from any of the forms of replica_groups."""
    if explicit := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(explicit.group(1).split(",")) if explicit.group(1) else num_chips
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota.group(1))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([\w.\-]+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([\w.\-]+)'", mesh.group(2)) if axis in sizes)
    return num_chips


def _sent_factor(kind: str, group: int) -> float:
    """Bytes sent by one chip over bytes of the result."""
    share = (group - 1) / group
    if kind == "all-reduce":
        return 2 * share
    if kind == "reduce-scatter":
        return group - 1  # the result is 1/n of what is reduced
    return 1.0 if kind in ("collective-permute", "collective-broadcast") else share


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    width = re.search(r"^[a-z]+(\d+)", kind)
    return int(width.group(1)) if width else 0
