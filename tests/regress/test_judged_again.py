"""A finished run that is judged again: no launch, no profile, and the same run with the same notes."""

import contextlib

import pytest

from jaxbench.regress import run, trees, why
from jaxbench.regress.history import History
from jaxbench.regress.pairs import BASE, HEAD, Launches
from jaxbench.regress.suite import Suite

CASES = [{"name": "words", "workload": "tokenizing"}, {"name": "decode", "workload": "generation"}]
NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0)  # of a launch's rate on head
SUITE = Suite(
    model="tiny", cases=CASES, primary=["words.tokens_per_s"], looks=[3, 6], confirm=3, threads=1,
    requires={"memory_bytes": 0},
)  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """What was done: numbers of launches and `profiled`; and the rates that are written instead of measured."""
    done, rates = [], {BASE: 100.0, HEAD: 10.0}

    def case(self, index, case, workers):
        if case.name == "decode":
            self.lost.setdefault((HEAD, "decode"), "it died")
            return
        done.append(index)
        for side, rate in rates.items():
            self._append(index, side, {"words.tokens_per_s": [rate * (NOISE[index - 1] if side == HEAD else 1.0)]})

    def explain(launches, findings, folder):
        done.append("profiled")
        return {"packages": {}, "cases": {"words": {"stages": {"run": 9.0}}}}

    monkeypatch.setattr(Launches, "workers", lambda self, index, name: contextlib.nullcontext(({}, {})))
    monkeypatch.setattr(Launches, "_case", case)
    monkeypatch.setattr(why, "explain", explain)
    monkeypatch.setattr(trees, "of_commit", lambda name, folder, *, say: trees.here()._replace(commit="before"))
    monkeypatch.setattr(run, "_variables", lambda plan: [])
    return done, rates


def judged(suite, folder):
    """The record of a run of a suite beside a base, without the state of the machine when it was judged."""
    found = run.run_suite(suite, compare_with="before", device="cpu", workdir=folder / "w", say=lambda text: None)
    return {name: value for name, value in found.record.items() if name != "machine"}, found.record


def test_a_critical_regression_that_was_confirmed_is_judged_again_from_the_same_launches(made, tmp_path):
    done, _ = made
    first, record = judged(SUITE, tmp_path)
    assert done == [1, 2, 3, 4, 5, 6, "profiled"] and first["confirmed"] == {"words.tokens_per_s": True}
    assert first["lost"] == {"decode": "it died"} and "decode of head: it died" in first["notes"]
    again, same = judged(SUITE, tmp_path)
    assert again == first and len(done) == 7
    history = History(tmp_path / "h")
    history.add(record)
    history.add(same)
    [path] = history.files()
    assert history.load(path.stem)["notes"] == first["notes"]


def test_a_look_that_was_left_out_for_its_time_stays_out(made, tmp_path):
    done, rates = made
    rates[HEAD] = 87.0  # at the margin: undecided
    limited = SUITE.model_copy(update={"requires": SUITE.requires.model_copy(update={"time_s": 1e-9})})
    first, _ = judged(limited, tmp_path)
    assert done == [1, 2, 3, "profiled"] and "the look after 6 launches is left out" in first["notes"][0]
    assert judged(limited, tmp_path)[0] == first and len(done) == 4


def test_a_run_that_was_killed_while_it_confirmed_goes_on_with_the_same_launches(made, tmp_path, monkeypatch):
    done, _ = made
    until = Launches.until

    def killed(self, count):
        until(self, min(count, 4))
        if count > 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Launches, "until", killed)
    with pytest.raises(KeyboardInterrupt):
        judged(SUITE, tmp_path)
    monkeypatch.setattr(Launches, "until", until)
    record, _ = judged(SUITE, tmp_path)
    assert done == [1, 2, 3, 4, 5, 6, "profiled"] and record["launches"] == 6
