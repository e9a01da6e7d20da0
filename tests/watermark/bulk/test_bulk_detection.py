"""Bulk detection: the same scores whatever the engine, the kind of output, or where a run was killed."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import rich.console

from jaxbench import store
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.text import lines
from jaxbench.watermark import commands, detection, identify
from jaxbench.watermark.bulk import bulk_detection, part_files
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged
from tests.structure import ROOT
from tests.test_cli import shell_environment

VOCAB = 101


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(lines, "CHUNK_LINES", 8)


def job(*schemes: str, key: int = 5, **how) -> bulk_detection.Job:
    schemes = schemes or ("kgw",)
    return bulk_detection.Job(
        tuple(identify.Candidate(n, parse_scheme(n), Key(key)) for n in schemes), vocab_size=VOCAB, **how
    )


def texts(rows: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, random.integers(0, 30)).tolist() for _ in range(rows)]


def write(path, rows: list[list[int]]) -> str:
    content = "".join(json.dumps({"id": f"t{i}", "text": row}) + "\n" for i, row in enumerate(rows)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def expected(rows: list[list[int]]) -> np.ndarray:
    detector = detection.NumpyDetector(parse_scheme("kgw"), vocab_size=VOCAB)
    return detection.detect(detector, Ragged.from_lists(rows), Key(5)).p_value


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("kind", part_files.KINDS)
def test_every_text_is_scored_in_order(suffix, kind, tmp_path, small_chunks):
    rows = texts(45)
    out = tmp_path / f"scores.{kind}"
    summary = bulk_detection.run(write(tmp_path / f"a.{suffix}", rows), str(out), job())
    assert (summary["texts"], summary["bad"], summary["tokens"]) == (45, 0, sum(map(len, rows)))
    if kind == "parquet":
        table = pq.read_table(out).to_pylist()
    elif kind == "jsonl":
        table = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        with open(out, newline="") as file:
            table = list(csv.DictReader(file))
    assert [float(row["p_value"]) for row in table] == expected(rows).tolist()
    assert [int(row["line"]) for row in table] == list(range(1, 46))
    assert [row["id"] for row in table] == [f"t{i}" for i in range(45)]
    assert [int(row["num_tokens"]) for row in table] == [len(row) for row in rows]
    assert all(bool(row["reason"]) == (len(ids) < 2) for row, ids in zip(table, rows))
    assert sorted(os.listdir(tmp_path)) == [f"a.{suffix}", f"scores.{kind}", f"scores.{kind}.report.json"]


def test_several_files_and_a_family_of_candidates(tmp_path, small_chunks):
    write(tmp_path / "a.jsonl", texts(10, 1)), write(tmp_path / "b.jsonl.gz", texts(12, 2))
    out = tmp_path / "scores.parquet"
    summary = bulk_detection.run(f"{tmp_path}/*.jsonl*", str(out), job("kgw", "unigram"))
    table = pq.read_table(out)
    assert (summary["files"], summary["texts"], table.num_rows) == (2, 22, 22)
    assert table["file"].to_pylist() == [f"{tmp_path}/a.jsonl"] * 10 + [f"{tmp_path}/b.jsonl.gz"] * 12
    p = np.stack([table[f"p_{name}"].to_numpy() for name in ("kgw", "unigram")], axis=1)
    assert (p[:10, 0] == expected(texts(10, 1))).all()
    assert table["best"].to_pylist() == [("kgw", "unigram")[i] for i in p.argmin(axis=1)]
    np.testing.assert_allclose(table["p_value"].to_numpy(), np.minimum(1, 2 * p.min(axis=1)))


def test_a_run_that_died_goes_on_where_it_stopped(tmp_path, small_chunks, monkeypatch):
    rows = texts(45)
    path, out = write(tmp_path / "a.jsonl", rows), tmp_path / "scores.parquet"
    real, done = bulk_detection.Worker.__call__, []

    def dies(self, chunk):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(chunk.name)
        return real(self, chunk)

    monkeypatch.setattr(bulk_detection.Worker, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        bulk_detection.run(path, str(out), job())
    assert not out.exists() and len(list((tmp_path / "scores.parquet.parts").glob("*.parquet"))) == 3
    with pytest.raises(ValueError, match="other keys"):
        bulk_detection.run(path, str(out), job(key=6))
    with pytest.raises(ValueError, match="other job"):
        bulk_detection.run(path, str(out), job("gumbel"))
    monkeypatch.setattr(
        bulk_detection.Worker, "__call__", lambda self, chunk: done.append(chunk.name) or real(self, chunk)
    )
    summary = bulk_detection.run(path, str(out), job())
    assert done == [f"00000-{i:07d}" for i in range(6)] and summary["texts"] == 45
    assert pq.read_table(out)["p_value"].to_pylist() == expected(rows).tolist()
    assert not (tmp_path / "scores.parquet.parts").exists()


KILLED = """
import sys, time
from jaxbench.text import lines
from jaxbench.watermark import detection
from jaxbench.watermark.bulk import bulk_detection
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from tests.watermark.bulk import test_bulk_detection

class Slow(detection.NumpyDetector):
    def evidence(self, *arguments, **how):
        time.sleep(0.2)
        return super().evidence(*arguments, **how)

if __name__ == "__main__":
    lines.CHUNK_LINES = 8
    bulk_detection.run(sys.argv[1], sys.argv[2], test_bulk_detection.job(make_detector=Slow), processes=2)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_a_run_goes_on_with_the_tokenizer_that_it_began_with_whatever_lies_at_its_place(tmp_path):
    words = load_tokenizer()
    (tmp_path / "model").mkdir()
    words.save(tmp_path / "model")
    before = bulk_detection.describe(job(model=str(tmp_path / "model")))
    assert before == bulk_detection.describe(job(model=str(tmp_path / "model")))
    words.core.add_special_tokens(["<another>"])
    words.save(tmp_path / "model")
    assert before != bulk_detection.describe(job(model=str(tmp_path / "model")))


def test_kill_9_loses_no_finished_part_and_leaves_no_process(tmp_path, small_chunks):
    rows, out = texts(160), tmp_path / "scores.parquet"
    path, script = write(tmp_path / "a.jsonl", rows), tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = shell_environment(PYTHONPATH=str(ROOT))
    process = subprocess.Popen([sys.executable, str(script), path, str(out)], cwd=ROOT, env=environment)
    parts = tmp_path / "scores.parquet.parts"
    try:
        deadline = time.monotonic() + 100
        while len(list(parts.glob("[0-9]*.json"))) < 3 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        children = _children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(children) >= 2 and not out.exists()
    finished = {one: one.stat().st_mtime_ns for one in parts.glob("[0-9]*.parquet")}
    assert len(finished) >= 3
    deadline = time.monotonic() + 30
    while any(_is_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_is_alive(child) for child in children)
    kept = part_files.finished(parts)
    scored = []
    summary = bulk_detection.run(path, str(out), job(), say=lambda report, total: scored.append(report["name"]))
    assert scored[: len(kept)] == sorted(kept) and len(scored) == 20 and summary["texts"] == 160
    assert pq.read_table(out)["p_value"].to_pylist() == expected(rows).tolist()


def _children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def _is_alive(process: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def test_an_output_is_not_written_over_unless_asked(tmp_path, small_chunks):
    path, out = write(tmp_path / "a.jsonl", texts(9)), tmp_path / "scores.csv"
    bulk_detection.run(path, str(out), job())
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"scores.csv exists; name another --output, or pass --overwrite"):
        bulk_detection.run(path, str(out), job(key=6))
    assert out.read_bytes() == before
    bulk_detection.run(path, str(out), job(key=6), overwrite=True)
    assert out.read_bytes() != before


def test_bad_lines_and_tokens_outside_the_vocabulary_are_counted_and_named(tmp_path, small_chunks):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": [1, 2, 3]}\n{"text": "\xff"}\n\n{"text": [1, 101]}\n{"text": [4]}\nnothing\n')
    summary = bulk_detection.run(str(path), str(tmp_path / "scores.jsonl"), job())
    assert (summary["texts"], summary["bad"]) == (2, 3)
    assert [one[1] for one in summary["first_bad"]] == [2, 4, 6]
    assert "token 101 is outside the vocabulary of 101" in summary["first_bad"][1][2]
    assert json.loads((tmp_path / "scores.jsonl.report.json").read_text())["bad"] == 3


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"txt": 1}\n'])
def test_a_file_without_texts_is_an_error(content, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.jsonl (is empty|holds no usable text)"):
        bulk_detection.run(str(path), str(tmp_path / "scores.jsonl"), job())
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_an_unknown_kind_of_output_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"scores.xlsx has an unknown suffix, wanted one of .parquet, .jsonl, .csv"):
        bulk_detection.run(write(tmp_path / "a.jsonl", texts(2)), str(tmp_path / "scores.xlsx"), job())


def test_keys_are_in_no_file_of_a_run(tmp_path, small_chunks, monkeypatch):
    key = 0x1234567890ABCDEF
    monkeypatch.setattr(bulk_detection.shutil, "rmtree", lambda folder: None)
    bulk_detection.run(write(tmp_path / "a.jsonl", texts(9)), str(tmp_path / "scores.jsonl"), job(key=key))
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "scores.jsonl.parts" in os.listdir(tmp_path)
    assert str(key).encode() not in found and f"{key:x}".encode() not in found.lower()


def test_one_deeply_nested_line_is_a_bad_line(tmp_path):
    path = tmp_path / "a.jsonl"
    deep = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    path.write_text('{"text": [1, 2, 3]}\n' + deep + '\n{"text": [4, 5]}\n')
    summary = bulk_detection.run(str(path), str(tmp_path / "scores.jsonl"), job())
    assert (summary["texts"], summary["bad"]) == (2, 1)
    assert summary["first_bad"][0][:2] == [str(path), 2] and "nested too deeply" in summary["first_bad"][0][2]


@pytest.mark.parametrize("kind", part_files.KINDS)
def test_an_id_that_is_no_text_is_a_bad_line(kind, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "\\ud800", "text": [1, 2]}\n{"id": {"a": [1]}, "text": [1, 2]}\n')
    summary = bulk_detection.run(str(path), str(tmp_path / f"scores.{kind}"), job())
    assert (summary["texts"], summary["bad"]) == (1, 1) and "lone surrogate" in summary["first_bad"][0][2]


def test_files_of_one_name_in_two_folders_differ_in_the_rows(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", texts(2))
    bulk_detection.run(f"{tmp_path}/*/a.jsonl", str(tmp_path / "scores.jsonl"), job())
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [f"{tmp_path}/{name}/a.jsonl" for name in ("one", "one", "two", "two")]


def test_no_usable_text_names_the_file_and_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n{broken\n")
    with pytest.raises(ValueError, match=r"1 bad lines; .*/a.jsonl line 2: not JSON"):
        bulk_detection.run(f"{tmp_path}/*.jsonl", str(tmp_path / "scores.csv"), job())


def test_an_output_that_is_an_input_is_refused_whatever_it_is_called(tmp_path):
    path = write(tmp_path / "a.jsonl", texts(3))
    write(tmp_path / "b.jsonl", texts(3))
    (tmp_path / "soft.jsonl").symlink_to(path)
    os.link(path, tmp_path / "hard.jsonl")
    before = (tmp_path / "a.jsonl").read_bytes()
    for output in ("a.jsonl", "soft.jsonl", "hard.jsonl"):
        for pattern in (path, f"{tmp_path}/[ab].jsonl"):
            with pytest.raises(ValueError, match=rf"--output=.*{output} is the input .*a.jsonl, which would be lost"):
                bulk_detection.run(pattern, str(tmp_path / output), job(), overwrite=True)
    assert (tmp_path / "a.jsonl").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "b.jsonl", "hard.jsonl", "soft.jsonl"]


def test_a_run_goes_on_also_where_the_pattern_finds_its_parts_and_where_it_replaces(
    tmp_path, small_chunks, monkeypatch
):
    path, out = write(tmp_path / "a.jsonl", texts(45)), tmp_path / "scores.jsonl"
    pattern, real, done = f"{tmp_path}/**/*.jsonl", bulk_detection.Worker.__call__, []

    def dies(self, chunk):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(chunk.name)
        return real(self, chunk)

    monkeypatch.setattr(bulk_detection.Worker, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        bulk_detection.run(pattern, str(out), job(), overwrite=True)
    monkeypatch.setattr(
        bulk_detection.Worker, "__call__", lambda self, chunk: done.append(chunk.name) or real(self, chunk)
    )
    assert bulk_detection.run(pattern, str(out), job(), overwrite=True)["texts"] == 45
    assert done == [f"00000-{i:07d}" for i in range(6)]
    with pytest.raises(ValueError, match="is the input"):
        bulk_detection.run(pattern, str(out), job(), overwrite=True)
    assert path


def test_a_folder_of_someone_else_in_the_place_of_the_parts_is_not_touched(tmp_path):
    path, parts = write(tmp_path / "a.jsonl", texts(3)), tmp_path / "scores.csv.parts"
    parts.mkdir()
    (parts / "mine").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="scores.csv.parts is in the way and was not made by this command"):
            bulk_detection.run(path, str(tmp_path / "scores.csv"), job(), overwrite=overwrite)
    assert (parts / "mine").read_text() == "mine"


def test_an_output_that_another_process_writes_is_refused_and_its_parts_are_not_touched(tmp_path):
    path, out = write(tmp_path / "a.jsonl", texts(3)), tmp_path / "scores.csv"
    with store.alone(out):
        with pytest.raises(ValueError, match=r"another process writes .*scores\.csv; wait for its end"):
            bulk_detection.run(path, str(out), job())
        assert sorted(each.name for each in tmp_path.iterdir()) == [".scores.csv.writing", "a.jsonl"]
    assert bulk_detection.run(path, str(out), job())["texts"] == 3


def test_an_output_that_appeared_meanwhile_is_not_replaced_and_the_parts_are_kept(tmp_path):
    path, out = write(tmp_path / "a.jsonl", texts(3)), tmp_path / "scores.csv"
    with pytest.raises(ValueError, match=r"scores\.csv exists"):
        bulk_detection.run(path, str(out), job(), say=lambda report, total_bytes: out.write_text("mine"))
    assert out.read_text() == "mine" and (tmp_path / "scores.csv.parts").is_dir()


def test_a_csv_file_keeps_ids_and_names_of_any_characters(tmp_path):
    ids = ["a\rb", '",\n', "\u2028", "c\r\n"]
    lines_of_ids = (json.dumps({"id": each, "text": [1, 2, 3]}) + "\n" for each in ids)
    (tmp_path / "a.jsonl").write_text("".join(lines_of_ids))
    candidates = (identify.Candidate('a,"b"', parse_scheme("kgw"), Key(5)), *job("gumbel").candidates)
    bulk_detection.run(
        str(tmp_path / "a.jsonl"), str(tmp_path / "scores.csv"), bulk_detection.Job(candidates, vocab_size=VOCAB)
    )
    with open(tmp_path / "scores.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ids
    assert all(float(row['p_a,"b"']) == expected([[1, 2, 3]])[0] and float(row["p_gumbel"]) <= 1 for row in rows)


def test_a_candidate_whose_column_would_be_the_familys_is_refused(tmp_path):
    path, candidate = write(tmp_path / "a.jsonl", texts(3)), identify.Candidate("value", parse_scheme("kgw"), Key(5))
    family = bulk_detection.Job((candidate, *job("gumbel").candidates), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="'value' would have the column p_value"):
        bulk_detection.run(path, str(tmp_path / "scores.csv"), family)
    bulk_detection.run(path, str(tmp_path / "scores.csv"), bulk_detection.Job((candidate,), vocab_size=VOCAB))


def test_a_prompt_field_that_no_line_has_is_said(tmp_path):
    rows = [{"text": [1, 2, 3, 4], "prompt_tokens": 2}, {"text": [5, 6]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, is_said in (("prompt_tokens", False), ("prompt_token", True), (None, False)):
        screen, output = io.StringIO(), str(tmp_path / f"{name}.jsonl")
        how = {"level": 0.01, "console": rich.console.Console(file=screen)}
        commands.detect_file(str(tmp_path / "a.jsonl"), output, job(prompt_field=name), **how)
        assert ("under --prompt_field=prompt_token, so that every token" in screen.getvalue()) == is_said
