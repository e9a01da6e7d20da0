"""A whole run with stand-in launches: budget, interrupt, resume, earlier results moved aside."""

import pytest

from jaxbench.bench import launch, records, run
from jaxbench.bench.records import Record, RecordFile, Workload
from jaxbench.bench.suite import Suite

SUITE = Suite.model_validate(
    {
        "model": "tiny", "arms": ["flax"], "prefill": {"dtypes": ["float32"], "prompt_tokens": [32]},
        "decode": {"dtypes": ["float32"], "batches": [1], "prompt_tokens": [8], "new_tokens": 4},
        "train": {"num_layers": 1, "seq_len": 16}, "rounds": {"launches": 3, "budget_s": 100},
        "tpu": {"topologies": []}, "parity": [],
    }
)  # fmt: skip


class FakeLaunch:
    """Appends one record and the mark; `interrupt_at` raises instead of the mark."""

    begun: list[int] = []
    interrupt_at = 0
    clock = [0.0]
    lasts_s = 10.0

    def __init__(self, work, number, file, say, *, limit_s):
        self.compile_s = 0.0
        self.work, self.number, self.file = work, number, file

    def run(self):
        FakeLaunch.begun.append(self.number)
        FakeLaunch.clock[0] += self.lasts_s
        self.file.append(self.work.record("decode_tokens_per_s", arm="flax", value=1.0, launch=self.number))
        if self.number == self.interrupt_at:
            raise KeyboardInterrupt
        self.file.append(self.work.record(records.LAUNCH_DONE, value=self.number, launch=self.number))


@pytest.fixture
def compare(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "Launch", FakeLaunch)
    monkeypatch.setattr(run.time, "monotonic", lambda: FakeLaunch.clock[0])

    def go(*, resume=False, interrupt_at=0, lasts_s=10.0):
        FakeLaunch.begun, FakeLaunch.interrupt_at, FakeLaunch.lasts_s = [], interrupt_at, lasts_s
        FakeLaunch.clock = [0.0]
        return run.compare(SUITE, device="cpu", workdir=tmp_path, resume=resume, say=lambda text: None)

    return go


def test_every_launch_runs_and_settings_are_written(compare, tmp_path):
    found = compare()
    assert FakeLaunch.begun == [1, 2, 3]
    assert sum(r.metric == records.LAUNCH_DONE for r in found) == 3
    assert '"settings"' in (tmp_path / "environment.json").read_text()
    assert found[0].config_id in (tmp_path / "suite.json").read_text()


def test_resume_after_an_interrupt_runs_only_what_is_missing(compare):
    with pytest.raises(KeyboardInterrupt):
        compare(interrupt_at=2)
    assert FakeLaunch.begun == [1, 2]
    found = compare(resume=True)
    assert FakeLaunch.begun == [2, 3]
    assert sorted(r.launch for r in found if r.metric == records.LAUNCH_DONE) == [1, 2, 3]
    assert sum(r.metric == "decode_tokens_per_s" for r in found) == 3
    compare(resume=True)
    assert FakeLaunch.begun == []


def test_a_fresh_run_moves_earlier_results_aside_and_deletes_nothing(compare, tmp_path):
    compare()
    before = (tmp_path / "results.jsonl").read_text()
    compare()
    assert (tmp_path / "results.1.jsonl").read_text() == before
    assert len(RecordFile(tmp_path / "results.jsonl").read()) == len(RecordFile(tmp_path / "results.1.jsonl").read())


def test_no_launch_starts_that_would_pass_the_budget(compare):
    found = compare(lasts_s=50.0)
    assert FakeLaunch.begun == [1]
    [note] = [r for r in found if r.metric == "budget"]
    assert note.status == "skipped" and "the budget of 100 s ends before launch 2" in note.reason


def test_notes_say_which_arms_agree_and_where_one_parts():
    load = Workload(kind="decode", dtype="float32", batch=1)

    def tokens(arm, digest, difference):
        detail = {"digest": digest, "first_difference": difference, "reference": "torch_eager"}
        return Record(metric="tokens", arm=arm, workload=load, launch=1, detail=detail,
                      value=0.0 if difference else 1.0)  # fmt: skip

    equal = [tokens("flax", "aa", None), tokens("torch_eager", "aa", None)]
    assert run.agreement_notes(equal) == ["decode float32 b1: equal output on flax, torch_eager"]
    differing = [tokens("flax", "bb", [0, 3]), tokens("torch_eager", "aa", None)]
    assert run.agreement_notes(differing) == ["decode float32 b1: differs from torch_eager: flax at row 0 step 3"]


def test_a_failed_proof_is_a_failed_gate_and_a_missing_one_is_not():
    outcomes = (("flax", True, "ok"), ("equinox", False, "ok"), ("x", False, "error"))
    proofs = [Record(metric="parity", arm=arm, detail={"passed": passed}, status=s) for arm, passed, s in outcomes]
    assert run.failed_gates(proofs) == ["equinox"]
