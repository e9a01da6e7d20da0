"""The machine and settings that a result came from (S file: neither JAX nor PyTorch)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from jaxbench.process_environment import cpuinfo, malloc_settings, usable_cores

ROOT = Path(__file__).resolve().parents[2]
CODE = ("jaxbench", "torch_ref", "experiments")
SOURCES = (".py", ".c", ".h")  # what a new file of code ends in: Python, and the native kernels
PACKAGES = (
    "jax", "jaxlib", "flax", "equinox", "optax", "torch", "transformers", "numpy", "scipy", "libtpu",
    "llama-cpp-python",
    # With a GPU: what its kernels come from, by CUDA's major version.
    "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cublas", "triton",
)  # fmt: skip


def describe(*, threads: int) -> dict:
    """Return everything needed to judge or repeat a measurement, as plain JSON."""
    return {
        "host": fingerprint(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": threads,
        "memory_bytes": total_memory_bytes(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "load_average": list(os.getloadavg()),
        "malloc": malloc_settings(os.environ),
        "pressure": pressure(),
    }


def fingerprint() -> str:
    """Return a hashed id of this machine: 12 hex digits, the same on every run here, without the host name in clear."""
    parts = [platform.node(), platform.machine(), cpu_model(), str(os.cpu_count()), str(total_memory_bytes() >> 30)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def cpu_model() -> str:
    """Name of the processor."""
    named = cpuinfo("model name").partition(":")[2].strip()
    return named or platform.processor() or platform.machine()


def total_memory_bytes() -> int:
    """Memory of this machine, in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def available_memory_bytes() -> int:
    """Memory that can still be allocated, in bytes, within the control group's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        counts = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used + int(counts.get("inactive_file", 0)))


def versions() -> dict[str, str]:
    """Return package -> version for python and the packages that are installed."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str:
    """Return the version of the code: the short git commit, then + and a hash of the changes if the code differs.

    Changes to documents or configurations do not count. Outside git: `sources-` and a hash of the files of code.
    """
    if not (ROOT / ".git").exists():
        return f"sources-{_hash(_sources())}"
    try:
        head = _git("rev-parse", "--short=12", "HEAD").decode().strip()
        changes = [_git("diff", "HEAD", "--binary", "--", *CODE)]
        new = _git("ls-files", "--others", "--exclude-standard", "-z", "--", *CODE).decode().split("\0")
        changes += [name.encode() + (ROOT / name).read_bytes() for name in sorted(new) if name.endswith(SOURCES)]
    except (OSError, subprocess.SubprocessError):
        return f"sources-{_hash(_sources())}"
    return head + (f"+{_hash(changes)}" if any(changes) else "")


def _sources() -> list[bytes]:
    found = (path for folder in CODE for path in sorted((ROOT / folder).rglob("*")))
    files = [path for path in found if path.suffix in SOURCES]
    return [str(path.relative_to(ROOT)).encode() + path.read_bytes() for path in files]


def _hash(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:8]


def pressure() -> dict[str, float]:
    """Return the share of the last 10 s that tasks waited for cpu, memory and io (Linux PSI), where readable."""
    shares = {}
    for kind in ("cpu", "memory", "io"):
        try:
            first = Path(f"/proc/pressure/{kind}").read_text().splitlines()[0]
        except (OSError, IndexError):
            continue
        shares[kind] = float(first.split("avg10=")[1].split()[0]) / 100
    return shares


def _git(*arguments: str) -> bytes:
    command = ["git", "--no-optional-locks", *arguments]  # git killed by the timeout would leave its lock behind
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=10, check=True).stdout
