"""Where a command may write: never over an input, over a file only where it was asked, never half a file."""

from __future__ import annotations

import csv
import errno
import json
import os
import resource

import numpy as np
import pytest
import safetensors.numpy

from jaxbench import cli, outputs


def test_a_new_file_may_be_written_also_into_folders_to_be_made(tmp_path):
    for place in (tmp_path / "new", tmp_path / "a" / "b" / "new"):
        assert outputs.check_file(place, [None, tmp_path / "absent"]) == place
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_there_needs_overwrite(tmp_path):
    path = tmp_path / "there"
    path.write_text("mine")
    with pytest.raises(ValueError, match="there exists; name another --output, or pass --overwrite"):
        outputs.check_file(path)
    assert outputs.check_file(path, overwrite=True) == path
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dangling exists"):
        outputs.check_file(tmp_path / "dangling")


def test_what_is_written_beside_a_file_is_checked_too(tmp_path):
    assert outputs.check_beside(tmp_path / "new.json", ".svg") == tmp_path / "new.svg"
    (tmp_path / "there.svg").write_text("mine")
    with pytest.raises(ValueError, match=r"there.json: .*there.svg, which is written beside it, exists; name another"):
        outputs.check_beside(tmp_path / "there.json", ".svg")
    assert outputs.check_beside(tmp_path / "there.json", ".svg", overwrite=True) == tmp_path / "there.svg"
    with pytest.raises(ValueError, match="there.svg, which would be lost"):
        outputs.check_beside(tmp_path / "there.json", ".svg", [tmp_path / "there.svg"], overwrite=True)
    with pytest.raises(ValueError, match=r"new.svg ends with .svg, as what is written beside it does"):
        outputs.check_beside(tmp_path / "new.svg", ".svg", overwrite=True)


def test_an_input_is_refused_by_whatever_name(tmp_path, monkeypatch):
    path = tmp_path / "input"
    path.write_text("mine")
    (tmp_path / "soft").symlink_to(path)
    os.link(path, tmp_path / "hard")
    (tmp_path / "folder").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("input", "soft", "hard", "folder/input"):
        with pytest.raises(ValueError, match=f"--output={name} is the input .*input, which would be lost"):
            outputs.check_file(name, [tmp_path / "other", path], overwrite=True)


def test_what_is_no_file_or_lies_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a folder, wanted a file"):
        outputs.check_file(tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="cannot be a folder: .*file is a file"):
        outputs.check_file(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="no ordinary file"):
        outputs.check_file(os.devnull, overwrite=True)


def test_a_folder_may_be_there_or_made_and_a_file_or_a_dangling_link_is_none(tmp_path):
    for place in (tmp_path, tmp_path / "a" / "b"):
        assert outputs.check_folder(place) == place
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("file", "file/below", "dangling", "dangling/below"):
        with pytest.raises(ValueError, match=rf"--workdir={tmp_path / name} cannot be a folder: .* is a file"):
            outputs.check_folder(tmp_path / name)
    with pytest.raises(ValueError, match="--workdir= cannot be a folder: it is empty"):
        outputs.check_folder("")


def test_a_folder_that_the_system_lets_nobody_write_is_named(tmp_path, monkeypatch):
    def read_only(dir):
        raise OSError(30, "Read-only file system", str(dir))

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", read_only)
    with pytest.raises(ValueError, match=r"--output=.*nothing can be written in .*Read-only file system"):
        outputs.check_file(tmp_path / "x.json")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "stage.json"
    outputs.write_text(path, "old")
    monkeypatch.setattr(outputs.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match=r"no space: .*stage\.json'"):
        outputs.write_json(path, {"new": 1})
    assert path.read_text() == "old" and os.listdir(path.parent) == ["stage.json"]


def test_a_full_disk_is_named_by_the_file_and_an_interrupt_keeps_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    outputs.write_text(path, "old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), OSError("results: no sentence is lost")):
        with pytest.raises(type(error)) as caught, outputs.whole(path) as temporary:
            temporary.write_text("half")
            raise error
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["report.html"]
    assert str(caught.value) == "results: no sentence is lost"
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'"), outputs.whole(path):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "said", ["Not enough free space to write 800 bytes after offset 128", "800 requested and 16 written"]
)
def test_what_numpy_says_of_a_full_disk_names_the_file(said, tmp_path):
    with pytest.raises(OSError, match=said[:10]) as caught, outputs.whole(tmp_path / "x"):
        raise OSError(f"of something else: {said[:10]}")
    assert caught.value.errno is None
    with pytest.raises(OSError, match="No space left on device: '.*/x'") as caught, outputs.whole(tmp_path / "x"):
        raise OSError(said)
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []


def test_a_folder_that_is_only_read_may_lie_where_nothing_can_be_written(tmp_path, monkeypatch):
    def full(**how):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", full)
    assert outputs.check_folder(tmp_path / "queue", is_written=False) == tmp_path / "queue"
    with pytest.raises(ValueError, match="Read-only file system"):
        outputs.check_folder(tmp_path / "queue")


def test_a_folder_is_whole_or_not_there(tmp_path):
    folder = tmp_path / "a" / "model"
    with pytest.raises(KeyboardInterrupt), outputs.whole_folder(folder) as made:
        (made / "weights").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(folder.parent) == []
    with outputs.whole_folder(folder) as made:
        (made / "weights").write_text("whole")
    assert (folder / "weights").read_text() == "whole" and os.listdir(folder.parent) == ["model"]
    with pytest.raises(OSError, match="not empty"), outputs.whole_folder(folder) as made:
        (made / "weights").write_text("other")
    assert (folder / "weights").read_text() == "whole"


def test_tensors_are_written_as_safetensors_does_it_and_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    path, tensors = tmp_path / "new" / "x.safetensors", {"b": np.arange(6, dtype=np.float16).reshape(2, 3)}
    outputs.save_tensors(path, tensors, {"about": "é"})
    before = path.read_bytes()
    assert before == safetensors.numpy.save(tensors, {"about": "é"})
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, kept[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*new.x\.safetensors'") as caught:
            outputs.save_tensors(path, {"b": np.zeros(100_000)})
        assert caught.value.errno == errno.EFBIG and cli.explain(caught.value).startswith(f"cannot write {path}: File")
        with pytest.raises(OSError, match="File too large") as caught, outputs.whole_folder(tmp_path / "model") as made:
            outputs.save_tensors(made / "x.safetensors", {"b": np.zeros(100_000)})
        assert caught.value.filename == str(tmp_path / "model" / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["new"] and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("rows", "columns", "text"),
    [
        ([{"a": 1, "b": "x,y"}, {"b": "z"}], (), 'a,b\n1,"x,y"\n,z\n'),
        ([{"a": 1, "b": 2}], ("b", "a", "c"), "b,a,c\n2,1,\n"),
        ([], ("a",), "a\n"),
    ],
)
def test_rows_become_a_csv_file(tmp_path, rows, columns, text):
    outputs.write_csv(tmp_path / "x.csv", rows, columns)
    assert (tmp_path / "x.csv").read_text() == text


def test_a_carriage_return_in_a_value_ends_no_row_of_a_csv_file(tmp_path):
    rows = [{"a": "one\rtwo", "b": "1"}, {"a": "three\r\n", "b": '",\n'}]
    outputs.write_csv(tmp_path / "x.csv", rows)
    with open(tmp_path / "x.csv", encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == rows
    assert (tmp_path / "x.csv").read_bytes().startswith(b'a,b\n"one\rtwo",1\n')


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_json_file_is_named(content, tmp_path):
    path = tmp_path / "stage.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="stage.json: cannot be read as JSON .* the work is done again"):
        outputs.read_json(path)


def test_json_files_have_null_where_a_number_is_not_finite(tmp_path):
    path, nan = tmp_path / "x.json", float("nan")
    outputs.write_json(path, {"a": nan, "deep": [{"b": (1.5, float("inf"))}, np.float64(nan)], "word": "NaN", "n": 3})
    strict = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert strict == {"a": None, "deep": [{"b": [1.5, None]}, None], "word": "NaN", "n": 3}


def test_numpys_scalars_are_pythons_in_json():
    found = outputs.finite([np.float32(0.5), np.float32("inf"), np.int64(3), np.bool_(True), np.float64(0.1)])
    assert found == [0.5, None, 3, True, 0.1] and [type(x) for x in found] == [float, type(None), int, bool, float]
