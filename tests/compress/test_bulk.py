"""Files compressed part by part: the bytes of a text at once, also after a run that was broken off."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors

from jaxbench import cli, initial, process_environment, store
from jaxbench.compress import artifact, auto, bulk, document
from jaxbench.compress import config as shapes
from jaxbench.parity import cases
from jaxbench.pretrained import tokenizer, weights
from jaxbench.text import stream as text_stream
from tests.structure import ROOT

DECODER = cases.LLAMA.model_copy(update={"vocab_size": 49152, "num_layers": 3})
CONFIG = cases.COMPRESSOR.model_copy(update={"decoder": DECODER, "chunk": 16, "ratios": (2, 4, 8)})
LINE = "The mill by the river turned — slowly; its wheel (of oak) was 112 years old, said Ann.\n"
TEXT = "".join(f"{i}: {LINE}" for i in range(40))
PIECE, PART = 200, 40  # bytes that are read at once, vectors of a part


@pytest.fixture(scope="module")
def compressor():
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(DECODER, 0).items()}
    held = weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "1" * 64)
    trained = shapes.initial_params(CONFIG, 3, distinct=True)
    trained = {name: value.astype(np.float32) for name, value in trained.items() if shapes.is_trained(name)}
    words = tokenizer.load_tokenizer(None)
    return auto.AutoCompressor.from_weights(
        artifact.Trained(CONFIG, trained, held.sha256, "abc", {}), held, words, 2, "float32"
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    read = text_stream.read
    monkeypatch.setattr(text_stream, "read", lambda path, *, start=0: read(path, PIECE, start=start))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def run(compressor, source, *, dtype="bfloat16", sha256="5" * 64, **how):
    output, workdir = source.with_suffix(".safetensors"), source.with_suffix(".parts")
    return bulk.compress_file(
        compressor, source, output, sha256=sha256, dtype=dtype, workdir=workdir, part=PART, **how
    )  # fmt: skip


def content(path):
    """Tensors' bytes and metadata of a file, but for the time it took."""
    with safetensors.safe_open(path, framework="np") as file:
        about = json.loads(file.metadata()["compressed_text"])
        names = sorted(file.keys())  # noqa: SIM118  not a mapping
        return {name: file.get_tensor(name).tobytes() for name in names} | {"about": about | {"processing_time": 0}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_file_in_parts_has_the_bytes_of_a_text_at_once(compressor, source, tmp_path, dtype):
    found = run(compressor, source, dtype=dtype)
    result = compressor.compress(TEXT)
    document.save(tmp_path / "whole.safetensors", result, dtype=dtype)
    assert content(tmp_path / "a.safetensors") == content(tmp_path / "whole.safetensors")
    assert found[:2] == (result.original_length, result.compressed_length)
    assert found.bytes == (tmp_path / "a.safetensors").stat().st_size
    assert found.vectors > 5 * PART and not (tmp_path / "a.parts").exists()
    np.testing.assert_array_equal(document.load(tmp_path / "a.safetensors").spans, result.spans)


def test_product_codes_of_a_file_in_parts_are_those_of_a_text_at_once(compressor, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 3, encoding="utf-8")
    run(compressor, tmp_path / "a.txt", dtype="pq")
    document.save(tmp_path / "whole.safetensors", compressor.compress(TEXT * 3), dtype="pq")
    assert content(tmp_path / "a.safetensors") == content(tmp_path / "whole.safetensors")


def test_a_text_too_short_for_product_codes_leaves_nothing_behind(compressor, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT[:40], encoding="utf-8")
    with pytest.raises(ValueError, match="dtype=pq of .* wanted 1024 at least, and a multiple of 8: take int8"):
        run(compressor, tmp_path / "a.txt", dtype="pq")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert run(compressor, tmp_path / "a.txt", dtype="int8").vectors > 0


def interrupted(after):
    """A progress that breaks a run off when so many bytes were read."""
    count = []

    def stop(size):
        count.append(size)
        if sum(count) >= after:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("bytes_read", [PIECE, 1200, len(TEXT.encode())])
def test_a_run_that_is_broken_off_goes_on_without_doubling(compressor, source, tmp_path, bytes_read):
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "a.txt").write_bytes(source.read_bytes())
    plain = run(compressor, whole / "a.txt")
    with pytest.raises(KeyboardInterrupt):
        run(compressor, source, progress=interrupted(bytes_read))
    assert not (tmp_path / "a.safetensors").exists()
    told = []
    found = run(compressor, source, progress=told.append)
    assert sum(told) == len(source.read_bytes()) and told[0] == found.resumed_at
    assert (found.resumed_at > 0) == (bytes_read > PIECE) and found[:2] == plain[:2]
    assert content(tmp_path / "a.safetensors") == content(whole / "a.safetensors")


def test_a_part_is_as_little_as_a_piece_of_the_text_gives():
    assert bulk.PART * 8 <= text_stream.SIZE / 4 * 1.01  # tokens of 64 KB of prose, at 8 a vector


def test_a_run_that_is_broken_off_while_it_writes_the_file_has_its_parts(compressor, source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(document, "write", full)
        with pytest.raises(OSError, match="No space left"):
            run(compressor, source)
    assert not (tmp_path / "a.safetensors").exists()
    assert run(compressor, source).resumed_at == len(source.read_bytes())


@pytest.mark.parametrize("removed", [1, 3])
def test_a_run_that_is_killed_while_it_removes_its_parts_can_be_run_again(
    compressor, source, tmp_path, monkeypatch, removed
):
    unlink, gone = Path.unlink, []

    def killed(path, **how):
        if path.name.startswith("part-") and len(gone) == removed:
            raise KeyboardInterrupt
        gone.append(path.name)
        unlink(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            run(compressor, source)
    first = content(tmp_path / "a.safetensors")
    assert len(gone) == removed and any((tmp_path / "a.parts").glob("part-*"))
    run(compressor, source)
    assert content(tmp_path / "a.safetensors") == first and not (tmp_path / "a.parts").exists()


def test_parts_of_another_text_or_cut_in_half_are_refused(compressor, source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(compressor, source, progress=interrupted(1200))
    with pytest.raises(ValueError, match=r"a.parts holds the work of configuration 5555.*use another --workdir"):
        run(compressor, source, sha256="6" * 64)
    part = min((tmp_path / "a.parts").glob("part-*"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"part-000000.safetensors is damaged"):
        run(compressor, source)


def test_a_text_without_tokens_leaves_nothing_behind(compressor, tmp_path):
    (tmp_path / "a.txt").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="the text has 0 tokens; wanted at least one"):
        run(compressor, tmp_path / "a.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """compress.py's compress, of a.txt into a.safetensors."""
    command = runpy.run_path(str(ROOT / "experiments/compress.py"))["compress"]
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    values = SimpleNamespace(
        input=str(tmp_path / "a.txt"), output=str(tmp_path / "a.safetensors"), overwrite=False, name="rfcc-base-8x",
        weights=None, precision="float32", backend="flax", dtype="bfloat16",
    )  # fmt: skip
    monkeypatch.setitem(command.__globals__, "VALUES", values)
    monkeypatch.setitem(command.__globals__, "_compressor", lambda name: None)
    monkeypatch.setattr(cli, "workdir", lambda _: tmp_path / "a.parts")
    monkeypatch.setattr(process_environment, "ensure", lambda device: None)
    return command


def test_a_file_that_another_command_writes_or_wrote_meanwhile_is_not_lost(command, monkeypatch, tmp_path):
    monkeypatch.setattr(bulk, "compress_file", lambda *_, **__: pytest.fail("nothing may be written"))
    with store.alone(tmp_path / "a.safetensors"), pytest.raises(ValueError, match="another process writes .*a.safeten"):
        command()
    written = tmp_path / "a.safetensors"
    monkeypatch.setitem(command.__globals__, "_compressor", lambda name: written.write_text("theirs"))
    with pytest.raises(ValueError, match="a.safetensors exists; name another --output, or pass --overwrite"):
        command()
    assert written.read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "a.txt"]


def test_an_interrupt_names_parts_only_where_there_are_some(command, compressor, monkeypatch, tmp_path):
    said, real = [], bulk.compress_file
    where = (compressor, tmp_path / "a.txt", tmp_path / "a.safetensors")
    how = {"sha256": "5" * 64, "dtype": "bfloat16", "workdir": tmp_path / "a.parts", "part": PART}

    def stopped(*_, **__):
        said.append(cli._kept_sentence())
        with pytest.raises(KeyboardInterrupt):
            real(*where, **how, progress=interrupted(PIECE))
        said.append(cli._kept_sentence())
        with pytest.raises(KeyboardInterrupt):
            real(*where, **how, progress=interrupted(1200))
        said.append(cli._kept_sentence())
        raise KeyboardInterrupt

    monkeypatch.setattr(bulk, "compress_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        command()
    parts = f"finished parts are in {tmp_path / 'a.parts'}; the same command goes on"
    assert said == ["", "", parts]
