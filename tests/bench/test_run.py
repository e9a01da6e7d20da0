"""A whole run with stand-in launches: budget, interrupt, resume, earlier results moved aside."""

import importlib.util
import re

import pytest

from jaxbench import config
from jaxbench.bench import launch, parts, plan, run
from jaxbench.bench.report import report
from jaxbench.bench.suite import Suite
from jaxbench.measure import environment, records
from jaxbench.measure.records import Record, RecordFile, Workload
from tests.bad_input import harness
from tests.bad_input.harness import Case

SUITE = Suite.model_validate(
    {
        "model": "tiny", "arms": ["flax"], "prefill": {"dtypes": ["float32"], "prompt_tokens": [32]},
        "decode": {"dtypes": ["float32"], "batches": [1], "prompt_tokens": [8], "new_tokens": 4},
        "train": {"num_layers": 1, "seq_len": 16}, "rounds": {"launches": 3, "budget_s": 100},
        "tpu": {"topologies": []}, "parity": [], "verdicts": {"baseline": "flax"},
    }
)  # fmt: skip


class FakeLaunch:
    """Appends one record and the mark; `interrupt_at` raises instead of the mark."""

    begun: list[int] = []
    num_rounds: list[int] = []
    interrupt_at = 0
    clock = [0.0]
    lasts_s = 10.0

    def __init__(self, plan, number, file, say, *, num_rounds):
        self.compile_s = 0.0
        FakeLaunch.num_rounds.append(num_rounds)
        self.plan, self.number, self.file = plan, number, file

    def run(self):
        FakeLaunch.begun.append(self.number)
        FakeLaunch.clock[0] += self.lasts_s
        self.file.append(self.plan.record("decode_tokens_per_s", arm="flax", value=1.0, launch=self.number))
        if self.number == self.interrupt_at:
            raise KeyboardInterrupt
        self.file.append(self.plan.record(records.LAUNCH_DONE, value=self.number, launch=self.number))


@pytest.fixture
def compare(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "Launch", FakeLaunch)
    monkeypatch.setattr(run.time, "monotonic", lambda: FakeLaunch.clock[0])

    def go(*, resume=False, interrupt_at=0, lasts_s=10.0, device="cpu", suite=None, say=lambda text: None):
        FakeLaunch.begun, FakeLaunch.interrupt_at, FakeLaunch.lasts_s = [], interrupt_at, lasts_s
        FakeLaunch.num_rounds = []
        FakeLaunch.clock = [0.0]
        settings = SUITE.model_copy(update=suite or {})
        return run.compare(settings, device=device, workdir=tmp_path, resume=resume, say=say)

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


def test_each_report_of_more_launches_is_kept_as_a_look(compare):
    def looks(found):
        return [record.detail["launches"] for record in found if record.metric == records.LOOK]

    two = {"rounds": SUITE.rounds.model_copy(update={"launches": 2})}
    assert looks(compare(suite=two)) == [[2]]
    assert looks(compare(suite=two, resume=True)) == [[2]]  # nothing was added
    with pytest.raises(KeyboardInterrupt):
        compare(resume=True, interrupt_at=3)  # no report follows
    assert looks(compare(resume=True)) == [[2, 3]]
    assert looks(compare()) == [[3]]


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_runs(compare, tmp_path, monkeypatch):
    def run_launch(self):
        with pytest.raises(ValueError, match="another process writes .*results.jsonl; wait for its end"):
            run.compare(SUITE, device="cpu", workdir=tmp_path, say=lambda text: None)
        original(self)

    original = FakeLaunch.run
    monkeypatch.setattr(FakeLaunch, "run", run_launch)
    assert sum(r.metric == records.LAUNCH_DONE for r in compare()) == 3
    assert not list(tmp_path.glob("results.1.jsonl"))


def test_a_fresh_run_moves_earlier_results_aside_and_deletes_nothing(compare, tmp_path):
    compare()
    before = (tmp_path / "results.jsonl").read_text()
    compare()
    assert (tmp_path / "results.1.jsonl").read_text() == before
    assert len(RecordFile(tmp_path / "results.jsonl").read()) == len(RecordFile(tmp_path / "results.1.jsonl").read())


def test_no_launch_starts_that_would_pass_the_budget(compare):
    found = compare(lasts_s=60.0)
    assert FakeLaunch.begun == [1]
    [note] = [r for r in found if r.metric == "budget"]
    assert note.status == "skipped" and "the budget of 100 s ends before launch 2" in note.reason


def test_launches_are_shortened_before_there_are_too_few(compare):
    rounds = SUITE.rounds.model_copy(update={"launches": 6})
    compare(lasts_s=20.0, suite={"rounds": rounds})
    assert FakeLaunch.num_rounds[:4] == [1, 1, 1, 1]  # of 85 s, five of 20 s do not fit
    compare(lasts_s=8.0, suite={"rounds": rounds})
    assert FakeLaunch.num_rounds == [1] + [2] * 5  # the cold one is short in any case


def test_everything_that_was_asked_for_and_failed_is_named():
    decode = Workload(kind="decode", dtype="float32", batch=1)
    found = [
        Record(metric="parity", arm="flax", detail={"passed": True, "worst": 1e-14}),
        Record(metric="parity", arm="equinox", detail={"passed": False, "worst": 0.3}),
        Record(metric="parity", arm="x", status="error", reason="exit code 1: boom"),
        Record(metric="tpu", device="v5e:2x2", status="error", reason="took longer than 600 s"),
        Record(metric="tpu", device="v5p:2x2x1", status="skipped", reason="libtpu is not installed"),
        Record(metric="tpu_memory_bytes", device="v5e:1x1", status="error", reason="does not fit"),
        Record(
            metric="decode_tokens_per_s", arm="llama_cpp", workload=decode, status="skipped", reason="not installed"
        ),
        Record(metric="decode_tokens_per_s", arm="flax", workload=decode, launch=1, status="error", reason="signal 9"),
        Record(metric="decode_tokens_per_s", arm="flax", workload=decode, launch=2, status="error", reason="signal 9"),
    ]
    assert run.failures(found) == [
        "parity: equinox: worst relative difference 3.0e-01",
        "parity: x: exit code 1: boom",
        "tpu v5e:2x2: took longer than 600 s",
        "flax: signal 9 (and 1 more)",
    ]


def test_without_libtpu_the_slices_are_skipped_by_name_and_the_command_is_not_failed(compare, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else found(name))
    records_of_run = compare(suite={"tpu": SUITE.tpu.model_copy(update={"topologies": ("v5e:2x2",)})})
    [skipped] = [record for record in records_of_run if record.metric == "tpu"]
    assert (skipped.status, skipped.device) == ("skipped", "v5e:2x2") and "libtpu is not installed" in skipped.reason
    assert run.failures(records_of_run) == []


class Differing(FakeLaunch):
    """A launch whose arms write other tokens."""

    def run(self):
        workload = Workload(kind="decode", dtype="float32", batch=1)
        detail = {"first_difference": [0, 3], "reference": "torch_eager", "token": 7, "reference_token": 1}
        self.file.append(self.plan.record("tokens", arm="flax", workload=workload, value=0.0, launch=1, detail=detail))
        super().run()


@pytest.mark.parametrize(
    ("parity", "stand_in", "wanted"),
    [
        ("[flax]", FakeLaunch, "failed: parity: flax: exit code 1: boom"),
        ("[]", Differing, "failed: tokens: flax from torch_eager on decode float32 b1 at prompt 0 step 3: token 7"),
    ],
)
def test_the_command_ends_with_1_and_its_last_line_says_why(
    parity, stand_in, wanted, tmp_path, capsys, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(launch, "Launch", stand_in)
    monkeypatch.setattr(parts, "_run", lambda *_: (tmp_path / "none.json", "exit code 1: boom"))
    config.dump(SUITE, tmp_path / "suite.yaml")
    case = Case(f"compare.py --config=suite.yaml --workdir={{tmp}}/out --set=parity={parity}", ())
    done = harness.call(case, tmp_path, capsys, monkeypatch)
    assert done.code == 1 and wanted in done.err.splitlines()[-1]
    assert (tmp_path / "out" / "report.html").exists()


def change_commit(monkeypatch):
    monkeypatch.setattr(environment, "commit", lambda: "0123456789ab+cafe0000")


def change_versions(monkeypatch):
    monkeypatch.setattr(environment, "versions", lambda: {"python": "3.11", "jax": "9.9.9"})


def change_host(monkeypatch):
    monkeypatch.setattr(environment, "fingerprint", lambda: "another host")


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        (change_commit, {}, "commit was "),
        (change_versions, {}, "jax version was "),
        (change_host, {}, "host was "),
        (None, {"device": "gpu"}, "device was cpu, is gpu"),
        (None, {"suite": {"arms": ("flax", "torch_eager")}}, "arms was ['flax'], is ['flax', 'torch_eager']"),
        (None, {"suite": {"seed": 5}}, "configuration was "),
    ],
    ids=["commit", "versions", "host", "device", "arms", "configuration"],
)
def test_resume_counts_nothing_of_another_run_and_says_why(compare, tmp_path, monkeypatch, change, options, named):
    monkeypatch.setattr(plan.process_environment, "check_attached", lambda device: None)
    before = compare()
    lines = (tmp_path / "results.jsonl").read_text()
    if change is not None:
        change(monkeypatch)
    said = []
    after = compare(resume=True, say=said.append, **options)
    assert FakeLaunch.begun == [1, 2, 3]
    assert {record.run_id for record in after}.isdisjoint(record.run_id for record in before)
    assert (tmp_path / "results.jsonl").read_text().startswith(lines)
    [note] = [line for line in said if "left aside" in line]
    assert note.startswith(f"{len(before)} records of other runs are left aside: ") and named in note
    found, suite = report.read_run(tmp_path)
    assert found == after and suite.seed == options.get("suite", {}).get("seed", 0)
    compare(resume=True, **options)
    assert FakeLaunch.begun == []


@pytest.mark.parametrize("content", [b"\x89PNG", b"[]", b'{"suite": 3}', b"{}"])
def test_a_damaged_folder_of_results_is_named(compare, tmp_path, content):
    compare()
    (tmp_path / "suite.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"suite\.json.* (cannot be read as JSON|holds a list|holds no suite)"):
        report.read_run(tmp_path)


def test_results_from_before_runs_had_ids_are_left_aside_by_resume_and_still_reported(compare, tmp_path):
    compare()
    for name in ("results.jsonl", "suite.json"):
        lines = (tmp_path / name).read_text().splitlines()
        lines = [line for line in lines if '"metric":"run"' not in line and '"metric":"look"' not in line]
        text = "\n".join([*lines, ""])
        (tmp_path / name).write_text(re.sub(r'"run_id": ?"[0-9a-f]*",?', "", text))
    assert len(report.read_run(tmp_path)[0]) == 6  # two of each launch
    said = []
    compare(resume=True, say=said.append)
    assert FakeLaunch.begun == [1, 2, 3]
    assert "6 records of other runs are left aside: written before records carried their origin" in said
