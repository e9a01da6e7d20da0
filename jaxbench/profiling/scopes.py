"""Chrome trace of named scopes: which functions of jaxbench the operations of each thread belong to (S file).

Open it in https://ui.perfetto.dev or chrome://tracing. JAX's own trace names instructions; here each instruction is
nested in the scopes that it comes from (jax.named_scope, then functions of jaxbench, the outermost on top).
Neighbouring instructions of one scope share one slice.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxbench.profiling.events import Event, Key, Span
from jaxbench.profiling.program_cost import Costed


def slices(events: Iterable[Event], programs: Mapping[Key, Costed]) -> Iterator[tuple[str, str, float, float]]:
    """Yield scopes and operations as (name, thread, start, end) in nanoseconds, nested in their outer scopes."""
    threads: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.thread].append(event)
    for thread, on_thread in threads.items():
        opened: list[tuple[str, float]] = []
        end, run = 0.0, None
        for event in sorted(on_thread, key=lambda each: each.start_ns):
            path = _path(event, programs)
            kept = _shared([name for name, _ in opened], path) if event.start_ns >= end and event.run == run else 0
            for name, start in opened[kept:]:
                yield name, thread, start, end
            opened = opened[:kept] + [(name, event.start_ns) for name in path[kept:]]
            end, run = max(end, event.start_ns + event.duration_ns), event.run
            yield event.instruction, thread, event.start_ns, event.start_ns + event.duration_ns
        for name, start in opened:
            yield name, thread, start, end


def write(path: Path, events: Iterable[Event], programs: Mapping[Key, Costed], spans: Iterable[Span]) -> None:
    """Write scopes, operations and host spans as a gzipped chrome trace."""
    found = list(slices(events, programs))
    found += [(span.name, span.thread, span.start_ns, span.start_ns + span.duration_ns) for span in spans]
    numbers = {thread: number for number, thread in enumerate(sorted({thread for _, thread, *_ in found}))}
    written: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": thread}}
        for thread, number in numbers.items()
    ]
    for name, thread, start, end in found:
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}  # microseconds
        written.append({"ph": "X", "pid": 0, "tid": numbers[thread], "name": name, **times})
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": written, "displayTimeUnit": "ms"}, file)


def _path(event: Event, programs: Mapping[Key, Costed]) -> list[str]:
    costed = programs.get(event.key)
    return [event.key[0], *(costed.scopes.get(event.instruction, ()) if costed else ())]


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Count the outermost names that two paths share."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
