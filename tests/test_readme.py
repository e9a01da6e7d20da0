"""The documents' library snippets, run as they stand there, by a user whose shell sets nothing."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.structure import ROOT
from tests.test_cli import shell_environment


def run(code: str) -> subprocess.CompletedProcess:
    environment = shell_environment(PYTHONPATH=str(ROOT))
    environment.pop("TPU_SKIP_MDS_QUERY")
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)


def test_the_library_snippet_completes_its_prompt_and_prints_nothing_else():
    snippet = re.search(r"As a library:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    done = run(snippet + "\nimport jax\nprint(jax.config.jax_platforms)")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith(" Paris.") and done.stdout.endswith("\ncpu\n"), done.stdout


def test_the_engines_snippet_answers_and_prints_nothing():
    text = (ROOT / "docs" / "serving.md").read_text()
    snippet = re.search(r"## The engine\n\n```python\n(.*?)```", text, re.DOTALL)[1]
    done = run(snippet + '\nprint(sorted(events), len([e for e in events["a"] if e.token is not None]) > 1)')
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout == "['a', 'b'] True\n"
