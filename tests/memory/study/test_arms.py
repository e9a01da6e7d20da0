"""Arms on tasks: equal in parameters, counted by distance, resumable, and a report of what was found."""

import json

import numpy as np
import pytest
import scipy.stats

from jaxbench import config
from jaxbench.memory.study import arm_report, arms, tasks, text_task
from tests.structure import ROOT

PLAIN = {
    "window": 4,
    "decoder": {"d_model": 16, "num_layers": 1, "num_heads": 1, "head_dim": 16},
    "arms": {"plain": {"d_ff": 16}},
    "tasks": {"recall": {"task": "recall", "length": 16, "vocab_size": 16, "items": 2, "queries": 2}},
    "learning_rates": [1e-2],
    "seeds": [0],
    "steps": 3,
    "batch_size": 4,
    "warmup_steps": 1,
    "factors": [1, 2],
    "test_rows": 8,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from jaxbench.memory.study import arm_runs

    workdir = tmp_path_factory.mktemp("arms")
    arm_runs.run_all(arms.Arms(**PLAIN), workdir)
    return workdir


def test_a_finished_run_is_not_taken_again_and_a_line_cut_short_is(finished):
    from jaxbench.memory.study import arm_runs

    path = finished / "runs-1-of-1.jsonl"
    before = path.read_text()
    arm_runs.run_all(arms.Arms(**PLAIN), finished)
    assert path.read_text() == before and before.count("\n") == 1
    whole = json.loads(before)
    path.write_text(before[:-20])
    arm_runs.run_all(arms.Arms(**PLAIN), finished)
    again = json.loads(path.read_text())
    for timed in ("seconds", "cpu_seconds"):
        del whole[timed], again[timed]
    assert again == whole  # the same losses and answers: a run is a function of its settings


def test_every_question_is_counted_once_at_every_length(finished):
    settings = arms.Arms(**PLAIN)
    (record,) = arms.known(settings, finished).values()
    for factor, found in record["factors"].items():
        assert sum(cell["asked"] for cell in found["cells"]) == settings.test_rows * 2
        right = sum(cell["right"] for cell in found["cells"])
        assert found["token"] == pytest.approx(right / (settings.test_rows * 2))
        assert max(cell["to"] for cell in found["cells"]) <= 16 * int(factor)


def test_as_many_rows_are_counted_as_wanted_however_many_are_computed_at_once(tmp_path, monkeypatch):
    from jaxbench.memory.study import arm_runs

    monkeypatch.setattr(arm_runs, "TOKENS_AT_ONCE", 5 * 16)
    settings = arms.Arms(**PLAIN | {"factors": [1], "steps": 1})
    arm_runs.run_all(settings, tmp_path)
    (record,) = arms.known(settings, tmp_path).values()
    assert sum(cell["asked"] for cell in record["factors"]["1"]["cells"]) == settings.test_rows * 2


def test_runs_of_other_settings_do_not_count(finished):
    longer = PLAIN | {"steps": 4}
    assert not arms.known(arms.Arms(**longer), finished)
    more = arms.Arms(**PLAIN | {"seeds": [0, 1], "learning_rates": [1e-3, 1e-2]})
    assert len(arms.known(more, finished)) == 1 and len(arms.runs(more)) == 4


def test_the_report_holds_what_was_found(finished):
    settings = arms.Arms(**PLAIN)
    rows = arms.summarise(settings, arms.known(settings, finished))
    assert {row["factor"] for row in rows} == {1, 2} and all(row["chance"] == 1 / 6 for row in rows)
    (record,) = arms.known(settings, finished).values()
    lengths = arms.by_length(settings, arms.known(settings, finished))
    assert {row["factor"]: row["mean"] for row in lengths} == {f: record["factors"][str(f)]["token"] for f in (1, 2)}
    shown = arm_report.write(settings, arms.known(settings, finished), finished)
    assert [table.row_count for table in shown] == [1, 1] and "plain" in (finished / "report.html").read_text()
    assert (finished / "results.csv").read_text().count("\n") == len(rows) + 1
    (run,) = json.loads((finished / "summary.json").read_text())["runs"]
    assert run["factors"] == record["factors"]  # so that later arms can be paired with these runs


def test_the_learning_rate_is_chosen_by_held_out_rows():
    settings = arms.Arms(**PLAIN | {"learning_rates": [1e-3, 1e-2], "seeds": [0, 1]})
    held_out = {(1e-3, 0): 0.5, (1e-3, 1): 0.5, (1e-2, 0): 0.9, (1e-2, 1): 0.2}
    cells = [{"over": 0, "to": 4, "asked": 10, "right": 5}]
    records = {
        arms.Run("recall", "plain", rate, seed): {"held_out": value, "factors": {f: {"cells": cells} for f in "12"}}
        for (rate, seed), value in held_out.items()
    }
    assert arms.best_rate(settings, records, "recall", "plain") == 1e-2
    assert {row["learning_rate"] for row in arms.summarise(settings, records)} == {1e-2}


def test_distances_fall_into_classes_that_double():
    distance = np.array([1, 4, 5, 8, 9, 33])
    cells = arms.counted(np.array([1, 0, 1, 1, 0, 1], bool), distance, 4, 64, "right")
    assert [(cell["over"], cell["to"], cell["asked"], cell["right"]) for cell in cells] == [
        (0, 4, 2, 1), (4, 8, 2, 2), (8, 16, 1, 0), (32, 64, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {"plain": {"d_ff": 16}, "wide": {"d_ff": 64}}}, "wide has .* parameters, plain has .* d_ff"),
        ({"arms": {"plain": {"d_ff": 16, "memory": {"kind": "bank", "window": 8}}}}, "window of plain is 8"),
        ({"tasks": {"recall": {"task": "recall", "length": 5, "items": 4, "vocab_size": 16}}}, "length=5"),
        ({"factors": []}, "factors"),
        ({"arms": {"plain": {"d_ff": 16, "against": "mag"}}}, "plain is against mag, wanted another of plain"),
        ({"arms": {"plain": {"d_ff": 16, "against": "plain"}}}, "plain is against plain, wanted another of plain"),
        (
            {"arms": {"a": {"d_ff": 16}, "b": {"d_ff": 14}, "c": {"d_ff": 18, "against": "b"}}},
            "c has 2192 parameters, b has 2000: more than 5%",
        ),
        ({"task_steps": {"copy": 5}}, "task_steps has copy: 5, wanted a task of recall"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, change, message):
    path = tmp_path / "arms.yaml"
    path.write_text(json.dumps(PLAIN | change))
    with pytest.raises(ValueError, match=message):
        config.load(path, (), arms.Arms)


TEXT = PLAIN | {"tasks": {"prose": {"task": "text", "length": 16}}, "learning_rates": [1e-3, 1e-2], "seeds": [0, 1]}


def test_bits_of_a_text_are_counted_by_what_lies_before(tmp_path):
    from jaxbench.memory.study import arm_runs

    settings = arms.Arms(**TEXT | {"learning_rates": [1e-2], "seeds": [0]})
    arm_runs.run_all(settings, tmp_path)
    (record,) = arms.known(settings, tmp_path).values()
    for factor, found in record["factors"].items():
        assert [cell["to"] for cell in found["cells"]] == [4, 8, 16, 32][: 2 + int(factor)]
        assert sum(cell["asked"] for cell in found["cells"]) == settings.test_rows * 16 * int(factor)
        bits = sum(cell["bits"] for cell in found["cells"]) / (settings.test_rows * 16 * int(factor))
        assert found["bits_per_byte"] == pytest.approx(bits) and 6 < bits < 10  # near log2(257) after three steps
    shown = arm_report.write(settings, arms.known(settings, tmp_path), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "bits per byte" in shown[0].title and "bits per byte" in page and "bytes of the row before (dotted" in page
    assert "distance of the fact" not in page and "accuracy by distance" not in page


def test_a_run_whose_bits_are_no_number_is_no_reason_to_lose_the_report(tmp_path):
    from jaxbench.memory.study import arm_runs

    both = {"arms": {"plain": {"d_ff": 16}, "wide": {"d_ff": 16, "window": 8}}, "steps": 1, "seeds": [0]}
    both["arms"]["wide"]["learning_rates"] = [1e10]  # its logits overflow behind one step
    settings = arms.Arms(**TEXT | both | {"learning_rates": [1e-2, 1e10]})
    arm_runs.run_all(settings, tmp_path)
    finished = arms.known(settings, tmp_path)
    assert [record["held_out"] is None for record in finished.values()] == [False, True, True]
    shown = arm_report.write(settings, finished, tmp_path)
    rates = {(row["arm"], row["learning_rate"]) for row in json.loads((tmp_path / "summary.json").read_text())["rows"]}
    assert rates == {("plain", 1e-2), ("wide", 1e10)}
    means = dict(zip(shown[0].columns[0].cells, shown[0].columns[3].cells, strict=True))
    assert 6 < float(means["plain"]) < 10 and means["wide"] == "nan"
    assert "<svg" in (tmp_path / "report.svg").read_text()


def test_the_learning_rate_of_a_text_is_the_one_with_fewest_bits():
    settings = arms.Arms(**TEXT)
    records = {
        arms.Run("prose", "plain", rate, seed): {"held_out": bits}
        for rate, bits in ((1e-3, 3.0), (1e-2, 2.5))
        for seed in (0, 1)
    }
    assert arms.best_rate(settings, records, "prose", "plain") == 1e-2


def test_arms_are_compared_with_their_rival_seed_by_seed(tmp_path):
    plain = {"d_ff": 16}
    names = {"plain": plain, "memory": plain, "half": plain | {"against": "memory"}}
    settings = arms.Arms(**TEXT | {"arms": names, "learning_rates": [1e-2], "seeds": [0, 1, 2]})
    bits = {"plain": (2.0, 4.0, 3.0), "memory": (1.9, 3.8), "half": (2.0, 4.0, 7.0)}
    records = {}
    for arm, values in bits.items():
        for seed, mean in enumerate(values):
            cells = [{"over": 0, "to": 4, "asked": 10, "bits": 10 * mean}]
            found = {"bits_per_byte": mean, "cells": cells}
            records[arms.Run("prose", arm, 1e-2, seed)] = {"held_out": mean, "factors": {f: found for f in "12"}}
    expected = {"plain": (3, 0.0, 0.0), "memory": (2, -0.15, 0.0707107), "half": (2, 0.15, 0.0707107)}  # mean, std
    for rows in (arms.summarise(settings, records), arms.by_length(settings, records)):
        for row in rows:
            count, mean, spread = expected[row["arm"]]
            assert row["pairs"] == count and row["seeds"] == len(bits[row["arm"]])
            half = scipy.stats.t.ppf(0.975, count - 1) * spread / count**0.5
            assert row["difference"] == pytest.approx(mean)
            assert row["difference_high"] - row["difference"] == pytest.approx(half, abs=1e-6)
            assert row["rival"] == ("memory" if row["arm"] == "half" else "plain")
    rows, lengths = arms.summarise(settings, records), arms.by_length(settings, records)
    picture = arm_report.picture(settings, rows)
    assert "those of plain" in picture and "those of memory" in picture and picture.count("<polyline") == 2
    assert "means over 2 to 3 seeds" in picture
    table = arm_report.difference_table(settings, rows, lengths, "prose")
    assert list(table.columns[0].cells) == ["memory minus plain", "half minus memory"]
    assert list(table.columns[2].cells) == ["2", "2"]
    alone = {run: record for run, record in records.items() if run.arm == "half"}
    rows = arms.summarise(settings, alone)
    assert all(row["mean"] == pytest.approx(13 / 3) and row["difference"] is None and not row["pairs"] for row in rows)
    assert "<polyline" not in arm_report.picture(settings, rows)


def test_an_arm_may_have_a_window_of_its_own():
    names = {"plain": {"d_ff": 16}, "full": {"d_ff": 16, "window": 16}}
    settings = arms.Arms(**PLAIN | {"arms": names})
    assert [settings.model(name, 16).sliding_window for name in names] == [4, 16]
    with pytest.raises(ValueError, match="window of full is 4, and window=16"):
        memory = {"kind": "mag", "window": 4, "neural": {"d_model": 16, "num_heads": 1, "head_dim": 16}}
        arms.Arms(**PLAIN | {"arms": names | {"full": {"d_ff": 16, "window": 16, "memory": memory}}})


@pytest.mark.parametrize("study", ["controls", "books"])
@pytest.mark.parametrize(("arm", "reach"), [("plain", 7), ("no learning", 7), ("convolution only", 7), ("mag", 35)])
def test_controls_see_as_far_as_the_plain_decoder_and_memory_sees_everything(study, arm, reach):
    import jax
    import jax.numpy as jnp

    from jaxbench import initial
    from jaxbench.memory import decoder as decoders

    settings = config.load(ROOT / "configs" / "memory" / f"{study}.yaml", (), arms.Arms)
    model = settings.model(arm, 257)
    decoder = decoders.build(model, initial.initial_params(model, 0, distinct=True))
    tokens = np.random.default_rng(0).integers(256, size=(1, 40))
    changed = tokens.copy()
    changed[0, 5] += 1
    run = jax.jit(lambda tokens: decoder(tokens, jnp.arange(40)[None]))
    moved = np.abs(np.asarray(run(tokens) - run(changed))).max(axis=-1)[0]
    np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(5, 5 + reach))


def test_a_record_without_its_end_of_line_is_taken_again_not_lost(finished, tmp_path):
    """A line cut off just before its end is removed when the next one is written, so it is no finished run."""
    path = tmp_path / "runs-1-of-1.jsonl"
    path.write_text((finished / path.name).read_text().rstrip("\n"))
    assert arms.known(arms.Arms(**PLAIN), tmp_path) == {}
    path.write_text((finished / path.name).read_text())
    assert len(arms.known(arms.Arms(**PLAIN), tmp_path)) == 1


def test_a_text_that_is_too_short_to_be_asked_about_is_refused_before_anything_is_trained(tmp_path):
    from jaxbench.memory.study import arm_runs

    path = tmp_path / "text.txt"
    path.write_text(1000 * "a")  # 50 tokens are the last half of what is held out
    task = {"task": "text", "length": 16, "path": str(path)}
    settings = arms.Arms(**TEXT | {"tasks": {"prose": task}, "factors": [1, 4]})
    with pytest.raises(ValueError, match="rows of length=64 do not fit into a part of 51 tokens"):
        arm_runs.run_all(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_arm_may_have_seeds_and_rates_of_its_own():
    names = {"plain": {"d_ff": 16}, "memory": {"d_ff": 16, "seeds": [1, 5], "learning_rates": [1e-3]}}
    settings = arms.Arms(**PLAIN | {"arms": names, "seeds": [0, 1]})
    assert [run[1:] for run in arms.runs(settings)] == [
        ("plain", 1e-2, 0), ("plain", 1e-2, 1), ("memory", 1e-3, 1), ("memory", 1e-3, 5),
    ]  # fmt: skip


def test_a_part_without_runs_still_reports(tmp_path):
    settings = arms.Arms(**PLAIN)
    assert arm_report.write(settings, {}, tmp_path) == [] and "no runs" in (tmp_path / "report.svg").read_text()


def test_a_mean_of_one_seed_has_no_interval(finished):
    settings = arms.Arms(**PLAIN)
    rows = arms.summarise(settings, arms.known(settings, finished))
    for row in rows:
        assert row["mean"] is not None and row["low"] is row["high"] is row["difference_low"] is None
    assert "one seed; each point" in arm_report.picture(settings, rows)


def test_intervals_end_where_a_measure_does():
    assert arms._mean([2.0, 1.0, 4.0], [None] * 3, arms.BITS)["low"] == 0.0
    found = arms._mean([0.1, 0.9], [0.2, 0.8], arms.RIGHT)
    assert (found["low"], found["high"]) == (0.0, 1.0) and found["difference_low"] < 0 < found["difference_high"]


def test_rows_of_a_text_follow_it_and_no_others_reach_into_what_is_held_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(1600 * "a" + 200 * "b" + 200 * "c")
    task = text_task.TextConfig(task="text", length=20, path=str(path), held_out_share=0.2)
    for seed, letter in ((0, "a"), (tasks.HELD_OUT, "b"), (tasks.TEST, "c")):
        rows = text_task.batch(task, seed=seed, step=0, batch_size=50)
        assert set(rows.tokens.flat) | {256} == {ord(letter), 256}
        np.testing.assert_array_equal(rows.tokens[:, 1:], rows.targets[:, :-1])
        assert (rows.distance == np.arange(1, 21)).all()
        few = text_task.batch(task, seed=seed, step=0, batch_size=3)
        np.testing.assert_array_equal(few.tokens, rows.tokens[:3])
    with pytest.raises(ValueError, match="rows of length=400 do not fit into a part of 201 tokens"):
        text_task.batch(task.at_length(20), seed=tasks.TEST, step=0, batch_size=1)


def test_a_text_is_known_by_its_content_and_one_that_is_not_there_is_refused(tmp_path):
    places = [tmp_path / name for name in ("one.txt", "two.txt")]
    found = []
    for path in places:
        path.write_text("some prose, some prose")
        task = {"task": "text", "length": 4, "path": str(path)}
        settings = arms.Arms(**TEXT | {"tasks": {"prose": task}})
        found.append(arms.identity(settings, arms.runs(settings)[0]))
    assert found[0] == found[1] and str(tmp_path) not in json.dumps(found[0])
    settings = arms.Arms(**TEXT | {"tasks": {"prose": task | {"path": "missing.txt"}}})
    with pytest.raises(ValueError, match="missing.txt is no file"):
        arms.known(settings, tmp_path)
