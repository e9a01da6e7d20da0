"""Which instruction of which program ran when, on which thread, from a profile of XLA (S file)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench.profiling.operations import HOLDERS
from jaxbench.profiling.program_cost import Costed

Key = tuple[str, int]  # a program of a profile: its module, and XLA's number of it


class Event(NamedTuple):
    """One run of an instruction."""

    key: Key
    instruction: str
    thread: str
    start_ns: float
    duration_ns: float
    run: int = 0  # of the program: XLA's number of the execution


class Span(NamedTuple):
    """What the host did meanwhile: a call of a compiled function, an annotation."""

    name: str
    thread: str
    start_ns: float
    duration_ns: float


def newest(folder: Path) -> Path:
    """The newest profile below a folder.

    Raises:
      ValueError: there is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"--trace={folder} holds no profile of JAX (*.xplane.pb); --profile=FOLDER writes one")
    return files[-1]


def read(data: Any) -> tuple[list[Event], list[Span]]:
    """Runs of instructions, without those that only hold others, and spans of Python's threads, from ProfileData."""
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
    """The program of each key: of its module's, the one that has most of the instructions that ran.

    Programs of one function for several shapes may have equal instructions: these are told apart by XLA's numbers. A
    program that was compiled here has the number of its key, one that was read from the cache that of the process that
    compiled it. So they stand in the order of the keys where there are as many of both; else the number decides, and
    where none is the key's, the first of them stands for all.
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
        own = sorted(of_module, key=lambda each: each.number)  # with all of them compiled here, by the very numbers
        own = dict(zip(numbers, own)) if len(numbers) == len(own) else {each.number: each for each in own}
        found[key] = next((each for each in equal if each is own.get(key[1])), equal[0])
    return found
