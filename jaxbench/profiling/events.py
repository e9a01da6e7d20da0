"""Read from an XLA profile which instruction of which program ran when, on which thread (S file)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.profiling.operations import HOLDERS
from jaxbench.profiling.program_cost import Costed

Key = tuple[str, int]  # a program of a profile: its module, and XLA's program id


class Event(NamedTuple):
    """One run of an instruction."""

    key: Key
    instruction: str
    thread: str
    start_ns: float
    duration_ns: float
    run: int = 0  # XLA's run id of the program's execution


class Span(NamedTuple):
    """A host event: a call of a compiled function, or an annotation."""

    name: str
    thread: str
    start_ns: float
    duration_ns: float


def newest(folder: Path) -> Path:
    """Return the newest profile below a folder.

    Raises:
      ValueError: there is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"--trace={folder} holds no profile of JAX (*.xplane.pb); --profile=FOLDER writes one")
    return files[-1]


def read(data: Any) -> tuple[list[Event], list[Span]]:
    """Return runs of instructions (without loops, calls, branches, which hold others) and Python spans of a profile."""
    found, spans = [], []
    for plane in data.planes:
        for line in plane.lines:
            thread, is_python = f"{plane.name} {line.name}", line.name == "python"
            for event in line.events:
                stats = {} if is_python else dict(event.stats)
                if "hlo_op" in stats:
                    name = str(stats["hlo_op"])
                    if name.rstrip(".0123456789") not in HOLDERS:
                        key = (str(stats.get("hlo_module", "")), int(stats.get("program_id", 0)))
                        run = int(stats.get("run_id", 0))
                        found.append(Event(key, name, thread, event.start_ns, event.duration_ns, run))
                elif is_python and event.duration_ns > 0:
                    spans.append(Span(event.name, thread, event.start_ns, event.duration_ns))
    return found, spans


def assign(events: Iterable[Event], programs: Sequence[Costed]) -> dict[Key, Costed]:
    """Map each key to a program: of its module's programs, the one with most of the instructions that ran.

    Programs of one function for several shapes may have equal instructions; XLA's ids then tell them apart. A program
    that was compiled here has the id of its key; one read from the cache has the id from the process that compiled it.
    So if a module has as many keys as programs, both are matched in order of their ids. Else equal ids are matched, and
    if no program has the key's id, the first of the equal programs is used.
    """
    ran: dict[Key, set[str]] = defaultdict(set)
    for event in events:
        ran[event.key].add(event.instruction)
    found = {}
    for key, instructions in ran.items():
        of_module = [each for each in programs if each.program.module == key[0]]
        if not of_module:
            continue
        shared = [len(instructions & each.costs.keys()) for each in of_module]
        equal = [each for each, count in zip(of_module, shared, strict=True) if count == max(shared)]
        numbers = sorted(number for module, number in ran if module == key[0])
        own = sorted(of_module, key=lambda each: each.number)  # if all were compiled here, ids match exactly
        own = dict(zip(numbers, own)) if len(numbers) == len(own) else {each.number: each for each in own}
        found[key] = next((each for each in equal if each is own.get(key[1])), equal[0])
    return found
