"""Recorded permutations: those of a CPU are what the green lists' own algorithm draws; what is no vector is refused."""

from __future__ import annotations

import ctypes.util
import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxbench import cli
from jaxbench.gpu import randperm
from jaxbench.measure.records import RecordFile
from jaxbench.watermark import green_lists
from tests.structure import ROOT

torch = pytest.importorskip("torch")
SIZES, SEEDS = (3, 8, 128, 50257), (0, 15485863, 15485863 * 50256, 2**63 - 1, 2**64 - 1)


def command(folder, *words: str) -> subprocess.CompletedProcess:
    call = [sys.executable, "-m", "jaxbench.gpu.randperm", "--device=cpu", f"--output={folder / 'new.json'}", *words]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)


def listed(name, values) -> str:
    return f"--{name}={','.join(map(str, values))}"


def test_vectors_of_a_cpu_are_those_of_the_green_lists_own_algorithm(tmp_path):
    done = command(tmp_path, listed("sizes", SIZES), listed("seeds", SEEDS), f"--records={tmp_path / 'results.jsonl'}")
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "new.json").read_text())
    facts = {"torch": torch.__version__, "generator": "cpu", "device": "cpu"}
    assert content | facts == content
    cases = [(size, seed) for size in SIZES for seed in SEEDS]
    assert [(each["size"], each["seed"]) for each in content["vectors"]] == cases
    for each in content["vectors"]:
        wanted = green_lists.permutation(each["seed"], each["size"])
        assert each["first"] == wanted[:32].tolist() and each["last"] == wanted[-8:].tolist()
        packed = b"".join(int(entry).to_bytes(8, "little") for entry in wanted)
        assert each["sha256"] == hashlib.sha256(packed).hexdigest()
    (record,) = RecordFile(tmp_path / "results.jsonl").read()
    assert (record.metric, record.value, record.arm) == ("randperm_vectors", len(cases), "torch cpu")
    assert record.detail == facts | {"file": "new.json"}


def test_a_file_that_is_there_is_kept_unless_it_may_be_written_over(tmp_path):
    (tmp_path / "new.json").write_text("mine")
    words = "--sizes=3", "--seeds=0"
    done = command(tmp_path, *words)
    assert done.returncode == 2 and "pass --overwrite" in done.stderr
    assert (tmp_path / "new.json").read_text() == "mine"
    assert command(tmp_path, *words, "--overwrite").returncode == 0
    assert len(json.loads((tmp_path / "new.json").read_text())["vectors"]) == 1


@pytest.mark.parametrize(
    ("draws", "wanted"),
    [
        ([[0, 1, 2], [0, 2, 1]], "size 3, seed 7: drawn again it is another permutation"),
        ([[0, 1, 1], [0, 1, 1]], "size 3, seed 7: what cpu drew is no permutation"),
    ],
)
def test_what_is_not_drawn_again_or_is_no_permutation_fails(draws, wanted, monkeypatch):
    drawn = iter(draws)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: torch.tensor(next(drawn)))
    with pytest.raises(cli.GateFailed, match=wanted):
        list(randperm.drawn([3], [7], "cpu"))


def test_a_gpu_is_named_with_its_multiprocessors_and_both_versions_of_cuda(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA X", multi_processor_count=132, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: {0: properties}[number])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(randperm, "driver_version", lambda: "13.0")
    assert randperm.about("cuda") == {
        "torch": torch.__version__, "generator": "cuda", "device": "NVIDIA X", "multiprocessors": 132,
        "threads_per_multiprocessor": 2048, "cuda_of_torch": "12.8", "cuda_of_driver": "13.0",
    }  # fmt: skip


@pytest.mark.parametrize(("number", "failed", "wanted"), [(13000, 0, "13.0"), (12080, 0, "12.8"), (0, 3, "")])
def test_the_drivers_version_is_read_as_cuda_writes_it(number, failed, wanted, monkeypatch):
    def answer(pointer):
        pointer._obj.value = number
        return failed

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=answer))
    assert randperm.driver_version() == wanted


def test_without_a_driver_its_version_is_left_open():
    assert randperm.driver_version("no-such-library.so.1") == ""
    assert randperm.driver_version(ctypes.util.find_library("c")) == ""  # a library without that function


def test_few_entries_are_all_written_out():
    found = randperm.vector(np.array([2, 0, 1]), seed=5)
    assert (found["size"], found["seed"], found["first"], found["last"]) == (3, 5, [2, 0, 1], [2, 0, 1])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--sizes=3,0", "--sizes='0' is no whole number from 1"),
        ("--sizes=1e3", "--sizes='1e3' is no whole number"),
        ("--sizes=", "--sizes='' is no whole number"),
        (f"--sizes={2**31}", f"--sizes='{2**31}' is no whole number"),
        ("--seeds=-1", "--seeds='-1' is no whole number from 0"),
        (f"--seeds=0,{2**64}", f"--seeds='{2**64}' is no whole number"),
        ("--device=gpu", "this machine has none"),
        ("--output=configs --overwrite", "--output=configs is a folder"),
        ("--records=configs", "--records=configs is a folder"),
        ("--records={folder}/new.json", "is --output too"),
        ("fast", "'fast' is not a flag"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, wanted, tmp_path):
    done = command(tmp_path, *(word.format(folder=tmp_path) for word in words.split()))
    assert done.returncode == 2 and wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
