"""Two real processes train like one, and write and read its checkpoints; who holds a folder; bad places."""

import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxbench import cli, config, process_environment
from jaxbench.parallel import processes
from jaxbench.training import checkpoint, engine, trainer
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own, of several kinds
CONFIG = ROOT / "configs/lm/tiny.yaml"
CHANGES = (
    "model.num_layers=1", "data.tokenizer=character", "batch_size=8", "schedule.kind=constant",
    "schedule.warmup_steps=0", "evaluation.every_steps=2", "evaluation.batches=2", "checkpoints.every_steps=2",
)  # fmt: skip
MESH = ("parallel.mesh.data=2", "parallel.mesh.fsdp=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat and the dog sat on the log; " * 60)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def train_alone(workdir, text, steps):
    """Train in this process on one device."""
    settings = config.load(CONFIG, [*CHANGES, f"steps={steps}"], TrainConfig)
    return trainer.run(settings, engine.Engine, workdir=workdir, backend="flax", data_path=text)


def start(workdir, text, steps, *, count=2, own=((), ())):
    """Start the command in processes of two devices each; `own` are arguments that only one of them gets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mesh = MESH if count == 2 else ()
    changes = [f"--set={change}" for change in (*CHANGES, *mesh, f"steps={steps}")]
    command = [sys.executable, str(ROOT / "experiments" / "train.py"), f"--config={CONFIG}", f"--workdir={workdir}",
               f"--data={text}", *changes, f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"]  # fmt: skip
    uncached = {process_environment.CACHES: "false"}  # as the command sets it, where conftest.py does not say otherwise
    here = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} | uncached
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": here, "cwd": ROOT}
    return [subprocess.Popen([*command, f"--process_id={index}", *own[index]], **how) for index in range(count)]


def ended(started):
    """Wait for processes; return what they printed and their exit codes."""
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return printed, [process.returncode for process in started]


def train_in_two(workdir, text, steps):
    """Train with the command, in two processes of two devices each."""
    printed, codes = ended(start(workdir, text, steps))
    assert codes == [0, 0], "\n".join(printed)
    return printed


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    """Return folders of six steps on one device, and of two there, two in two processes and two there again."""
    one, many = tmp_path_factory.mktemp("runs") / "one", tmp_path_factory.mktemp("runs") / "many"
    train_alone(one, text, 6)
    train_alone(many, text, 2)
    printed = train_in_two(many, text, 4)
    meta = json.loads(next((many / "checkpoints" / "4" / "meta").glob("metadata")).read_text())
    parts = json.loads(meta["content"])
    train_alone(many, text, 6)
    return one, many, printed, parts


def test_two_processes_train_to_the_parameters_of_one(runs):
    one, many, _, _ = runs
    records = [
        [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()] for folder in runs[:2]
    ]
    assert [record["step"] for record in records[0]] == [record["step"] for record in records[1]]
    for name in ("loss", "grad_norm", "validation_loss", "validation_bits_per_byte"):
        found = [[record[name] for record in lines if name in record] for lines in records]
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    wanted, found = (load_file(folder / "export" / "model.safetensors") for folder in (one, many))
    for name, value in wanted.items():
        assert np.linalg.norm(value - found[name]) <= 1e-6 * np.linalg.norm(value), name


def test_the_first_process_speaks_and_writes_for_all(runs):
    _, many, printed, _ = runs
    assert "starts at step 2" in printed[0] and "finished 4 steps" in printed[0]
    assert "step" not in printed[1].replace("[Gloo]", "")
    assert len(list((many / "tensorboard").iterdir())) == 3  # one file a start


def test_every_part_of_an_array_that_processes_share_has_its_checksum(runs):
    sums = runs[3]["crc32"]
    halves = sums["params.layers.0.mlp.up_proj.kernel"]
    assert [bounds for bounds, _ in halves] == [[[0, 16], [0, 64]], [[16, 32], [0, 64]]]
    assert len({crc for _, crc in halves}) == 2 and len(sums["step"]) == 1
    value = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    known = [[bounds, checkpoint._sum(value[tuple(slice(*ends) for ends in bounds)])] for bounds, _ in halves]
    assert not checkpoint._differs(value, known)
    value[31, 63] += 1
    assert checkpoint._differs(value, known)


def test_all_processes_stop_where_one_cannot_go_on(tmp_path):
    others = processes.Processes(1, 2, lambda own: np.stack([0 * own, own]))  # the first one says no
    with pytest.raises(ValueError, match="process 1 stops, the first one cannot use"), processes.held(tmp_path, others):
        pass
    assert not list(tmp_path.iterdir())
    with processes.held(tmp_path, processes.ALONE), pytest.raises(ValueError, match="is in use by process"):
        with processes.held(tmp_path, processes.ALONE):
            pass


def test_processes_that_were_not_given_the_same_are_refused_and_write_nothing(tmp_path, text):
    other = tmp_path / "other.txt"
    other.write_text("another text of another length; " * 90)
    printed, codes = ended(
        start(tmp_path / "run", text, 4, own=(("--set=seed=1",), ("--set=seed=2", f"--data={other}")))
    )
    assert codes == [cli.EXIT_USAGE] * 2, "\n".join(printed)
    for index, lines in enumerate(printed):
        assert f"the 2 processes were not given the same seed, text_sha256 (process {index} has {index + 1}, " in lines
    assert not (tmp_path / "run").exists()


def test_processes_that_see_other_folders_are_refused(tmp_path, text):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / processes.LOCK).write_text("4711\n")  # of an earlier run on that host
    own = [(f"--workdir={tmp_path / name}",) for name in "ab"]
    printed, codes = ended(start(tmp_path / "unused", text, 4, own=own))
    assert codes == [cli.EXIT_USAGE] * 2, "\n".join(printed)
    for index, said in enumerate(("a of process 0 is the folder", "b of process 1 is not the folder")):
        assert f"{said} that the first one holds, wanted one that all 2 processes see" in printed[index]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_batch_systems_signal_ends_a_process_that_has_joined_a_coordinator(tmp_path, text):
    run = start(tmp_path / "run", text, 10**6, count=1, own=((),))
    while not checkpoint.finished(tmp_path / "run" / trainer.CHECKPOINTS) and run[0].poll() is None:
        time.sleep(0.1)
    run[0].terminate()
    printed, codes = ended(run)
    assert codes == [cli.EXIT_INTERRUPT], printed[0]
    assert "the same command goes on" in printed[0]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("node0:1234", None, None), "--num_processes and --process_id are missing beside --coordinator=node0:1234"),
        ((None, 2, 0), "--coordinator are missing"),
        (("node0", 2, 0), "--coordinator=node0 is not host:port"),
        (("node0:99999", 2, 0), "--coordinator=node0:99999 is not host:port .* port from 1 to 65535"),
        (("node0:\u00b2", 2, 0), "is not host:port"),
        (("node0:1234", 2, 2), "--process_id=2 is not from 0 to num_processes - 1 = 1"),
    ],
)
def test_half_a_place_among_processes_is_refused(place, message):
    with pytest.raises(ValueError, match=message):
        processes.check_place(*place)
    processes.check_place(None, None, None)
    processes.check_place("node0:1234", 2, 1)
