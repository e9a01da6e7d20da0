"""Runs of other tools and committed results become runs of the history, with their own units."""

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from jaxbench.measure.records import Record, RecordFile, Workload
from jaxbench.regress import imported, metrics, report
from jaxbench.regress.history import History
from jaxbench.regress.site import content

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
        {"commit": {"id": "a" * 40, "message": "One\n\nbody"}, "date": 1763632800000, "tool": "cargo",
         "benches": [{"name": "x", "value": 3, "unit": "ns/iter"}, {"name": "y", "value": 7.5, "unit": "MB/s"}]},
        {"commit": {"id": "b" * 40}, "date": 1763719200000, "tool": "customBiggerIsBetter",
         "benches": [{"name": "z", "value": 1, "unit": "points"}]},
    ]},
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"commit": "abc1234+ (detection: f00)", "host": "h", "cpu": "A CPU", "threads": 2, "versions": {"jax": "1"}}


def test_a_file_of_pytest_benchmark_is_one_run(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(PYTEST))
    [run] = imported.read_runs(tmp_path / "b.json", "pytest-benchmark")
    assert run["time_utc"] == "2026-11-20T08:00:00+00:00" and run["sides"]["head"]["commit"] == "0123456789ab"
    assert run["series"]["tests/a.py::test_a"]["head"] == {"median": 2.0, "launches": [1.0, 2.0, 9.0]}
    assert run["series"]["tests/a.py::test_b"]["head"]["median"] == 0.5 and run["machine"]["cpu"] == "A CPU"
    assert metrics.of_run(run, "tests/a.py::test_b") == metrics.Metric("s", False, "noted")
    assert report.table(run).row_count == 2


def test_tests_of_pytest_that_differ_in_their_parameters_are_told_apart_in_a_table(tmp_path):
    names = ["a.py::test_a[small]", "a.py::test_a[/large]"]
    (tmp_path / "b.json").write_text(json.dumps(PYTEST | {"benchmarks": [
        {"fullname": name, "stats": {"median": 2.0}} for name in names
    ]}))  # fmt: skip
    [run] = imported.read_runs(tmp_path / "b.json", "pytest-benchmark")
    screen = Console(width=200, file=io.StringIO())
    screen.print(report.table(run))
    assert all(name in screen.file.getvalue() for name in names)


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


def test_a_tool_that_says_which_direction_is_better_is_believed_whatever_the_unit(tmp_path):
    bench = [{"name": "dropped", "value": 3, "unit": "frames/s"}]
    entry = {"commit": {"id": "a" * 40}, "date": 1764000000000, "benches": bench}
    directions = {}
    for tool in ("customSmallerIsBetter", "customBiggerIsBetter", "cargo"):
        (tmp_path / "data.js").write_text(json.dumps({"entries": {"S": [entry | {"tool": tool}]}}))
        [run] = imported.read_runs(tmp_path / "data.js", "github-action-benchmark")
        directions[tool] = run["units"]["dropped"][1]
    assert directions == {"customSmallerIsBetter": False, "customBiggerIsBetter": True, "cargo": True}


def test_two_benchmarks_of_one_name_are_refused_and_none_is_lost_in_silence(tmp_path):
    entry = {"commit": {"id": "a" * 40}, "date": 1764000000000, "tool": "customSmallerIsBetter"}
    entry["benches"] = [{"name": "x", "value": value, "unit": "s"} for value in (1, 2)]
    (tmp_path / "data.js").write_text(json.dumps({"entries": {"S": [entry]}}))
    with pytest.raises(ValueError, match="S: a{12} has two benchmarks of the name x"):
        imported.read_runs(tmp_path / "data.js", "github-action-benchmark")


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
        Record(metric="load_s", value=9.0, unit="s", arm="flax", launch=1, **about),  # of a launch that was cut off
        Record(metric="launch_begun", value=1.0, unit="count", launch=1, **about),
        *(Record(metric="decode_tokens_per_s", value=v, unit="tokens/s", arm="flax", workload=decode, launch=i, **about)
          for i, v in ((1, 90.0), (2, 110.0))),
        Record(metric="train_mfu", value=0.5, unit="share", arm="flax", launch=1, **about),
        Record(metric="load_s", value=None, status="error", reason="no", arm="flax", launch=1, **about),
    ]  # fmt: skip
    RecordFile(tmp_path / "results.jsonl").append(*rows)
    [run] = imported.read_runs(tmp_path / "results.jsonl", "comparison")
    name = "flax.decode-float32-b1-p64-n48.decode_tokens_per_s"
    assert set(run["series"]) == {name, "flax.train_mfu"} and run["units"]["flax.train_mfu"] == ["share", True]
    assert run["series"][name]["head"] == {"median": 100.0, "launches": [90.0, 110.0]}
    assert run["units"][name] == ["tokens/s", True] and run["parity"][0]["gates"] == [gate]


@pytest.mark.parametrize("format", imported.FORMATS)
@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"entries": 3}', "\x00"])
def test_a_file_that_is_none_is_named(tmp_path, format, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=rf"--input=.*x (is no file|holds no run) of {format}"):
        imported.read_runs(tmp_path / "x", format)


def folder_of(tmp_path, **files):
    """Return a dated folder with these files; underscores in their names stand for dots."""
    folder = tmp_path / "2026-11-20-speed"
    folder.mkdir()
    for name, given in files.items():
        text = given if isinstance(given, str) else json.dumps(given)
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def medians(run):
    """Return the median of each series of a run."""
    return {name: each["head"]["median"] for name, each in run["series"].items()}


def test_the_numbers_of_a_folder_are_a_run_of_its_day_and_commit(tmp_path):
    table = {
        "about": ABOUT, "settings": {"rounds": 3}, "passed": True, "config_id": "0123abcd4567", "load_s": 2,
        "rates": [
            {"arm": "flax", "length": 8, "tokens_per_s": 5.5, "peak_bytes": 9, "samples": [1, 2], "finite": True},
            {"arm": "flax", "length": 16, "tokens_per_s": 7.5, "peak_bytes": 9, "bar": 3},
            {"arm": "torch", "length": 8, "tokens_per_s": float("nan"), "peak_bytes": None},
        ],
        "first_s": {"p50": 0.5, "p90": 1.5}, "ratio": [1.5, 1.25, 2.0],
    }  # fmt: skip
    folder = folder_of(tmp_path, a_json=table, readme_md="12", empty_jsonl="")
    [run] = imported.read_runs(folder, "figures")
    assert medians(run) == {
        "a.load_s": 2, "a.rates.flax,length=8.tokens_per_s": 5.5, "a.rates.flax,length=8.peak_bytes": 9,
        "a.rates.flax,length=16.tokens_per_s": 7.5, "a.rates.flax,length=16.peak_bytes": 9,
        "a.first_s.p50": 0.5, "a.first_s.p90": 1.5, "a.ratio": 1.5, "a.ratio.low": 1.25, "a.ratio.high": 2,
    }  # fmt: skip
    assert run["units"]["a.rates.flax,length=8.tokens_per_s"] == ["tokens/s", True]
    assert run["units"]["a.first_s.p90"] == ["s", False] and run["units"]["a.ratio.low"] == ["ratio", None]
    assert run["time_utc"] == "2026-11-20T00:00:00+00:00" and run["sides"]["head"]["commit"] == "abc1234+"
    assert (run["host"], run["machine"]["cpu"], run["suite_id"], run["device"]) == ("h", "A CPU", "speed", "cpu")
    assert run["notes"] == ["imported from 2026-11-20-speed: a.json"] and run["findings"] == []
    history = History(tmp_path / "h")
    history.add(run)
    assert history.verify() == {} and report.table(run).row_count == 10
    [point] = history.points("a.load_s", host="h", device="cpu")
    assert point.commit == "abc1234+" and len(content.gather(history).series) == 10


@pytest.mark.parametrize(
    ("key", "unit", "is_better"),
    [
        ("tokens_a_second", "tokens/s", True), ("texts_per_cpu_s", "texts/s", True), ("seconds", "s", False),
        ("documents_a_minute", "documents/min", True), ("wall_s_a_response", "s", False), ("added_ms", "ms", False),
        ("peak_mb", "MB", False), ("bits_per_byte_low", "bits", None), ("share_ended", "share", None),
        ("flops_per_token", "FLOP", None), ("accuracy", "", None), ("2_bits", "", None),
    ],
)  # fmt: skip
def test_the_end_of_a_key_says_the_unit_and_only_some_units_what_is_better(tmp_path, key, unit, is_better):
    [run] = imported.read_runs(folder_of(tmp_path, x_json={key: 1.0}), "figures")
    assert run["units"] == {f"x.{key}": [unit, is_better]}


def test_a_row_that_says_its_unit_is_believed(tmp_path):
    row = {"metric": "tpu_mfu", "value": 0.5, "unit": "share", "device": "v5e", "time_utc": "2026-11-21T20:42:51+00:00"}
    [run] = imported.read_runs(folder_of(tmp_path, tpu_jsonl=json.dumps(row) + "\n"), "figures")
    assert run["units"] == {"tpu.tpu_mfu,v5e.value": ["share", None]}


def test_what_was_measured_again_is_one_series_with_launches(tmp_path):
    rows = [{"arm": "a", "seed": seed, "loss": float(seed)} for seed in (1, 2, 6)]
    folder = folder_of(tmp_path, x_json={"seconds": {"load, a": [3, 1, 2, 9]}, "rows": rows, "many": list(range(21))})
    [run] = imported.read_runs(folder, "figures")
    assert run["series"] == {
        "x.seconds.load, a": {"head": {"median": 2.5, "launches": [3, 1, 2, 9]}},
        "x.rows.a.loss": {"head": {"median": 2, "launches": [1, 2, 6]}},
        "x.many": {"head": {"median": 10, "launches": [10]}},
    }
    assert run["units"]["x.seconds.load, a"] == ["s", False]


def test_rows_that_nothing_tells_apart_are_numbered(tmp_path):
    rows = [{"arm": "a", "loss": 0.5}, {"arm": "a", "loss": 0.75}]
    [run] = imported.read_runs(folder_of(tmp_path, x_json={"rows": rows}), "figures")
    assert medians(run) == {"x.rows.a,0.loss": 0.5, "x.rows.a,1.loss": 0.75}


def test_seeds_do_not_stand_for_what_was_varied_with_them(tmp_path):
    rows = [{"factor": 2, "seed": 0, "part": 1, "loss": 0.5}, {"factor": 4, "seed": 1, "part": 1, "loss": 0.75}]
    [run] = imported.read_runs(folder_of(tmp_path, x_json=rows), "figures")
    assert medians(run) == {"x.factor=2.loss": 0.5, "x.factor=4.loss": 0.75}


def test_of_steps_and_curves_the_last_is_kept(tmp_path):
    lines = "".join(json.dumps({"step": i, "loss": 9.0 - i, "held_out": {"bits_per_byte": 2.5}}) + "\n" for i in (1, 2))
    folder = folder_of(tmp_path, training_jsonl=lines, x_json={"loss_every_100": [5, 4, 3, 2.0]})
    [run] = imported.read_runs(folder, "figures")
    assert medians(run) == {"training.loss": 7, "training.held_out.bits_per_byte": 2.5, "x.loss_every_100": 2}


def test_a_csv_file_is_read_where_no_json_has_the_figures(tmp_path):
    table = "scheme,attack,tokens,rate_s,config_id\nkgw,,25,0.5,88dc86961459\nkgw,cut,25,,88dc86961459\n"
    folder = folder_of(tmp_path, results_csv=table, environment_json=ABOUT)
    [run] = imported.read_runs(folder, "figures")
    assert medians(run) == {"results.kgw.tokens": 25, "results.kgw,cut.tokens": 25, "results.kgw.rate_s": 0.5}
    (folder / "summary.json").write_text('{"load_s": 1}')
    [run] = imported.read_runs(folder, "figures")
    assert medians(run) == {"summary.load_s": 1} and run["host"] == "h"
    [run] = imported.read_runs(folder / "results.csv", "figures")
    assert len(run["series"]) == 3 and run["time_utc"][:10] == "2026-11-20"


def test_texts_of_a_csv_file_are_windows_of_one_figure(tmp_path):
    table = "file,line,num_tokens,score\n" + "".join(f"a.jsonl,{i},{200 - i % 2},{i}\n" for i in range(1, 30))
    [run] = imported.read_runs(folder_of(tmp_path, bf16_csv=table), "figures")
    assert medians(run) == {"bf16.num_tokens": 199, "bf16.score": 15}


def test_files_of_two_commits_are_two_runs_and_one_that_names_none_is_unknown(tmp_path):
    parts = {"a_json": {"about": {"machine": ABOUT}, "x": 1}, "b_json": {"x": 2}}
    other = {"environment": ABOUT | {"commit": "def", "host": "-", "nvidia_smi": ["H200"]}, "x": 3}
    folder = folder_of(tmp_path, **parts, c_json=other)
    runs = imported.read_runs(folder, "figures")
    found = [(run["sides"]["head"]["commit"], run["host"], run["device"], *run["series"]) for run in runs]
    assert found == [
        ("abc1234+", "h", "cpu", "a.x"), ("unknown", "unknown", "cpu", "b.x"), ("def", "unknown", "gpu", "c.x")
    ]  # fmt: skip


def test_a_folder_without_a_date_has_the_time_of_its_files(tmp_path):
    (tmp_path / "x.json").write_text('{"a": {"b": 10000000000000000, "c": "1"}}')
    os.utime(tmp_path / "x.json", (1e9, 1e9))
    [run] = imported.read_runs(tmp_path, "figures")
    assert run["time_utc"] == "2001-09-09T01:46:40+00:00" and medians(run) == {"x.a.b": 1e16}


def test_records_of_a_comparison_are_its_runs_whichever_format_reads_them(tmp_path):
    about = {"run_id": "r", "commit": "abc", "time_utc": "2026-11-20T10:00:00+00:00", "unit": "s", "metric": "load_s"}
    folder = folder_of(tmp_path, results_csv="a\n1\n", suite_json={"suite": {"seed": 0}}, environment_json=ABOUT)
    RecordFile(folder / "results.jsonl").append(
        Record(value=1.0, arm="flax", config_id="c", **about), Record(value=2.0, arm="flax", config_id="d", **about)
    )
    runs = imported.read_runs(folder, "figures")
    assert runs == imported.read_runs(folder / "results.jsonl", "comparison")
    assert medians(runs[0]) == {"c.flax.load_s": 1, "d.flax.load_s": 2} and runs[0]["host"] == "h"
    (folder / "results.jsonl").write_text('{"arm": "flax", "seconds": 3}\n{"arm": "torch", "seconds": 4}\n')
    [run] = imported.read_runs(folder, "figures")
    assert medians(run) == {"results.flax.seconds": 3, "results.torch.seconds": 4}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "holds no run of figures"),
        ({"a_md": "1", "a_json": '{"settings": {"x": 1}, "b": true}'}, "holds no run of figures"),
        ({"a_json": "[1, 2]"}, "holds no run of figures"),
        ({"good_json": '{"x": 1}', "bad_json": '{"x": 1'}, "bad.json is damaged: Expecting"),
        ({"a_json": "\xff"}, "a.json is damaged: Expecting value"),
        ({"a_json": "[" * 100_000}, "RecursionError"),
        ({"a_jsonl": '{"x": 1}\n{"x": \n'}, "a.jsonl is damaged: line 2 is no JSON"),
        ({"results_jsonl": '{"metric": "a"\n{"metric": "b"}\n'}, "results.jsonl is damaged: line 1 is no JSON"),
        ({"a_csv": "x,y\n1,2,3\n"}, "a.csv is damaged: row 1 has more fields than the header"),
    ],
)
def test_a_folder_that_is_damaged_or_holds_no_figures_is_named(tmp_path, files, wanted):
    folder = folder_of(tmp_path, **files)
    with pytest.raises(ValueError, match=f"--input={re.escape(str(folder))} .*{re.escape(wanted)}") as raised:
        imported.read_runs(folder, "figures")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("2026-11-21-watermark", "power.cells.kgw,num_tokens=25,level=0.01,sees_prompt=True.rate.value"),
        ("2026-11-23-sparsity", "speed.rows.feed-forward, 1 tokens,dense.ratio"),
        ("2026-11-23-startup", "startup.seconds.first token, llama-bench"),
        ("2026-11-26-compressor", "quality.rows.ratio=8.direct_nats.full"),
        ("2026-11-26-gpu-h200", "decode_turned.flax.decode-bfloat16-b1-p64-n128.decode_tokens_per_s"),
    ],
)
def test_a_committed_result_is_imported(name, series):
    runs = imported.read_runs(ROOT / "experiments/results" / name, "figures")
    assert sum(series in run["series"] for run in runs) == 1
    assert all(run["time_utc"].startswith(name[:10]) for run in runs) and sum(len(run["series"]) for run in runs) < 4000
