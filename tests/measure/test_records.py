"""Results on disk: whole lines or nothing, later lines win, a full disk keeps what was there."""

import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.measure import records
from jaxbench.measure.records import Record, RecordFile, Workload

DECODE = Workload(kind="decode", dtype="float32", batch=8, prompt_tokens=64, new_tokens=48)


def make(value: float, *, launch: int = 1, arm: str = "flax", metric: str = "decode_tokens_per_s") -> Record:
    return Record(metric=metric, value=value, unit="tokens/s", samples=(value,), arm=arm, workload=DECODE,
                  launch=launch, config_id="abc", versions={"jax": "0.10.2"}, detail={"share": 0.5})  # fmt: skip


def test_a_record_comes_back_as_it_was_written(tmp_path):
    file = RecordFile(tmp_path / "deep" / "results.jsonl")
    file.append(make(1.5), make(2.5, launch=2))
    assert file.read() == [make(1.5), make(2.5, launch=2)]
    assert file.path.read_text().count("\n") == 2


def test_the_later_of_two_equal_keys_wins(tmp_path):
    file = RecordFile(tmp_path / "results.jsonl")
    file.append(make(1.0), make(5.0, arm="equinox"), make(2.0))
    assert file.read() == [make(5.0, arm="equinox"), make(2.0)]


@given(cut=st.integers(min_value=1, max_value=60))
def test_a_torn_last_line_is_dropped_and_appending_goes_on(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "results.jsonl"
    file = RecordFile(path)
    file.append(make(1.0), make(2.0, launch=2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert file.read()[0] == make(1.0)
    file.append(make(3.0, launch=3))
    assert [record.launch for record in file.read()] in ([1, 3], [1, 2, 3])
    assert path.read_bytes().endswith(b"\n")


def test_a_damaged_line_in_the_middle_names_file_and_line(tmp_path):
    file = RecordFile(tmp_path / "results.jsonl")
    file.append(make(1.0))
    with open(file.path, "a") as handle:
        handle.write("{broken}\n")
    file.append(make(2.0, launch=2))
    with pytest.raises(ValueError, match=r"results\.jsonl line 2 is not a record"):
        file.read()


def test_an_unknown_field_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="sampels"):
        Record.model_validate({"metric": "x", "sampels": [1.0]})


def test_a_full_disk_keeps_finished_lines_and_says_so(tmp_path):
    file = RecordFile(tmp_path / "results.jsonl")
    file.append(make(1.0))
    size = file.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        with pytest.raises(OSError, match=rf"cannot write .*results\.jsonl.*{size} bytes before are kept.*--resume"):
            file.append(make(2.0, launch=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert file.path.stat().st_size == size
    assert file.read() == [make(1.0)]


def test_finished_launches_are_those_with_a_mark_of_the_same_run(tmp_path):
    file = RecordFile(tmp_path / "results.jsonl")
    marks = [Record(metric=records.LAUNCH_DONE, launch=n, value=n, run_id=c) for n, c in ((1, "abc"), (2, "other"))]
    file.append(make(1.0), *marks, make(2.0, launch=3))
    assert file.finished_launches("abc") == {1}


def test_of_a_launch_that_was_begun_twice_only_the_second_counts(tmp_path):
    file = RecordFile(tmp_path / "results.jsonl")
    begun = make(2.0, launch=2, metric=records.LAUNCH_BEGUN)
    broken = make(0.0, launch=2, metric="load").model_copy(update={"status": "error"})
    other = make(7.0, launch=2).model_copy(update={"run_id": "another run"})
    file.append(make(1.0), other, begun, broken, make(2.0, launch=2, arm="equinox"))
    file.append(begun, make(3.0, launch=2))
    assert file.read() == [make(1.0), other, begun, make(3.0, launch=2)]


def test_labels_are_short_and_distinct():
    assert DECODE.label() == "decode float32 b8 p64 n48"
    assert Workload(kind="load", dtype="bfloat16").label() == "load bfloat16"
    assert DECODE.model_copy(update={"batch": 1}).label() != DECODE.label()
