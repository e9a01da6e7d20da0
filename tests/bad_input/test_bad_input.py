"""Bad input of every command: one line that names it, exit code 2, in seconds, and nothing written."""

from __future__ import annotations

import collections

import pytest

from tests.bad_input import (
    benchmarks,
    compress,
    core,
    generation,
    gpu,
    hallucination,
    harness,
    jobs,
    memory,
    presets,
    profile,
    proofs,
    pruning,
    quantization,
    serve,
    startup,
    training,
    watermark,
)
from tests.structure import ROOT

MODULES = (
    benchmarks,
    compress,
    core,
    generation,
    gpu,
    hallucination,
    jobs,
    memory,
    profile,
    presets,
    proofs,
    pruning,
    quantization,
    serve,
    startup,
    training,
    watermark,
)
CASES = list(harness.cases(*MODULES))


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory):
    """Import what the commands import, and convert the default model, so that a case pays for its own work only."""
    import flax.nnx  # noqa: F401
    import torch  # noqa: F401

    from jaxbench.bench import plan
    from jaxbench.bench.suite import Suite

    plan.find_model(Suite(model="default"), tmp_path_factory.mktemp("work"))


@pytest.mark.parametrize("case", CASES, ids=harness.name)
def test_bad_input_is_refused_in_one_line(case, tmp_path, capsys, monkeypatch):
    harness.check(harness.call(case, tmp_path, capsys, monkeypatch), case)


def test_every_command_is_fed_at_least_forty():
    counts = collections.Counter(harness.words_of(case)[0] for case in CASES)
    commands = {path.name for path in (ROOT / "experiments").glob("*.py")}
    assert {name for name, count in counts.items() if count >= 40} == commands


def test_a_command_that_accepts_fails_the_table(tmp_path, capsys, monkeypatch):
    accepted = harness.Case("parity.py --help", ())
    with pytest.raises(AssertionError):
        harness.check(harness.call(accepted, tmp_path, capsys, monkeypatch), accepted)
