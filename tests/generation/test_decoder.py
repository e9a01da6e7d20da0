"""Which kernels are taken, and what is refused."""

from __future__ import annotations

import pytest

from jaxbench.generation import decoder
from jaxbench.generation.decoder import Options
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.decoder_config import DecoderMemory, with_memory
from jaxbench.native import build, library
from jaxbench.pretrained import weights
from tests.generation import tiny

NEURAL = NeuralMemoryConfig(d_model=32, num_heads=2, head_dim=16, chunk_size=4)
WITH_MEMORY = with_memory(tiny.CONFIG, DecoderMemory(kind="mac", layers=(0,), window=4, neural=NEURAL))


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


def test_a_models_own_layers_have_no_native_block_so_auto_takes_xla_and_says_why(there):
    choice = decoder.choose(Options(), "cpu", config=lambda: WITH_MEMORY)
    assert choice[:2] == ("xla", "float32") and choice.note == (
        "kernels: xla, because native kernels have no block for the model's layers of kind 'mac'"
    )
    with pytest.raises(ValueError, match="^--kernels=native: native kernels have no block .* of kind 'mac'$"):
        decoder.choose(Options("native"), "cpu", config=lambda: WITH_MEMORY)
    with pytest.raises(ValueError, match="^--cache=int8 is for native kernels alone .* of kind 'mac'"):
        decoder.choose(Options(cache="int8"), "cpu", config=lambda: WITH_MEMORY)


def test_the_model_is_looked_at_for_native_kernels_alone(there):
    def unread():
        raise AssertionError("the model was read")

    assert decoder.choose(Options("xla"), "cpu", config=unread).kernels == "xla"
    assert decoder.choose(Options(), "gpu", config=unread).kernels == "xla"
    narrow = tiny.CONFIG.model_copy(update={"d_model": 16})
    with pytest.raises(ValueError, match="^weights=q8_0: groups of 32 do not divide the model's d_model=16"):
        decoder.choose(Options(weights="q8_0"), "cpu", config=lambda: narrow)


def test_the_number_type_of_a_configuration_counts_where_no_weights_are_named(there):
    chosen = lambda kernels, dtype, named=None: decoder.choose(Options(kernels, named), "cpu", dtype=dtype).weights
    assert [chosen("native", dtype) for dtype in ("float32", "bfloat16")] == ["file", "bfloat16"]
    assert [chosen("xla", dtype) for dtype in ("float32", "bfloat16")] == ["float32", "bfloat16"]
    assert chosen("native", "bfloat16", "q4_0") == "q4_0" and chosen("xla", "bfloat16", "float32") == "float32"


def test_only_what_a_configuration_does_not_say_is_added_to_its_id(there):
    native, xla = decoder.choose(Options(cache="int8"), "cpu"), decoder.choose(Options("xla"), "cpu", dtype="bfloat16")
    assert native.suffix() == "-native-file-int8-float32" and native.added() == native.identity()
    assert (xla.suffix("bfloat16"), xla.added("bfloat16")) == ("", {}) and xla.suffix("float32") == "-xla-bfloat16"


@pytest.mark.parametrize("spec", ["folder", None])
def test_a_models_configuration_is_read_without_its_tensors(spec, folder, monkeypatch):
    spec = spec and folder
    whole = weights.load_checkpoint(spec)
    monkeypatch.setattr(weights, "_convert", None)
    assert weights.read_config(spec) == whole.config and weights.checksum(spec) == whole.sha256
