"""How fast ids are scored: a record a scheme, of all its texts; bad input is refused before anything runs."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from jaxbench.gpu import rates
from jaxbench.measure.records import RecordFile
from tests.structure import ROOT

TINY = ("--device=cpu", "--rows=12", "--tokens=20", "--vocab_size=64")


def command(folder, *words: str) -> subprocess.CompletedProcess:
    call = [sys.executable, "-m", "jaxbench.gpu.detection", f"--output={folder / 'results.jsonl'}", *TINY, *words]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)


def test_every_scheme_has_a_rate_over_all_tokens_of_a_call(tmp_path):
    schemes = ["kgw", "unigram", "gumbel", "synthid", "dip"]
    done = command(tmp_path, f"--schemes={','.join(schemes)}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = RecordFile(tmp_path / "results.jsonl").read()
    assert [(each.metric, each.arm) for each in found] == [("detect_tokens_per_s", name) for name in schemes]
    for each in found:
        assert len(each.samples) == rates.REPEATS and each.value == statistics.median(each.samples)
        assert each.value * each.detail["call_s"] == pytest.approx(12 * 20)
        assert each.detail["evidence_s"] > 0 and each.detail["vocab_size"] == 64 and each.detail["device_kind"] == "cpu"
        assert (each.workload.batch, each.workload.prompt_tokens) == (12, 20)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--schemes=kgw,kgv", "'kgv' is unknown, the nearest is kgw"),
        ("--schemes=kgw_markllm", "--schemes=kgw_markllm: its lists are scored on the host"),
        ("--schemes=", "names none"),
        ("--rows=0", "--rows"),
        ("--tokens=4097", "--tokens"),
        ("--vocab_size=1", "--vocab_size"),
        ("--device=gpu", "this machine has none"),
        ("--output=/", "--output=/ is a folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, wanted, tmp_path):
    done = command(tmp_path, words)
    assert done.returncode == 2 and wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
