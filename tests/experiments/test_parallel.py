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
