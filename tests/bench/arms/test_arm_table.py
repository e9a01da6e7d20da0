"""No arm is left out: what lists arms is made from the one table, and a newcomer's row reaches every judgement."""

from __future__ import annotations

import ast
import importlib
import types
import typing
from pathlib import Path

import pytest

from jaxbench import cli, config
from jaxbench.bench import agreement, labels, launch, suite, summary
from jaxbench.bench.arms import arm_table, contract
from jaxbench.bench.arms.arm_table import ARMS
from jaxbench.bench.report import contents
from jaxbench.measure import environment
from jaxbench.measure.records import Record, Workload
from jaxbench.parity import cases

ROOT = Path(__file__).resolve().parents[3]
DECODE = Workload(kind="decode", dtype="float32", batch=1, prompt_tokens=8, new_tokens=4)


@pytest.fixture
def newcomer(monkeypatch) -> str:
    """Add a row to the table, as somebody who adds a backend does, and nothing else."""
    row = ARMS["flax"]._replace(label="Newcomer", color="#123456", library="Newcomer's")
    monkeypatch.setitem(ARMS, "newcomer", row)
    return "newcomer"


@pytest.mark.parametrize("name", ARMS)
def test_a_row_says_what_its_class_does(name):
    row = ARMS[name]
    made = getattr(importlib.import_module(row.module), row.attribute)
    assert issubclass(made, contract.Arm) and made.name == name
    overrides = [getattr(made, name) is not getattr(contract.Arm, name) for name in ("read_seconds", "gemm_seconds")]
    assert all(overrides) == (row.library is not None)
    assert set(made.packages) <= {*environment.PACKAGES, "python"}, "a record would not carry its version"


def test_names_and_colours_tell_arms_apart():
    for field in ("label", "color"):
        assert len({getattr(row, field) for row in ARMS.values()}) == len(ARMS)


def test_suites_and_parity_take_the_arms_of_the_table():
    assert typing.get_args(suite.Arm) == (*ARMS, *(name + arm_table.AGAIN for name in ARMS))
    assert arm_table.names("is_judged") == cases.BACKENDS
    assert cli.BACKENDS == (*cases.BACKENDS, "torch")
    every = tuple(name for name, row in ARMS.items() if not (row.has_own_weights or row.is_extra))
    assert suite.Suite().arms == every
    assert config.load(ROOT / "configs" / "suites" / "default.yaml", [], suite.Suite).arms == every
    assert all((ROOT / "jaxbench" / "parity" / f"{side}_side.py").is_file() for side in cases.BACKENDS)


def test_a_newcomer_is_judged_named_and_held_to_equal_output(newcomer, tmp_path):
    rates = {"torch_eager": (10.0, 10.1, 10.0), newcomer: (5.0, 5.1, 5.0), "flax": (20.0, 20.1, 20.0)}
    found = [
        Record(metric="decode_tokens_per_s", value=rate, samples=(rate, rate), arm=arm, workload=DECODE, launch=n + 1)
        for arm, values in rates.items()
        for n, rate in enumerate(values)
    ]
    found += [
        Record(metric="flops", value=7.0 + (arm == newcomer), arm=arm, workload=DECODE, launch=1) for arm in rates
    ]
    detail = {"first_difference": [0, 1], "reference": "torch_eager"}
    found += [Record(metric="tokens", value=0.0, arm=newcomer, workload=DECODE, launch=1, detail=detail)]
    table = summary.rows(found, suite.Verdicts())
    assert [row.arm for row in table if row.verdict == "slower"] == [newcomer]
    shown = contents.gather(found, suite.Suite(), tmp_path)
    assert contents.verdict_counts(shown) == {"faster": 1, "slower": 1, "undecided": 0}
    assert any("Flax 7, Newcomer 8" in note for note in contents.program_notes(shown))
    assert len(agreement.failures(found)) == 1
    assert (labels.arm(newcomer), labels.color(newcomer)) == ("Newcomer", "#123456")


def test_the_roofline_measures_one_arm_of_each_array_library(newcomer):
    asked = []

    class Asked(launch.Launch):
        """A launch whose workers answer at once."""

        def __init__(self):
            self.say = lambda line: None
            self.plan = types.SimpleNamespace(suite=suite.Suite())
            self.file = types.SimpleNamespace(append=lambda *rows: None)

        def _alive(self, quietly=False):
            return list(ARMS)

        def _ask(self, arm, operation, *workload, **arguments):
            asked.append(arm)
            return {"seconds": [1.0]}

        def _record(self, *fields, **more):
            return fields

    Asked()._roofline()
    assert list(dict.fromkeys(asked)) == ["flax", "torch_eager", newcomer]


def test_no_other_file_lists_arms_by_hand():
    listed = []
    for path in [*sorted((ROOT / "jaxbench" / "bench").rglob("*.py")), ROOT / "experiments" / "compare.py"]:
        if path.name == "arm_table.py":
            continue
        tree = ast.parse(path.read_text())
        packages = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES"
        }
        for node in ast.walk(tree):
            parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            values = {part.value for part in parts if isinstance(part, ast.Constant)}
            if len(values & ARMS.keys()) >= 2 and id(node) not in packages:
                listed.append(f"{path.name}:{node.lineno}")
    assert not listed, f"{listed} name arms by hand; take them from bench/arms/arm_table.py"
