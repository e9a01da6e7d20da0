"""Stages of a rehearsal that run beside one another."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from jaxbench.gpu import run, stages
from jaxbench.measure import records
from jaxbench.measure.records import RecordFile
from tests.gpu.small_stages import measuring, python, stage
from tests.gpu.test_run import PATIENCE_S, RATE, command, config_of, is_gone, wait_for
from tests.structure import ROOT

MEETS = """
import pathlib, time
pathlib.Path('{{work}}.here').touch()
print('{name} came')
while not pathlib.Path('{{work}}').with_name('{other}.here').exists():
    time.sleep(0.02)
print('{name} met {other}')
"""


def meeting(name, other):
    """Return a stage that ends once the other one runs too."""
    return stage(name, python(MEETS.format(name=name, other=other) + measuring(RATE)), limit_s=PATIENCE_S)


def test_as_many_stages_as_asked_run_at_once_and_each_is_kept_whole(call):
    broken = stage("broken", python("raise SystemExit('lost')"))
    ended = call(meeting("one", "two"), meeting("two", "one"), broken, at_once=2)
    assert [(each.arm, each.reason) for each in ended] == [("one", ""), ("two", ""), ("broken", "exit code 1: lost")]
    kept = call.kept()
    assert sorted(each.detail[run.STAGE] for each in kept if each.metric == RATE.metric) == ["one", "two"]
    assert {name: each.status for name, each in call.named().items()} == {"one": "ok", "two": "ok", "broken": "error"}
    log = (call.results / "log.txt").read_text()
    for name, other in (("one", "two"), ("two", "one")):
        said = log.partition(f"== {name}: ")[2].partition("\n== ")[0]
        assert said.rstrip().endswith(f"{name} came\n{name} met {other}")
    assert {path.name for path in call.results.iterdir()} == {
        "results.jsonl", "figures.csv", "environment.json", "log.txt",
    }  # fmt: skip


SLEEPS = "sleep 600 >/dev/null 2>&1 & echo $! > '{work}/pid'; mv '{work}/pid' '{work}/begun'; wait"


def sleeping(name):
    return stage(name, shlex.join(["sh", "-c", SLEEPS]))


def test_an_interrupt_ends_all_that_run_and_starts_no_more(tmp_path):
    chosen = config_of(tmp_path, stage("done", python(measuring(RATE))), sleeping("a"), sleeping("b"), stage("c", "ls"))
    words = command(tmp_path, chosen, "--at_once=2")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun = [tmp_path / "w" / name / "begun" for name in "ab"]
    wait_for(lambda: all(path.exists() for path in begun) or process.poll() is not None)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, error
    assert error.splitlines()[-1].startswith("interrupted; finished stages are in ") and "--resume" in error
    found = records.read_lines(tmp_path / "r" / records.RESULTS_NAME)
    assert sorted((each.metric, each.arm, each.reason) for each in found) == [
        (RATE.metric, "flax", ""), (run.STAGE, "a", "interrupted"), (run.STAGE, "b", "interrupted"),
        (run.STAGE, "done", ""),
    ]  # fmt: skip
    for path in begun:
        wait_for(lambda path=path: is_gone(int(path.read_text())))


def test_results_that_cannot_be_written_end_the_stages_that_run(call, monkeypatch):
    append = RecordFile.append

    def full(self, *found):
        if any(each.arm == "torch" for each in found):
            raise OSError("disk full")
        append(self, *found)

    monkeypatch.setattr(RecordFile, "append", full)
    monkeypatch.setattr(stages, "LOOK_S", 0.05)
    begun = call.results.parent / "work/slow/begun"
    waits = f"import os, time\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.02)\n"
    filling = stage("filling", python(waits + measuring(RATE.model_copy(update={"arm": "torch"}))))
    with pytest.raises(OSError, match="disk full"):
        call(sleeping("slow"), filling, at_once=2)
    wait_for(lambda: is_gone(int(Path(begun).read_text())))
    assert call.named()["slow"].reason == "interrupted"


def test_figures_are_not_measured_at_once():
    words = [word for word in command(Path("unused"), "--at_once=2") if word != "--rehearse"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: --at_once=2 is for --rehearse: figures measured at once disturb each other\n"
