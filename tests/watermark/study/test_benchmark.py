"""The watermark benchmark: its cases, its numbers and its files, on records made up here and on one tiny real run."""

import json
import math
from pathlib import Path

import pytest

from jaxbench import config
from jaxbench.generation import decoder
from jaxbench.measure import worker
from jaxbench.pretrained import weights
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.watermark.study import benchmark, benchmark_config, benchmark_report, evaluate_models

ROOT = Path(__file__).resolve().parents[3]
KGW = {"scheme": "kgw", "gamma": 0.25, "context": {"kind": "left", "width": 1}}


def detection(arm: str, scheme: dict, part: str, launch: int, seconds: list[float], *, texts: int, batch_size: int = 1):
    case = {"scheme": scheme, "part": part, "batch_size": batch_size}
    found = {"seconds": seconds, "cpu_seconds": [0.5 * s for s in seconds], "texts": texts}
    return {"kind": "detection", "arm": arm, "launch": launch, "case": case, **found}


def pair_of_launches() -> list[dict]:
    """Return records in which jax is 100 and 400 times as fast as MarkLLM."""
    peer = benchmark.MARKLLM_KGW
    return [
        detection("jax", KGW, "text", 0, [0.1, 0.1, 9.0], texts=100, batch_size=100),
        detection("jax", KGW, "text", 1, [0.025], texts=100, batch_size=100),
        detection("markllm", peer, "text", 0, [1.0], texts=10),
        detection("markllm", peer, "text", 1, [1.0], texts=10),
    ]


def test_rates_are_medians_of_a_launch_and_means_of_logs_over_launches():
    summary = benchmark_report.summarise(pair_of_launches(), {}, {})
    row = next(row for row in summary["rates"] if row["arm"] == "jax")
    assert row["texts_per_s"] == pytest.approx(2000.0)  # 1000 and 4000 texts a second
    assert row["texts_per_cpu_s"] == pytest.approx(4000.0)
    assert row["low"] < 1000 and row["high"] > 4000
    assert row["bar"] == 3000.0


def test_ratios_are_of_the_same_launch_and_carry_their_bar():
    (row,) = benchmark_report.summarise(pair_of_launches(), {}, {})["ratios"]
    assert row["ratio"] == pytest.approx(200.0)
    assert (row["arm"], row["peer"], row["part"], row["bar"]) == ("jax", "markllm KGW", "text", 80.0)


def test_ratios_without_the_peer_are_left_out():
    records = [row for row in pair_of_launches() if row["arm"] == "jax"]
    assert benchmark_report.summarise(records, {}, {})["ratios"] == []


def test_only_the_largest_calls_are_compared_with_peers():
    records = pair_of_launches() + [detection("jax", KGW, "text", 0, [1.0], texts=1, batch_size=1)]
    assert len(benchmark_report.summarise(records, {}, {})["ratios"]) == 1


def test_overhead_is_the_loops_difference_over_the_plain_step():
    record = {
        "kind": "generation",
        "scheme": KGW,
        "batch_size": 8,
        "plain_step": [0.010, 0.011, 0.010],
        "marked_step": [0.0102, 0.01122, 0.0102],
        "plain_loop": [0.001, 0.001, 0.002],
        "marked_loop": [0.0013, 0.0013, 0.0023],
    }
    (row,) = benchmark_report.summarise([record], {}, {})["overhead"]
    assert row["added_ms"] == pytest.approx(0.3)
    assert row["overhead"] == pytest.approx(0.03)
    assert row["bar"] == 0.02
    assert row["end_to_end"] == pytest.approx(0.02)
    assert row["end_to_end_low"] == pytest.approx(0.02) and row["end_to_end_high"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("scheme", "bar"),
    [
        ({"scheme": "kgw", "context": {"kind": "min", "width": 4}}, 0.02),
        ({"scheme": "kgw", "context": {"kind": "self", "width": 4}}, 0.10),
        ({"scheme": "kgw", "context": {"kind": "skip", "width": 4}}, None),
        ({"scheme": "unigram"}, 0.02),
        ({"scheme": "synthid", "context": {"kind": "left", "width": 4}}, 0.05),
        ({"scheme": "dip", "context": {"kind": "left", "width": 4}}, None),
    ],
)
def test_bars_of_overhead_are_those_of_the_plan(scheme, bar):
    assert benchmark_report.overhead_bar(scheme) == bar


def test_verdicts_count_texts_with_equal_counts():
    same = {"green": 30.0, "scored": 99.0}
    theirs = {**same, "z": 5.0, "is_marked": True}
    ours = {**same, "z": 5.0, "p_value": 1e-6}
    rows = [
        {"kind": "verdict", "author": "markllm", "theirs": theirs, "ours": ours},
        {"kind": "verdict", "author": "human", "theirs": theirs, "ours": {**ours, "green": 29.0, "z": 1.0}},
    ]
    marked, human = benchmark_report.summarise(rows, {}, {})["verdicts"]
    assert (marked["written by"], marked["equal counts"], marked["jaxbench: z > 4"]) == ("markllm", 1, 1)
    assert (human["written by"], human["equal counts"], human["jaxbench: z > 4"]) == ("human", 0, 0)
    assert human["MarkLLM: z > 4"] == 1


def test_files_hold_every_number(tmp_path, capsys):
    summary = benchmark_report.summarise(pair_of_launches(), {}, {"missing": {"transformers": "not installed"}})
    benchmark_report.write(summary, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    lines = (tmp_path / "benchmark.csv").read_text().splitlines()
    assert len(lines) == 1 + len(summary["rates"]) + len(summary["ratios"])
    page = (tmp_path / "report.html").read_text()
    assert "Against peers in the same run" in page and "transformers was left out: not installed" in page
    assert "80 reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratio", "low", "high", "shown"),
    [
        (200.0, 90.0, 400.0, "80 reached"),
        (200.0, 20.0, 2000.0, "80 reached, not by the interval"),
        (60.0, 50.0, 70.0, "80 MISSED"),
        (60.0, 20.0, 180.0, "80 MISSED, not by the interval"),
    ],
)
def test_a_bar_inside_the_interval_is_said_to_be_undecided(ratio, low, high, shown):
    (row,) = benchmark_report.summarise(pair_of_launches(), {}, {})["ratios"]
    row |= {"ratio": ratio, "low": low, "high": high}
    assert benchmark_report._cells(row, benchmark_report.SHOWN["ratios"])["wanted"] == shown


def test_a_single_launch_has_no_interval_and_no_crash(tmp_path):
    records = [row for row in pair_of_launches() if row["launch"] == 0]
    summary = benchmark_report.summarise(records, {}, {})
    assert math.isinf(summary["ratios"][0]["high"])
    benchmark_report.write(summary, tmp_path)


def test_every_scheme_is_measured_with_and_without_tokenising():
    settings = config.load(ROOT / "configs/watermark/benchmark.yaml", (), benchmark.Benchmark).detection
    found = benchmark.cases("numpy", settings)
    for scheme in settings.schemes:
        parts = {case["part"] for case in found if case["scheme"] == scheme.model_dump(mode="json")}
        assert {"ids", "text", "evidence", "statistics"} <= parts
    assert {case["batch_size"] for case in found if case["part"] == "ids"} == set(settings.batch_sizes)
    assert [case["part"] for case in found].count("identify") == 1
    names = [benchmark_report.label(scheme.model_dump()) for scheme in settings.schemes]
    assert len(set(names)) == len(names)


def test_texts_have_exactly_so_many_tokens():
    tokenizer = load_tokenizer("default")
    documents = ["The quick brown fox jumps over the lazy dog. " * 40]
    texts, ids = benchmark.cut_texts(tokenizer, documents, 6, 50)
    assert [len(row) for row in ids] == [50] * 6
    assert len(set(texts)) > 1
    with pytest.raises(ValueError, match="too few for 5000 texts of 50"):
        benchmark.cut_texts(tokenizer, documents, 5000, 50)


def tiny(**changes):
    own = {
        "schemes": [KGW], "engines": ["numpy"], "texts": 8, "text_tokens": 32, "batch_sizes": [8], "slow_peer_texts": 1,
        "fast_peer_texts": 1, "identify_keys": 2, "rounds": 1, "repeats": 1,
    }  # fmt: skip
    return benchmark.Benchmark(launches=1, detection=own | changes)


def test_a_tiny_run_measures_resumes_and_names_a_missing_peer_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.process, "PEERS", tmp_path / "none")
    monkeypatch.chdir(tmp_path)  # workers run in another folder
    summary = benchmark.run(tiny(), "out")
    parts = {row["part"] for row in summary["rates"] if row["arm"] == "numpy"}
    assert {"ids", "text", "tokenise", "split", "evidence", "statistics", "identify"} <= parts
    assert "make peers" in summary["about"]["missing"]["markllm"]
    assert {row["peer"] for row in summary["ratios"]} == {"transformers WatermarkDetector"}
    before = (tmp_path / "out/records.jsonl").read_text()
    again = benchmark.run(tiny(), "out")
    assert (tmp_path / "out/records.jsonl").read_text() == before
    assert again["about"]["missing"] == summary["about"]["missing"]


def test_memory_is_of_a_process_for_each_scheme_and_batch_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.process, "PEERS", tmp_path / "none")
    memory = {"schemes": [KGW], "engines": ["numpy"], "batch_sizes": [8, 1], "text_tokens": 32}
    settings = benchmark.Benchmark(memory=memory)
    summary = benchmark.run(settings, tmp_path)
    assert [(row["arm"], row["scheme"], row["part"], row["batch_size"]) for row in summary["memory"]] == [
        ("numpy", "kgw-left1", "text", 1), ("numpy", "kgw-left1", "text", 8), ("numpy", "kgw-left1", "identify", 8),
        ("transformers", "transformers", "text", 1),
    ]  # fmt: skip
    for row in summary["memory"]:
        assert 10 < row["held_mb"] <= row["peak_mb"] < 4000 and row["steady_mb"] <= row["peak_mb"]
    assert "make peers" in summary["about"]["missing"]["markllm"]
    assert "Detection, memory of a process" in capsys.readouterr().out
    before = (tmp_path / "records.jsonl").read_text()
    assert benchmark.run(settings, tmp_path)["memory"] == summary["memory"]
    assert (tmp_path / "records.jsonl").read_text() == before


def test_memory_is_measured_for_every_scheme_and_batch_size_of_the_configuration():
    settings = config.load(ROOT / "configs/watermark/benchmark.yaml", (), benchmark.Benchmark).memory
    found = benchmark.memory_cases("jax", settings)
    texts = [(benchmark_report.label(case["scheme"]), case["batch_size"]) for case in found if case["part"] == "text"]
    names = [benchmark_report.label(scheme.model_dump()) for scheme in settings.schemes]
    assert texts == [(name, size) for name in names for size in settings.batch_sizes]
    assert [case["part"] for case in found[len(texts) :]] == ["identify", "neural"]


def test_memory_is_a_column_of_the_rates_of_the_same_case():
    record = {"kind": "memory", "arm": "jax", "held_bytes": 2e8, "peak_bytes": 3e8, "steady_bytes": 25e7}
    case = {"scheme": KGW, "part": "text", "batch_size": 100}
    records = [*pair_of_launches(), record | {"case": case}, record | {"case": case | {"batch_size": 1}}]
    summary = benchmark_report.summarise(records, {}, {})
    assert {row["arm"]: row["peak_mb"] for row in summary["rates"]} == {"jax": 300.0, "markllm": None}
    assert [(row["batch_size"], row["held_mb"], row["steady_mb"]) for row in summary["memory"]] == [
        (100, 200.0, 250.0),
        (1, 200.0, 250.0),
    ]


def test_a_second_call_that_frees_has_a_lower_peak_than_the_first_that_built():
    size, held = 64 * 2**20, []
    before = worker.resident_bytes()

    def build_once() -> None:
        if not held:
            held.append(True)
            bytearray(b"x" * size)  # two copies for a moment, then none

    found = worker.peaks(build_once)
    assert found["peak_bytes"] > before + size
    assert found["steady_bytes"] < found["peak_bytes"] - size


def test_rates_without_memory_have_no_such_column():
    rates = benchmark_report.summarise(pair_of_launches(), {}, {})
    shown = [table for table in benchmark_report.tables(rates) if hasattr(table, "columns")]
    assert all("peak memory" not in [column.header for column in table.columns] for table in shown)


def test_a_folder_of_another_configuration_lends_no_texts_and_no_tokenizer(tmp_path):
    few, more = tiny(), tiny(texts=12, text_tokens=40)
    for settings, count, size in ((few, 8, 32), (more, 12, 40)):
        run = benchmark._Run(settings, tmp_path, benchmark.choose(settings, decoder.Options("xla")))
        content = json.loads(Path(run.inputs()).read_text())
        assert len(content["texts"]) == count and {len(ids) for ids in content["ids"]} == {size}
        assert run.about()["model_sha256"] == weights.checksum(None)
    model = evaluate_models.resolve("tiny", tmp_path)
    other = benchmark.Benchmark(model=str(model), detection=more.detection)
    run = benchmark._Run(other, tmp_path, decoder.XLA)
    assert run.about()["model_sha256"] == weights.checksum(str(model)) != weights.checksum(None)
    assert load_tokenizer(run.tokenizer_folder()).vocab_size == load_tokenizer(str(model)).vocab_size


def test_too_little_text_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="too few for 10000000 texts of 32"):
        benchmark.run(tiny(texts=10**7), tmp_path / "out")
    generation = {"schemes": [KGW], "prompt_tokens": 10**6}
    for settings in ({"generation": generation}, {"verdicts": {"new_tokens": 10**6}}):
        with pytest.raises(ValueError, match="prompts: the text has .* tokens"):
            benchmark.run(benchmark.Benchmark(**settings), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_case_says_how_many_texts_its_calls_have():
    found = benchmark.cases("numpy", tiny(batch_sizes=[1, 8, 64, 2048]).detection)
    assert [case["batch_size"] for case in found if case["part"] == "ids"] == [8, 1]


def test_whole_calls_are_measured_by_scheme_length_and_batch_for_a_decoder_of_any_shape(tmp_path, capsys):
    tiny_shape = {
        "vocab_size": 49152, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 8, "max_seq_len": 64,
    }  # fmt: skip
    wanted = {"schemes": [KGW, {"scheme": "unigram"}], "batch_sizes": [1, 2], "new_tokens": [4, 8], "rounds": 2}
    settings = benchmark.Benchmark(shape=tiny_shape, throughput=wanted | {"prompt_tokens": 8})
    summary = benchmark.run(settings, tmp_path)
    rows = summary["throughput"]
    names = ["unmarked", "kgw-left1", "unigram", "control"]
    assert [(row["batch_size"], row["new_tokens"], row["scheme"]) for row in rows] == [
        (batch, length, name) for batch in (1, 2) for length in (4, 8) for name in names
    ]
    assert all(row["ratio"] == 1 for row in rows if row["scheme"] == "unmarked")
    assert all(row["tokens_per_s"] > 0 and row["peak_mb"] > 10 for row in rows)
    assert "Whole calls of generation" in capsys.readouterr().out
    before = (tmp_path / "records.jsonl").read_text()
    assert benchmark.run(settings, tmp_path)["throughput"] == rows
    assert (tmp_path / "records.jsonl").read_text() == before


def test_whole_calls_are_tokens_over_seconds_and_paired_by_round():
    record = {
        "kind": "throughput", "scheme": KGW, "batch_size": 2, "new_tokens": 10, "seconds": [2.0, 4.0],
        "plain": [1.0, 2.0], "rss": 5e6,
    }  # fmt: skip
    (row,) = benchmark_report.summarise([record], {}, {})["throughput"]
    assert row["tokens_per_s"] == pytest.approx(20 / 8**0.5) and row["peak_mb"] == 5
    assert row["ratio"] == row["ratio_low"] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [benchmark_config.Detection, benchmark_config.Generation])
def test_schemes_that_a_table_cannot_tell_apart_are_refused(kind):
    with pytest.raises(ValueError, match="2 schemes are called 'kgw-left1'"):
        kind(schemes=[KGW, KGW | {"gamma": 0.5}])
    assert len(kind(schemes=[KGW, {"scheme": "unigram"}]).schemes) == 2
