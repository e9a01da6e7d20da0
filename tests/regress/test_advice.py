"""What to do after a run follows from its findings; the checklist of a release from its record."""

import json

import pytest

from jaxbench.regress import advice, html_report, report, run_file
from tests.regress.records import BITS, BUSY, FLOPS, LOAD, RATE, finding, quiet, record


def done(run):
    return {item.what: item.is_done for item in advice.checklist(run)}


def test_a_quiet_run_leaves_nothing_to_do_and_every_point_done():
    run = record(quiet())
    assert advice.recommendations(run) == [] and all(done(run).values())
    text = report.markdown(run)
    assert "What to do next" not in text and text.count("- [x]") == 8 and "- [ ]" not in text


def test_a_critical_regression_is_to_be_bisected_and_its_slower_operations_looked_at():
    operations = [{"name": "dot", "seconds": [0.1, 0.2]}, {"name": "tanh", "seconds": [0.2, 0.1]}]
    why = {"packages": {}, "cases": {"decode": {"stages": {}, "operations": operations}}}
    run = record([finding(RATE, "regression", "critical", 0.4), *quiet()[1:]], confirmed={RATE: True}, why=why)
    first, second = advice.recommendations(run)
    assert f"`git bisect start {'c' * 12} {'b' * 12}`" in first and f"--suite=quick --compare_with={'b' * 12}`" in first
    assert second == "decode: look first at dot, which take longer under the profiler"
    assert [what for what, is_done in done(run).items() if not is_done] == ["no critical regression"]


def test_changes_that_are_not_committed_cannot_be_bisected():
    sides = {"head": {"commit": "c+1"}, "base": {"commit": "b"}}
    run = record([finding(RATE, "regression", "critical", 0.4)], sides=sides)
    assert "commit what c+1 has beside its commit" in advice.recommendations(run)[0]
    assert not done(run)["what was measured is a commit"]


def test_one_that_fresh_launches_did_not_find_is_to_be_run_again():
    run = record([finding(RATE, "regression", "warning", 0.3)], confirmed={RATE: False})
    first, second = advice.recommendations(run)
    assert first.startswith(f"fresh launches did not find {RATE} critical again: run once more")
    assert second.startswith(f"worse, short of critical: {RATE};")


def test_counts_that_rose_name_the_differences_of_their_programs():
    found = [*quiet()[:2], finding(FLOPS, "regression", "warning", 0.05), finding(BITS)]
    why = {"packages": {}, "cases": {"decode": {"stages": {}, "opcodes": {"decode": {"dot": [1, 2]}}}}}
    assert advice.recommendations(record(found, why=why)) == [
        f"counted, so no noise: {FLOPS} rose; read `why/decode/decode.diff` in the run's folder: instructions that one "
        "side has more often"
    ]
    assert "--compare_with=COMMIT`) writes how the programs differ" in advice.recommendations(record(found))[0]
    points = {item.what: item for item in advice.checklist(record(found))}
    assert not points["counted metrics are equal"].is_done
    assert points["counted metrics are equal"].detail == f"{FLOPS} +5.0 %"


def test_quality_that_fell_is_not_unchanged_and_calls_for_the_proof():
    run = record([*quiet()[:3], finding(BITS, "regression", "warning", 0.03)])
    assert "experiments/parity.py --all" in advice.recommendations(run)[0] and not done(run)["quality is unchanged"]


def test_undecided_series_say_how_many_launches_and_the_primary_ones_count():
    found = [finding(RATE, "undecided", wanted_pairs=12), finding(LOAD, "undecided", wanted_pairs=90), *quiet()[2:]]
    run = record(found)
    [said] = advice.recommendations(run)
    assert f"{RATE} (about 12 launches), {LOAD} (about 90 launches)" in said and "--set=looks=[12]` would tell" in said
    assert not done(run)["every primary series is decided"]
    [said] = advice.recommendations(record([finding(RATE, "undecided", wanted_pairs=1000), *quiet()[1:]]))
    assert said == f"too noisy or too near a margin for any number of launches: {RATE}"


def test_a_machine_that_was_not_qualified_or_was_busy_is_said():
    run = record(quiet(), qualified=None)
    assert "qualify --suite=quick" in advice.recommendations(run)[0]
    assert not done(run)["the machine is qualified for this suite"]
    [said] = advice.recommendations(record(quiet(), machine=record([])["machine"] | BUSY))
    assert said.startswith("the machine was busy (load 7.0 with 2 threads of the run's own, waiting for a core in 60 %")
    assert advice.recommendations(record([finding(FLOPS)], machine=record([])["machine"] | BUSY)) == []


def test_a_case_that_one_side_lost_is_not_covered_and_its_rate_not_decided():
    run = record([finding(BITS)])
    points = done(run)
    assert not points["every case was measured on both sides"] and not points["every primary series is decided"]
    assert not points["counted metrics are equal"]


def test_a_count_that_is_gone_is_not_equal():
    points = {item.what: item for item in advice.checklist(record(quiet(), gone=["decode.prefill.flops"]))}
    counted = points["counted metrics are equal"]
    assert not counted.is_done and counted.detail == "decode.prefill.flops is gone"
    assert points["quality is unchanged"].is_done


@pytest.mark.parametrize("suite", [{}, {"cases": [{"name": "a", "workload": "of another version"}]}])
def test_a_run_without_a_base_or_of_another_suite_has_its_points_too(suite):
    run = record([], sides={"head": {"commit": "c"}}, suite=suite)
    assert "--compare_with=COMMIT` gives verdicts" in advice.recommendations(run)[0]
    assert advice.primaries(run) == () and not done(run)["the base is named"]
    assert "- [ ] the base is named (none: pass --compare_with)" in report.markdown(run)


def test_a_run_read_from_its_file_has_the_same_report_where_a_count_rose_from_nothing():
    """JSON has no infinity: the file has null, which the checklist multiplied."""
    recompiled = finding("decode.recompilations", "regression", "critical", float("inf"), base=0.0, head=1.0)
    run = record([*quiet(), recompiled])
    again = json.loads(run_file.text(run))
    assert advice.checklist(again) == advice.checklist(run)
    assert report.markdown(again) == report.markdown(run) and "recompilations" in html_report.render(again)
