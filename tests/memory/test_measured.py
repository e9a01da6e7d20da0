"""What measures memories: ratios and exponents by hand, bytes and FLOPs by formula, stability that can fail."""

import json

import jax
import numpy as np
import pytest

from jaxbench import config
from jaxbench.measure.records import RecordFile
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.study import arm_report, arms, cost, cost_layer, speed, speed_worker, stability
from tests.structure import ROOT
from torch_ref.memory.study import cost_layer as torch_cost_layer

NEURAL = NeuralMemoryConfig(d_model=8, num_heads=2, head_dim=4, chunk_size=16, depth=1)
BANK = {"d_model": 8, "num_heads": 2, "head_dim": 4, "block_size": 32, "memory_slots": 16, "ratio": 4}
SHAPE = cost.LayerShape(d_model=8, num_heads=2, head_dim=4, key_block=64, bank=BANK, window=32, neural=NEURAL)
SEGMENT = 128
PARTS = {"flax": cost_layer, "torch": torch_cost_layer}


# Speed


def test_the_exponent_of_a_power_law_is_found():
    points = [{"length": n, "seconds": 3e-5 * n**1.5} for n in (1024, 2048, 8192)]
    assert speed.exponent(points, "seconds") == pytest.approx(1.5)


def test_ratios_are_of_medians_in_the_same_launch():
    def row(arm, launch, seconds, read="chunk"):
        return {"arm": arm, "network": "n", "read": read, "part": "forward", "launch": launch} | {
            "seconds": [seconds, 100.0, seconds], "cpu_seconds": [seconds / 2] * 3
        }  # fmt: skip

    rows = [row("titans", 0, 8.0), row("titans", 1, 4.0), row("flax", 0, 2.0, "token"), row("flax", 1, 1.0, "token")]
    (found,) = speed._ratios(rows)
    assert found["wall"] == pytest.approx([4.0] * 3) and found["cpu"] == pytest.approx([4.0] * 3)
    assert (found["arm"], found["read"], found["bar"]) == ("flax", "token", 4.0)
    assert speed._ratios([row("flax", 0, 1.0)]) == []


def test_peak_memory_is_compared_at_the_same_length():
    def row(arm, length, peak):
        return {"arm": arm, "network": "n", "read": "chunk", "length": length, "peak_bytes": peak}

    rows = [row("flax", 1024, 10), row("titans", 1024, 30), row("flax", 4096, 20), row("titans", 4096, 180)]
    found = speed._memory_ratios(rows)
    assert {each["length"]: each["ratio"] for each in found} == {1024: 3.0, 4096: 9.0}
    assert speed._memory_ratios(rows[:1]) == []
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        speed.Speed(networks=[], memory_lengths=[0])


@pytest.mark.parametrize(("engine", "part"), [("flax", "forward"), ("torch", "forward_backward")])
def test_a_worker_of_each_backend_answers_the_benchmark(tmp_path, engine, part):
    """In a process of its own: in this one the peak of all tests so far may lie above what the case takes."""
    case = {"network": NEURAL.model_dump(mode="json"), "batch": 1, "length": 32, "part": part}
    with speed._worker(engine, tmp_path, "cpu", is_malloc_tuned=False) as worker:
        assert worker.request("start")["versions"]
        found = worker.request("measure", **case, repeats=2)
        assert len(found["seconds"]) == len(found["cpu_seconds"]) == 2 and min(found["seconds"]) > 0
        assert worker.request("memory", **case)["peak_bytes"] > 0


def test_a_worker_of_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="engine='jnp' is unknown"):
        speed_worker.Session("jnp", 1)


# Cost


@pytest.fixture(scope="module")
def table():
    """Return what each backend says about each layer at two lengths."""
    return {
        (name, layer, length): part.measure(layer, SHAPE, length, SEGMENT)
        for name, part in PARTS.items()
        for layer in cost.LAYERS
        for length in (512, 2048)
    }


def test_a_bank_takes_a_share_of_naive_attention_that_falls_with_length(table):
    for name in PARTS:
        naive, bank = (table[name, layer, 2048].temp_bytes for layer in ("naive", "bank"))
        assert naive >= 2048**2 * 2 * 4 and naive > 8 * bank  # 128 times at 32 K is 8 times at 2 K
        assert naive > 15 * table[name, "naive", 512].temp_bytes
        assert bank == table[name, "bank", 512].temp_bytes


def test_the_state_of_a_memory_does_not_grow_and_a_cache_does(table):
    for name in PARTS:
        for layer in ("bank", "neural"):
            assert table[name, layer, 2048].state_bytes == table[name, layer, 512].state_bytes > 0
            assert table[name, layer, 512].state_bytes == table["flax", layer, 512].state_bytes
            blank = cost_layer.build(layer, SHAPE).init_state(1)  # behind a segment it is as large as before it
            assert table[name, layer, 512].state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(blank))
        assert table[name, "naive", 2048].state_bytes == 2 * 2048 * 8 * 4
        assert table[name, "blocked", 2048].temp_bytes < table[name, "naive", 2048].temp_bytes / 4


def test_flops_are_counted(table):
    projections, scores = 4 * 2 * 8 * 8, 2 * 2 * 2048 * 8
    assert table["torch", "naive", 2048].flops == 2048 * (projections + scores)
    assert table["torch", "neural", 2048].flops == 4 * table["torch", "neural", 512].flops > 0
    assert table["flax", "naive", 512].flops is None


def test_both_backends_read_the_same_sequence():
    for layer in ("blocked", "bank"):
        times = PARTS["torch"].seconds(layer, SHAPE, 256, SEGMENT, 2)
        assert len(times) == 2 and min(times) > 0


@pytest.mark.parametrize("layer", ["blocked", "bank", "neural"])
def test_a_timed_call_copies_nothing_to_the_device(layer, monkeypatch):
    def timed(call, repeats):
        call()
        with jax.transfer_guard_host_to_device("disallow"):
            call()
        return {"seconds": [1.0]}

    monkeypatch.setattr(cost_layer.worker, "timed", timed)
    assert cost_layer.seconds(layer, SHAPE, 256, SEGMENT, 1) == [1.0]


@pytest.mark.parametrize("layer", ["bank", "neural"])
def test_a_timed_call_of_pytorch_starts_from_a_state_that_is_there_and_that_it_leaves_as_it_is(layer, monkeypatch):
    model, states = torch_cost_layer.build(layer, SHAPE), []
    init_state, forward = model.init_state, type(model).forward

    def recorded(self, x, state):
        states.append((state, [leaf.clone() for leaf in jax.tree.leaves(state)]))
        return forward(self, x, state)

    def timed(call, repeats):
        call()
        model.init_state = lambda batch_size: pytest.fail(f"a state of {batch_size} rows was made within the time")
        call()
        return {"seconds": [1.0]}

    model.init_state = init_state
    monkeypatch.setattr(type(model), "forward", recorded)
    monkeypatch.setattr(torch_cost_layer, "build", lambda *_: model)
    monkeypatch.setattr(torch_cost_layer.worker, "timed", timed)
    assert torch_cost_layer.seconds(layer, SHAPE, 256, SEGMENT, 1) == [1.0]
    first, again = states[0], states[2]
    assert again[0] is first[0] and all(map(np.array_equal, first[1], again[1]))


def test_the_page_has_a_line_for_each_layer_and_backend(table):
    rows = [
        {"backend": name, "layer": layer, "length": length, "temp_bytes": each.temp_bytes, "seconds": None,
         "state_bytes": each.state_bytes, "flops_per_token": 1.0}
        for (name, layer, length), each in table.items()
    ]  # fmt: skip
    page = cost.charts(rows)
    assert all(f"{title}, {name}" in page for title in cost.TITLES.values() for name in PARTS)
    assert cost.saving(rows, 2048)["torch"] > 8
    picture = cost.picture({"about": {"cpu": "a processor", "threads": 2}, "rows": rows})
    assert all(picture.count(f">{title}</text>") == 1 for title in cost.TITLES.values())
    assert picture.count("<polyline") == 4 * 2 + 4 + 4, "no rate was measured; state and FLOPs are the same on both"


def test_times_are_records_and_what_is_not_timed_says_so(tmp_path):
    settings = cost.Cost(layer=SHAPE, lengths=[SEGMENT], segment=SEGMENT, repeats=2, max_bytes=1.0)
    summary = cost.run(settings, tmp_path, PARTS)
    first = (tmp_path / "summary.json").read_bytes()
    cost.run(settings, tmp_path, PARTS)  # again, in the same folder: the first run's files are set aside
    assert (tmp_path / "summary.1.json").read_bytes() == first
    found = RecordFile(tmp_path / "results.jsonl").read()
    assert len(found) == len(summary["rows"]) == len(RecordFile(tmp_path / "results.1.jsonl").read())
    assert {(record.arm, record.status, record.value) for record in found} == {
        (f"{name} {layer}", "skipped", None) for name in PARTS for layer in cost.LAYERS
    }
    assert all(row["seconds"] is None for row in summary["rows"])
    timed = cost._record("flax", "bank", 256, "cpu", [0.5, 0.25, 0.75])
    assert (timed.value, timed.status, timed.workload.prompt_tokens) == (0.5, "ok", 256)


def test_bytes_have_binary_prefixes_and_counts_decimal_ones():
    assert [cost._short(value, "B") for value in (256, 16 * 2**10, 2.0**40)] == ["256 B", "16 KiB", "1 TiB"]
    assert [cost._short(value) for value in (1, 10_000, 1e6)] == ["1", "10 K", "1 M"]


RESULTS = ROOT / "experiments" / "results" / "2026-11-21-memory"


def test_pictures_in_the_docs_are_those_of_the_committed_records():
    summary = json.loads((RESULTS / "cost.json").read_text())
    assert cost.picture(summary) == (ROOT / "docs" / "memory_cost.svg").read_text()
    for name, day in (("arms", "2026-11-21"), ("books", "2026-11-22")):
        settings = config.load(ROOT / "configs" / "memory" / f"{name}.yaml", (), arms.Arms)
        rows = json.loads((RESULTS.parent / f"{day}-memory" / f"{name}.json").read_text())["rows"]
        assert arm_report.picture(settings, rows) == (ROOT / "docs" / f"memory_{name}.svg").read_text()


def test_differences_in_the_docs_are_those_of_the_committed_records():
    summary = json.loads((RESULTS.parent / "2026-11-22-memory" / "books.json").read_text())
    known = {}
    for again, lengths in ((False, summary["lengths"]), (True, summary["controls"]["lengths"])):
        for row in lengths:
            numbers = (f"{row[name]:.3f}" for name in ("difference", "difference_low", "difference_high"))
            shown = "{} [{}, {}]".format(*numbers)
            known[row["arm"], row["rival"], again, row["factor"]] = (
                str(row["pairs"]),
                shown.replace("-0.000", "0.000"),
            )
    shown = set()
    for line in (ROOT / "docs" / "memory_measured.md").read_text().splitlines():
        if " minus " in line and line.startswith("|"):
            label, pairs, *_, short, long = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
            label, comma, _ = label.partition(", again")
            key = (*label.split(" minus "), bool(comma) or label == "no learning minus plain")
            assert [known[*key, factor] for factor in (1, 4)] == [(pairs, short), (pairs, long)], line
            shown.add(key)
    assert {arm for arm, *_ in shown} == {row["arm"] for row in summary["lengths"]} - {"plain"}


def test_controls_of_recall_in_the_docs_are_those_of_the_committed_records():
    summary = json.loads((RESULTS.parent / "2026-11-30-memory-controls" / "recall.json").read_text())
    settings = config.load(ROOT / "configs" / "memory" / "controls.yaml", (), arms.Arms)
    assert summary["settings"] == settings.model_dump(mode="json")
    text = (ROOT / "docs" / "memory_measured.md").read_text()
    table = text[text.index("| recall (chance 3.3) | rate, seeds |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(settings.arms)
    for line in table:
        arm, rate, *by_distance, rows_128, rows_256, rows_1024 = (cell.strip() for cell in line.strip("|").split("|"))
        arm = arm.replace("`", "").removesuffix(", again")
        rows = {row["over"]: row for row in summary["rows"] if (row["arm"], row["factor"]) == (arm, 1)}
        lengths = {row["factor"]: row for row in summary["lengths"] if row["arm"] == arm}
        assert rate == f"{lengths[1]['learning_rate'] * 1e3:g}e-3, {lengths[1]['seeds']}"
        for shown, row in zip(by_distance, (rows[8], rows[16], rows[32]), strict=True):
            numbers = [100 * row[name] for name in ("mean", "low", "high") if row[name] is not None]
            assert shown == "{:.1f}".format(*numbers) + (
                " [{:.1f}, {:.1f}]".format(*numbers[1:]) if numbers[1:] else ""
            )
        assert [rows_128, rows_256, rows_1024] == [f"{100 * lengths[i]['mean']:.1f}" for i in (2, 4, 16)]


def test_a_length_that_segments_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="length 2000 is not a multiple of segment=512"):
        cost.Cost(layer=SHAPE, lengths=[1024, 2000], segment=512)


# Stability


def test_a_second_run_in_a_folder_keeps_the_figures_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(stability, "train", lambda settings, depth: {"depth": depth, "seed": settings.seed})
    for seed in range(3):
        stability.run(stability.Stability(memory=NEURAL, depths=[2], length=16, seed=seed), tmp_path)
    kept = [json.loads((tmp_path / f"summary{part}.json").read_text()) for part in (".1", ".2", "")]
    assert [summary["rows"] for summary in kept] == [[{"depth": 2, "seed": seed}] for seed in range(3)]


def test_training_is_watched_and_a_number_that_is_none_is_seen():
    settings = stability.Stability(memory=NEURAL, steps=3, length=16)
    row = stability.train(settings, depth=4)
    assert row["is_finite"] and 0 < row["last_loss"] < 10 and row["largest_gradient"] > 0
    with pytest.raises(ValueError, match="depths.*\n.*less than or equal to 4"):
        stability.Stability(memory=NEURAL, depths=[7])
    assert not stability._summary(np.asarray([[1.0, 2.0, 3.0], [1.0, np.nan, 3.0]]))["is_finite"]
