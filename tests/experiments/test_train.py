"""The training command's own flags; what it runs is tested in tests/training/test_trainer.py."""

import os
import re
import subprocess
import sys

import pytest

from tests.structure import ROOT


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile_steps=13:10"], "--profile_steps=13:10 is not a:b with a < b <= steps=60"),
        (["--profile_steps=10:99"], "--profile_steps=10:99 is not a:b"),
        (["--backend=torch", "--memory_ladder=2"], "--backend=torch has none"),
        (["--backend=torch", "--find_batch_size", "--memory_mib=1", "--memory_share=1"], "=1.0 are two limits; wanted"),
        (["--set=step.precision=int4"], "step.precision"),
        (["--set=parallel.mesh.stages=2"], "the nearest is parallel.mesh.stage"),
        (["--data=no/such.txt"], "no/such.txt is no file"),
        (["--find_batch_size", "--set=parallel.mesh.data=2"], "--find_batch_size works on one device"),
        (
            ["--find_batch_size", "--coordinator=a:1", "--num_processes=1", "--process_id=0"],
            "--find_batch_size works in one process, got --cluster or --coordinator=a:1",
        ),
        (["--find_batch_size", "--memory_ladder=2"], "--find_batch_size and --memory_ladder=2 end the command each"),
        (["--memory_share=0.5"], "--memory_share=0.5 is the limit of --find_batch_size and --memory_ladder; name one"),
        (["--find_batch_size", "--memory_share=0.5", "--memory_mib=5"], "--memory_mib=5 and --memory_share=0.5 are"),
        (["--find_batch_size", "--memory_share=1.5"], "--memory_share=1.5, wanted a share above 0, up to 1"),
        (["--memory_mib=5"], "--memory_mib=5 is the limit of --find_batch_size and --memory_ladder; name one"),
        (
            ["--memory_ladder=2", "--profile_steps=1:2"],
            "--profile_steps=1:2 is for a training run, and --memory_ladder",
        ),
        (["--coordinator=node0:1234", "--num_processes=2"], "--process_id are missing beside --coordinator=node0:1234"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, message, tmp_path):
    command = [sys.executable, str(ROOT / "experiments" / "train.py"), f"--workdir={tmp_path}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


SEARCHED = """
import runpy, sys
from jaxbench import process_environment
process_environment.ensure = lambda *args, **options: None  # it would start Python anew, without what is replaced here
from jaxbench.training import batch_size
batch_size.device_bytes = lambda: 100 * 2**20
batch_size.run_bytes = lambda run, model, **options: run.batch_size * 2**20
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_batch_size_is_searched_in_a_share_of_the_memory_and_says_what_is_compiled(tmp_path):
    main = str(ROOT / "experiments" / "train.py")
    arguments = [main, "--config=configs/lm/tiny.yaml", "--find_batch_size", "--memory_share=0.1"]
    code = f"import sys; sys.argv = {[*arguments, f'--workdir={tmp_path}', '--set=model.num_layers=1']}" + SEARCHED
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0 and done.stdout.startswith("batch_size=10: 10.0 MiB of 10.0 MiB, "), done
    told = re.findall(r"^compiled batch_size=(\d+): (\d+)\.0 MiB$", done.stderr, re.MULTILINE)
    assert {"10", "11"} <= {rows for rows, _ in told} and all(rows == needed for rows, needed in told), done.stderr


def test_pytorch_s_batch_size_is_traced_and_one_row_more_would_not_fit(tmp_path):
    main = str(ROOT / "experiments" / "train.py")
    arguments = [main, "--config=configs/lm/tiny.yaml", "--find_batch_size", "--backend=torch", "--memory_mib=5"]
    arguments += [f"--workdir={tmp_path}", "--set=model.num_layers=1"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done
    told = dict(re.findall(r"^traced batch_size=(\d+): ([\d.]+) MiB$", done.stderr, re.MULTILINE))
    found = re.match(r"batch_size=(\d+): ([\d.]+) MiB of 5.0 MiB, (\d+) sizes traced; .* loss \d", done.stdout)
    assert found is not None and int(found[3]) == len(told), done.stdout
    assert told[found[1]] == found[2] and float(found[2]) <= 5.0 < float(told[str(int(found[1]) + 1)]), told
