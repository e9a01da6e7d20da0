"""A process that runs cases on the jaxbench tree in PYTHONPATH: `python case_worker.py NAME THREADS`.

This file, cases.py and workload_cases.py come from the comparing commit; `import jaxbench` finds the compared tree. The
protocol is that of measure/worker.py, also loaded by path from the comparing commit, so that trees older than it work.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# JAX's own names for the stages before a program runs
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
COUNTS = {  # of memory_analysis
    "temp_bytes": "temp_size_in_bytes", "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
}  # fmt: skip
# Collectives between devices; an asynchronous pair of start and done counts once.
COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)
OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)


def beside(name: str, path: Path) -> Any:
    """Import a module from its file, whatever tree is on the path."""
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


worker = beside("worker_of_head", HERE.parent / "measure" / "worker.py")
operations = beside("operations_of_head", HERE.parent / "profiling" / "operations.py")


class Session:
    """Run cases of one tree, one after another."""

    def __init__(self, name: str, threads: int):
        self.name, self.threads = name, threads
        self.case: Any = None
        self.programs: dict[str, Any] = {}
        self.level_bytes = self.device_level_bytes = 0
        self._spent: dict[str, float] = defaultdict(float)
        self._compiled = 0

    def start(self) -> dict:
        """Import jaxbench's decoder with what it needs, and initialise the JAX backend."""
        started = time.perf_counter()
        import jax

        import jaxbench
        from jaxbench import sample, transformer  # noqa: F401  this import is what is timed
        from jaxbench.pretrained import weights  # noqa: F401

        jax.devices()
        seconds = time.perf_counter() - started
        jax.monitoring.register_event_duration_secs_listener(self._note)
        self.level_bytes = worker.resident_bytes()
        tree = str(Path(jaxbench.__file__).resolve().parents[1])
        packages = {each.name: each.version for each in importlib.metadata.distributions()}
        return {"import_s": seconds, "tree": tree, "device": jax.default_backend(), "packages": packages}

    def load(self, *, case: dict, model: str | None) -> dict:
        """Load what a case needs."""
        worker.release_memory()
        worker.reset_peak()
        self.device_level_bytes = device_peak()
        self.case = workloads()[case["workload"]](case, model)
        started = time.perf_counter()
        self.case.load()
        return {"load_s": time.perf_counter() - started}

    def prepare(self) -> dict:
        """Compile what the case needs; return seconds of each stage, and the compiler's counts for each program."""
        with self._stages() as spent:
            programs = self.case.prepare()
        self.programs = {name: program for name, program in programs.items() if program is not None}
        counts = {name: counted(program) for name, program in self.programs.items()}
        worker.release_memory()
        return {"stages": dict(spent), "executables": self._compiled, "counts": counts}

    def measure(self, *, seconds: float) -> dict:
        """Sample for `seconds`, at least once; also count compiled programs and measure the threads' busy share."""
        compiled, samples = self._compiled, []
        started, cpu_started = time.perf_counter(), time.process_time()
        while not samples or time.perf_counter() - started < seconds:
            samples.append(self.case.measure())
        spent, cpu_spent = time.perf_counter() - started, time.process_time() - cpu_started
        return {
            "samples": samples, "recompilations": self._compiled - compiled,
            "utilisation": cpu_spent / (spent * self.threads),
        }  # fmt: skip

    def memory(self) -> dict:
        """Return the peak resident set since before the case was loaded, above the level after the imports.

        Also the peak of device memory if the case raised it: that counter cannot be reset.
        """
        found = {"peak_memory_bytes": max(worker.peak_bytes() - self.level_bytes, 0)}
        device = device_peak()
        return found | ({"device_peak_bytes": device} if device > self.device_level_bytes else {})

    def texts(self, *, folder: str) -> dict:
        """Write each program's HLO into a folder; return its number of instructions per opcode."""
        found = {}
        for name, program in self.programs.items():
            Path(folder, f"{name}.txt").write_text(program.as_text(), encoding="utf-8")
            found[name] = operations.read_program(program.as_text()).opcodes
        return {"opcodes": found}

    def profile(self) -> dict:
        """Profile one measurement with JAX's profiler; return its seconds and those of each operation."""
        programs = {name: operations.read_program(program.as_text()) for name, program in self.programs.items()}
        spent: list[float] = []

        def run() -> None:
            started = time.perf_counter()
            self.case.measure()
            spent.append(time.perf_counter() - started)

        found = operations.profile(run, programs)
        return {"seconds": spent[0], "operations": found}

    def unload(self) -> dict:
        """Drop the case."""
        import gc

        import jax

        self.case, self.programs = None, {}
        jax.clear_caches()
        gc.collect()
        worker.release_memory()
        self._compiled = 0
        return {}

    def _note(self, event: str, seconds: float, **_: Any) -> None:
        if (stage := STAGES.get(event)) is not None:
            self._spent[stage] += seconds
            self._compiled += stage == "compile_s"

    @contextlib.contextmanager
    def _stages(self) -> Iterator[dict[str, float]]:
        """Record the seconds of each of JAX's stages inside the context."""
        self._spent = defaultdict(float)
        yield self._spent


def workloads() -> dict[str, type]:
    """Return the class that runs each kind of case."""
    files = ("cases", "workload_cases")
    return {
        kind: made for name in files for kind, made in beside(f"{name}_of_head", HERE / f"{name}.py").WORKLOADS.items()
    }


def device_peak() -> int:
    """Return the peak memory of the first device in bytes; 0 if it does not report one."""
    import jax

    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def counted(program: Any) -> dict[str, float]:
    """Return the compiler's counts for a compiled program; a loop's body counts once."""
    cost, memory, found = program.cost_analysis() or {}, program.memory_analysis(), {}
    for name, key in (("flops", "flops"), ("bytes_accessed", "bytes accessed")):
        if cost.get(key, 0) > 0:
            found[name] = float(cost[key])
    if memory is not None:
        found |= {name: float(getattr(memory, field)) for name, field in COUNTS.items()}
    if text := program.as_text():
        found["hlo_ops"] = float(len(OPERATION.findall(text)))
        found["collectives"] = float(len(COLLECTIVE.findall(text)))
    return found


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # no `cases` from this folder
    worker.serve(Session)
