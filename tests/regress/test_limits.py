"""Limits of a suite end to end and in every report, and runs of some of a suite's cases."""

import csv
import json
import os
import subprocess
import sys

import pytest

from jaxbench.measure.environment import ROOT
from jaxbench.regress import advice, alerts, history, html_report, limits, report, run, run_file, tables
from jaxbench.regress.limits import Limit
from jaxbench.regress.site import content
from jaxbench.regress.suite import Suite
from tests.regress.records import BUSY, LOAD, RATE, SUITE, finding, quiet, record

BOUNDS = {RATE: Limit(least=1000), LOAD: Limit(least=5, most=30), "bits.load_s": Limit(most=1)}


def limited(**changes):
    """A run's record beside a base: tokens/s too few, loading within its bounds, another load not measured."""
    own = record(quiet())
    return own | {"limits": [each._asdict() for each in limits.judge(BOUNDS, own["series"])]} | changes


def command(folder, *words):
    """Exit code, output and errors of a run of the tiny suite's quality case, in one folder."""
    line = [sys.executable, "experiments/benchmarks.py", "run", "--suite=tiny", "--cases=bit*", *words]
    line += [f"--workdir={folder / 'w'}", f"--history={folder / 'h'}"]
    done = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_a_broken_limit_ends_a_run_with_1_and_a_held_one_with_0_from_the_same_launches(tmp_path):
    code, out, errors = command(tmp_path, "--set=limits={bits.bits_per_byte: {most: 0.01}, bits.load_s: {most: 100}}")
    assert code == 1 and "1 of 2 limits broken" in out, errors
    [line] = [line for line in errors.splitlines() if "broken limits" in line]
    assert "bits.bits_per_byte" in line and "wanted at most 0.01 bits" in line and "load_s" not in line
    assert "this run is no whole suite; cases left out: decode, train" in out
    code, out, errors = command(tmp_path, "--set=limits={bits.bits_per_byte: {least: 0.01}, decode.load_s: {most: 0}}")
    assert code == 0 and "1 of 1 limits held" in out and "launch 1" not in errors, errors
    kept = json.loads((tmp_path / "w" / run.RECORD).read_text())
    assert kept["left_out"] == ["decode", "train"] and [each["series"] for each in kept["limits"]] == [
        "bits.bits_per_byte"
    ]
    [path] = history.History(tmp_path / "h").files()  # the same launches, judged anew
    assert run_file.read(path)["limits"] == kept["limits"]


def test_the_limit_of_a_case_that_failed_is_broken_and_not_measured(tmp_path):
    words = {"name": "words", "workload": "tokenizing", "characters": 500}
    suite = Suite(
        model="tiny", cases=[words, {"name": "detect", "workload": "detection", "scheme": "no-such"}], looks=[2],
        rounds=1, sample_s=0, threads=1, requires={"memory_bytes": 0},
        limits={"words.tokens_per_s": {"least": 1}, "detect.tokens_per_s": {"least": 1}},
    )  # fmt: skip
    found = run.run_suite(suite, compare_with=None, device="cpu", workdir=tmp_path, say=lambda text: None).record
    assert [(each["series"], each["verdict"]) for each in found["limits"]] == [
        ("words.tokens_per_s", "held"), ("detect.tokens_per_s", "broken"),
    ]  # fmt: skip
    assert report.broken_limits(found) == ["detect.tokens_per_s not measured, wanted at least 1 tokens/s"]
    assert "no-such" in found["notes"][0]


@pytest.mark.parametrize(
    "limit, value, verdict",
    [
        (Limit(least=10), 10.0, "held"),
        (Limit(most=10), 10.0, "held"),
        (Limit(least=10), 9.99, "broken"),
        (Limit(most=10), 10.01, "broken"),
        (Limit(least=1, most=2), 3.0, "broken"),
        (Limit(least=0), float("nan"), "broken"),
    ],
)
def test_a_bound_holds_where_it_is_reached_and_no_number_breaks_it(limit, value, verdict):
    [found] = limits.judge({RATE: limit}, {RATE: {"head": {"median": value}, "base": {"median": 10.0}}})
    assert found.verdict == verdict


def test_limits_are_of_head_whatever_the_base_did():
    [found] = limits.judge({RATE: Limit(least=1)}, {RATE: {"base": {"median": 10.0}}})
    assert found.verdict == "broken" and found.value is None


def test_every_report_has_the_limits_beside_the_verdicts(tmp_path):
    run_ = limited()
    assert report.summary(run_) == "4 no change; 2 of 3 limits broken"
    assert report.limits_table(run_).row_count == 3 and report.limits_table(record(quiet())) is None
    assert "| decode.load_s | 10 s | at least 5 s, at most 30 s | held |" in report.markdown(run_)
    assert "| bits.load_s | not measured | at most 1 s | broken |" in report.markdown(run_)
    assert 'failures="2"' in report.junit(run_) and "10 tokens/s; wanted at least 1,000" in report.junit(run_)
    page = html_report.render(run_)
    assert '<section id="limits">' in page and '<span class="slower">broken</span>' in page and "1 of 3" in page
    assert '<section id="limits">' not in html_report.render(record(quiet()))
    report.write(run_, tmp_path)
    lines = (tmp_path / "report.csv").read_text().splitlines()
    rows = {row["series"]: row for row in csv.DictReader(lines)}
    assert (rows[RATE]["least"], rows[RATE]["limit"], rows[RATE]["verdict"]) == ("1000.0", "broken", "no change")
    assert rows["bits.load_s"]["limit"] == "broken" and rows["bits.load_s"]["head"] == ""
    assert json.loads((tmp_path / "report.json").read_text())["limits"] == run_["limits"]


def test_a_broken_limit_is_to_be_mended_and_a_busy_machine_is_named():
    assert advice.recommendations(limited())[0].startswith(f"limits broken: {RATE}, bits.load_s")
    alone = limited(findings=[], sides={"head": {"commit": "c"}})
    assert not any("busy" in said for said in advice.recommendations(alone))
    assert any("busy" in said for said in advice.recommendations(alone | {"machine": alone["machine"] | BUSY}))
    assert advice.checklist(limited())[-1] == ("every limit is held", False, f"broken: {RATE}, bits.load_s")
    assert advice.checklist(record(quiet()))[-1].what == "the machine is qualified for this suite"


def test_limits_do_not_change_what_a_suite_is_and_left_out_cases_do():
    bounded = Suite(**SUITE.model_dump() | {"limits": BOUNDS})
    part = bounded.only(["qual*"])
    assert bounded.id == SUITE.id and part.id != SUITE.id
    assert [case.name for case in part.cases] == ["bits"] and list(part.limits) == ["bits.load_s"]
    assert bounded.only(["decode", "quality"]) == bounded
    assert Suite.model_validate(part.model_dump()) == part


def test_a_part_of_a_suite_leaves_primary_series_and_margins_of_the_rest_out():
    margins = {key: {"warning": 1, "critical": 2} for key in (RATE, "bits.load_s", "load_s", "timed")}
    whole = Suite(**SUITE.model_dump() | {"primary": [RATE, "bits.bits_per_byte"], "margins": margins})
    part = whole.only(["bits"])
    assert part.primary == ("bits.bits_per_byte",) and list(part.margins) == ["bits.load_s", "load_s", "timed"]


def part_of(whole):
    """The record of a run of the decode case alone."""
    part = SUITE.only(["decode"])
    kept = [each for each in whole["findings"] if each["series"].startswith("decode.")]
    names = [each["series"] for each in kept]
    return whole | {
        "suite": part.model_dump(mode="json"), "suite_id": part.id, "left_out": ["bits"], "findings": kept,
        "series": {name: whole["series"][name] for name in names}, "qualified": None,
    }  # fmt: skip


def test_a_part_of_a_suite_is_said_to_be_one_and_stands_for_no_whole_run(tmp_path):
    whole = record(quiet(), suite_id=SUITE.id)
    part = part_of(whole)
    covered = {item.what: item for item in advice.checklist(part)}
    assert covered["every case was measured on both sides"][1:] == (False, "not on both sides: bits")
    assert not covered["the machine is qualified for this suite"].is_done
    assert "quick (decode alone)" in tables.table(part, "r") and "quick (decode alone)" in html_report.render(part)
    lost = part | {"findings": [], "sides": {"head": {"commit": "c"}}}
    assert "--suite=quick --cases=decode --compare_with" in advice.recommendations(lost)[0]
    assert report.worth(part) == ["verdicts of some cases alone are not qualified: `qualify` measures a whole suite"]
    kept = history.History(tmp_path)
    for each in (whole, part | {"time_utc": "2026-11-27T12:00:00+00:00"}):
        kept.add(each)
    shown = content.gather(kept)
    assert [run_.suite for run_, _ in shown.newest] == ["quick (decode alone)", "quick"]
    assert len({point.work for point in kept.points(RATE, host="abc", device="cpu")}) == 1  # one series, both runs


def test_a_part_of_a_suite_does_not_end_an_alert_of_the_whole(tmp_path):
    whole = record([finding("bits.load_s", "regression", "critical", 0.5), *quiet()], suite_id=SUITE.id)
    opened = list(alerts._events_of(whole, "run", []))
    assert [each["event"] for each in opened] == [alerts.OPENED]
    mine = [alerts._after(None, opened[0] | {"time_utc": whole["time_utc"]})]
    fine = record([finding("bits.load_s"), *quiet()], suite_id=SUITE.id)
    assert [each["event"] for each in alerts._events_of(fine, "r", mine)] == [alerts.OVER]
    assert list(alerts._events_of(part_of(record(quiet())), "r", mine)) == []


def test_a_run_beside_one_of_the_history_says_which_of_them_is_no_whole_suite():
    assert run._parts((), None) == [] == run._parts((), {})
    assert run._parts(["bits"], {"left_out": ["decode", "words"]}) == [
        "this run is no whole suite; cases left out: bits",
        "the run beside it is no whole suite; cases left out: decode, words",
    ]
