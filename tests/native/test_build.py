"""The library is built once, whole, and where there is a place for it; otherwise one line says why not."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxbench.native import build

REAL_SOURCES = build.SOURCES
SOURCE = '__attribute__((visibility("default"))) int answer(void) { return 42; }\n'
ASK = "import ctypes; from jaxbench.native import build; print(ctypes.CDLL(str(build.library_path())).answer())"

needs_compiler = pytest.mark.skipif(not build.compilers(), reason="no C compiler here")


@pytest.fixture(autouse=True)
def small_library(tmp_path, monkeypatch):
    """A library of one line, a cache and a folder for temporary files of the test's own."""
    sources = tmp_path / "src"
    sources.mkdir()
    for name in ("team", "common", "plain", "xla", *build.INSTRUCTION_SETS):
        (sources / f"{name}.c").write_text(SOURCE if name == "plain" else "")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXBENCH_INSTRUCTIONS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def _answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).answer()


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    """Neither $CC nor a compiler on the path, nor the package that brings one."""
    find_spec = importlib.util.find_spec
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ziglang" else find_spec(name))


@needs_compiler
def test_what_was_built_is_taken_without_a_compiler(monkeypatch):
    path = build.library_path()
    monkeypatch.setattr(build, "compilers", lambda: [])
    assert build.library_path() == path and _answer(path) == 42


@needs_compiler
def test_changed_sources_are_built_anew():
    before = build.library_path()
    (build.SOURCES / "plain.c").write_text(SOURCE.replace("42", "43"))
    after = build.library_path()
    assert (before != after, _answer(before), _answer(after)) == (True, 42, 43)


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"\x7fELF", None], ids=["empty", "header", "half"])
def test_a_torn_file_is_built_anew(content):
    path = build.library_path()
    whole = path.read_bytes()
    path.unlink()  # a loaded file must not be cut
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert _answer(build.library_path()) == 42


@needs_compiler
def test_processes_that_build_at_once_all_get_a_whole_library(tmp_path):
    prepare = (
        f"from jaxbench.native import build; from pathlib import Path; build.SOURCES = Path({str(build.SOURCES)!r}); "
    )
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", prepare + ASK], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=100)[0] for process in processes] == ["42\n"] * 3
    assert not [path for path in (tmp_path / "cache" / "native").iterdir() if path.suffix != ".so"]


@needs_compiler
def test_a_cache_that_is_no_folder_is_passed_over(tmp_path):
    (tmp_path / "cache").write_text("a file")
    path = build.library_path()
    assert path.is_relative_to(tmp_path / "tmp") and _answer(path) == 42


@needs_compiler
def test_a_cache_that_may_not_hold_programs_is_passed_over(tmp_path, monkeypatch):
    load = ctypes.CDLL

    def refuse(name: str) -> ctypes.CDLL:
        if name.startswith(str(tmp_path / "cache")):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    path = build.library_path()
    assert path.is_relative_to(tmp_path / "tmp")
    monkeypatch.setattr(build, "compilers", lambda: [])
    assert build.library_path() == path  # nothing is built again


@needs_compiler
def test_no_folder_at_all_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    with pytest.raises(
        build.NotAvailable, match=r"^native kernels: no folder takes the library \(.*/cache/native: Not a dir"
    ) as error:
        build.library_path()
    assert "\n" not in str(error.value)


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no user ids")
def test_a_library_that_others_could_have_put_there_is_not_loaded(tmp_path):
    (tmp_path / "cache").write_text("a file")
    own = tmp_path / "tmp" / f"jaxbench-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(build.NotAvailable, match="no folder takes the library"):
        build.library_path()
    own.rmdir()
    own.symlink_to(tmp_path / "src")
    with pytest.raises(build.NotAvailable, match="no folder takes the library"):
        build.library_path()


def test_no_compiler_is_one_line_that_names_a_cure(no_compiler):
    with pytest.raises(build.NotAvailable) as error:
        build.library_path()
    message = "native kernels: no C compiler here; install a C compiler (cc), or the extra `native`, which brings one"
    assert str(error.value) == message


def test_a_compiler_that_is_not_there_is_one_line(no_compiler, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(build.NotAvailable, match="^native kernels: no-such-compiler -m64: .*No such file") as error:
        build.library_path()
    assert "\n" not in str(error.value)


@needs_compiler
def test_a_source_that_does_not_compile_is_the_compilers_first_error():
    (build.SOURCES / "plain.c").write_text("int answer(void) { return missing; }\n")
    with pytest.raises(build.NotAvailable, match="missing") as error:
        build.library_path()
    assert "\n" not in str(error.value)


@needs_compiler
def test_the_next_instruction_set_is_taken_where_the_compiler_does_not_know_the_best(monkeypatch):
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build.NEEDED_FLAGS["avx2"]))
    (build.SOURCES / "avx2.c").write_text("#error unknown target\n")
    assert build.library_path().name.startswith("portable-")
    with pytest.raises(build.NotAvailable, match="unknown target"):
        build.library_path("avx2")


@needs_compiler
def test_what_no_set_can_compile_is_tried_once(monkeypatch):
    tried, compile_command = [], build.compile_command
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build.NEEDED_FLAGS["avx2"]))
    monkeypatch.setattr(build, "compile_command", lambda *args: tried.append(args[2]) or compile_command(*args))
    (build.SOURCES / "team.c").write_text("#error another header\n")
    with pytest.raises(build.NotAvailable, match="another header"):
        build.library_path()
    assert set(tried) == {"avx2"}


@pytest.mark.parametrize("name", build.NEEDED_FLAGS)
def test_a_processor_gets_the_best_set_that_it_has_all_features_of(name, monkeypatch):
    needed = build.NEEDED_FLAGS[name]
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(needed) | {"another"})
    assert build.instruction_sets()[0] == name
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(needed[1:]))
    assert name not in build.instruction_sets() and build.instruction_sets()[-1] == "portable"


def test_the_variable_names_the_set_or_is_refused(monkeypatch):
    monkeypatch.setenv("JAXBENCH_INSTRUCTIONS", "portable")
    assert build.instruction_sets() == ["portable"]
    monkeypatch.setenv("JAXBENCH_INSTRUCTIONS", "sse9")
    with pytest.raises(ValueError, match=re.escape("JAXBENCH_INSTRUCTIONS='sse9' is not one of amx, avx512bf16, ")):
        build.library_path()


@needs_compiler
@pytest.mark.parametrize("name", ["portable", "team", "common", "plain"])
def test_every_function_that_the_sources_call_is_declared(name):
    strict = ["-std=gnu11", "-fsyntax-only", "-Werror=implicit-function-declaration"]  # clang and zig take no other
    define = "-DINSTRUCTION_SET=kernels_portable"
    command = [*build.compilers()[0], *strict, define, str(REAL_SOURCES / f"{name}.c")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
