"""One workload alone: records of each at a tiny size; bad input is refused before anything runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxbench.measure.records import RecordFile
from tests.structure import ROOT

TINY = ("--device=cpu", "--config=configs/lm/tiny_shape.yaml", "--prompt_tokens=16", "--new_tokens=4")


def measured(folder, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxbench.gpu.one_workload", f"--output={folder / 'results.jsonl'}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_requests_are_served_by_their_number(tmp_path):
    done = measured(tmp_path, *TINY, "--workload=serving", "--clients=1,2")
    assert done.returncode == 0, done.stderr[-2000:]
    found = RecordFile(tmp_path / "results.jsonl").read()
    names = ("serve_tokens_per_s", "first_token_s", "token_gap_s")
    assert [(each.metric, each.workload.batch) for each in found] == [(name, n) for n in (1, 2) for name in names]
    assert all(each.value > 0 and len(each.samples) == 3 and each.detail["slots"] == 2 for each in found)


@pytest.mark.parametrize(
    "words, wanted",
    [
        (("--workload=prefill",), "features|compression|serving"),
        (("--workload=serving", "--clients=1,0"), "--clients='0' is no number"),
        (("--workload=serving", "--clients=some"), "--clients='some' is no number"),
        (("--workload=serving", "--prompt_tokens=300"), "304 tokens a row; the model's context is 256"),
        (("--workload=compression", "--batches=1,x"), "--batches='x' is no number"),
        (("--workload=features", "--context_tokens=250"), "318 tokens a row"),
        (("--workload=features", "--groups=0"), "groups"),
        (("--workload=features", "--set=step.precision=float8"), "step.precision=float8"),
        (("--workload=features", "--set=model.vocab_size=200"), "model.vocab_size=200; wanted 257 or more"),
        (("--config=configs/lm/books_bpe.yaml",), "model.vocab_size=None"),
        (("--workload=compression", "--output=/"), "--output=/ is a folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, wanted, tmp_path):
    done = measured(tmp_path, *TINY, *words)
    assert done.returncode == 2 and wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
