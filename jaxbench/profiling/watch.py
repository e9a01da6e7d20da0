"""A thread that watches a command: memory over time, compile times, programs; it also starts the profilers.

JAX's profiler starts as soon as the command has initialised a backend and not before, so that a command can still
choose its platform, restart itself or join other processes. The thread notices within 20 ms; what ran before is not in
the profile. PyTorch's starts at the end of the command's own import of PyTorch: it imports more of PyTorch first, for
two seconds on an idle machine, in which a thread would miss what the command does. Neither library is imported before
the command imports it.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxbench.measure import worker
from jaxbench.profiling import annotations, program_cost

LOOK_S = 0.02  # between two checks of what the command has imported
SAMPLE_S = 0.1  # between two samples of memory
LIVE_S = 0.5  # between two walks over JAX's arrays
MOST_S = 120.0  # longest profile: its file grows with every operation
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",  # or reading it from the cache
}


class Watch:
    """A thread that watches the command of this process.

    Args:
      library: the library whose profiler is started, "XLA" or "PyTorch".
    """

    def __init__(self, library: str):
        self.library = library
        self.folder: Path | None = None  # JAX's profiler writes into it; the caller removes it
        self.compiled: dict[str, dict[str, float]] = collections.defaultdict(dict)  # function -> stage -> seconds
        self.timeline: list[dict[str, float]] = []
        self.snapshot: list[dict[str, Any]] = []  # JAX's arrays at their peak
        self.workers: set[int] = set()  # processes that the command started
        self.texts: dict[tuple[str, bytes], program_cost.Costed] = {}
        self.torch_profile: Any = None
        self.annotations: set[str] = set()  # names of jax.profiler's annotations
        self._restored = contextlib.ExitStack()
        self.is_traced = False
        self._listens, self._most_live = False, 0
        self._torch_import = _AfterImport("torch", self._start_torch)
        self._started = self._next_sample = self._next_live = time.monotonic()
        self._trace_started = 0.0
        self._new_programs = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxbench-profile", daemon=True)

    def start(self) -> None:
        """Start watching; the first look is in the caller's thread, so that an existing backend is traced at once."""
        if self.library == "PyTorch" and (torch := _imported("torch")) is not None:
            self._start_torch(torch)
        elif self.library == "PyTorch":
            sys.meta_path.insert(0, self._torch_import)
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """End both profilers and the thread."""
        self._ended.set()
        self._thread.join()
        self._restored.close()
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._torch_import)
        if self._listens:
            sys.modules["jax"].monitoring.unregister_event_duration_listener(self._note)
        if self.torch_profile is not None:
            self.torch_profile.stop()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()
        self._look()
        if self._is_tracing():
            sys.modules["jax"].profiler.stop_trace()

    def _look(self) -> None:
        now = time.monotonic()
        jax = _imported("jax")
        if jax is not None and not self._listens:
            jax.monitoring.register_event_duration_secs_listener(self._note)
            self._listens = True
        if self.library == "XLA" and not self.is_traced and jax is not None and _has_backend():
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level, options.host_tracer_level = 0, 2
            # Created only now: a command that restarts itself would leave it behind.
            self.folder = Path(tempfile.mkdtemp(prefix="jaxbench-profile-"))
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self.is_traced, self._trace_started = True, now
            self.annotations = self._restored.enter_context(annotations.collected(jax))
        if self._is_tracing() and now - self._trace_started > MOST_S:
            jax.profiler.stop_trace()
            self._trace_started = 0.0
        if self.is_traced and (self._new_programs.is_set() or self._ended.is_set()):
            self._new_programs.clear()
            self._read_programs(jax)
        if now >= self._next_sample or self._ended.is_set():
            self._next_sample = now + SAMPLE_S
            self._sample(jax, now)

    def _start_torch(self, torch: Any) -> None:
        self.torch_profile = _torch_profile(torch)

    def _is_tracing(self) -> bool:
        return self._trace_started > 0.0

    def _note(self, event: str, seconds: float, **about: Any) -> None:
        """Record a duration that JAX reports for tracing, lowering or compiling a function."""
        if (stage := STAGES.get(event)) is None:
            return
        name = str(about.get("fun_name", "?"))
        name = name[4:-1] if name.startswith("jit(") else name
        spent = self.compiled[name]
        spent[stage] = spent.get(stage, 0.0) + seconds
        if stage == "compile_s":
            spent["programs"] = spent.get("programs", 0) + 1
            self._new_programs.set()

    def _read_programs(self, jax: Any) -> None:
        """Read the text of each program while it is alive."""
        for executable in jax.devices()[0].client.live_executables():
            for module in executable.hlo_modules():
                key = (module.name, bytes(executable.fingerprint or b""))
                if key not in self.texts:
                    number = program_cost.number_of(module.as_serialized_hlo_module_proto())
                    self.texts[key] = program_cost.read(module.to_string(), number)

    def _sample(self, jax: Any, now: float) -> None:
        import psutil

        sample = {"s": now - self._started, "resident_bytes": worker.resident_bytes()}
        self.workers |= {each.pid for each in psutil.Process().children(recursive=True)}
        if jax is not None and _has_backend():
            used = [(device.memory_stats() or {}).get("bytes_in_use") for device in jax.local_devices()]
            sample |= {"device_bytes": sum(used)} if None not in used else {}
            if now >= self._next_live or self._ended.is_set():
                self._next_live = now + LIVE_S
                sample["array_bytes"] = self._see_arrays(jax)
        self.timeline.append(sample)

    def _see_arrays(self, jax: Any) -> int:
        """Return the bytes of JAX's arrays, and keep a list of the arrays if this is the peak so far."""
        groups: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for array in jax.live_arrays():
            if not array.is_deleted():
                group = groups[f"{array.dtype}{list(array.shape)}"]
                group[0], group[1] = group[0] + 1, group[1] + array.nbytes
        total = sum(size for _, size in groups.values())
        if total > self._most_live:
            self._most_live = total
            rows = [{"array": name, "count": count, "bytes": size} for name, (count, size) in groups.items()]
            self.snapshot = sorted(rows, key=lambda row: -row["bytes"])
        return total


class _AfterImport:
    """Finder for sys.meta_path: `call` gets the module `name` in the thread that imports it, before anyone uses it."""

    def __init__(self, name: str, call: Callable[[Any], None]):
        self._name, self._call = name, call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Spec that the other finders have for the module; None for any other module."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: Any) -> None:
                execute(module)
                self._call(module)

            spec.loader.exec_module = run
        return spec


def _imported(name: str) -> Any:
    """Return a module that the command has finished importing, or None."""
    module = sys.modules.get(name)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def _has_backend() -> bool:
    from jax._src import xla_bridge  # every public query would initialise a backend

    return xla_bridge.backends_are_initialized()


def _torch_profile(torch: Any) -> Any:
    """Start and return PyTorch's profiler over all threads."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] + [kinds.CUDA] * torch.cuda.is_available()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    started = torch.profiler.profile(
        activities=activities, with_flops=True, record_shapes=True, profile_memory=True,
        experimental_config=every_thread,
    )  # fmt: skip
    started.start()
    return started
