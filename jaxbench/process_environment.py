"""Environment variables that a process needs before Python, JAX or PyTorch start (S file: neither JAX nor PyTorch).

Three things can only be set from outside: which platforms JAX looks for (with libtpu installed and no TPU attached,
looking prints pages of errors), how glibc's malloc keeps memory (large arrays are page-fault bound otherwise, and
weights occupy tens of thousands of small pages, docs/xla_cpu.md rule 8), and where compiled programs are cached.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
GPU_FILES = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg")  # of the drivers of NVIDIA, AMD and WSL
TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")  # of the drivers of TPUs
GOOGLE, NO_TPU = "0x1ae0", ("0x0042", "0x001f")  # PCI ids: the vendor of TPUs, and its network card and disk
MALLOC_BYTES = str(8 * 2**30)  # glibc keeps blocks up to this size mapped and does not trim
ARENAS = "MALLOC_ARENA_MAX"
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"  # 1: ask Linux for huge pages for malloc's memory
GC_OBJECTS = 20_000  # between collections (Python's 700): tracing makes many objects that live, and few cycles
MARKER = "JAXBENCH_LAUNCHED"  # set in the restarted process; holds its id, which a restart keeps
INHERITED = "JAXBENCH_INHERITED"  # set there too; JSON: the variables' previous values, null if unset
CACHES, DEVICE_COUNT = "JAX_ENABLE_COMPILATION_CACHE", "--xla_force_host_platform_device_count"
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"  # JAX's own variable for the same


def environment(device: str, *, library: str = "XLA") -> dict[str, str]:
    """Environment variables that a process for `device` needs, on top of the ones it inherits.

    The platforms are always those of `device`. Everything else keeps the user's own value where one is set. Where a
    processor is shown as several devices, compiled programs are not cached (`simulated_devices`).
    library: the one that computes in it. One malloc arena for all threads makes XLA's programs faster and PyTorch's
    slower, so "PyTorch" keeps glibc's default.

    Raises:
      ValueError: the device is unknown.
    """
    if device not in PLATFORMS:
        raise ValueError(f"process_environment: device={device!r} is unknown, wanted one of {', '.join(PLATFORMS)}")
    wanted = {
        "MALLOC_MMAP_THRESHOLD_": MALLOC_BYTES,
        "MALLOC_TRIM_THRESHOLD_": MALLOC_BYTES,
        ARENAS: "1",  # blocks above 64 MB of any other arena go back to the system when they are freed
        TUNABLES: f"{HUGE_PAGES}=1",
        "TOKENIZERS_PARALLELISM": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",  # C++ information and warnings off, errors stay
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache_dir()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if library == "PyTorch":
        del wanted[ARENAS]
    if device != "tpu":
        wanted["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu would query the cloud's metadata server, for minutes
    if device == "cpu" and simulated_count() > 1:
        wanted[CACHES] = "false"
    if device == "gpu":
        wanted["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # PyTorch and JAX share the device
    kept = {name: os.environ.get(name, value) for name, value in wanted.items()}
    if HUGE_PAGES not in kept[TUNABLES]:  # the user has set other tunables
        kept[TUNABLES] = ":".join(filter(None, (kept[TUNABLES], wanted[TUNABLES])))
    return kept | {"JAX_PLATFORMS": PLATFORMS[device]}


def malloc_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Select the environment variables that glibc's malloc reads."""
    return {name: value for name, value in sorted(variables.items()) if name.startswith("MALLOC_") or name == TUNABLES}


def check_attached(device: str) -> None:
    """Check that a device is attached, by its device files; imports no backend.

    Raises:
      ValueError: the device is unknown or not attached.
    """
    if device not in PLATFORMS:
        raise ValueError(f"--device={device} is unknown, wanted one of {', '.join(PLATFORMS)}")
    if sys.platform != "linux" or device == "cpu":
        return
    if not (any(map(glob.glob, GPU_FILES)) if device == "gpu" else is_tpu_attached()):
        looked = ", ".join(GPU_FILES if device == "gpu" else TPU_FILES)
        raise ValueError(f"--device={device}, but this machine has none ({looked} not found); use --device=cpu")


def is_tpu_attached() -> bool:
    """True if there may be a TPU; does not touch it."""
    vendors = map(Path, glob.glob("/sys/bus/pci/devices/*/vendor"))
    google = [path.with_name("device") for path in vendors if path.read_text(encoding="ascii").strip() == GOOGLE]
    on_bus = any(path.read_text(encoding="ascii").strip() not in NO_TPU for path in google)
    return on_bus or any(map(glob.glob, TPU_FILES))


def simulated_devices(count: int) -> dict[str, str]:
    """Environment variables under which JAX shows this machine's processor as `count` devices.

    A collective blocks one thread per device until all have arrived, and XLA has as many threads as devices: a single
    thread busy with something else would leave the last device waiting for ever. So there are four times as many, and
    a wait ends (with the process) after four minutes instead of 40 seconds, because a busy machine may stall. The
    user's own flags come first and take precedence.

    Programs are compiled in each process, whatever the user has set: in one of several devices that comes from the
    compile cache, XLA no longer knows that a collective inside a branch or loop comes before or after those beside it,
    so that two devices may enter them in different orders, and wait for each other for ever (docs/xla_cpu.md rule 19).

    Raises:
      ValueError: count < 1.
    """
    if count < 1:
        raise ValueError(f"process_environment: {count} simulated devices, wanted at least 1")
    own = os.environ.get("XLA_FLAGS", "").split()
    wanted = {
        DEVICE_COUNT: count,
        "--xla_cpu_collective_call_terminate_timeout_seconds": 240,
        "--xla_cpu_collective_timeout_seconds": 240,
    }
    named = {flag.partition("=")[0] for flag in own}
    added = [f"{name}={value}" for name, value in wanted.items() if name not in named]
    found = {"XLA_FLAGS": " ".join([*own, *added]), "NPROC": os.environ.get("NPROC", str(4 * count))}
    return found | ({CACHES: "false"} if simulated_count(found["XLA_FLAGS"]) > 1 else {})


def simulated_count(flags: str | None = None) -> int:
    """Number of devices as which JAX shows a processor by `flags` (None: XLA_FLAGS); 1 where it is not said."""
    if (own := os.environ.get(CPU_DEVICES, "")).isdigit():  # takes precedence
        return int(own)
    said = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    counts = re.findall(rf"{DEVICE_COUNT}=(\d+)", said)
    return int(counts[-1]) if counts else 1


def ensure(device: str, *, library: str = "XLA") -> None:
    """Restart this process with `environment(device, library=library)`, once; return at once if it has that already.

    Python then also looks for garbage less often: tracing and compiling make many objects that live.
    Call it first in a main, before JAX is imported. The command line, the interpreter's options and the process id
    are kept.

    Raises:
      ValueError: JAX is already imported, so that the platforms are fixed, or the variables differ after the restart.
    """
    wanted = environment(device, library=library)
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        gc.set_threshold(GC_OBJECTS)
        mend_compile_cache()
        return
    if os.environ.get(MARKER) == str(os.getpid()):
        changed = ", ".join(name for name, value in wanted.items() if os.environ.get(name) != value)
        raise ValueError(f"process_environment: {changed} still differ after starting anew for --device={device}")
    if "jax" in sys.modules:
        raise ValueError(f"process_environment: ensure({device!r}) came after `import jax`; call it first in main")
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, *sys.orig_argv[1:]]
    before = {name: os.environ.get(name) for name in wanted} | json.loads(os.environ.get(INHERITED, "{}"))
    marks = {MARKER: str(os.getpid()), INHERITED: json.dumps(before)}
    os.execve(sys.executable, arguments, {**os.environ, **wanted, **marks})


def inherited() -> dict[str, str]:
    """Variables of this process as its user set them: without those that `ensure` set, here or in a parent."""
    before = json.loads(os.environ.get(INHERITED, "{}"))
    kept = {name: value for name, value in os.environ.items() if name not in (MARKER, INHERITED, *before)}
    return kept | {name: value for name, value in before.items() if value is not None}


def cache_dir() -> Path:
    """Folder for downloads: $JAXBENCH_CACHE, else the platform's cache folder. Does not create it."""
    if folder := os.environ.get("JAXBENCH_CACHE"):
        return Path(folder).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("jaxbench"))


def compile_cache_dir() -> Path:
    """Folder of JAX's persistent compile cache: one for each jaxlib version and kind of processor."""
    try:
        version = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return cache_dir() / "xla" / f"jaxlib-{version}-{cpu_flags_id()}"


def mend_compile_cache() -> None:
    """From now on, remove truncated entries of the compile cache, e.g. after a full disk, when JAX warns of them.

    JAX never overwrites an entry, so it would recompile, and warn, in every run. If an entry that could not be read was
    removed, its warning is not shown.
    """
    global _show
    if warnings.showwarning is not _mend_or_show:
        _show, warnings.showwarning = warnings.showwarning, _mend_or_show


_show = warnings.showwarning
_TROUBLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']+)'")


def _mend_or_show(message: Warning | str, *more: Any, **how: Any) -> None:
    match = _TROUBLE.match(str(message))
    if match is None or not _remove_cut_short(match[2]) or match[1] == "writing":
        _show(message, *more, **how)


def _remove_cut_short(program: str) -> int:
    """Remove a program's entries that are not complete zlib streams, and return their number."""
    removed = 0
    for path in Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or compile_cache_dir()).glob(f"{program}-*-cache"):
        try:
            zlib.decompress(path.read_bytes())
        except zlib.error:  # also where JAX writes with zstandard: such an entry is compiled again
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        except OSError:
            continue
    return removed


def cpu_flags_id() -> str:
    """Id of this processor's instruction set: 8 hex digits."""
    flags = platform.machine() + (cpuinfo("flags", "Features") or platform.processor())
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def cpuinfo(*starts: str) -> str:
    """First line of /proc/cpuinfo that begins with one of `starts`; empty if there is none, e.g. outside Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(starts)), "")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's features by their Linux names; empty on other systems."""
    return frozenset(cpuinfo("flags", "Features").partition(":")[2].split())


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
