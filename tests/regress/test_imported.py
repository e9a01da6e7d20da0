"""Runs of other tools become runs of the history, with their own units."""

import json

import pytest

from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.regress import imported, metrics, report
from jaxbench.regress.history import History

PYTEST = {
    "machine_info": {"node": "n", "machine": "x86_64", "cpu": {"brand_raw": "A CPU"}},
    "commit_info": {"id": "0123456789abcdef0123"}, "datetime": "2026-11-20T10:00:00.123456+02:00",
    "benchmarks": [
        {"fullname": "tests/a.py::test_a", "stats": {"median": 2.0, "data": [1.0, 2.0, 9.0]}},
        {"fullname": "tests/a.py::test_b", "stats": {"median": 0.5}},
    ],
}  # fmt: skip
ACTION = {
    "lastUpdate": 1, "repoUrl": "https://example.org",
    "entries": {"Rust": [
        {"commit": {"id": "a" * 40, "message": "One\n\nbody"}, "date": 1763632800000, "tool": "customSmallerIsBetter",
         "benches": [{"name": "x", "value": 3, "unit": "ns/iter"}, {"name": "y", "value": 7.5, "unit": "MB/s"}]},
        {"commit": {"id": "b" * 40}, "date": 1763719200000, "tool": "customBiggerIsBetter",
         "benches": [{"name": "z", "value": 1, "unit": "points"}]},
    ]},
}  # fmt: skip


def test_a_file_of_pytest_benchmark_is_one_run(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(PYTEST))
    [run] = imported.read_runs(tmp_path / "b.json", "pytest-benchmark")
    assert run["time_utc"] == "2026-11-20T08:00:00+00:00" and run["sides"]["head"]["commit"] == "0123456789ab"
    assert run["series"]["tests/a.py::test_a"]["head"] == {"median": 2.0, "launches": [1.0, 2.0, 9.0]}
    assert run["series"]["tests/a.py::test_b"]["head"]["median"] == 0.5 and run["machine"]["cpu"] == "A CPU"
    assert metrics.of_run(run, "tests/a.py::test_b") == metrics.Metric("s", False, "noted")
    assert report.table(run).row_count == 2


@pytest.mark.parametrize("prefix", ["", "window.BENCHMARK_DATA = "])
def test_a_file_of_github_action_benchmark_is_a_run_a_commit(tmp_path, prefix):
    (tmp_path / "data.js").write_text(prefix + json.dumps(ACTION) + (";" if prefix else ""))
    first, second = imported.read_runs(tmp_path / "data.js", "github-action-benchmark")
    assert (
        first["sides"]["head"] == {"commit": "a" * 12, "subject": "One"} and second["sides"]["head"]["subject"] == " "
    )
    assert first["units"] == {"x": ["ns/iter", False], "y": ["MB/s", True]} and second["units"] == {
        "z": ["points", True]
    }
    assert first["host"] == second["host"] and first["time_utc"] < second["time_utc"]
    history = History(tmp_path / "h")
    for run in (first, second, first):
        history.add(run)
    assert len(history.list()) == 2 and history.verify() == {}
    [point] = history.points("y", host=first["host"], device="cpu")
    assert (point.commit, point.median) == ("a" * 12, 7.5)
    assert [row["series"] for row in history.every_point()] == ["x", "y", "z"]


def test_a_comparison_is_a_run_with_its_parity(tmp_path):
    about = {
        "run_id": "r",
        "config_id": "c",
        "device": "cpu",
        "host": "h",
        "commit": "abc",
        "time_utc": "2026-11-20T10:00:00+00:00",
    }
    decode = Workload(kind="decode", dtype="float32", batch=1, prompt_tokens=64, new_tokens=48)
    gate = {"id": "P1", "what": "layer", "passed": True, "error": 1e-15, "limit": 1e-9, "where": "", "note": ""}
    detail = {"case": "transformer/smollm2", "backend": "flax", "passed": True, "worst": 0, "gates": [gate]}
    rows = [
        Record(metric="run", detail={}, **about),
        Record(metric="parity", value=1e-15, arm="flax", detail=detail, **about),
        *(Record(metric="decode_tokens_per_s", value=v, unit="tokens/s", arm="flax", workload=decode, launch=i, **about)
          for i, v in ((1, 90.0), (2, 110.0))),
        Record(metric="load_s", value=None, status="error", reason="no", arm="flax", launch=1, **about),
    ]  # fmt: skip
    RecordFile(tmp_path / "results.jsonl").append(*rows)
    [run] = imported.read_runs(tmp_path / "results.jsonl", "comparison")
    name = "flax.decode-float32-b1-p64-n48.decode_tokens_per_s"
    assert set(run["series"]) == {name} and run["series"][name]["head"] == {"median": 100.0, "launches": [90.0, 110.0]}
    assert run["units"][name] == ["tokens/s", True] and run["parity"][0]["gates"] == [gate]


@pytest.mark.parametrize("format", imported.FORMATS)
@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"entries": 3}', "\x00"])
def test_a_file_that_is_none_is_named(tmp_path, format, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=rf"--input=.*x (is no file|holds no run) of {format}"):
        imported.read_runs(tmp_path / "x", format)
