"""Checkpoints: kept, refused, damaged, on a full disk."""

import json
import os
import shutil
import subprocess
import sys
import threading
import types
import zlib

import numpy as np
import pytest

from jaxbench.parallel.processes import Processes
from jaxbench.training import checkpoint
from jaxbench.training.checkpoint import Checkpoints

ARRAYS = {
    "params.layers.0.kernel": np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32),
    "moments.0.mu.layers.0.kernel": np.ones((40, 50)),
    "step": np.array(3, np.int32),
    "is_halted": np.array(False),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own, of several kinds


def accept(meta):
    pass


@pytest.fixture
def opened(tmp_path):
    said = []
    made = Checkpoints(tmp_path / "checkpoints", keep=2, say=said.append)
    made.said = said
    yield made
    made.close()


def save(checkpoints, *steps, losses=None):
    for step in steps:
        arrays = {name: value + np.array(step, value.dtype) if value.dtype != bool else value for name, value in ARRAYS.items()}  # fmt: skip  # noqa: E501
        checkpoints.save(step, arrays, {"text": f"step {step}"}, loss=(losses or {}).get(step))
    checkpoints.wait()


def data_files(checkpoints, step):
    found = [path for path in (checkpoints.folder / str(step) / "state").rglob("*") if path.is_file() and path.parent.name == "d"]  # fmt: skip  # noqa: E501
    return sorted(found, key=lambda path: path.stat().st_size, reverse=True)


def test_what_was_saved_comes_back_with_types_and_values(opened):
    save(opened, 7)
    found = opened.restore(ARRAYS, check_meta=accept)
    assert found.step == 7 and found.meta == {"text": "step 7"} and found.arrays.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        wanted = value if value.dtype == bool else value + np.array(7, value.dtype)
        assert found.arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(found.arrays[name], wanted)


def test_an_empty_folder_has_no_checkpoint(opened):
    assert opened.steps() == [] and opened.restore(ARRAYS, check_meta=accept) is None


def test_arrays_may_change_as_soon_as_a_save_has_begun(opened):
    arrays = {name: value.copy() for name, value in ARRAYS.items()}
    opened.save(1, arrays, {})
    arrays["params.layers.0.kernel"][:] = 0.0
    opened.wait()
    found = opened.restore(ARRAYS, check_meta=accept).arrays["params.layers.0.kernel"]
    np.testing.assert_array_equal(found, ARRAYS["params.layers.0.kernel"])


def test_the_newest_and_the_best_are_kept(opened):
    save(opened, 1, 2, 3, 4, 5, 6, losses={1: 3.0, 2: 1.0, 4: 2.0})
    assert opened.steps() == [2, 5, 6]


@pytest.mark.parametrize("damage", [False, True])
def test_the_best_is_kept_after_a_restart_and_after_a_damaged_one_was_set_aside(opened, damage):
    save(opened, 1, 2, 3, losses={1: 1.0, 2: 2.0, 3: 3.0})
    if damage:
        data_files(opened, 3)[0].unlink()
        assert opened.restore(ARRAYS, check_meta=accept).step == 2
        again = opened
    else:
        opened.close()
        again = Checkpoints(opened.folder, keep=2)
    save(again, 4, 5, 6, losses={4: 4.0, 6: 6.0})
    assert again.steps() == [1, 5, 6]
    assert again.restore(ARRAYS, check_meta=accept).meta == {"text": "step 6"}
    again.close()


def test_an_older_checkpoint_without_its_loss_is_the_best_if_its_progress_says_so(opened):
    for step in (1, 2):
        opened.save(step, ARRAYS, {"progress": {"best_loss": 0.5, "best_step": 1}}, loss=float(step))
    opened.close()
    for step in (1, 2):
        path = opened.folder / str(step) / "meta" / "metadata"
        text = json.loads(path.read_text())["content"]
        text = json.dumps({name: value for name, value in json.loads(text).items() if name != "loss"})
        path.write_text(json.dumps({"content": text, "crc32": zlib.crc32(text.encode())}))
    again = Checkpoints(opened.folder, keep=2)
    save(again, 4, 5, 6, losses={4: 1.0, 5: 2.0})
    assert again.steps() == [1, 5, 6]
    again.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "meta"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(opened, damage):
    save(opened, 1, 2)
    path = data_files(opened, 2)[0]
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "remove":
        path.unlink()
    else:
        (opened.folder / "2" / "meta" / "metadata").write_text('{"text": "st')
    found = opened.restore(ARRAYS, check_meta=accept)
    assert found.step == 1 and found.meta["text"] == "step 1"
    assert len(opened.said) == 1 and f"{opened.folder / '2'} is damaged" in opened.said[0]
    assert "going on from step 1" in opened.said[0] and opened.steps() == [1]
    save(opened, 2)  # its number is free again
    assert opened.restore(ARRAYS, check_meta=accept).step == 2 and len(opened.said) == 1


@pytest.mark.parametrize(
    "reason",
    [
        MemoryError("Unable to allocate 38.1 MiB for an array"),
        PermissionError(13, "Permission denied", "metadata"),
        ValueError('PERMISSION_DENIED: Error reading "a/.zarray": Failed to open: "d/ca70": Permission denied'),
        ValueError("UNAVAILABLE: Failed to open: d/ca70 [OS error 24: EMFILE Too many open files]"),
    ],
)
@pytest.mark.parametrize("of", ["_read", "_read_meta"])
def test_a_checkpoint_that_a_process_lacks_the_means_to_read_is_not_set_aside(opened, monkeypatch, reason, of):
    """Without memory, all of a run's checkpoints were, and it started anew."""
    save(opened, 1, 2)

    def fail(*arguments):
        raise reason

    with monkeypatch.context() as patched:
        patched.setattr(opened, of, fail)
        with pytest.raises(ValueError, match=r"checkpoints/2 cannot be read at the moment and stays where it is \("):
            opened.restore(ARRAYS, check_meta=accept)
    assert opened.steps() == [1, 2] and not opened.said
    assert opened.restore(ARRAYS, check_meta=accept).step == 2


def test_no_process_sets_aside_what_another_one_lacks_the_means_to_read(opened, monkeypatch):
    save(opened, 1)
    answers = iter([[1, 0], [1, 0]])  # this process could read it, the other one could not, and not for its content
    everyone = Processes(0, 2, lambda own: np.array(next(answers), np.uint32)[:, None])
    monkeypatch.setattr(opened, "processes", everyone)
    with pytest.raises(ValueError, match="cannot be read at the moment.*another process than 0 could not read it"):
        opened.restore(ARRAYS, check_meta=accept)
    assert opened.steps() == [1]


def test_no_flipped_bit_refuses_a_run_or_changes_what_it_reads(opened, tmp_path):
    """Every file of the newest checkpoint in turn: it is whole all the same, or the one before is used."""
    save(opened, 1, 2)
    random, outcomes = np.random.default_rng(0), set()

    def check_meta(meta):
        assert meta["text"] in ("step 1", "step 2")

    files = sorted(path for path in (opened.folder / "2").rglob("*") if path.is_file() and path.stat().st_size)
    flips = [(path, place) for path in files for place in random.integers(path.stat().st_size, size=2)]
    meta = opened.folder / "2" / "meta" / "metadata"
    flips += [(meta, place) for place in random.integers(meta.stat().st_size, size=20)]
    for number, (path, place) in enumerate(flips):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(opened.folder, copy)
        content = bytearray(path.read_bytes())
        content[place] ^= 1 << random.integers(8)
        (copy / path.relative_to(opened.folder)).write_bytes(content)
        one = Checkpoints(copy, keep=2, say=lambda text: None)
        found = one.restore(ARRAYS, check_meta=check_meta)
        one.close()
        assert found.meta["text"] == f"step {found.step}"
        for name, value in ARRAYS.items():
            wanted = value if value.dtype == bool else value + np.array(found.step, value.dtype)
            np.testing.assert_array_equal(found.arrays[name], wanted)
        outcomes.add((path == meta, found.step))
    assert outcomes >= {(False, 1), (False, 2), (True, 1)} and (True, 2) not in outcomes


def test_when_all_are_damaged_the_run_starts_anew(opened):
    save(opened, 1)
    data_files(opened, 1)[0].unlink()
    assert opened.restore(ARRAYS, check_meta=accept) is None and "starting anew" in opened.said[0]


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(opened):
    save(opened, 1)
    other = {name: value for name, value in ARRAYS.items() if name != "is_halted"}
    other |= {"params.layers.0.kernel": np.zeros((40, 51), np.float32), "params.layers.1.kernel": np.zeros(3)}
    with pytest.raises(ValueError) as error:
        opened.restore(other, check_meta=accept)
    for part in (
        "checkpoints/1 is of another model",
        "1 missing in it: params.layers.1.kernel",
        "1 unknown here: is_halted",
        "params.layers.0.kernel is (40, 50) float32, wanted (40, 51) float32",
    ):
        assert part in str(error.value)
    assert opened.steps() == [1], "a checkpoint of another model is no damaged one"


def test_of_the_same_model_the_caller_says_what_differs_before_an_optimiser_s_names_do(opened):
    def refuse(meta):
        raise ValueError(f"other run {meta['text']}")

    save(opened, 1)
    other = {name: value for name, value in ARRAYS.items() if name.startswith("params.")} | {"moments.b": np.zeros(3)}
    with pytest.raises(ValueError, match="other run step 1"):
        opened.restore(other, check_meta=refuse)
    with pytest.raises(ValueError, match="of another model or optimiser; 1 missing in it: moments.b"):
        opened.restore(other, check_meta=accept)
    with pytest.raises(ValueError, match="of another model or optimiser; .* params.layers.1.kernel"):
        opened.restore(other | {"params.layers.1.kernel": np.zeros(3)}, check_meta=refuse)
    assert opened.steps() == [1]


def test_another_run_s_checkpoint_is_refused_by_the_caller(opened):
    save(opened, 1)

    def refuse(meta):
        raise ValueError(f"other run {meta['text']}")

    with pytest.raises(ValueError, match="other run step 1"):
        opened.restore(ARRAYS, check_meta=refuse)
    assert opened.steps() == [1]


def test_a_half_written_checkpoint_of_a_killed_process_is_cleared_away(opened):
    save(opened, 1)
    half = opened.folder / "2.orbax-checkpoint-tmp-17"
    (half / "state").mkdir(parents=True)
    again = Checkpoints(opened.folder, keep=2)
    assert again.steps() == [1] and not half.exists()
    again.close()


FULL = """
import resource, signal, sys
import numpy as np
from jaxbench.training.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
small = {"a": np.random.default_rng(0).normal(size=(200, 200))}
checkpoints.save(1, small, {})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    checkpoints.save(2, small, {})
    checkpoints.wait()
except OSError as error:
    print("OSError", error)
many = {f"a{i}": small["a"] for i in range(12)}
try:
    checkpoints.save(3, many, {})
    checkpoints.wait()
except OSError as error:
    print("OSError", error)
print(checkpoints.steps() if not (checkpoints.folder / "2").is_dir() else "written")
"""


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "c")], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert "OSError" in done.stdout and "the last good checkpoint is step 1" in done.stdout, done.stdout + done.stderr
    assert "Event loop is closed" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert checkpoint.finished(tmp_path / "c") == [1] and checkpoint.finished(tmp_path / "none") == []
    again = Checkpoints(tmp_path / "c", keep=2)
    assert again.steps() == [1] and again.restore({"a": np.zeros((200, 200))}, check_meta=accept).step == 1
    again.close()


def test_only_late_callbacks_of_other_threads_are_kept_quiet(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    checkpoint._drop_late_callbacks()
    checkpoint._drop_late_callbacks()  # one hook is enough
    reports = [types.SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError(f"{text} is closed")) for text in ("Event loop", "The door")]  # fmt: skip  # noqa: E501
    for report in reports:
        thread = threading.Thread(target=sys.unraisablehook, args=(report,))
        thread.start()
        thread.join()
    assert told == reports[1:]
    sys.unraisablehook(reports[0])
    assert told == [reports[1], reports[0]]
