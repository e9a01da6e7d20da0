"""The gate before a push: counts of this tree beside its base's, from the history or one launch, kept by commit."""

import datetime
import functools
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxbench import cli, initial
from jaxbench.measure import environment
from jaxbench.pretrained import weights
from jaxbench.regress import gate, gate_command, history, pairs, tiny, trees
from jaxbench.regress.pairs import BASE, HEAD
from jaxbench.regress.suite import Suite
from tests.regress import records

WORDS = Suite(model="tiny", cases=[{"name": "words", "workload": "tokenizing", "characters": 500}], threads=1,
              requires={"memory_bytes": 0})  # fmt: skip
COUNTS = ["words.executables", "words.recompilations"]
TREE = trees.Tree(trees.ROOT, trees.here().python, "abc", "")


@pytest.fixture
def flags_of(monkeypatch, tmp_path):
    """Return a function that sets what the command's flags hold."""

    def set_flags(**values):
        given = {"workdir": str(tmp_path / "w"), "device": "cpu", "compare_with": None, "history": str(tmp_path / "h"),
                 "gone": []}  # fmt: skip
        monkeypatch.setattr(gate_command, "VALUES", SimpleNamespace(**given | values))
        monkeypatch.setattr(gate_command.history_commands, "VALUES", SimpleNamespace(**given | values))

    return set_flags


def kept(tmp_path, suite, **changes) -> history.History:
    """Return a history of one run of a suite on this machine: head c..., base b..., counts 7."""
    found = history.History(tmp_path / "h")
    machine = {"cpu": "A", "threads": 2, "versions": environment.versions()}
    series = {name: {side: {"median": 7.0} for side in (HEAD, BASE)} for name in ("decode.decode.flops", records.RATE)}
    run = records.record([], host=environment.fingerprint(), suite_id=suite.id, series=series, machine=machine)
    found.add(run | changes)
    return found


def test_counts_of_a_commit_are_measured_once_and_a_lost_case_is_not_kept(tmp_path):
    said = []
    counts_of = functools.partial(gate.counts_of, device="cpu", folder=tmp_path, say=said.append)
    counts, lost = counts_of(WORDS, TREE)
    assert sorted(counts) == COUNTS and lost == {} and len(said) > 0
    number = len(said)
    assert counts_of(WORDS, TREE) == (counts, {}) and len(said) == number
    broken = WORDS.model_copy(update={"timeout_s": 1e-3})
    for _ in range(2):
        counts, lost = counts_of(broken, TREE, side=BASE)
        assert counts == {} and list(lost) == ["start"]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_counts_of_other_weights_in_the_same_folder_are_not_those_that_were_kept(tmp_path):
    folder, params = tmp_path / "model", initial.initial_params(tiny.SHAPE, 1)
    tiny.save(folder)
    case = {"name": "bits", "workload": "quality", "windows": 1, "seq_len": 16}
    suite = Suite(model=str(folder), cases=[case], threads=1, requires={"memory_bytes": 0})
    measured = functools.partial(gate.counts_of, suite, TREE, device="cpu", folder=tmp_path / "counts")
    before = measured()[0]["bits.bits_per_byte"]
    found = kept(tmp_path, suite, machine={"threads": 1, "versions": environment.versions()},
                 model_sha256=weights.checksum(folder))  # fmt: skip
    own = {"commit": "c" * 12, "device": "cpu", "threads": 1}
    assert gate.stored(found, suite, **own).counts
    shutil.rmtree(folder)
    weights.save_checkpoint(folder, tiny.SHAPE, params, tokenizer=tiny.TOKENIZER)
    assert measured()[0]["bits.bits_per_byte"] != before
    assert gate.stored(found, suite, **own) is None


def test_counts_that_another_code_of_the_cases_gave_are_not_those_that_were_kept(tmp_path, monkeypatch):
    """Both sides run this tree's cases: beside counts of former ones a change of a case would be one of the library."""
    said, found = [], kept(tmp_path, records.SUITE, case_code=pairs.case_code())
    measured = functools.partial(gate.counts_of, WORDS, TREE, device="cpu", folder=tmp_path / "w", say=said.append)
    own = {"commit": "c" * 12, "device": "cpu", "threads": 2}
    counts, number = measured()[0], len(said)
    assert measured()[0] == counts and len(said) == number and gate.stored(found, records.SUITE, **own).counts
    (tmp_path / "cases.py").write_text("")
    monkeypatch.setattr(pairs, "CASES", (*pairs.CASES, tmp_path / "cases.py"))
    assert measured()[0] == counts and len(said) == 2 * number and gate.stored(found, records.SUITE, **own) is None


def test_a_count_that_rose_critically_is_found_and_what_one_side_lacks_is_named():
    base = {"a.p.flops": 100.0, "a.p.hlo_ops": 10.0, "a.recompilations": 0.0, "a.gone.flops": 1.0}
    head = {"a.p.flops": 105.0, "a.p.hlo_ops": 10.0, "a.recompilations": 1.0, "a.new.flops": 1.0}
    suite = Suite(cases=[{"name": "a", "workload": "generation"}])
    found = gate.compare(base, head, suite)
    levels = {each.series: each.level for each in found.findings}
    assert levels == {"a.p.flops": "warning", "a.p.hlo_ops": "", "a.recompilations": "critical"}
    assert found.missing == ["a.gone.flops"] and found.new == ["a.new.flops"]


@pytest.mark.parametrize("commit", ["c" * 12, "b" * 12])
def test_a_run_that_measured_the_commit_on_either_side_serves(tmp_path, commit):
    found = gate.stored(kept(tmp_path, records.SUITE), records.SUITE, commit=commit, device="cpu", threads=2)
    assert found.counts == {"decode.decode.flops": 7.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "other"}, {"device": "gpu"}, {"suite_id": "x"},
        {"machine": {"cpu": "A", "threads": 1, "versions": environment.versions()}},
        {"machine": {"cpu": "A", "threads": 2, "versions": environment.versions() | {"jax": "0.1"}}},
    ],
)  # fmt: skip
def test_a_run_of_another_machine_suite_number_of_threads_or_compiler_does_not(tmp_path, changes):
    found = kept(tmp_path, records.SUITE, **changes)
    assert gate.stored(found, records.SUITE, commit="c" * 12, device="cpu", threads=2) is None


def test_the_newest_run_serves(tmp_path):
    found = kept(tmp_path, records.SUITE)
    later = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC).isoformat()
    series = {"decode.decode.flops": {HEAD: {"median": 8.0}}}
    kept(tmp_path, records.SUITE, time_utc=later, series=series)
    assert (
        gate.stored(found, records.SUITE, commit="c" * 12, device="cpu", threads=2).counts["decode.decode.flops"] == 8
    )


def test_the_command_fails_on_a_critical_rise_and_passes_on_equal_counts(flags_of, tmp_path, monkeypatch, capsys):
    flags_of(compare_with="anything")
    monkeypatch.setattr(trees, "resolved", lambda name: "c" * 40)
    counts = {"decode.decode.flops": 7.0}
    monkeypatch.setattr(gate, "counts_of", lambda *_, **__: (counts, {}))
    kept(tmp_path, records.SUITE)
    suite = records.SUITE.model_copy(update={"threads": 2})
    monkeypatch.setattr(Suite, "id", history.History(tmp_path / "h").list()[0].suite_id)
    assert gate_command.gate(suite, say=print) == cli.EXIT_OK
    assert "1 of 1 counts of" in (out := capsys.readouterr().out) and "(run 2026" in out
    counts["decode.decode.flops"] = 70.0
    with pytest.raises(cli.GateFailed, match="critical rise of decode.decode.flops"):
        gate_command.gate(suite, say=print)
    assert "decode.decode.flops: 7 FLOP to 70 FLOP, +900.0 %, regression, critical" in capsys.readouterr().out
    monkeypatch.setattr(gate, "counts_of", lambda *_, **__: ({}, {"decode": "it failed"}))
    with pytest.raises(cli.GateFailed, match=r"does not run decode \(it failed\)"):
        gate_command.gate(suite, say=print)
    assert "not there any more: decode.decode.flops" in capsys.readouterr().out


def test_a_count_that_is_gone_fails_unless_it_is_meant_or_its_case_is_lost(flags_of, tmp_path, monkeypatch):
    counts, lost = {"decode.decode.hlo_ops": 7.0}, {}
    monkeypatch.setattr(trees, "resolved", lambda name: "c" * 40)
    monkeypatch.setattr(gate, "stored", lambda *_, **__: gate.Stored("a", {"decode.decode.flops": 7.0, **counts}))
    monkeypatch.setattr(gate, "counts_of", lambda *_, **__: (counts, lost))
    flags_of(compare_with="anything", gone=["decode.prefill.*", "decode"])
    with pytest.raises(cli.GateFailed, match="^this tree has no longer, and --gone does not name, decode.decode.fl"):
        gate_command.gate(records.SUITE, say=print)
    flags_of(compare_with="anything", gone=["decode.*.flops"])
    assert gate_command.gate(records.SUITE, say=print) == cli.EXIT_OK
    flags_of(compare_with="anything")
    lost["decode"] = "it failed"
    with pytest.raises(cli.GateFailed, match=r"^this tree does not run decode \(it failed\)$"):
        gate_command.gate(records.SUITE, say=print)


def test_a_tree_that_is_its_base_has_nothing_to_compare(flags_of, monkeypatch, capsys):
    flags_of()
    monkeypatch.setattr(trees, "here", lambda: TREE._replace(commit="d" * 12))
    monkeypatch.setattr(gate, "base_commit", lambda: "d" * 40)
    assert gate_command.gate(WORDS, say=print) == cli.EXIT_OK
    assert capsys.readouterr().out == f"nothing to compare: this tree is {'d' * 12} itself\n"


def test_a_base_that_cannot_be_built_is_said_and_does_not_stop_a_push(flags_of, monkeypatch, capsys):
    def not_built(name, folder, *, say):
        raise trees.NotBuilt(f"{name}: no packages")

    flags_of()
    monkeypatch.setattr(gate, "base_commit", lambda: "d" * 40)
    monkeypatch.setattr(trees, "of_commit", not_built)
    assert gate_command.gate(WORDS, say=print) == cli.EXIT_OK
    assert capsys.readouterr().out == f"nothing to compare with: {'d' * 12}: no packages\n"


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_some_cases_of_a_suite_are_gated_and_an_unknown_one_is_named():
    command = [sys.executable, "experiments/benchmarks.py", "gate", "--suite=tiny", "--compare_with=HEAD"]
    done = subprocess.run([*command, "--cases=bits,nope"], cwd=trees.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "error: --cases: 'nope' matches no case; wanted names" in done.stderr


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_an_empty_base_is_no_base_and_not_the_default_one(flags_of):
    flags_of(compare_with="")
    with pytest.raises(ValueError, match="--compare_with=: git knows no such commit"):
        gate_command.gate(WORDS, say=print)


@pytest.mark.skipif(not (trees.ROOT / ".git").exists(), reason="a copy without git")
def test_a_branch_without_upstream_or_main_asks_for_its_base(monkeypatch):
    monkeypatch.setattr(gate, "BRANCHES", ("HEAD",))
    assert gate.base_commit() == trees.resolved("HEAD")
    monkeypatch.setattr(gate, "BRANCHES", ("no-such-branch",))
    with pytest.raises(ValueError, match="finds none of no-such-branch here; name the base with --compare_with"):
        gate.base_commit()
