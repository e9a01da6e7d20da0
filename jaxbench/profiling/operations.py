"""Profile a compiled program's operations with XLA's profiler, named by the source code that each comes from.

An instruction's own name (`fusion.12`) means nothing in another compilation. Operations are therefore named by the
primitive and by the functions of jaxbench that called it, which the program's text gives for each instruction.
Instructions that the compiler added are named by opcode and shape. Operations that only hold others (a loop, a call) do
not count, because their contents do.

This file is also loaded next to another tree's library (case_worker.py), so it imports nothing of jaxbench.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HOLDERS = {"while", "call", "conditional"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # they do no work
INSTRUCTION = re.compile(
    # A tuple's shapes are counted in comments from the sixth on: /*index=5*/
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\((?:[^=]|/\*index=\d+\*/)*?\)|\S+) (?P<opcode>[a-z][a-z0-9\-]*)\("
)
LAYOUT = re.compile(r"\{[^}]*\}|/\*index=\d+\*/")  # and the counts of a long tuple's shapes
ENTRY = re.compile(r"^(\d+) (.*)$")
FIELD = re.compile(r"(\w+)=(\d+)")
NUM_FUNCTIONS = 2  # number of innermost functions of jaxbench in an operation's name


class Operation(NamedTuple):
    """Totals of all instructions of one name."""

    calls: int
    seconds: float  # on all threads


class Program(NamedTuple):
    """Contents of a program's text."""

    module: str
    names: dict[str, str]  # instruction -> operation
    opcodes: dict[str, int]  # opcode -> number of instructions


def read_program(text: str) -> Program:
    """Read the operation names of a compiled program's instructions from its HLO text."""
    first, tables = text.partition("\n")[0], source_tables(text)
    names, opcodes = {}, Counter()
    for line in text.splitlines():
        if (found := INSTRUCTION.match(line)) is None:
            continue
        opcode = found["opcode"]
        if opcode not in FREE:
            opcodes[opcode] += 1
        if opcode not in HOLDERS:
            names[found["name"]] = _named(line, opcode, found["shape"], tables)
    return Program(re.sub(r"HloModule (\S+?),.*", r"\1", first), names, dict(opcodes))


def instructions(text: str) -> list[str]:
    """Return every instruction of a program that does work, as opcode, shape and source."""
    tables, found = source_tables(text), []
    for line in text.splitlines():
        made = INSTRUCTION.match(line)
        if made is not None and made["opcode"] not in FREE:
            own = f"{made['opcode']} {LAYOUT.sub('', made['shape'])}"
            said = _named(line, made["opcode"], made["shape"], tables)
            found.append(own if said == own else f"{own} {said}")
    return found


def profile(run: Callable[[], Any], programs: Mapping[str, Program]) -> dict[str, Operation]:
    """Profile `run` and return each operation's time by `program: name`; other programs are named by module.

    Raises:
      RuntimeError: JAX wrote no profile.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.profiler.trace(folder, profiler_options=options))
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError(f"JAX wrote no profile in {folder}")
        events = jax.profiler.ProfileData.from_file(str(files[-1]))
        return read_profile(events, programs)


def read_profile(events: Any, programs: Mapping[str, Program]) -> dict[str, Operation]:
    """Sum JAX's profile data by operation."""
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    modules: dict[str, list[tuple[str, Program]]] = defaultdict(list)
    for name, program in programs.items():
        modules[program.module].append((name, program))
    for plane in events.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats:
                    continue
                where = _place(str(stats.get("hlo_module", "")), str(stats["hlo_op"]), modules)
                if where is not None:
                    calls[where] += 1
                    seconds[where] += event.duration_ns / 1e9
    return {name: Operation(calls[name], seconds[name]) for name in calls}


def _place(module: str, instruction: str, modules: Mapping[str, list[tuple[str, Program]]]) -> str | None:
    """Return the operation name of a profile's instruction; None if it only holds others."""
    for name, program in modules.get(module, ()):
        if instruction in program.names:
            return f"{name}: {program.names[instruction]}"
    opcode = re.sub(r"[.\d]+$", "", instruction)
    return None if opcode in HOLDERS else f"{module}: {opcode}"


def _named(line: str, opcode: str, shape: str, tables: Mapping[str, Mapping[int, str]]) -> str:
    metadata = re.search(r"metadata=\{([^}]*)\}", line)
    where = re.search(r'op_name="([^"]*)"', metadata[1]) if metadata else None
    if where is None:
        return f"{opcode} {LAYOUT.sub('', shape)}"
    primitive = where[1].rpartition("/")[2]
    frame = re.search(r"stack_frame_id=(\d+)", metadata[1])
    functions = functions_of(int(frame[1]), tables)[-NUM_FUNCTIONS:] if frame else []
    return f"{primitive} in {' > '.join(functions)}" if functions else primitive


def functions_of(frame: int, tables: Mapping[str, Mapping[int, str]]) -> list[str]:
    """Return the functions of jaxbench in a frame's stack, the outermost first; each once, at its innermost place."""
    found: list[str] = []
    while frame:
        entry = dict(FIELD.findall(tables["StackFrames"].get(frame, "")))
        location = dict(FIELD.findall(tables["FileLocations"].get(int(entry.get("file_location_id", 0)), "")))
        file = tables["FileNames"].get(int(location.get("file_name_id", 0)), "")
        name = tables["FunctionNames"].get(int(location.get("function_name_id", 0)), "").strip('"')
        name = name.replace(".<locals>", "")
        if "jaxbench/" in file and name not in found:
            found.insert(0, name)
        parent = int(entry.get("parent_frame_id", 0))
        frame = parent if parent != frame else 0
    return found


def source_tables(text: str) -> dict[str, dict[int, str]]:
    """Read the program's own tables of files, functions, locations and stack frames."""
    found: dict[str, dict[int, str]] = {
        name: {} for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    current = None
    for line in text.splitlines():
        if line in found:
            current = found[line]
        elif current is not None and (entry := ENTRY.match(line)):
            current[int(entry[1])] = entry[2]
        elif line and not line[0].isdigit():
            current = None
    return found
