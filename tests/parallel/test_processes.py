"""The folder of a run: held by one process, and taken away again where nothing came of it."""

import pytest

from jaxbench.parallel import processes


def test_an_error_leaves_no_folder_that_was_made_for_the_run(tmp_path):
    with pytest.raises(ValueError, match="bad"), processes.locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / processes.LOCK).is_file()
        raise ValueError("bad")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_an_error_keeps_what_was_written_and_what_was_there(tmp_path, is_there):
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
    with pytest.raises(ValueError, match="bad"), processes.locked(folder):
        (folder / "records.jsonl").write_text("kept")
        raise ValueError("bad")
    assert sorted(path.name for path in folder.iterdir()) == [processes.LOCK, "records.jsonl"]


def test_a_run_that_ends_well_keeps_its_folder(tmp_path):
    with processes.locked(tmp_path / "run"):
        pass
    assert (tmp_path / "run").is_dir()
