"""Files of rows: other keys are kept, a run that was stopped goes on, rows of another run are not touched."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import shutil

import pytest

from jaxbench.generation import batch, requests, writer
from jaxbench.prompts import SamplingParams

SETTINGS = writer.Settings(8, SamplingParams(temperature=1.0), seed=5)
LINES = [{"prompt": f"Prompt number {i}", "tag": [i]} for i in range(5)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def write(flax, text):
    """A writer of some settings, whose programs are compiled once."""
    return functools.cache(lambda settings: writer.Writer(flax, text, settings))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(source, output, write, text, *, settings=SETTINGS, batch_size=4, overwrite=False, **more):
    output = batch.check_output(output, [source], overwrite=overwrite)
    content = source.read_bytes()
    wanted = batch.describe(settings, content, **more)
    text = copy.copy(text)
    text.template_time = batch.begun(output, overwrite=overwrite)
    done = 0 if overwrite else batch.finished(output, wanted)
    asked = requests.parsed(content, source, text)
    batch.run(asked, output, wanted, write(settings), batch_size=batch_size, begun=text.template_time, done=done)
    return lines(output)


def test_rows_keep_their_own_keys_and_do_not_depend_on_the_batch(source, tmp_path, write, text):
    rows = run(source, tmp_path / "new" / "out.jsonl", write, text)
    assert [{name: row[name] for name in LINES[0]} for row in rows] == LINES
    assert [row["row"] for row in rows] == list(range(5))
    assert all(list(row) == ["prompt", "tag", *requests.WRITTEN] for row in rows)
    for row in rows:
        assert row["text"] == text.decode(row["ids"], skip_special=True) and row["prompt_tokens"] == 15
    assert run(source, tmp_path / "one.jsonl", write, text, batch_size=1) == rows


def test_a_run_that_was_stopped_goes_on_after_its_last_whole_line(source, tmp_path, write, text):
    whole = run(source, tmp_path / "whole.jsonl", write, text)
    path = tmp_path / "parts.jsonl"
    shutil.copy(tmp_path / "whole.jsonl.run.json", tmp_path / "parts.jsonl.run.json")
    path.write_text("".join(json.dumps(row) + "\n" for row in whole[:2]) + '{"torn')
    assert run(source, path, write, text, batch_size=2) == whole
    before = path.stat().st_mtime_ns
    assert run(source, path, write, text) == whole and path.stat().st_mtime_ns == before


def test_a_run_that_goes_on_another_day_writes_the_date_of_its_first_into_its_prompts(tmp_path, write, text):
    """In words, so that prompts of other days have other lengths."""
    text, source, first = copy.copy(text), tmp_path / "chat.jsonl", datetime.datetime(2024, 9, 25, 23, 59)
    text.chat_template = "{{ strftime_now('%A %d %B') }}{% for message in messages %}{{ message.content }}{% endfor %}"
    source.write_text("".join(json.dumps({"messages": [{"role": "user", "content": "a" * i}]}) + "\n" for i in (1, 2)))
    path, record = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run.json"
    run(source, path, write, text)
    held = json.loads(record.read_text())
    assert datetime.datetime.now() - datetime.datetime.fromisoformat(held[batch.BEGUN]) < datetime.timedelta(hours=1)
    record.write_text(json.dumps(held | {batch.BEGUN: first.isoformat()}))
    path.write_text(path.read_text().splitlines()[0] + "\n")
    resumed = run(source, path, write, text)
    assert resumed[1]["prompt_tokens"] == len(text.encode("Wednesday 25 Septemberaa", add_special=False))
    assert json.loads(record.read_text())[batch.BEGUN] == first.isoformat()
    assert batch.begun(path, overwrite=True) > first
    path.unlink()
    assert batch.begun(path, overwrite=False) > first


def test_what_is_kept_says_the_command_that_goes_on():
    assert batch.kept("o.jsonl", overwrite=False) == "finished rows in o.jsonl are kept; the same command goes on"
    assert batch.kept("o.jsonl", overwrite=True).endswith("; the same command without --overwrite goes on")


def test_rows_of_another_run_are_not_touched(source, tmp_path, write, text):
    path = tmp_path / "out.jsonl"
    run(source, path, write, text, kernels="xla")
    before = path.read_bytes()
    others = {
        "seed": {"settings": SETTINGS._replace(seed=6)},
        "sampling": {"settings": SETTINGS._replace(sampling=SamplingParams(top_k=3))},
        "stop": {"settings": SETTINGS._replace(stop=("a",))},
        "new_tokens": {"settings": SETTINGS._replace(new_tokens=3)},
        "kernels": {"kernels": "native"},
    }
    for name, changed in others.items():
        with pytest.raises(ValueError, match=f"out.jsonl holds rows made with other {name}; name another file"):
            run(source, path, write, text, **{"kernels": "xla"} | changed)
    source.write_text(source.read_text() + '{"prompt": "more"}\n')
    with pytest.raises(ValueError, match="rows made with other input_sha256"):
        run(source, path, write, text, kernels="xla")
    assert path.read_bytes() == before
    assert len(run(source, path, write, text, kernels="xla", overwrite=True)) == 6


def test_rows_of_the_same_settings_in_another_order_are_not_gone_on_with(source, tmp_path, write, text):
    path = tmp_path / "out.jsonl"
    rows = run(source, path, write, text)
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows[1], rows[0])))
    with pytest.raises(ValueError, match="out.jsonl line 1 is row 1 of run .*, wanted row 0"):
        run(source, path, write, text)
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match="out.jsonl line 1 is no row of this command"):
        run(source, path, write, text)


@pytest.mark.parametrize("content", ["my notes, without a line end", '{"text": "mine"}\n'])
def test_a_file_that_is_no_output_is_not_touched(content, source, tmp_path, write, text):
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="mine.jsonl exists, and mine.jsonl.run.json, .* does not"):
        run(source, path, write, text)
    assert path.read_text() == content


def test_the_requests_are_never_written_over(source, tmp_path, write, text):
    (tmp_path / "link.jsonl").symlink_to(source)
    for output in (source, tmp_path / "link.jsonl"):
        with pytest.raises(ValueError, match="is the input .*in.jsonl, which would be lost"):
            run(source, output, write, text, overwrite=True)
    assert lines(source) == LINES


def test_a_request_that_does_not_fit_is_named_before_anything_is_written(source, tmp_path, write, text):
    source.write_text(source.read_text() + json.dumps({"prompt": "x" * 121}) + "\n")
    with pytest.raises(ValueError, match="in.jsonl line 6 has 121 tokens.*pass --new_tokens=7 or less"):
        run(source, tmp_path / "out.jsonl", write, text)
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out.jsonl.run.json").exists()


def test_a_run_with_another_bias_is_another_run_and_one_without_has_the_record_of_before_there_were_any():
    biased = SETTINGS._replace(sampling=SamplingParams(temperature=1.0, logit_bias=((5, -1.0),)))
    plain, other = (batch.describe(each, b"") for each in (SETTINGS, biased))
    assert "logit_bias" not in plain["sampling"] and other["sampling"]["logit_bias"] == [[5, -1.0]]
    assert plain["run"] != other["run"]
