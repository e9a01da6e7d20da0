"""Build the native kernels on first use and keep them in the cache (S file).

The library's name holds a hash of its inputs (sources, XLA's header, instruction set) and one of its bytes: a truncated
file is detected before it is loaded, and processes that build at the same time each put a whole file in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxbench import process_environment
from jaxbench.process_environment import cpu_flags

SOURCES = Path(__file__).parent / "src"
HEADER = "xla/ffi/api/c_api.h"
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c", "bmi2")
# Flags of /proc/cpuinfo that each set's file needs, the best set first; `portable` needs none.
NEEDED_FLAGS = {
    "amx": (*AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512bf16": (*AVX512, "avx512_bf16"),
    "avx512": AVX512,
    "avxvnni": ("avx2", "fma", "f16c", "bmi2", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "neon": ("asimd", "asimddp"),
}
INSTRUCTION_SETS = (*NEEDED_FLAGS, "portable")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-w")
SHARED = ("team", "common", "plain", "xla")  # sources of every set's library; xla where jaxlib is installed
BUILD_TIMEOUT_S = 300


class NotAvailable(ValueError):
    """The native kernels are not available here; the message says why in one line."""


class NotCompiled(NotAvailable):
    """No compiler here can build them; for another instruction set one may."""


def instruction_sets() -> list[str]:
    """Return this machine's instruction sets that have kernels, best first; or the one in JAXBENCH_INSTRUCTIONS.

    Raises:
      ValueError: the variable names no such set.
    """
    named = os.environ.get("JAXBENCH_INSTRUCTIONS")
    if named:
        if named not in INSTRUCTION_SETS:
            raise ValueError(f"JAXBENCH_INSTRUCTIONS={named!r} is not one of {', '.join(INSTRUCTION_SETS)}")
        return [named]
    return [name for name, needed in NEEDED_FLAGS.items() if set(needed) <= cpu_flags()] + ["portable"]


def library_path(instructions: str | None = None) -> Path:
    """Return the path of the library, built first if it is not in the cache.

    Args:
      instructions: None takes the best set that the compiler also supports.

    Raises:
      NotAvailable: no compiler could build it, or no folder can hold it (not writable, noexec).
    """
    problems = []
    for name in [instructions] if instructions else instruction_sets():
        try:
            return _library_path(name)
        except NotCompiled as error:
            problems.append(error)
            if any(f"{shared}.c:" in str(error) for shared in SHARED):
                break  # another set would take a minute to fail alike
    raise problems[0]


def _library_path(instructions: str) -> Path:
    key = f"{instructions}-{_source_hash(instructions)}"
    problems = []
    for folder in _folders():
        try:
            whole = (path for path in sorted(folder.glob(f"{key}-*.so")) if _content_hash(path) == path.stem[-16:])
            path = next(whole, None) or _build(folder, key, instructions)
            ctypes.CDLL(str(path))  # a folder may be noexec, or hold another system's build
            return path
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or str(error).splitlines()[0]}")
    raise NotAvailable(f"native kernels: no folder takes the library ({'; '.join(problems)})")


def _folders() -> Iterator[Path]:
    """Folders for the library: the cache, else a folder in the temporary folder to which nobody else can write."""
    yield process_environment.cache_dir() / "native"
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"jaxbench-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            yield folder / "native"


def include_folder() -> Path | None:
    """Folder of jaxlib's headers, found without importing it; None if jaxlib is not installed."""
    spec = importlib.util.find_spec("jaxlib")
    places = list(spec.submodule_search_locations or []) if spec else []
    return next((Path(p) / "include" for p in places if (Path(p) / "include" / HEADER).is_file()), None)


def _source_hash(instructions: str) -> str:
    digest = hashlib.sha256(" ".join((instructions, platform.machine(), *FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    include = include_folder()
    digest.update(b"no XLA" if include is None else (include / HEADER).read_bytes())
    return digest.hexdigest()[:16]


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def compilers() -> list[list[str]]:
    """Commands of the C compilers to try: $CC, the system's, the `ziglang` package's."""
    found = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found += [[path] for path in map(shutil.which, ("cc", "gcc", "clang")) if path][:1]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def compile_command(compiler: list[str], output: Path, instructions: str) -> list[str]:
    """Command that builds a library."""
    include = include_folder()
    files = [f"{name}.c" for name in (instructions, *SHARED) if name != "xla" or include is not None]
    flags = [*FLAGS, f"-DINSTRUCTION_SET=kernels_{instructions}"]
    if include is not None:
        flags.append(f"-I{include}")
    return [*compiler, *flags, *(str(SOURCES / file) for file in files), "-o", str(output), "-lpthread", "-lm"]


def _build(folder: Path, key: str, instructions: str) -> Path:
    """Build a library, return its path; OSError if the folder cannot hold it, NotCompiled if no compiler builds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as made:
        problems, output = [], Path(made) / "kernels.so"
        for compiler in compilers():
            command = compile_command(compiler, output, instructions)
            try:
                done = subprocess.run(
                    command, check=False, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S,
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"{' '.join(compiler)}: {error}")
                continue
            if done.returncode == 0 and output.is_file():
                path = folder / f"{key}-{_content_hash(output)}.so"
                os.replace(output, path)
                return path
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            problems.append(f"{' '.join(compiler)}: {errors[0].strip() if errors else f'exit {done.returncode}'}")
    cure = "install a C compiler (cc), or the extra `native`, which brings one"
    raise NotCompiled(f"native kernels: {'; '.join(problems) or 'no C compiler here'}; {cure}")
