"""TensorBoard's event files."""

import subprocess
import sys

from tests.structure import ROOT

WRITES = """
import sys
from jaxbench.measure import event_files
with event_files.library().SummaryWriter({folder!r}) as writer:
    writer.add_scalar("loss", 1.5, 3)
assert "torch" not in sys.modules
import torch
with event_files.library().SummaryWriter({folder!r}) as writer:
    writer.add_scalar("loss", torch.tensor(2.5), 4)
"""
TRAINS = """
import runpy, sys
sys.argv = ["train.py", "--config=configs/lm/tiny.yaml", "--workdir=" + {folder!r}, "--set=steps=6"]
try:
    runpy.run_path("experiments/train.py", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_scalars_are_written_without_pytorch_and_with_its_tensors_where_it_is_imported(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(WRITES.format(folder=str(tmp_path)))
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(3, 1.5), (4, 2.5)]


def test_a_training_run_in_flax_does_not_import_pytorch(tmp_path):
    run(TRAINS.format(folder=str(tmp_path / "run")))
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
