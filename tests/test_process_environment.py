"""The environment of processes, and starting anew with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jaxbench import process_environment
from tests.structure import ROOT


def run_fresh(code: str, argument: str = "argument with space", **environment: str) -> subprocess.CompletedProcess:
    """Run Python code in a process without this one's JAX and malloc variables."""
    own = (process_environment.MARKER, process_environment.INHERITED)
    names = ("JAX_", "XLA_", "MALLOC_", process_environment.TUNABLES, *own)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    command = [sys.executable, "-c", code, argument]
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=120)


def test_platforms_follow_the_device_and_the_rest_respects_the_user(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    found = process_environment.environment("gpu")
    assert found["JAX_PLATFORMS"] == "cuda,cpu"
    assert found["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert found["MALLOC_MMAP_THRESHOLD_"] == "8589934592"
    assert found["MALLOC_ARENA_MAX"] == "1"
    assert "MALLOC_ARENA_MAX" not in process_environment.environment("gpu", library="PyTorch")
    assert process_environment.environment("cpu")["JAX_PLATFORMS"] == "cpu"
    assert "TPU_SKIP_MDS_QUERY" not in process_environment.environment("tpu")
    with pytest.raises(ValueError, match="'phone'"):
        process_environment.environment("phone")


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_huge_pages_are_asked_for_unless_the_user_has_said_otherwise(own, wanted, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    found = process_environment.environment("cpu")
    assert found["GLIBC_TUNABLES"] == wanted
    monkeypatch.setenv("GLIBC_TUNABLES", wanted)  # a process that was started anew asks again
    assert process_environment.environment("cpu")["GLIBC_TUNABLES"] == wanted
    assert process_environment.malloc_settings(found | {"HOME": "x"}).keys() >= {"GLIBC_TUNABLES", "MALLOC_ARENA_MAX"}
    assert "HOME" not in process_environment.malloc_settings(found | {"HOME": "x"})


HOLDS = """
from jaxbench import process_environment
process_environment.ensure("cpu")
import jax.numpy as jnp
held = [jnp.ones(2**18).block_until_ready() for _ in range(64)]
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")))
"""


def huge_pages_are_given() -> bool:
    """True where Linux and glibc (2.35) give them to who asks."""
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    name, _, version = (
        (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ") if sys.platform == "linux" else ("",) * 3
    )
    is_new = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    return is_new and modes.exists() and "[madvise]" in modes.read_text()


@pytest.mark.skipif(
    not huge_pages_are_given(), reason="huge pages are asked for with glibc 2.35, on Linux in mode madvise"
)
def test_arrays_of_a_process_lie_in_huge_pages():
    with_them, without = (
        int(run_fresh(HOLDS, **more).stdout) for more in ({}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    )
    assert with_them > without + 8 * 1024  # KiB, of 64 MiB in arrays of one: scattered memory may hold few


def test_simulated_devices_keep_the_users_flags_and_have_threads_to_spare(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_dump_to=there")
    monkeypatch.delenv("NPROC", raising=False)
    found = process_environment.simulated_devices(2)
    assert found["XLA_FLAGS"].split()[:2] == ["--xla_force_host_platform_device_count=3", "--xla_dump_to=there"]
    assert found["XLA_FLAGS"].count("device_count") == 1 and "terminate_timeout_seconds=240" in found["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", "")
    code = "import jax, os; jax.numpy.ones(3) + 1; print(jax.device_count(), len(os.listdir('/proc/self/task')))"
    few, many = (
        run_fresh(
            code, JAX_PLATFORMS="cpu", **{**process_environment.simulated_devices(2), "NPROC": threads}
        ).stdout.split()
        for threads in ("2", process_environment.simulated_devices(2)["NPROC"])
    )
    assert few[0] == many[0] == "2"
    assert int(many[1]) > int(few[1])  # XLA reads NPROC
    with pytest.raises(ValueError, match="0 simulated devices"):
        process_environment.simulated_devices(0)


ONE_ORDER = """
import os, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

def exchange(x, is_summed):  # no value of one goes into the other
    sent = jax.lax.ppermute(x, "model", [(0, 1), (1, 0)])
    return sent, jax.lax.cond(is_summed, lambda x: jax.lax.psum(jnp.sin(x), "model"), lambda x: x, x)

mesh = Mesh(jax.devices(), ("model",))
mapped = jax.shard_map(exchange, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"), check_vma=False)
jax.jit(mapped).lower(jnp.ones((8, 256)), jnp.bool_(True)).compile()
print(len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])))
"""


def test_programs_of_several_devices_do_not_come_from_the_cache_which_loses_the_order_of_collectives(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", f"{process_environment.DEVICE_COUNT}=2")
    for name in (process_environment.CACHES, "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings = process_environment.environment("cpu") | {
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "thunk_executor=6",  # XLA says what each step of a program waits for
    }
    for _ in range(2):
        done = run_fresh(ONE_ORDER, **settings)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "0\n"
        (branch,) = (line for line in done.stderr.splitlines() if "kind=conditional" in line)
        assert "ppermute" in branch.partition("dependencies=")[2]
    assert process_environment.simulated_devices(2)[process_environment.CACHES] == "false"
    monkeypatch.setenv(process_environment.CACHES, "true")  # a user's own value
    assert process_environment.environment("cpu")[process_environment.CACHES] == "true"
    monkeypatch.setenv("XLA_FLAGS", f"{process_environment.DEVICE_COUNT}=1")
    monkeypatch.delenv(process_environment.CACHES)
    found = process_environment.environment("cpu") | process_environment.simulated_devices(1)
    assert process_environment.CACHES not in found
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert process_environment.environment("cpu")[process_environment.CACHES] == "false"
    assert process_environment.CACHES not in process_environment.environment("gpu")


def test_this_suite_reads_programs_of_one_device_alone_from_the_cache():
    import jax
    import jax.numpy as jnp
    import numpy as np

    hits = []

    def listen(event, **more):
        hits.append(event.endswith("/cache_hits"))

    def compile_twice(x):
        found = []
        for _ in range(2):
            hits.clear()
            jax.jit(lambda x: jnp.sin(x).sum()).lower(x).compile()
            found.append(sum(hits))
        return found

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    one, several = np.ones((2, 37), np.float32), jax.device_put(np.ones((2, 37), np.float32), sharding)
    jax.monitoring.register_event_listener(listen)
    try:
        assert compile_twice(one)[1] == 1
        assert compile_twice(several) == [0, 0]
    finally:
        jax.monitoring.unregister_event_listener(listen)


def test_a_process_starts_anew_once_with_its_arguments_and_prints_no_library_noise():
    code = """
import gc, json, os, sys
print("start", os.getpid(), flush=True)
from jaxbench import process_environment
process_environment.ensure("cpu")
process_environment.ensure("cpu")
import jax
wanted = process_environment.environment("cpu")
is_set = {name: os.environ.get(name) for name in wanted} == wanted
print(json.dumps([sys.argv[1], jax.default_backend(), is_set, gc.get_threshold()[0]]))
"""
    done = run_fresh(code)
    assert done.returncode == 0 and done.stderr == ""
    *starts, last = done.stdout.splitlines()
    assert len(starts) == 2 and len(set(starts)) == 1  # twice, in the same process
    assert json.loads(last) == ["argument with space", "cpu", True, process_environment.GC_OBJECTS]


ANEW_TWICE = """
import json, os, subprocess, sys
from jaxbench import process_environment
process_environment.ensure(sys.argv[1])
if sys.argv[1] == "gpu":
    print(json.dumps([dict(os.environ), process_environment.inherited()]))
else:  # a command that starts another one
    subprocess.run([*sys.orig_argv[:-1], "gpu"], check=True)
"""


def test_what_the_user_had_set_is_known_after_starting_anew_once_and_once_more():
    set_by_user = {"GLIBC_TUNABLES": "glibc.malloc.check=0", "MALLOC_TRIM_THRESHOLD_": "7", "JAX_PLATFORMS": "rocm"}
    done = run_fresh(ANEW_TWICE, argument="cpu", **set_by_user)
    assert done.returncode == 0, done.stderr
    now, inherited = json.loads(done.stdout)
    assert now["JAX_PLATFORMS"] == "cuda,cpu" and now["GLIBC_TUNABLES"].endswith("hugetlb=1")
    assert "MALLOC_ARENA_MAX" in now and "MALLOC_ARENA_MAX" not in inherited
    assert {name: inherited.get(name) for name in set_by_user} == set_by_user
    assert process_environment.INHERITED not in inherited and process_environment.MARKER not in inherited
    assert inherited["HOME"] == now["HOME"]


def test_a_process_that_never_started_anew_has_what_it_has(monkeypatch):
    monkeypatch.delenv(process_environment.INHERITED, raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert process_environment.inherited()["MALLOC_TRIM_THRESHOLD_"] == "1"


def test_starting_anew_after_jax_was_imported_is_an_error():
    done = run_fresh("import jax\nfrom jaxbench.process_environment import ensure\nensure('cpu')")
    assert done.returncode == 1 and "process_environment: ensure('cpu') came after `import jax`" in done.stderr


def test_the_compile_cache_is_one_folder_a_jaxlib_and_a_processor(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path))
    first = process_environment.compile_cache_dir()
    assert first.parent == tmp_path / "xla" and "jaxlib-" in first.name and not first.exists()
    monkeypatch.setattr(process_environment.platform, "machine", lambda: "other")
    assert process_environment.compile_cache_dir() != first


def test_a_system_without_proc_and_affinity_has_an_id_and_all_its_cores(monkeypatch):
    assert process_environment.usable_cores() >= 1
    known = process_environment.cpu_flags_id()
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(process_environment, "Path", lambda name: Path("/nowhere" + name))
    assert process_environment.usable_cores() == os.cpu_count()
    assert process_environment.cpuinfo("flags", "Features") == ""
    assert len(process_environment.cpu_flags_id()) == len(known) == 8


COMPILES = """
from jaxbench import process_environment
process_environment.ensure("cpu")
import jax
def f(x):
    return x * 3 + 1
print(jax.jit(f)(2.0))
"""


def test_an_entry_of_the_compile_cache_that_was_cut_short_is_made_again_without_a_word(tmp_path):
    environment = {"JAXBENCH_CACHE": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert run_fresh(COMPILES, **environment).stdout == "7.0\n"
    entries = sorted((tmp_path / "xla").glob("*/jit_f-*-cache"))
    whole = [path.read_bytes() for path in entries]
    assert len(entries) == 1
    for size in (0, len(whole[0]) // 2):
        entries[0].write_bytes(whole[0][:size])
        done = run_fresh(COMPILES, **environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "7.0\n", "")
        assert entries[0].stat().st_size > size and zlib.decompress(entries[0].read_bytes())


def test_other_warnings_and_what_cannot_be_mended_are_shown(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(process_environment, "_show", lambda message, *more, **how: shown.append(str(message)))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    whole, cut = tmp_path / "jit_f-12-cache", tmp_path / "jit_f-34-cache"
    whole.write_bytes(zlib.compress(b"whole"))
    for text in (
        "something else", "Error reading persistent compilation cache entry for 'jit_f': XlaRuntimeError: other jaxlib"
    ):  # fmt: skip
        process_environment._mend_or_show(UserWarning(text), UserWarning, "x.py", 1)
    assert len(shown) == 2 and whole.exists()
    cut.write_bytes(whole.read_bytes()[:5])
    text = "Error writing persistent compilation cache entry for 'jit_f': OSError: No space left on device"
    process_environment._mend_or_show(UserWarning(text), UserWarning, "x.py", 1)
    assert shown[2:] == [text] and whole.exists() and not cut.exists()
