"""What a watermark adds to decoding: records by scheme and batch; bad input is refused before anything runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxbench.measure.records import RecordFile
from tests.structure import ROOT

TINY = ("--device=cpu", "--config=configs/lm/tiny_shape.yaml", "--new_tokens=4", "--rounds=2", "--batches=1")


def marked(folder, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxbench.gpu.marked", f"--output={folder / 'results.jsonl'}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_every_scheme_has_one_ratio_a_round(tmp_path):
    done = marked(tmp_path, *TINY, "--schemes=control,kgw")
    assert done.returncode == 0, done.stderr[-2000:]
    found = RecordFile(tmp_path / "results.jsonl").read()
    assert [(record.arm, record.metric, len(record.samples)) for record in found] == [
        ("control", "watermark_overhead", 2), ("kgw", "watermark_overhead", 2),
    ]  # fmt: skip
    assert all(record.detail["plain_s"] > 0 and record.workload.new_tokens == 4 for record in found)


@pytest.mark.parametrize(
    "words, wanted",
    [
        (("--schemes=kgv",), "'kgv' is unknown, the nearest is kgw"),
        (("--batches=1,0",), "--batches='0' is no number of rows"),
        (("--batches=many",), "--batches='many' is no number of rows"),
        (("--config=configs/lm/books_bpe.yaml",), "leaves model.vocab_size to its tokenizer"),
        (("--rounds=0",), "rounds"),
        (("--output=/",), "/"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, wanted, tmp_path):
    done = marked(tmp_path, *TINY, *words)
    assert done.returncode == 2 and wanted in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
