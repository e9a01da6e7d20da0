"""Ray gives the same scores as one process, with two local workers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from tests.structure import ROOT
from tests.test_cli import shell_environment

# A process of its own: Ray starts others, which JAX in the tests' process warns about.
CODE = """
import json, sys
from jaxbench.text import lines
from jaxbench.watermark.bulk import bulk_detection, ray_engine
from tests.watermark.bulk import test_bulk_detection

if __name__ == "__main__":
    pattern, out, engine = sys.argv[1:4]
    lines.CHUNK_LINES = 16
    how = {"processes": 2, "engine": ray_engine.engine} if engine == "ray" else {}
    print(json.dumps(bulk_detection.run(pattern, out, test_bulk_detection.job(), **how)))
"""


def test_two_ray_workers_score_plain_and_packed_files_as_one_process_does(tmp_path):
    pytest.importorskip("ray")
    rows = [{"id": i, "text": [(i * j) % 101 for j in range(5 + i % 30)]} for i in range(50)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode() + b"bad\n"
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    script = tmp_path / "script.py"
    script.write_text(CODE)
    environment = shell_environment(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0")
    for engine in ("one", "ray"):
        arguments = [sys.executable, str(script), f"{tmp_path}/?.jsonl*", str(tmp_path / f"{engine}.csv"), engine]
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        assert (summary["texts"], summary["bad"], summary["files"]) == (100, 2, 2)
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
