"""What comes back of a stage beside its records; texts that a stage reads; stages that repeat."""

import os

from jaxbench.gpu import kept, run
from tests.gpu.small_stages import counting, python, runs, stage, writing


def test_files_that_a_stage_returns_come_back_in_parts_where_they_are_large(call, monkeypatch):
    monkeypatch.setattr(kept, "PART_BYTES", 4)
    small, large = writing("a.txt", "abc"), writing("b.txt", "abcdefghij")
    call(stage("one", python(small + large), returned=("a.txt", "b.txt", "none.txt")))
    found = {path.name: path.read_text() for path in call.results.glob("one-*")}
    parts = {"one-b.txt.part0": "abcd", "one-b.txt.part1": "efgh", "one-b.txt.part2": "ij"}
    assert found == {"one-a.txt": "abc"} | parts
    shorter = python("open('{work}/b.txt', 'w').write('xy')")
    call(stage("one", shorter, returned=("b.txt",)), resume=True, commit="def")
    assert {path.name for path in call.results.glob("one-b*")} == {"one-b.txt"}


def test_a_training_gives_its_rate_and_loss_and_other_summaries_nothing(call):
    training = '{"backend": "flax", "tokens_per_s": 12.5, "validation_loss": NaN, "mfu": 0.25, "steps": 3}'
    call(
        stage("a", python(writing("summary.json", training))),
        stage("b", python(writing("summary.json", '{"rows": []}'))),
    )
    found = {each.metric: (each.value, each.arm) for each in call.kept() if each.metric != run.STAGE}
    assert found == {"train_tokens_per_s": (12.5, "flax"), "train_mfu": (0.25, "flax")}
    rows = kept._of_training({"backend": "flax", "tokens_per_s": 0.0, "mfu": 0.0, "validation_loss": 2.5})
    assert [(each.metric, each.value) for each in rows] == [("train_validation_loss", 2.5)]  # no step was timed


def test_a_stage_that_repeats_is_run_again_by_a_resumed_call(call):
    stages = counting("once"), counting("again").model_copy(update={"repeats": True})
    call(*stages)
    call(*stages, resume=True)
    assert (runs(call, "once"), runs(call, "again")) == (1, 2)


def test_a_file_of_an_earlier_call_is_not_given_back_again(call):
    first = stage("one", python(writing("a.txt", "abc")), returned=("a.txt",))
    call(first)
    (call.results / "one-a.txt").write_text("mine")
    os.utime(call.results.parent / "work/one/a.txt", (1, 1))
    call(stage("one", python("print(1)"), returned=("a.txt",)), resume=True, commit="def")
    assert (call.results / "one-a.txt").read_text() == "mine"


def test_a_stage_that_reads_texts_is_skipped_without_any(call, monkeypatch):
    place = run.Place("gpu", False, call.results, call.results.parent / "work")
    reading = stage("a", python("print(open('{data}/x.txt').read())"))
    run.run([reading], place, budget_s=100, resume=False, say=call.said.append)
    assert (call.named()["a"].status, call.named()["a"].reason) == (
        "skipped",
        "needs texts: name their folder by --data",
    )
    (call.results.parent / "x.txt").write_text("hello")
    place = place._replace(data=str(call.results.parent))
    run.run([reading], place, budget_s=100, resume=True, say=call.said.append)
    assert call.named()["a"].status == "ok" and "hello" in (call.results / "log.txt").read_text()
