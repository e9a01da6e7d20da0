"""Detect memory leaks of a function or a server that is called repeatedly (S file).

After warm-up calls, memory is read after each further call, following a garbage collection: the resident set, Python's
allocations (tracemalloc) and JAX's arrays. Growth per call is the median slope over all pairs of calls, with its 99 %
interval (Sen 1968, Journal of the American Statistical Association 63(324):1379-1389), so that a few jumps of an
allocator do not count. It is a leak if the whole interval lies above `LEAST`, no leak if it lies below; else undecided.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import http.client
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
import tracemalloc
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxbench import cli

LEAST = {"python_bytes": 64.0, "array_bytes": 1.0, "resident_bytes": 4096.0}  # bytes per call; less is negligible
CONFIDENCE = 0.99
WARMUP, REPEATS, FEWEST = 5, 50, 10
MOST_SAMPLES = 1000  # used for slopes, which makes half a million pairs; more samples are thinned evenly
SHOWN = 5  # lines
TIMEOUT_S = 300.0  # of a request
LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class Growth(NamedTuple):
    """Growth of one kind of memory."""

    bytes_a_call: float
    low: float  # of the interval
    high: float
    verdict: str  # leak, no leak, undecided


class Found(NamedTuple):
    """Memory growth under repeated calls."""

    growth: dict[str, Growth]
    lines: list[tuple[str, float]]  # file:line that allocated, bytes per call

    @property
    def is_leak(self) -> bool:
        """True if any kind of memory leaks."""
        return any(each.verdict == "leak" for each in self.growth.values())


def growth(samples: Sequence[float], *, least: float) -> Growth:
    """Estimate the growth per call of one kind of memory.

    Raises:
      ValueError: there are too few samples.
    """
    _check(len(samples))
    import numpy as np
    from scipy import stats

    kept = np.unique(np.linspace(0, len(samples) - 1, min(len(samples), MOST_SAMPLES)).astype(int))
    fit = stats.theilslopes(np.asarray(samples, dtype=float)[kept], kept, alpha=CONFIDENCE)
    low, high = float(fit.low_slope), float(fit.high_slope)
    verdict = "leak" if low > least else "no leak" if high <= least else "undecided"
    return Growth(float(fit.slope), low, high, verdict)


def find(
    call: Callable[[], Any],
    *,
    repeats: int = REPEATS,
    warmup: int = WARMUP,
    advance: Callable[[int], None] = lambda count: None,
) -> Found:
    """Call a function repeatedly in this process and measure its memory growth.

    Args:
      advance: called with 1 after each finished call, to show progress.

    Raises:
      ValueError: there are too few repeats.
    """
    import numpy as np

    _check(repeats)
    samples = {name: np.zeros(repeats) for name in LEAST}  # allocated first, so that they do not count as growth
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        for _ in range(warmup):
            call()
            advance(1)
        _read()  # so that one-time allocations of reading are not counted
        before = tracemalloc.take_snapshot()
        for place in range(repeats):
            call()
            for name, value in _read().items():
                samples[name][place] = value
            advance(1)
        after = tracemalloc.take_snapshot()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    kinds = samples if "jax" in sys.modules else {name: each for name, each in samples.items() if name[0] != "a"}
    found = {name: growth(each, least=LEAST[name]) for name, each in kinds.items()}
    return Found(found, _lines(before, after, repeats))


def find_elsewhere(
    call: Callable[[], Any], resident_bytes: Callable[[], int], *, repeats: int, warmup: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Found:  # fmt: skip
    """Do as `find` for another process, of which only the resident set can be read."""
    _check(repeats)
    samples = []
    for place in range(warmup + repeats):
        call()
        if place >= warmup:
            samples.append(float(resident_bytes()))
        advance(1)
    return Found({"resident_bytes": growth(samples, least=LEAST["resident_bytes"])}, [])


def report(found: Found) -> list[str]:
    """Report the result: one line per kind of memory, then the lines of code that kept most."""
    names = {"python_bytes": "Python's allocations", "array_bytes": "JAX's arrays", "resident_bytes": "resident memory"}
    lines = [
        f"{names[name]}: {each.verdict}; {each.bytes_a_call:+.4g} bytes a call ({each.low:+.4g} to {each.high:+.4g})"
        for name, each in found.growth.items()
    ]
    return lines + [f"  {place} kept {size:.4g} bytes a call" for place, size in found.lines]


# Targets of the calls, checked before the first call


def split(place: str) -> tuple[str, str]:
    """Split FILE.py:FUNCTION or MODULE:FUNCTION into file or module, and function.

    Raises:
      ValueError: it has another form, or the file does not exist.
    """
    module, _, name = place.rpartition(":")
    if not name.isidentifier() or not module:
        raise ValueError(f"--call={place} is neither FILE.py:FUNCTION nor MODULE:FUNCTION")
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"--call={place}: {module} is no file")
    elif not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"--call={place}: {module} is neither a file .py nor the name of a module")
    return module, name


def load(module: str, name: str) -> Callable[[], Any]:
    """Import the function that `split` named, which runs its file; the returned function's errors name their place.

    Raises:
      cli.GateFailed: raised by the returned function if the named one raises or ends the process.
      ValueError: the module cannot be imported or lacks the function, the function requires arguments, or a call of it
        runs nothing (it is a coroutine or generator).
    """
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own file may fail in any way
        raise ValueError(f"--call={module}:{name}: {type(error).__name__} while importing it: {error}") from error
    call = getattr(found, name, None)
    if not callable(call):
        raise ValueError(f"--call={module}:{name}: {module} has no function {name}")
    if wanted := _arguments(call):
        raise ValueError(f"--call={module}:{name} wants arguments ({', '.join(wanted)}); wanted a function without")
    if any(is_lazy(call) for is_lazy in LAZY):
        raise ValueError(f"--call={module}:{name} is a coroutine or generator, of which a call runs nothing; wrap it")

    def named() -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:  # exit code 0 would say that there is no leak
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise cli.GateFailed(f"--call={module}:{name}: {type(error).__name__} at {place}: {error}") from error

    return named


def asker(url: str, body: str | None) -> Callable[[], Any]:
    """Return a function that sends the request of `--url` and `--body` to a server.

    Raises:
      ValueError: the URL is not a server's address, or the body is not JSON; at a request: the server does not answer.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url={url} is no address; wanted http://HOST:PORT/PATH")
    if body is not None and body.startswith("@"):
        if not Path(body[1:]).is_file():
            raise ValueError(f"--body={body}: {body[1:]} is no file")
        body = Path(body[1:]).read_text(encoding="utf-8")
    try:
        json.loads(body or "0")
    except ValueError as error:
        raise ValueError(f"--body={body!a} is no JSON ({error})") from error
    data = None if body is None else body.encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"--url={url} does not answer: {error}") from error

    return ask


def resident_of(pid: int) -> Callable[[], int]:
    """Return a function that reads another process's resident set.

    Raises:
      ValueError: there is no such process.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        process.memory_info()
    except (psutil.Error, OSError) as error:
        raise ValueError(f"--pid={pid}: no process of this number can be read ({error})") from error
    return lambda: process.memory_info().rss


def _arguments(call: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []  # a function in C, without a signature
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def _check(count: int) -> None:
    if count < FEWEST:
        raise ValueError(f"leaks: {count} calls, wanted {FEWEST} at least")


@functools.cache
def _process() -> Any:
    import psutil

    return psutil.Process()


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim, which frees unused memory; looked up once, as the look-up itself keeps memory."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def _clear_type_cache() -> None:
    """Empty CPython's cache of attribute look-ups, which keeps up to 4,096 names that C code made for one look-up each.

    JAX's calls fill it by 50 to 200 bytes each, hundreds of times, which is no leak.
    """
    for name in ("_clear_internal_caches", "_clear_type_cache"):  # from Python 3.13 on; before
        if hasattr(sys, name):
            return getattr(sys, name)()
    return None


def _read() -> Mapping[str, float]:
    gc.collect()
    _clear_type_cache()
    if (trim := _trim()) is not None:
        trim(0)
    read = {"python_bytes": tracemalloc.get_traced_memory()[0], "resident_bytes": _process().memory_info().rss}
    if (jax := sys.modules.get("jax")) is not None:
        read["array_bytes"] = sum(each.nbytes for each in jax.live_arrays() if not each.is_deleted())
    return read


def _lines(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot, repeats: int) -> list[tuple[str, float]]:
    own = [tracemalloc.Filter(False, name) for name in (__file__, tracemalloc.__file__)]
    changes = after.filter_traces(own).compare_to(before.filter_traces(own), "lineno")
    kept = [(f"{each.traceback[0].filename}:{each.traceback[0].lineno}", each.size_diff / repeats) for each in changes]
    most = sorted((each for each in kept if each[1] > LEAST["python_bytes"]), key=lambda each: -each[1])
    return most[:SHOWN]
