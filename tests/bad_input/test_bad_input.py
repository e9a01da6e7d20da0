"""Bad input of every command: one line that names it, exit code 2, in seconds, and nothing written."""

from __future__ import annotations

import pytest

from tests.bad_input import core, harness, memory

CASES = list(harness.cases(core, memory))


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import what the commands import, so that a case pays for its own work only."""
    import flax.nnx  # noqa: F401
    import torch  # noqa: F401


@pytest.mark.parametrize("case", CASES, ids=harness.name)
def test_bad_input_is_refused_in_one_line(case, tmp_path, capsys, monkeypatch):
    harness.check(harness.call(case, tmp_path, capsys, monkeypatch), case)
