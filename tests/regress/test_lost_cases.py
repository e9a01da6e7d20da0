"""A case that this tree cannot run fails the run, with or without a base, in every report."""

import subprocess
import sys
from xml.etree import ElementTree

from jaxbench.measure.environment import ROOT
from jaxbench.regress import report
from tests.regress.records import RATE, finding, quiet, record

LOST = """
model: tiny
cases:
  - {name: words, workload: tokenizing, characters: 500}
  - {name: detect, workload: detection, scheme: no-such}
looks: [2]
rounds: 1
sample_s: 0
requires: {memory_bytes: 0}
"""


def test_a_run_that_loses_a_case_of_this_tree_ends_with_1_and_is_kept(tmp_path):
    (tmp_path / "lost.yaml").write_text(LOST)
    command = [sys.executable, "experiments/benchmarks.py", "run", f"--suite={tmp_path / 'lost.yaml'}"]
    command += [f"--workdir={tmp_path / 'w'}", f"--history={tmp_path / 'h'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "; not measured: detect" in done.stdout, done.stderr
    assert "this tree does not run detect (" in done.stderr and "kept as " in done.stdout
    [failure] = ElementTree.parse(tmp_path / "w" / "report.xml").iter("failure")
    assert "no-such" in failure.get("message")


def test_a_lost_case_fails_beside_regressions_and_one_of_the_base_alone_does_not():
    lost = record([*quiet()[1:], finding(RATE, "regression", "critical", 0.5)], lost={"train": "it died"})
    assert report.failures(lost) == [f"critical regression of {RATE}", "this tree does not run train (it died)"]
    assert 'failures="2"' in report.junit(lost) and 'tests="5"' in report.junit(lost)
    assert "not measured: train" in report.markdown(lost)
    assert report.failures(record(quiet(), lost={})) == [] == report.failures(record(quiet()))
