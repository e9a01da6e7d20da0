"""What holds for every test: one platform, no network, strict shapes, warnings that are errors, fixed seeds.

Float64: everything runs in 32 bits unless a test asks. Put the whole test (arrays made before keep their type) into

    with jax.enable_x64(True):
        ...

or take the fixture `x64`. PyTorch needs nothing, its float64 is always there.

Subprocesses inherit the environment set here, so they are off the network and on the CPU too. A test that starts a
command and wants the environment of a user's shell builds it with `shell_environment()` from tests/test_cli.py.
"""

from __future__ import annotations

import gc
import os
import socket

# Before anything imports JAX or PyTorch
os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu is installed; looking for a TPU prints pages of errors
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # [B D] + [D] must be written out
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["PIP_NO_INDEX"] = "1"  # `make test` fetched the model before
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# OpenMP's threads, which are PyTorch's, spin while they wait, and take the cores from the other test process: one test
# beside five busy processes took 177 s of CPU time, and 53 s if they sleep
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's and scipy's spin too, and know no such policy

from jaxbench import process_environment  # noqa: E402

os.environ.update(process_environment.simulated_devices(8))  # meshes
os.environ[process_environment.CACHES] = "true"  # for programs of one device: see `programs_of_meshes_anew`

# Compiling is most of the suite's time; the cache halves a second run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(process_environment.compile_cache_dir()) + "-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LARGE_BYTES = 5 * 2**28  # resident memory from which on programs are dropped between files

_connect = socket.socket.connect


def _refuse_network(self: socket.socket, address):
    """Stand in for socket.connect: this machine only."""
    host = address[0] if isinstance(address, tuple) else address
    if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"tests may not use the network, one asked for {host}")
    return _connect(self, address)


def pytest_collection_finish(session):
    """Look for garbage as rarely as commands do, and never among what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(process_environment.GC_OBJECTS)


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Fail whatever opens a connection to another machine."""
    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", _refuse_network)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def programs_of_meshes_anew():
    """Compile programs of several devices in each process, as commands do: cached ones may stand still for ever.

    JAX's setting is for all programs of a process, and most of the suite's are of one device (docs/xla_cpu.md rule 19).
    """
    from jax._src import compilation_cache

    read = compilation_cache.get_executable_and_time

    def read_for_one(*asked):
        return (None, None) if len(asked[-1]) > 1 else read(*asked)  # the last argument: the program's devices

    patch = pytest.MonkeyPatch()
    patch.setattr(compilation_cache, "get_executable_and_time", read_for_one)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def torch_settings():
    """Give PyTorch two threads and a fixed seed, in the tests that use it; imports nothing."""
    import sys

    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(min(2, os.cpu_count() or 1))
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def memory_of_one_file(request):
    """Let go of compiled programs between files once they take room: all of the suite's would take over 5 GB."""
    yield
    import psutil

    if psutil.Process().memory_info().rss > LARGE_BYTES:
        for value in vars(request.module).values():
            if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
                value.cache_clear()
        drop_programs()


@pytest.fixture(scope="session")
def free_programs():
    """Return a function that drops what the compilers keep, for tests that hold large models one after another."""
    return drop_programs


def drop_programs() -> None:
    """Drop what the compilers keep, and give the memory back."""
    import ctypes
    import gc
    import sys

    if (jax := sys.modules.get("jax")) is not None:
        jax.clear_caches()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def plain_codegen():
    """Compile a file's programs by plain code generation, for files that judge mathematics (tests/codegen.py)."""
    from tests import codegen

    with codegen.plain():
        yield


@pytest.fixture
def x64():
    """Run the test with JAX's 64-bit types."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_dtypes():
    """Run the test with JAX's strict type promotion (for forwards; optax's AdamW breaks under it)."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield
