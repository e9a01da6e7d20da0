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
from jaxbench.measure.records import Record, RecordFile, Workload
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


def has_line(path):
    return path.exists() and path.read_bytes().endswith(b"\n")


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# A call, or a command, that is killed

QUICK = """
import runpy, signal, sys
from jaxbench.gpu import stages
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
stages.LOOK_S = 0.05
sys.argv = ["experiments/gpu.py", *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, ["interrupted"]), (signal.SIGHUP, ["interrupted"]), (signal.SIGKILL, [])]
)
def test_what_a_stage_has_measured_and_printed_survives_the_end_of_the_call(number, ends, tmp_path):
    slow = stage("slow", python("print('begun', flush=True); " + measuring(RATE) + "import time; time.sleep(600)"))
    chosen = tmp_path / "stages.yaml"
    chosen.write_text(json.dumps({"stages": [slow.model_dump()]}))
    words = [
        "--rehearse",
        "--at_once=1",
        f"--config={chosen}",
        f"--workdir={tmp_path / 'r'}",
        f"--work={tmp_path / 'w'}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", QUICK, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path = tmp_path / "r" / records.RESULTS_NAME
    wait_for(lambda: has_line(path) or process.poll() is not None)
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


def note_started(monkeypatch, folder):
    """Leave the file `seen` in the folder of a stage once what it says to have started is known to who runs it."""
    whole = stages._started

    def started(process):
        found = whole(process)
        pid = folder / "pid"
        if has_line(pid) and int(pid.read_text()) in {each.pid for each in found}:
            (folder / "seen").touch()
        return found

    monkeypatch.setattr(stages, "_started", started)


def test_a_stage_ends_with_its_command_whatever_that_has_started(call, monkeypatch):
    monkeypatch.setattr(stages, "LOOK_S", 0.05)
    wait = "while [ ! -e '{work}/seen' ]; do sleep 0.05; done"
    begin = f"setsid sleep 600 & echo $! > '{{work}}/pid'; echo said; {wait}"  # it holds the output open
    note_started(monkeypatch, call.results.parent / "work/one")
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


DEAF = "trap '' INT; setsid sleep 600 & echo $! > '{work}/pid'; sleep 600"


def test_a_second_interrupt_ends_all_at_once_and_keeps_what_was_measured(call, monkeypatch):
    folder, asked, waited = call.results.parent / "work/deaf", [], []
    whole, look = subprocess.Popen.wait, run.Keeper.look

    def wait(self, timeout=None):
        if timeout == stages.GRACE_S and not waited:
            waited.append(timeout)
            (folder / records.RESULTS_NAME).write_text(RATE.model_dump_json() + "\n")  # behind the last look
            raise KeyboardInterrupt
        return whole(self, timeout)

    def interrupted(self):
        look(self)
        if not asked and (folder / "seen").exists():
            asked.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(stages, "LOOK_S", 0.05)
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(run.Keeper, "look", interrupted)
    note_started(monkeypatch, folder)
    opened = []
    monkeypatch.setattr(run, "Log", lambda *given: opened.append(stages.Log(*given)) or opened[0])
    with pytest.raises(KeyboardInterrupt):
        call(stage("deaf", shlex.join(["sh", "-c", DEAF])), stage("never", "ls"))
    wait_for(lambda: is_gone(int((folder / "pid").read_text())))
    assert waited and opened[0].output.closed and list(folder.parent.glob("*.running")) == []
    assert [(each.metric, each.reason) for each in call.kept()] == [(RATE.metric, ""), (run.STAGE, "interrupted")]


def begun(pid):
    return [pid, psutil.Process(pid).create_time()]


def test_a_resumed_call_ends_what_a_killed_one_left_running(call, tmp_path):
    """Else it would write into the same file, and hold the device."""
    slow = stage("slow", shlex.join(["sh", "-c", "sleep 600 & echo $$ $! > '{work}/pids'; wait"]))
    chosen = tmp_path / "stages.yaml"
    chosen.write_text(json.dumps({"stages": [slow.model_dump()]}))
    words = ["--rehearse", f"--config={chosen}", f"--workdir={call.results}", f"--work={tmp_path / 'work'}"]
    process = subprocess.Popen(
        [sys.executable, "-c", QUICK, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    pids, mark = tmp_path / "work/slow/pids", tmp_path / "work/slow.running"
    wait_for(lambda: (has_line(pids) and mark.exists()) or process.poll() is not None)
    process.kill()
    process.wait(PATIENCE_S)
    left = [int(each) for each in pids.read_text().split()]
    assert [is_gone(pid) for pid in left] == [False, False]
    call(counting("other"), resume=True)
    assert [is_gone(pid) for pid in left] == [True, True]
    assert "slow: ended what a killed call had left running" in call.said and not mark.exists()


def test_a_process_of_another_time_or_of_a_call_that_runs_is_no_command_that_was_left(tmp_path):
    mark, gone = tmp_path / "one.running", [os.getpid(), 1.0]  # as of a call whose number this process has got
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        for marks in (
            {"command": [process.pid, begun(process.pid)[1] - 100], "call": gone},
            {"command": begun(process.pid), "call": begun(os.getpid())},
            {"command": begun(process.pid)},
            [1],
        ):
            mark.write_text(json.dumps(marks))
            assert stages.end_left(mark) is False and not is_gone(process.pid)
        mark.write_text(json.dumps({"command": begun(process.pid), "call": gone}))
        assert stages.end_left(mark) is True and is_gone(process.pid) and not mark.exists()
        assert stages.end_left(mark) is False
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_a_command_that_has_ended_leaves_no_mark(call):
    call(stage("one", python("import pathlib; assert pathlib.Path('{work}.running').is_file()")))
    assert call.named()["one"].status == "ok" and list((call.results.parent / "work").glob("*.running")) == []


def test_a_file_that_goes_between_two_looks_is_for_the_next(call, tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "kept.jsonl")
    keeper = run.Keeper(file, stage("one", "ls"), run.Place("cpu", True, tmp_path, tmp_path), "")
    monkeypatch.setattr(run.Path, "exists", lambda self: True)  # and is gone when it is read
    keeper.look()
    keeper.folder.mkdir()
    (keeper.folder / records.RESULTS_NAME).write_text(RATE.model_dump_json() + "\n")
    keeper.look()  # the other files are gone
    monkeypatch.undo()
    (keeper.folder / "summary.json").write_text("{}")
    keeper.look()
    assert [each.value for each in file.read()] == [5.0]


def test_results_that_cannot_be_written_are_no_file_that_is_gone(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "kept.jsonl")
    keeper = run.Keeper(file, stage("one", "ls"), run.Place("cpu", True, tmp_path, tmp_path), "")
    keeper.folder.mkdir()
    (keeper.folder / records.RESULTS_NAME).write_text(RATE.model_dump_json() + "\n")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(file, "append", full)
    with pytest.raises(OSError, match="disk full"):
        keeper.look()


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


def test_launches_of_one_gpu_do_not_end_those_of_another_whose_host_is_the_same(call, monkeypatch):
    for name, value in ((H100, 5.0), (H200, 7.0)):
        marks = [
            Record(metric=metric, value=1.0, launch=1, run_id="r")
            for metric in (records.LAUNCH_BEGUN, records.LAUNCH_DONE)
        ]
        rate = RATE.model_copy(update={"value": value, "launch": 1, "run_id": "r"})
        on_gpu(call, monkeypatch, name, counting("one", measuring(marks[0], rate, marks[1])))
    rates = {each.detail["gpu"]: (each.value, each.run_id) for each in call.kept() if each.metric == RATE.metric}
    assert rates == {H100: (5.0, f"r {H100}"), H200: (7.0, f"r {H200}")}
    assert len([each for each in call.kept() if each.metric == records.LAUNCH_DONE]) == 2


def test_what_nvidia_smi_says_of_its_failure_is_no_gpu(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: no version'\necho 'NVML library version: 5'\nexit 18\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert run.gpu_of(run.machine()) == ""
    script.write_text("#!/bin/sh\necho 'name, memory'\necho 'NVIDIA H200, 1 MiB'\n")
    assert run.gpu_of(run.machine()) == H200


@pytest.mark.parametrize(
    ("text", "earlier"),
    [('{"host": "b", "earlier": [1, {"host": "c"}]}', ["c", "b"]), ('{"host": "b", "earlier": 1}', ["b"]), ("[1]", [])],
)
def test_what_is_no_machine_in_an_earlier_description_is_left_out(text, earlier, tmp_path):
    path = tmp_path / "environment.json"
    path.write_text(text)
    run.write_machine(path, {"host": "a"})
    assert [each["host"] for each in json.loads(path.read_text()).get("earlier", [])] == earlier


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


@pytest.mark.parametrize("words", ["--config={0}", "--config {0}", "-config={0}", "--config={1}"])
def test_a_stage_whose_configuration_has_other_content_is_run_again(words, call, tmp_path):
    mine, suite = tmp_path / "mine.yaml", tmp_path / "suite.yml"
    mine.write_text("a: 1\n")
    suite.write_text(f"model: {mine}  # what it measures\n")
    one = counting("one")
    one = one.model_copy(
        update={"command": f"{one.command} {words.format(shlex.quote(str(mine)), shlex.quote(str(suite)))}"}
    )
    for text, times in (("a: 1\n", 1), ("a: 1\n", 1), ("a: 2\n", 2), ("a: 2\n", 2)):
        mine.write_text(text)
        call(one, resume=True)
        assert runs(call, "one") == times


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
    wanted = counting("long").model_copy(update={"least_s": 5000.0}), counting("short")
    call(*wanted, budget_s=4000.0)
    assert (runs(call, "long"), runs(call, "short")) == (1, 1)
    place = run.Place("cpu", False, call.results.parent / "real", call.results.parent / "work")
    ended = run.run(wanted, place, budget_s=4000.0, resume=False, say=call.said.append)
    assert [each.status for each in ended] == ["skipped", "ok"]
    assert ended[0].reason.endswith("s of the budget were left, wanted 5000; use --resume")
    assert (runs(call, "long"), runs(call, "short")) == (1, 2)
