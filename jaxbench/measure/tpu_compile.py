"""Compile a program for a TPU slice that is not attached, and read the compiler's figures for it.

The real TPU compiler (libtpu) is called with abstract arguments, in its own process: call `start_anew` first. Bytes are
per chip. The compiler's `optimal_seconds` is never used.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxbench.measure import hlo
from jaxbench.measure.chips import Topology
from jaxbench.measure.records import Record, now_utc

# Without these, libtpu asks the cloud's metadata server, waits, and complains on stderr if there is none.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else libtpu's lock file refuses a second compiling process
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",  # the compiler is called directly; JAX must not look for a TPU
}
MEMORY = ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_temp")


class DoesNotFitError(RuntimeError):
    """A program needs more memory than a chip has; `str()` is the compiler's sentence."""


class Compiled(NamedTuple):
    """The compiler's figures for one program, per chip."""

    compile_s: float
    memory: dict[str, int]  # argument, output, alias, temp, code, host_argument, host_temp: bytes
    flops: float  # the compiler's own count
    traffic: float  # bytes accessed, the compiler's own count
    collectives: dict[str, hlo.Collective]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the chip's memory in use while the program runs."""
        return sum(self.memory[name] for name in ("argument", "output", "temp", "code")) - self.memory["alias"]

    @property
    def kinds(self) -> dict[str, dict[str, Any]]:
        """Collectives by kind, as plain JSON."""
        return {kind: total._asdict() for kind, total in self.collectives.items()}

    @property
    def sent_bytes(self) -> int:
        """Bytes that a chip sends to other chips."""
        return sum(kind.sent_bytes for kind in self.collectives.values())


def unavailable() -> str:
    """Return why nothing can be compiled for TPUs here, or an empty string."""
    if importlib.util.find_spec("libtpu") is None:
        return "tpu: libtpu is not installed; `pip install -e '.[tpu]'` brings it (no TPU is needed)"
    return ""


def devices(topology: Topology) -> list[Any]:
    """Return the slice's devices, for a mesh.

    Raises:
      ValueError: libtpu is not installed.
    """
    if reason := unavailable():
        raise ValueError(f"{reason} (asked for {topology.name})")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **topology.chip.options).devices


def compile_program(lower: Callable[[], Any], topology: Topology) -> Compiled:
    """Compile the jax.stages.Lowered that `lower` returns for the slice's devices; the time includes lowering.

    Raises:
      DoesNotFitError: the program needs more memory than a chip has.
    """
    import jax

    start = time.perf_counter()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(f"does not fit: {_memory_line(str(error))}") from error
    seconds, memory, cost = time.perf_counter() - start, compiled.memory_analysis(), compiled.cost_analysis()
    return Compiled(
        compile_s=seconds,
        memory={name.removeprefix("generated_"): int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY},
        flops=float(cost.get("flops", math.nan)),
        traffic=float(cost.get("bytes accessed", math.nan)),
        collectives=hlo.collectives(compiled.as_text(), topology.num_chips),
    )


def make_records(figures: Sequence[tuple[str, float, str, dict]], shape: dict, **common: Any) -> list[Record]:
    """Return the records of a compiled program.

    Args:
      figures: (metric, value, unit, facts) of each record.
      shape: facts that all records share.
      common: further fields of the records: workload, device.
    """
    return [
        Record(metric=name, value=float(value), unit=unit, detail=facts | shape, time_utc=now_utc(), **common)
        for name, value, unit, facts in figures
    ]


def refusal(error: DoesNotFitError, shape: dict, **common: Any) -> Record:
    """Return the record of a program that does not fit."""
    reason, detail = str(error), shape | {"fits": False}
    return Record(
        metric="tpu_memory_bytes", unit="bytes", status="error", reason=reason, detail=detail, time_utc=now_utc(),
        **common,
    )  # fmt: skip


def start_anew() -> None:
    """Restart this process once if libtpu's variables are not set yet, then disable the compilation cache."""
    wanted = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()} | {"JAX_PLATFORMS": "cpu"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})
    import jax

    # A program for a device that is not attached cannot be loaded from the cache.
    jax.config.update("jax_enable_compilation_cache", False)


def _memory_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if "memory" in line.lower()), lines[0])[:300]
