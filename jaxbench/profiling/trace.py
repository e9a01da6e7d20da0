"""`--profile=FOLDER`: profile a command by operation, scope, compiled function and memory.

The folder holds `plugins/` (JAX's own profile, for TensorBoard), `operations.json` and `.txt` (the operation table),
`scopes.json.gz` (a chrome trace of scopes), `compile.json` (seconds by function), `memory.json` (timeline, and snapshot
of JAX's arrays at their peak), and with PyTorch `trace.json` (its chrome trace). A command that fails on bad input
writes no profile.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxbench import outputs, process_environment
from jaxbench.measure import worker
from jaxbench.profiling import events, scope_table, scopes, table
from jaxbench.profiling.events import Span
from jaxbench.profiling.watch import MOST_S, Watch

REFUSED = (ValueError, OSError, MemoryError)  # a command's bad input: no profile is written
OPERATIONS, COMPILE, MEMORY = "operations.json", "compile.json", "memory.json"
GEMM, READ_BYTES, REPEATS = 1024, 2**27, 5  # of the measured rates; the array is larger than caches are
SHOWN = 12
NO_ROWS = (
    "no operation of JAX or PyTorch: this process computed nothing, or with native kernels, which no table shows "
    "(--kernels=xla leaves them out)"
)


def check_folder(folder: str, *, flag: str = "--profile") -> Path:
    """Return the path of a folder that a profile can be written to.

    Raises:
      ValueError: it cannot be written, or is not empty.
    """
    path = outputs.check_folder(folder, flag=flag)
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{flag}={folder} holds something already; name a new folder")
    return path


@contextlib.contextmanager
def recorded(folder: Path, *, library: str = "XLA", say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Profile what runs in the block and write it into a folder that does not exist yet or is empty.

    An interrupt or a failed gate still writes a profile; bad input (ValueError, OSError, MemoryError) does not.

    Args:
      library: the library that computes, "XLA" or "PyTorch".
      say: prints a line (unset: to standard error).
    """
    if library == "XLA":
        _leave_out_libtpu()
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    watch, started = Watch(library), time.monotonic()
    watch.start()
    try:
        try:
            yield
        except REFUSED:
            watch.stop()
            raise
        except BaseException:
            watch.stop()
            _write(folder, watch, time.monotonic() - started, say)
            raise
        watch.stop()
        _write(folder, watch, time.monotonic() - started, say)
    finally:
        if watch.folder is not None:
            shutil.rmtree(watch.folder, ignore_errors=True)


def _leave_out_libtpu() -> None:
    """Keep JAX from loading libtpu if no TPU is attached: libtpu's part of JAX's profiler would end the process.

    If JAX is not imported yet, this sets JAX_PLATFORMS, which JAX reads when it is imported. JAX is not imported here:
    a command may restart itself first (process_environment.ensure), and must do so before that import.
    """
    if "jax" in sys.modules:
        from jaxbench import libtpu

        libtpu.leave_out_if_absent()
    elif not (
        os.environ.get("JAX_PLATFORMS")
        or importlib.util.find_spec("libtpu") is None
        or process_environment.is_tpu_attached()
        or importlib.metadata.entry_points(group="jax_plugins")
    ):
        os.environ["JAX_PLATFORMS"] = "cpu"


def measure_rates() -> table.Rates:
    """Measure the rates of matrix products and reading on JAX's default device, in this process: a second or two."""
    import jax
    import jax.numpy as jnp

    from jaxbench.measure import roofline

    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    flops = {}
    for name, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16)):
        side = jnp.ones((GEMM, GEMM), dtype)
        seconds = worker.timed(lambda side=side: product(side, side).block_until_ready(), REPEATS)["seconds"]
        flops[name] = roofline.rate(2 * GEMM**3, seconds)
    array, total = jnp.ones(READ_BYTES // 4, jnp.float32), jax.jit(jnp.sum)
    seconds = worker.timed(lambda: total(array).block_until_ready(), REPEATS)["seconds"]
    return table.Rates(flops, roofline.rate(READ_BYTES, seconds))


def read_operations(file: Path, programs: list[Any], rates: table.Rates | None) -> tuple[list[table.Row], Any]:
    """Read the operation table of JAX's profile, and the arguments for scopes.write (events, programs, spans).

    Raises:
      ValueError: the file is not a profile, or is empty.
    """
    import jax

    if not file.stat().st_size:
        raise ValueError(f"{file} is empty, wanted a profile of JAX; the command may have been killed as it wrote")
    try:
        data = jax.profiler.ProfileData.from_file(str(file))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{file} is no profile of JAX ({error})") from error
    found, spans = events.read(data)
    assigned = events.assign(found, programs)
    return table.rows(found, assigned, rates), (found, assigned, spans)


def _write(folder: Path, watch: Watch, seconds: float, say: Callable[[str], None]) -> None:
    """Write a whole profile and print a summary."""
    say(f"profile: {seconds:.1f} s recorded; reading it")
    about: dict[str, Any] = {"command": sys.argv, "seconds": seconds, "library": watch.library}
    if folder.is_dir():
        folder.rmdir()  # empty: checked
    with outputs.whole_folder(folder) as made:
        found: list[table.Row] = []
        named: list[scope_table.ScopeRow] = []
        if watch.is_traced:
            found, named = _write_jax(made, watch, about)
        if watch.torch_profile is not None:
            found, named = _write_torch(made, watch.torch_profile, seconds)
        rows = [row._asdict() for row in found]
        scoped = [row._asdict() for row in named]
        outputs.write_json(made / OPERATIONS, {"about": about, "rows": rows, "scopes": scoped})
        outputs.write_json(made / COMPILE, _compiled(watch))
        peak = max((sample["resident_bytes"] for sample in watch.timeline), default=0)
        memory = {"peak_resident_bytes": peak, "timeline": watch.timeline, "snapshot": watch.snapshot}
        outputs.write_json(made / MEMORY, memory)
        text = render(rows, scoped, top=max(len(rows), len(scoped)))
        outputs.write_text(made / "operations.txt", text)
    print(render(rows, scoped, top=SHOWN), file=sys.stderr, end="")
    for line in _said(watch, rows, seconds, peak):
        say(line)
    say(f"profile: written to {folder}; `make tensorboard` and docs/profiling.md say how to open it")


def render(rows: list[dict[str, Any]], scoped: list[dict[str, Any]], *, top: int) -> str:
    """Render the operation table as text, and the scope table if code has named scopes."""
    import io

    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False)
    console.print(table.picture(rows, top=top))
    if scoped:
        console.print(scope_table.picture(scoped, top=top))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _write_jax(made: Path, watch: Watch, about: dict[str, Any]) -> tuple[list[table.Row], list[scope_table.ScopeRow]]:
    import jax

    rates = measure_rates()
    about |= {"rates": rates._asdict(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    rows, parts = read_operations(events.newest(watch.folder), list(watch.texts.values()), rates)
    scopes.write(made / "scopes.json.gz", *parts)
    found, assigned, spans = parts
    named = scope_table.of_operations(found, assigned)
    named += scope_table.of_spans(spans, watch.annotations, about["seconds"])
    shutil.copytree(watch.folder / "plugins", made / "plugins")
    (made / "memory.pprof").write_bytes(jax.profiler.device_memory_profile())
    return rows, named


def _write_torch(made: Path, profile: Any, seconds: float) -> tuple[list[table.Row], list[scope_table.ScopeRow]]:
    """Write PyTorch's chrome trace and return its tables; the first has FLOPs of products and sums only, no bytes."""
    profile.export_chrome_trace(str(made / "trace.json"))
    averages = profile.key_averages()
    on_device = any(each.self_device_time_total for each in averages)
    times = {each.key: each.self_device_time_total if on_device else each.self_cpu_time_total for each in averages}
    total = sum(times.values())
    rows = [
        table.Row(each.key, each.count, times[each.key] / 1e6, times[each.key] / total if total else 0.0,
                  each.flops or None, None, None, None)
        for each in averages
    ]  # fmt: skip
    spans = [
        Span(each.name, str(each.thread), 1e3 * each.time_range.start, 1e3 * each.time_range.elapsed_us())
        for each in profile.events() if each.is_user_annotation and not each.is_async
    ]  # fmt: skip
    named = scope_table.of_spans(spans, {span.name for span in spans}, seconds)
    return sorted(rows, key=lambda row: -row.seconds), named


def _compiled(watch: Watch) -> list[dict[str, Any]]:
    """Return the compiled functions, the slowest first."""
    stages = ("trace_s", "lower_s", "compile_s", "programs")
    rows = [{"function": name} | {each: spent.get(each, 0) for each in stages} for name, spent in
            watch.compiled.items()]  # fmt: skip
    return sorted(rows, key=lambda row: -(row["trace_s"] + row["lower_s"] + row["compile_s"]))


def _said(watch: Watch, rows: list[dict[str, Any]], seconds: float, peak: int) -> Iterator[str]:
    if not rows:
        yield f"profile: {NO_ROWS}"
    else:
        total = sum(row["seconds"] for row in rows)
        yield f"profile: {len(rows)} operations took {total:.2f} s on all threads, of {seconds:.1f} s by the clock"
    if slowest := _compiled(watch)[:3]:
        shown = [f"{row['function']} {row['trace_s'] + row['lower_s'] + row['compile_s']:.2f} s" for row in slowest]
        yield f"profile: traced, lowered and compiled longest: {', '.join(shown)}"
    yield f"profile: peak of the resident memory {peak / 2**20:.0f} MiB"
    if watch.workers:
        yield f"profile: {len(watch.workers)} processes that the command started were not traced"
    if watch.is_traced and seconds > MOST_S:
        yield f"profile: operations are those of the first {MOST_S:.0f} s on the device"
