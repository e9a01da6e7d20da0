"""The command itself on the tiny suite: required keys, equal tokens, files; bad input is one line and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxbench.bench import agreement, run
from jaxbench.measure.records import RecordFile

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--set=rounds.launches=1", "--set=rounds.rounds=1", "--set=decode.batches=[2]"]


def compare(workdir: Path, *arguments: str, limit_s: float = 170) -> subprocess.CompletedProcess:
    command = [sys.executable, "experiments/compare.py", "--config=configs/suites/tiny.yaml", f"--workdir={workdir}"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=limit_s)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("compare")
    done = compare(workdir, *SHORT)
    assert done.returncode == 0, done.stderr[-2000:]
    return workdir, RecordFile(workdir / "results.jsonl").read()


def test_every_arm_has_every_metric_and_every_record_its_origin(finished):
    _, found = finished
    wanted = {"load_s", "prefill_tokens_per_s", "first_token_s", "decode_tokens_per_s", "train_tokens_per_s"}
    wanted |= {"peak_memory_bytes", "import_bytes", "tokens"}
    for arm in ("flax", "equinox", "torch_eager"):
        metrics = {record.metric for record in found if record.arm == arm and record.status == "ok"}
        compiled = {"compile_cold_s", "temp_bytes", "flops"} if arm != "torch_eager" else set()
        assert wanted | compiled <= metrics
    assert not [record.reason for record in found if record.status == "error"]
    for record in found:
        assert record.config_id and record.host and record.time_utc and record.device == "cpu"
        assert len(record.model_sha256) == len(record.text_sha256) == 64
    assert all(record.value > 0 for record in found if record.metric.endswith("_per_s"))
    assert {record.versions.get("jax") for record in found if record.metric == "load_s" and record.arm == "flax"} != {
        None
    }


def test_float32_tokens_and_the_training_loss_agree_on_all_arms(finished):
    notes = agreement.notes(finished[1])
    assert [note.split()[0] for note in notes] == ["prefill", "decode", "train"]
    assert all(note.endswith(": equal on Flax NNX, Equinox, PyTorch eager") for note in notes)
    assert agreement.failures(finished[1]) == [] and run.failures(finished[1]) == []


def test_flax_and_equinox_compile_to_equal_flops_and_temp_bytes(finished):
    counts = {
        (r.metric, r.workload.label(), r.arm): r.value for r in finished[1] if r.metric in ("flops", "temp_bytes")
    }
    ours = {key: value for key, value in counts.items() if key[2] == "flax"}
    exact = {key for key in ours if key[0] == "flops" or not key[1].startswith("train")}
    pairs = [(ours[key], counts[key[0], key[1], "equinox"]) for key in exact]
    assert len(pairs) == 5 and all(flax == equinox for flax, equinox in pairs)


def test_the_run_leaves_settings_and_a_report(finished):
    workdir, found = finished
    assert json.loads((workdir / "suite.json").read_text())["config_id"] == found[0].config_id
    environment = json.loads((workdir / "environment.json").read_text())
    assert environment["threads"] >= 1 and any("malloc" in line for line in environment["settings"])
    assert (workdir / "report.html").stat().st_size > 1000 and (workdir / "results.csv").exists()


def test_resume_of_a_finished_run_measures_nothing_again(finished):
    workdir, found = finished
    done = compare(workdir, *SHORT, "--resume", limit_s=60)
    assert done.returncode == 0 and "1 of 1 launches are already in results.jsonl" in done.stderr
    assert RecordFile(workdir / "results.jsonl").read() == found


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("--tpu_topology=v9z:2x2", "unknown topology 'v9z:2x2'"),
        ("--set=prefill.prompt_tokens=[900]", "takes 900 positions, the model's context is 128"),
        ("--set=prefill.prompt_tokens=[0]", "prefill.prompt_tokens"),
        ("--set=decode.batches=[100000000]", "GiB are available; lower the batch"),
        ("--set=decode.batch=[1]", "batches"),
        ("--model=/nowhere/model.gguf", "/nowhere/model.gguf does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, argument, wanted):
    done = compare(tmp_path / "out", argument, limit_s=60)
    assert done.returncode == 2, done.stderr
    assert wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    done = compare(tmp_path, "--device=gpu", limit_s=60)
    assert done.returncode == 2 and "--device=gpu" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_full_disk_keeps_what_was_written_and_says_how_to_go_on(tmp_path):
    limit = "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000)); sys.argv = sys.argv[1:]; "
    limit += "runpy.run_path(sys.argv[0], run_name='__main__')"
    workdir = tmp_path / "out"
    workdir.mkdir()
    line = '{"metric":"kept","value":1.0,"reason":"' + "x" * 398_000 + '"}\n'
    (workdir / "results.jsonl").write_text(line)  # a few records more and the disk is full
    command = [sys.executable, "-c", limit, "experiments/compare.py", "--config=configs/suites/tiny.yaml", "--resume"]
    command += [f"--workdir={workdir}", "--set=arms=[torch_eager]", *SHORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr[-1500:]
    assert "results.jsonl" in done.stderr.splitlines()[-1] and "--resume" in done.stderr.splitlines()[-1]
    assert (workdir / "results.jsonl").read_text().startswith(line)
    assert (workdir / "results.jsonl").read_bytes().endswith(b"\n")
