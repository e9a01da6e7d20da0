"""Stages run inside a budget: what is kept of each, how one ends, and what a second call leaves out."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jaxbench import terminal
from jaxbench.gpu import run, stages
from jaxbench.measure import records
from jaxbench.measure.records import Record, RecordFile, Workload
from tests.gpu.small_stages import counting, measuring, python, runs, stage, writing
from tests.structure import ROOT

PATIENCE_S = 120.0  # for what another process does at once, unless the machine stands still
RATE = Record(metric="decode_tokens_per_s", value=5.0, unit="tokens/s", arm="flax", workload=Workload(kind="decode"))


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.02)


# What is kept


def test_a_failing_stage_keeps_those_before_and_after(call):
    ended = call(
        stage("before", python(measuring(RATE))),
        stage("broken", python("print('some'); print('no memory left'); print(); raise SystemExit(3)")),
        stage("after", python(measuring(RATE.model_copy(update={"arm": "torch"})))),
    )
    assert [(each.arm, each.status) for each in ended] == [("before", "ok"), ("broken", "error"), ("after", "ok")]
    assert list(call.named()) == ["before", "broken", "after"]
    broken = call.named()["broken"]
    assert broken.reason == "exit code 3: no memory left"
    assert broken.detail["tail"] == "some\nno memory left\n\n"
    rates = [each for each in call.kept() if each.metric == RATE.metric]
    assert [(each.arm, each.value, each.detail[run.STAGE]) for each in rates] == [
        ("flax", 5.0, "before"), ("torch", 5.0, "after"),
    ]  # fmt: skip


def test_a_traceback_is_named_by_its_last_line(call):
    (ended,) = call(stage("broken", python("raise KeyError('layers')")))
    assert ended.reason == "exit code 1: KeyError: 'layers'"


def test_a_silent_failure_says_that_nothing_was_printed(call):
    (ended,) = call(stage("silent", "sh -c 'exit 4'"))
    assert ended.reason == "exit code 4: nothing printed"


def test_a_failing_stage_keeps_what_it_measured_before(call):
    (ended,) = call(stage("half", python(measuring(RATE) + "raise SystemExit('then it broke')")))
    assert (ended.status, ended.detail["figures"]) == ("error", 1)
    assert [each.metric for each in call.kept()] == [RATE.metric, run.STAGE]


def test_records_are_in_the_file_before_the_next_stage_begins(call):
    path = call.results / records.RESULTS_NAME
    look = f"text = open({str(path)!r}).read(); assert {RATE.metric!r} in text and text.count('first') > 1, text"
    ended = call(stage("first", python(measuring(RATE))), stage("second", python(look)))
    assert [each.reason for each in ended] == ["", ""]


def test_a_record_of_a_stage_says_what_ran_where_and_how_long(call):
    (ended,) = call(stage("first", python(measuring(RATE, RATE.model_copy(update={"arm": "torch"})))), commit="a1b2")
    assert (ended.metric, ended.unit, ended.device, ended.commit) == (run.STAGE, "s", "cpu", "a1b2")
    assert ended.value > 0 and ended.detail["figures"] == 2 and ended.time_utc
    assert ended.detail["command"].startswith("python -c") and "tail" not in ended.detail


def test_two_stages_that_measure_the_same_of_another_model_are_both_kept(call):
    call(stage("large", python(measuring(RATE))), stage("small", python(measuring(RATE))))
    assert [each.detail[run.STAGE] for each in call.kept() if each.metric == RATE.metric] == ["large", "small"]


def test_a_record_that_has_a_configuration_keeps_its_id(call):
    call(stage("large", python(measuring(RATE.model_copy(update={"config_id": "c1"})))))
    assert [each.config_id for each in call.kept() if each.metric == RATE.metric] == ["c1"]


def test_a_parity_file_becomes_a_record_for_each_case(call):
    gate = {"id": "forward", "what": "logits", "passed": True, "error": 1e-9, "limit": 1e-6, "where": "x", "more": 1}
    cases = [
        {"case": "transformer/a", "passed": True, "gates": [gate]},
        {"case": "transformer/b", "passed": False, "gates": [gate, gate | {"passed": False}]},
    ]
    call(stage("proof", python(writing("parity.json", json.dumps(cases)))))
    found = {each.arm: each for each in call.kept() if each.metric == "parity"}
    assert {arm: each.value for arm, each in found.items()} == {"transformer/a": 1.0, "transformer/b": 0.0}
    del gate["more"]
    assert found["transformer/a"].detail == {"gates": [gate], run.STAGE: "proof"}
    assert [each["passed"] for each in found["transformer/b"].detail["gates"]] == [True, False]


def test_figures_have_a_row_for_each_value_and_none_for_marks(call):
    found = [
        RATE.model_copy(update={"samples": (4.0, 5.0), "launch": 1, "detail": {"share_of_roofline": 0.51239}}),
        RATE.model_copy(update={"arm": "torch", "value": 1234567.8}),
        RATE.model_copy(update={"arm": "other", "value": None, "status": "error", "reason": "it broke"}),
        Record(metric=records.LAUNCH_DONE, value=1.0, launch=1),
        Record(metric=records.RUN, value=1.0),
        Record(metric="tokens", value=1.0, arm="flax"),
    ]
    call(stage("first", python(measuring(*found))), stage("second", python(measuring(found[1]))))
    with open(call.results / "figures.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["stage"], row["arm"], row["value"]) for row in rows] == [
        ("first", "flax", "5"), ("first", "torch", "1.23457e+06"), ("second", "torch", "1.23457e+06"),
    ]  # fmt: skip
    assert rows[0] == {
        "stage": "first", "gpu": "", "figure": "decode_tokens_per_s", "arm": "flax", "workload": "decode", "value": "5",
        "unit": "tokens/s", "share_of_roofline": "0.512", "launch": "1", "samples": "2",
    }  # fmt: skip
    assert rows[1]["share_of_roofline"] == ""


def test_the_log_has_what_every_stage_printed_and_the_machine_is_described(call):
    call(stage("first", python("print('one')")), stage("second", python("import sys; print('two', file=sys.stderr)")))
    log = (call.results / "log.txt").read_text()
    assert log.index("== first: ") < log.index("\none\n") < log.index("== second: ") < log.index("\ntwo\n")
    machine = json.loads((call.results / "environment.json").read_text())
    assert machine["commit"] == "abc" and machine["versions"]["jax"] and isinstance(machine["nvidia_smi"], list)


def test_files_of_an_earlier_call_are_not_taken_for_this_one(call):
    failing = stage("first", python("raise SystemExit('no results')"))
    folder = call.results.parent / "work" / "first"
    folder.mkdir(parents=True)
    (folder / records.RESULTS_NAME).write_text(RATE.model_dump_json() + "\n")
    (folder / "parity.json").write_text('[{"case": "a", "passed": true, "gates": []}]')
    (ended,) = call(failing)
    assert (ended.status, ended.detail["figures"]) == ("error", 0)
    assert [each.metric for each in call.kept()] == [run.STAGE]
    assert {path.name for path in folder.iterdir()} == {"earlier-results.jsonl", "earlier-parity.json"}


@pytest.mark.parametrize(
    ("name", "text"), [(records.RESULTS_NAME, "torn\n{}\n"), ("parity.json", "[{"), ("parity.json", '[{"case": "a"}]')]
)
def test_records_that_cannot_be_read_are_an_error_of_their_stage_alone(name, text, call):
    ended = call(stage("torn", python(writing(name, text))), stage("after", python(measuring(RATE))))
    assert [each.status for each in ended] == ["error", "ok"]
    assert ended[0].reason.startswith("its records cannot be read: ")


def test_a_program_that_is_not_there_is_an_error_of_its_stage_alone(call):
    ended = call(stage("absent", "no-such-program {device}"), stage("after", python(measuring(RATE))))
    assert [each.status for each in ended] == ["error", "ok"]
    assert ended[0].reason == "cannot be started: No such file or directory: no-such-program"


def test_a_stage_finds_jaxbench_and_its_own_settings(call):
    code = "import os, jaxbench; assert os.environ['OWN'] == 'cpu:{work}', os.environ['OWN']"
    (ended,) = call(stage("first", python(code), environment={"OWN": "{device}:{work}"}))
    assert ended.reason == ""


def test_the_users_flags_of_xla_apply_beside_a_stages_own_and_are_recorded(call, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine=1")
    code = "import os; print(os.environ['XLA_FLAGS']); raise SystemExit(1)"
    ended = call(stage("own", python(code), environment={"XLA_FLAGS": "--own=2"}), stage("none", python(code)))
    assert [each.reason for each in ended] == [
        f"exit code 1: --mine=1 --own=2 {run.REHEARSED}", f"exit code 1: --mine=1 {run.REHEARSED}",
    ]  # fmt: skip
    assert json.loads((call.results / "environment.json").read_text())["xla_flags"] == "--mine=1"


def test_only_a_rehearsal_is_compiled_without_optimisations(call):
    code = "import os; print(os.environ.get('XLA_FLAGS', '')); raise SystemExit(1)"
    own = stage("own", python(code), environment={"XLA_FLAGS": "--own=2"})
    (measured,) = call(own, is_rehearsal=False)
    (rehearsed,) = call(own, resume=True)
    assert measured.reason.endswith("--own=2") and rehearsed.reason.endswith(f"--own=2 {run.REHEARSED}")


def test_a_rehearsal_runs_the_tiny_form(call):
    code = "import sys; assert sys.argv[1:] == ['cpu', 'tiny'], sys.argv"
    (ended,) = call(stage("first", python(code) + " {device}", rehearsal="tiny"))
    assert ended.reason == ""


# How a stage ends


CHILDREN = """
trap 'exit 1' INT
sleep 600 >/dev/null 2>&1 & echo $! > '{work}/child'
setsid sleep 600 >/dev/null 2>&1 & echo $! > '{work}/apart'
echo measured
mv '{work}/before' '{work}/results.jsonl'
wait
"""


def test_a_stage_at_its_limit_is_ended_with_its_children_and_keeps_its_records(call):
    folder = call.results.parent / "work" / "long"
    folder.mkdir(parents=True)
    (folder / "before").write_text(RATE.model_dump_json() + "\n")
    ended = call(stage("long", shlex.join(["sh", "-c", CHILDREN]), limit_s=5), stage("after", python("")))
    assert [(each.status, each.reason) for each in ended] == [("error", "ended at its limit of 5 s"), ("ok", "")]
    assert ended[0].detail["figures"] == 1 and ended[0].detail["tail"] == "measured\n"
    assert [each.value for each in call.kept() if each.metric == RATE.metric] == [5.0]
    for name in ("child", "apart"):  # one that ignores an interrupt, one in a session of its own
        pid = int((folder / name).read_text())
        wait_for(lambda pid=pid: is_gone(pid))


DEAF = "trap '' INT; echo $$ > '{work}/pid'; while :; do sleep 9; done"


def test_a_stage_that_ignores_an_interrupt_is_ended_too(call, monkeypatch):
    monkeypatch.setattr(stages, "GRACE_S", 0.5)
    (ended,) = call(stage("deaf", shlex.join(["sh", "-c", DEAF]), limit_s=5))
    assert ended.reason == "ended at its limit of 5 s"
    pid = int((call.results.parent / "work" / "deaf" / "pid").read_text())
    wait_for(lambda: is_gone(pid))


def test_a_stage_without_budget_is_skipped_with_a_reason(call):
    ended = call(stage("first", python("")), stage("second", python("")), budget_s=run.LEAST_S - 1)
    assert [each.status for each in ended] == ["skipped", "skipped"]
    assert "of the budget were left, wanted 15; use --resume" in ended[0].reason
    assert {name: each.value for name, each in call.named().items()} == {"first": None, "second": None}
    assert not (call.results / "log.txt").exists() and not (call.results / "figures.csv").exists()


def test_a_stage_gets_no_more_than_what_is_left_of_the_budget(call):
    call(stage("first", python(""), limit_s=3600), stage("second", python(""), limit_s=7), budget_s=100)
    first, second = (line for line in call.said if ": up to " in line)
    limit, left = numbers(first)
    assert limit == left <= 100
    assert numbers(second)[0] == 7


def numbers(line):
    """Return the seconds of a line that says how long a stage may take: its limit, and what is left."""
    limit, left = line.partition(": up to ")[2].partition(";")[0].split(" s of ")
    return int(limit), int(left.removesuffix(" left"))


def test_a_stage_whose_packages_are_missing_is_skipped_and_the_rest_runs(call):
    ended = call(stage("needy", python(""), needs=("no-such-package", "numpy")), stage("after", python("")))
    assert [(each.status, each.reason) for each in ended] == [
        ("skipped", "needs no-such-package, not installed here"), ("ok", ""),
    ]  # fmt: skip


# A second call


def test_resuming_leaves_out_what_ended_well_and_runs_the_rest(call):
    failing = f"import os; assert os.path.exists({str(call.results.parent / 'mended')!r})"
    wanted = counting("good"), counting("bad", failing), counting("late")
    call(*wanted[:2])
    (call.results.parent / "mended").touch()
    ended = call(*wanted, resume=True)
    assert [(each.arm, each.status) for each in ended] == [("bad", "ok"), ("late", "ok")]
    assert "good: done before" in call.said
    assert {name: runs(call, name) for name in ("good", "bad", "late")} == {"good": 1, "bad": 2, "late": 1}
    assert {name: each.status for name, each in call.named().items()} == {"good": "ok", "bad": "ok", "late": "ok"}


def test_a_stage_that_was_skipped_is_run_when_resumed(call):
    call(counting("first"), budget_s=1.0)
    call(counting("first"), resume=True)
    assert runs(call, "first") == 1 and call.named()["first"].status == "ok"


def test_results_of_another_commit_are_measured_again(call):
    call(counting("first", measuring(RATE)), commit="old")
    call(counting("first", measuring(RATE.model_copy(update={"value": 7.0}))), commit="new", resume=True)
    assert runs(call, "first") == 2
    assert [each.value for each in call.kept() if each.metric == RATE.metric] == [7.0]
    assert call.named()["first"].commit == "new"


def test_results_of_another_device_are_measured_again_and_kept_beside(call):
    call(counting("first"), device="cpu")
    call(counting("first"), device="gpu", resume=True)
    assert runs(call, "first") == 2
    assert [each.device for each in call.kept()] == ["cpu", "gpu"]


def test_without_resume_old_results_are_refused_and_stay(call):
    call(counting("first"))
    before = (call.results / records.RESULTS_NAME).read_bytes()
    with pytest.raises(ValueError, match=r"results.jsonl has results; --resume goes on"):
        call(counting("first"), counting("second"))
    assert (call.results / records.RESULTS_NAME).read_bytes() == before
    assert (runs(call, "first"), runs(call, "second")) == (1, 0)


def test_resuming_without_results_runs_everything(call):
    assert [each.status for each in call(counting("first"), resume=True)] == ["ok"]


# The table and the command


def shown(folder, capsys):
    terminal.console().print(run.table(folder))
    return capsys.readouterr().out


def test_the_table_has_stages_and_figures_worth_a_look(call, capsys):
    share = RATE.model_copy(update={"value": 12345.6, "detail": {"share_of_roofline": 0.5}})
    call(stage("first", python(measuring(share, Record(metric="compile_cold_s", value=9.0, unit="s", arm="flax")))))
    text = shown(call.results, capsys)
    (line,) = [line for line in text.splitlines() if "decode_tokens_per_s" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "first", "decode_tokens_per_s", "flax", "decode", "1.235e+04 tokens/s", "0.500",
    ]  # fmt: skip
    assert "compile_cold_s" not in text


def test_the_table_shows_a_reason_with_brackets_as_it_is(call, capsys):
    call(stage("first", python("raise SystemExit('lost [/home] and [bold]this[red]')")))
    assert "exit code 1: lost [/home] and [bold]this[red]" in shown(call.results, capsys)


def command(folder, *arguments):
    return [
        sys.executable, "experiments/gpu.py", "--rehearse", f"--workdir={folder / 'r'}", f"--work={folder / 'w'}",
        *arguments,
    ]  # fmt: skip


def config_of(folder, *stages):
    path = folder / "stages.yaml"
    path.write_text(json.dumps({"stages": [each.model_dump() for each in stages]}))
    return f"--config={path}"


def test_a_failed_stage_ends_the_command_with_1_after_its_table(tmp_path):
    chosen = config_of(tmp_path, stage("broken", python("raise SystemExit('lost')")), stage("good", python("")))
    done = subprocess.run(command(tmp_path, chosen), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "failed: broken: exit code 1: lost"
    assert "good" in done.stdout and "results.jsonl" in done.stdout


def test_an_interrupt_keeps_finished_stages_and_ends_what_runs(tmp_path):
    begin = "sleep 600 >/dev/null 2>&1 & echo $! > '{work}/pid'; mv '{work}/pid' '{work}/begun'; wait"
    sleeping = stage("sleeping", shlex.join(["sh", "-c", begin]))
    chosen = config_of(tmp_path, stage("done", python(measuring(RATE))), sleeping, stage("never", "ls"))
    process = subprocess.Popen(
        command(tmp_path, chosen, "--at_once=1"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    begun = tmp_path / "w" / "sleeping" / "begun"
    wait_for(lambda: begun.exists() or process.poll() is not None)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, error
    assert error.splitlines()[-1].startswith("interrupted; finished stages are in ") and "--resume" in error
    found = records.read_lines(tmp_path / "r" / records.RESULTS_NAME)
    assert [(each.metric, each.arm, each.reason) for each in found] == [
        (RATE.metric, "flax", ""), (run.STAGE, "done", ""), (run.STAGE, "sleeping", "interrupted"),
    ]  # fmt: skip
    pid = int(begun.read_text())
    wait_for(lambda: is_gone(pid))


def test_a_rehearsal_of_real_stages_ends_well_and_its_table_names_them(tmp_path):
    done = subprocess.run(command(tmp_path, "--stage=rates,decode_1b"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "rates" in done.stdout and "decode_1b" in done.stdout
    found = RecordFile(tmp_path / "r" / records.RESULTS_NAME).read()
    assert {each.arm: each.status for each in found if each.metric == run.STAGE} == {"rates": "ok", "decode_1b": "ok"}
    measured = {(each.detail[run.STAGE], each.metric) for each in found if each.metric != run.STAGE and each.value}
    assert {
        ("rates", "read_bandwidth_bytes_per_s"),
        ("rates", "gemm_flops_per_s"),
        ("decode_1b", "decode_tokens_per_s"),
    } <= (measured)
    for name in ("figures.csv", "environment.json", "log.txt"):
        assert Path(tmp_path / "r" / name).stat().st_size
