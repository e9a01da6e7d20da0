"""The command that proves meshes, as a shell calls it."""

import os
import subprocess
import sys

from tests.structure import ROOT


def test_devices_that_a_shell_simulates_for_trainings_do_not_change_the_proof():
    command = [sys.executable, str(ROOT / "experiments" / "parallel.py"), "--case=zero0"]
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    here = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, env=here, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 cases equal the unsharded program" in done.stdout


def test_lines_are_appended_to_those_of_an_earlier_run(tmp_path):
    row = '{"case": "zero0", "passed": true, "worst": 0.0, "kind": "loss"}\n'
    (tmp_path / "rows.jsonl").write_text(row + '{"case": "ze')  # killed as it wrote
    command = [sys.executable, str(ROOT / "experiments" / "parallel.py"), "--case=zero0"]
    done = subprocess.run([*command, f"--output={tmp_path / 'rows.jsonl'}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, new = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    assert before == row and new.startswith('{"case": "zero0", "passed": true')
