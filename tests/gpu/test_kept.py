"""What is there of a stage when it, or the call that runs it, is killed; results of several GPUs; a second call."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jaxbench.gpu import run, stages
from jaxbench.measure import records
from jaxbench.measure.records import Record, Workload
from tests.gpu.small_stages import counting, measuring, python, runs, stage, writing
from tests.structure import ROOT

RATE = Record(metric="decode_tokens_per_s", value=5.0, unit="tokens/s", arm="flax", workload=Workload(kind="decode"))
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
PATIENCE_S = 120.0


def wait_for(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# A call, or a command, that is killed

QUICK = """
import runpy, sys
from jaxbench.gpu import stages
stages.LOOK_S = 0.05
sys.argv = ["experiments/gpu.py", *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, ["interrupted"]), (signal.SIGKILL, [])])
def test_what_a_stage_has_measured_and_printed_survives_the_end_of_the_call(number, ends, tmp_path):
    slow = stage("slow", python("print('begun', flush=True); " + measuring(RATE) + "import time; time.sleep(600)"))
    chosen = tmp_path / "stages.yaml"
    chosen.write_text(json.dumps({"stages": [slow.model_dump()]}))
    words = ["--rehearse", f"--config={chosen}", f"--workdir={tmp_path / 'r'}", f"--work={tmp_path / 'w'}"]
    process = subprocess.Popen([sys.executable, "-c", QUICK, *words], cwd=ROOT, stdout=-3, stderr=-3)
    path = tmp_path / "r" / records.RESULTS_NAME
    wait_for(lambda: path.exists() or process.poll() is not None)
    started = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    process.wait(PATIENCE_S)
    for each in started:  # a call that is killed ends nothing
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    found = records.read_lines(path)
    assert [(each.value, each.detail[run.STAGE]) for each in found if each.metric == RATE.metric] == [(5.0, "slow")]
    assert [each.reason for each in found if each.metric == run.STAGE] == ends
    assert "\nbegun\n" in (tmp_path / "r/log.txt").read_text()


def test_a_stage_ends_with_its_command_whatever_that_has_started(call, monkeypatch):
    monkeypatch.setattr(stages, "LOOK_S", 0.05)
    begin = "setsid sleep 600 & echo $! > {work}/pid; echo said; sleep 1"  # it holds the output open
    (ended,) = call(stage("one", shlex.join(["sh", "-c", begin]), limit_s=PATIENCE_S))
    assert (ended.status, ended.reason) == ("ok", "") and ended.value < PATIENCE_S
    pid = int((call.results.parent / "work/one/pid").read_text())
    wait_for(lambda: is_gone(pid))  # or it would keep the memory of the device
    assert (call.results / "log.txt").read_text().endswith("said\n")


def test_a_command_that_is_killed_is_named_by_the_signal(call):
    (ended,) = call(stage("one", shlex.join(["sh", "-c", "echo compiling; kill -9 $$"])))
    assert ended.reason == "ended by SIGKILL, as where memory runs out: compiling"


def test_the_log_keeps_the_first_and_the_last_of_a_stage_that_prints_much(call, monkeypatch):
    monkeypatch.setattr(stages, "LOG_BYTES", 20)
    call(stage("loud", python("print('begin' + 'x' * 1000 + 'end')")), stage("after", python("print('more')")))
    text = (call.results / "log.txt").read_text()
    assert "\nbeginxxxxx\n[989 bytes left out]\nxxxxxxend\n" in text and text.endswith("more\n")


def test_places_are_those_of_the_folder_that_the_command_is_called_from(tmp_path):
    chosen = tmp_path / "stages.yaml"
    chosen.write_text(json.dumps({"stages": [stage("one", python(measuring(RATE))).model_dump()]}))
    words = [sys.executable, ROOT / "experiments/gpu.py", "--rehearse", "--config=stages.yaml", "--workdir=r"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    found = records.read_lines(tmp_path / "r" / records.RESULTS_NAME)
    assert [each.metric for each in found] == [RATE.metric, run.STAGE]
    assert (tmp_path / "r-work/one" / records.RESULTS_NAME).is_file()


def test_without_the_packages_of_every_command_one_line_says_what_brings_them(tmp_path):
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError('No module named pydantic', name='pydantic')")
    settings = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "experiments/gpu.py", "--rehearse"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=settings)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: gpu: this Python lacks pydantic; carry the wheels of `make gpu_pack`")


# Several GPUs, and a second call


def on_gpu(call, monkeypatch, name, *wanted):
    lines = ["name, memory.total [MiB]"] + ([f"{name}, 1 MiB"] if name else [])
    monkeypatch.setattr(run, "machine", lambda: {"host": "a", "commit": "abc", "versions": {}, "nvidia_smi": lines})
    return call(*wanted, device="gpu", resume=True)


def test_results_of_another_kind_of_gpu_are_measured_again_and_kept_beside(call, monkeypatch):
    for name, value in ((H100, 5.0), (H200, 7.0), (H200, 7.0)):
        on_gpu(call, monkeypatch, name, counting("one", measuring(RATE.model_copy(update={"value": value}))))
    assert runs(call, "one") == 2
    rates = [(each.value, each.detail["gpu"]) for each in call.kept() if each.metric == RATE.metric]
    assert rates == [(5.0, H100), (7.0, H200)]
    assert [each.detail["gpu"] for each in call.kept() if each.metric == run.STAGE] == [H100, H200]
    assert [row["gpu"] for row in run.figures(call.kept())] == [H100, H200]
    columns = run.table(call.results).columns
    assert list(columns[0].cells) == [f"one ({name})" for name in (H100, H200, H100, H200)]
    machines = json.loads((call.results / "environment.json").read_text())
    assert machines["nvidia_smi"][1].startswith(H200)
    assert [each["nvidia_smi"][1].partition(",")[0] for each in machines["earlier"]] == [H100]


def test_a_gpu_is_named_as_nvidia_smi_names_it_several_with_their_number():
    head = "name, memory.total [MiB]"
    for lines, wanted in (
        ([head, "NVIDIA H200, 143771 MiB"], H200),
        ([head, "NVIDIA H200, 1 MiB", "NVIDIA H200, 1 MiB"], "NVIDIA H200 x 2"),
        (["NVIDIA-SMI has failed because it could not talk to the driver."], ""),
        ([], ""),
    ):
        assert run.gpu_of({"nvidia_smi": lines}) == wanted


@pytest.mark.parametrize("change", [{"command": None}, {"environment": {"XLA_FLAGS": "--xla_dump_to="}}])
def test_a_stage_whose_command_or_settings_have_changed_is_run_again(change, call):
    first = counting("one")
    call(first)
    changed = {"command": first.command + " more"} if "command" in change else change
    call(first.model_copy(update=changed), resume=True)
    assert runs(call, "one") == 2


def test_a_skipped_stage_does_not_take_the_place_of_how_it_ended_before(call):
    broken = stage("one", python("raise SystemExit('lost')"))
    call(broken)
    (ended,) = call(broken, resume=True, budget_s=1.0)
    assert ended.status == "skipped"
    assert (call.named()["one"].status, call.named()["one"].reason) == ("error", "exit code 1: lost")


def test_records_are_copied_once_however_often_they_are_looked_at(call, monkeypatch):
    monkeypatch.setattr(stages, "LOOK_S", 0.02)
    slow = measuring(RATE) + "import time; time.sleep(0.5); "
    call(stage("one", python(slow + writing(records.RESULTS_NAME, ""))))
    lines = records.read_lines(call.results / records.RESULTS_NAME)
    assert [each.metric for each in lines] == [RATE.metric, run.STAGE]


def test_a_stage_that_has_no_figure_in_what_is_left_leaves_it_to_the_next_but_in_a_rehearsal(call):
    wanted = counting("long").model_copy(update={"least_s": 50.0}), counting("short")
    call(*wanted, budget_s=40.0)
    assert (runs(call, "long"), runs(call, "short")) == (1, 1)
    place = run.Place("cpu", False, call.results.parent / "real", call.results.parent / "work")
    ended = run.run(wanted, place, budget_s=40.0, resume=False, say=call.said.append)
    assert [each.status for each in ended] == ["skipped", "ok"]
    assert ended[0].reason.endswith("s of the budget were left, wanted 50; use --resume")
    assert (runs(call, "long"), runs(call, "short")) == (1, 2)
