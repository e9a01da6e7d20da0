"""Which kernels are taken, and what is refused."""

from __future__ import annotations

import pytest

from jaxbench.generation import decoder
from jaxbench.generation.decoder import Options
from jaxbench.native import build, library


@pytest.fixture
def there(monkeypatch):
    monkeypatch.setattr(library, "load", lambda *_: None)


@pytest.fixture
def missing(monkeypatch):
    def load(*_):
        raise build.NotAvailable("native kernels: no C compiler here; install a C compiler (cc)")

    monkeypatch.setattr(library, "load", load)


def test_auto_takes_native_kernels_on_a_cpu(there):
    assert decoder.choose(Options(), "cpu") == ("native", "file", "float32", "float32", 0, None)
    wanted = Options(weights="q8_0", cache="int8", activations="int8", threads=3)
    assert decoder.choose(wanted, "cpu") == ("native", "q8_0", "int8", "int8", 3, None)


def test_auto_without_a_compiler_takes_the_frameworks_programs_and_says_why_in_one_line(missing):
    choice = decoder.choose(Options(), "cpu")
    assert choice[:5] == ("xla", "float32", None, None, 0)
    assert choice.note == ("kernels: xla, because native kernels: no C compiler here; install a C compiler (cc)")


def test_auto_on_another_device_takes_the_frameworks_programs(there):
    assert decoder.choose(Options(weights="bfloat16"), "gpu")[:2] == ("xla", "bfloat16")
    assert "--device=gpu" in decoder.choose(Options(), "gpu").note


def test_xla_that_was_asked_for_needs_no_note_and_no_compiler(missing):
    assert decoder.choose(Options("xla"), "cpu").note is None


def test_native_kernels_that_were_asked_for_and_cannot_be_had_are_an_error(missing):
    with pytest.raises(build.NotAvailable, match="^--kernels=native: native kernels: no C compiler here"):
        decoder.choose(Options("native"), "cpu")


def test_native_kernels_are_for_cpus(there):
    with pytest.raises(ValueError, match="^--kernels=native: native kernels are for CPUs, and --device=tpu"):
        decoder.choose(Options("native"), "tpu")


@pytest.mark.parametrize("given", [{"cache": "int8"}, {"activations": "float32"}, {"threads": 0}, {"weights": "q4_0"}])
def test_what_native_kernels_alone_can_do_is_refused_without_them(given, missing):
    ((name, value),) = given.items()
    for kernels, because in (("auto", "no C compiler here"), ("xla", "--kernels=xla")):
        with pytest.raises(ValueError, match=f"^--{name}={value} is for native kernels alone .*{because}"):
            decoder.choose(Options(kernels, **given), "cpu")


def test_more_rows_than_native_kernels_take_are_refused(there):
    native, rows = decoder.choose(Options(), "cpu"), library.MAX_ROWS + 1
    with pytest.raises(ValueError, match=f"^--batch_size={rows}: native kernels decode at most {rows - 1} rows"):
        decoder.check_rows(native, rows)
    decoder.check_rows(native, library.MAX_ROWS)
    decoder.check_rows(decoder.choose(Options("xla"), "cpu"), rows)


def test_threads_are_no_part_of_what_decides_the_tokens(there):
    one, two = (decoder.choose(Options(threads=number), "cpu").identity() for number in (1, 2))
    assert one == two and one["kernels"] == "native"
    assert decoder.choose(Options(cache="int8"), "cpu").identity() != one
