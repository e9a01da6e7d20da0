"""Measure the device's rates, of which other figures are shares: reading memory, and matrix products by number type.

    python -m jaxbench.gpu.rates --library=jax --output=results.jsonl
    python -m jaxbench.gpu.rates --library=torch --output=results.jsonl

Operands are random: on zeros or ones a product draws less power and a GPU clocks higher. A rate is that of the fastest
of several calls, each with several products or reads in sequence, so that launch overhead does not count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.measure import environment, roofline
from jaxbench.measure.records import Record, RecordFile, Workload

REPEATS = 5
IN_A_ROW = 10  # products, or reads, per call
DTYPES = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16", "float8": "float8_e4m3fn"}


SAVED = "/jax/compilation_cache/compile_time_saved_sec"  # JAX's event of a program that came from its cache
WARM = 0.1  # share of a compile time: less is saved where helpers of the program were known


class Rate(NamedTuple):
    """One measured rate."""

    kind: str  # read or gemm
    dtype: str  # a key of DTYPES
    work: float  # bytes read or FLOPs, of a call
    seconds: list[float]


def timed(call: Callable[[], object], wait: Callable[[object], object]) -> list[float]:
    """Return the seconds of each call, including the wait for its result; the first call compiles and is left out."""
    wait(call())
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        wait(call())
        seconds.append(time.perf_counter() - start)
    return seconds


@contextlib.contextmanager
def apart(lost: list[str], name: str, keep: Callable[[Record], None], record: Record) -> Iterator[None]:
    """Measure one of several cases: keep an error as `record` with its reason, and let later cases continue.

    lost: list that gets a line about the error, for `check_all`.
    """
    if lost:
        gc.collect()  # frees arrays of earlier failures, which the error's frames held while it was handled
    try:
        yield
    except Exception as error:  # a library's error about a kernel or memory may be of any type
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        keep(record.model_copy(update={"status": "error", "reason": reason, "value": None}))
        lost.append(f"{name}: {reason}")
        print(lost[-1], file=sys.stderr, flush=True)


def check_all(lost: Sequence[str], count: int) -> None:
    """Check that none of `count` measurements was lost.

    Raises:
      GateFailed: some were.
    """
    if lost:
        raise cli.GateFailed(f"{len(lost)} of {count} could not be measured, the first: {lost[0]}")


def seconds_saved(library: str) -> Callable[[], float]:
    """Return a function that sums the compile seconds that caches on disk have saved since this call.

    library: flax (XLA's cache) or torch (Inductor's, which does not say them: infinite if it had a program).
    """
    if library == "flax":
        import jax

        found: list[float] = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, seconds, **_: found.append(seconds) if event == SAVED else None
        )
        return lambda: sum(found)
    from torch._dynamo.utils import counters

    def hits() -> int:
        return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]

    before = hits()
    return lambda: math.inf if hits() > before else 0.0


def compile_metric(seconds: float, saved: float) -> str:
    """Return the metric of a compile time, which is warm if a cache saved more than WARM of the whole."""
    return "compile_warm_s" if saved > WARM * (seconds + saved) or saved == math.inf else "compile_cold_s"


def jax_rates(size: int, read_bytes: int, names: Sequence[str]) -> Iterator[Rate]:
    """Yield rates of XLA; names: keys of DTYPES."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    largest = functools.partial(jax.jit(jnp.max), jax.random.normal(keys[0], (read_bytes // 2,), jnp.bfloat16))
    seconds = timed(lambda call=largest: [call() for _ in range(IN_A_ROW)], jax.block_until_ready)
    yield Rate("read", "bfloat16", read_bytes * IN_A_ROW, seconds)
    del largest
    left, right = (jax.random.normal(key, (size, size)) for key in keys[1:])
    for name in names:
        dtype = DTYPES[name]
        precision = "highest" if name == "float32" else "default"

        def product(a, b, precision=precision, dtype=dtype):  # a chain: each product needs the previous one
            def body(_, x):
                out = jnp.matmul(x, b, precision=precision, preferred_element_type=jnp.float32)
                return (out * size**-0.5).astype(dtype)

            return jax.lax.fori_loop(0, IN_A_ROW, body, a)

        try:
            a, b = left.astype(dtype), right.astype(dtype)
            seconds = timed(functools.partial(jax.jit(product), a, b), jax.block_until_ready)
        except Exception as error:  # noqa: BLE001 - this device has no product of the type
            print(f"{name}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
            continue
        yield Rate("gemm", name, 2.0 * size**3 * IN_A_ROW, seconds)


def torch_rates(size: int, read_bytes: int, device: str, names: Sequence[str]) -> Iterator[Rate]:
    """Yield rates of PyTorch; names: keys of DTYPES."""
    import torch

    place = "cuda" if device == "gpu" else "cpu"
    wait = (lambda _: torch.cuda.synchronize()) if place == "cuda" else (lambda _: None)
    largest = torch.randn(read_bytes // 2, dtype=torch.bfloat16, device=place).max
    seconds = timed(lambda call=largest: [call() for _ in range(IN_A_ROW)], wait)
    yield Rate("read", "bfloat16", read_bytes * IN_A_ROW, seconds)
    del largest
    left, right = (torch.randn(size, size, device=place) for _ in range(2))
    for name in names:
        dtype = DTYPES[name]
        if name == "float8":  # needs torch._scaled_mm, a private call with scales and a transposed operand
            continue
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            a, b = left.to(getattr(torch, dtype)), right.to(getattr(torch, dtype))

            def products(a=a, b=b) -> None:
                for _ in range(IN_A_ROW):
                    torch.mm(a, b)

            seconds = timed(products, wait)
        except Exception as error:  # noqa: BLE001 - as above
            print(f"{name}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
            continue
        yield Rate("gemm", name, 2.0 * size**3 * IN_A_ROW, seconds)


def main() -> int:
    """Measure one library and append its records."""
    values = flags.FLAGS
    for name in values.dtypes:
        if name not in DTYPES:
            raise ValueError(f"--dtypes={name!r} is unknown, wanted some of {', '.join(DTYPES)}")
    output = outputs.check_file(values.output, overwrite=True)
    process_environment.ensure(values.device, library="PyTorch" if values.library == "torch" else "XLA")
    found = (
        jax_rates(values.size, values.read_bytes, values.dtypes)
        if values.library == "jax"
        else torch_rates(values.size, values.read_bytes, values.device, values.dtypes)
    )
    file, versions = RecordFile(output), environment.versions()
    for rate in found:
        metric, unit = (
            ("gemm_flops_per_s", "FLOP/s") if rate.kind == "gemm" else ("read_bandwidth_bytes_per_s", "bytes/s")
        )
        value = roofline.rate(rate.work, rate.seconds)
        workload = Workload(kind=rate.kind, dtype=rate.dtype)
        detail = {"size": values.size if rate.kind == "gemm" else values.read_bytes}
        file.append(
            Record(
                metric=metric, value=value, unit=unit, arm=values.library, workload=workload, device=values.device,
                samples=tuple(rate.work / seconds for seconds in rate.seconds), detail=detail, versions=versions,
            )
        )  # fmt: skip
        print(f"{values.library} {rate.kind} {rate.dtype}: {value / 1e12:.3g} T{unit}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_device("gpu")
    flags.DEFINE_enum("library", "jax", ["jax", "torch"], "whose kernels are measured")
    flags.DEFINE_list("dtypes", list(DTYPES), f"number types of the products: some of {', '.join(DTYPES)}")
    flags.DEFINE_integer("size", 8192, "rows and columns of the matrices", lower_bound=1)
    flags.DEFINE_integer("read_bytes", 4 * 2**30, "bytes that are read", lower_bound=2)
    flags.DEFINE_string("output", "out/gpu-rates/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
