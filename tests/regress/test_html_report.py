"""The page of a run: everything that was found, escaped, with charts whose points are the findings'."""

import json
import re

from jaxbench.regress import html_report, report
from jaxbench.regress.site import content
from tests.regress.records import BITS, FLOPS, LOAD, RATE, SUITE, finding, quiet, record

MIXED = [
    finding(RATE, "regression", "critical", 0.4),
    finding(LOAD, "undecided", wanted_pairs=12),
    finding(FLOPS, "improvement", worse=-0.1),
    finding(BITS),
]


def body(page: str) -> str:
    """Return a page without its scripts."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def open_sections(page: str) -> dict[str, bool]:
    """Return the sections of a page, and whether each shows what it holds."""
    found = re.findall(r'<section id="(\w+)"><h2>[^<]*</h2>\s*(<details>)?', body(page))
    return {name: not is_folded for name, is_folded in found}


def test_the_short_page_shows_what_moved_or_is_open_and_counts_the_rest():
    page = html_report.render(record(MIXED, notes=["case x of base: it <failed>"]))
    text = body(page)
    table = text[text.index('id="findings"') : text.index('id="ratios"')]
    assert all(name in table for name in (RATE, LOAD, FLOPS)) and BITS not in table
    assert "1 series that did not change are left out" in table and "+40.0 [+38.0, +42.0] %" in table
    assert "it &lt;failed&gt;" in text and "&lt;b&gt; | of" in text and "<failed>" not in text
    assert open_sections(page) == {
        "findings": True, "ratios": True, "recommendations": True, "checklist": True, "worth": False, "notes": True,
        "system": False,
    }  # fmt: skip


def test_intervals_are_said_to_hold_at_the_suites_level():
    own = {"suite": SUITE.model_copy(update={"alpha": 0.1}).model_dump(mode="json")}
    for changes, level in (({}, "95 %"), (own, "90 %")):
        run = record(MIXED, **changes)
        assert f"Each interval holds at {level} for its own series" in html_report.render(run)
        assert report.table(run).columns[3].header == f"worse by, {level} each"
        assert content._shown(run)["level"] == level


def test_the_detailed_page_shows_every_series_with_every_section_open():
    page = html_report.render(record(MIXED), detailed=True)
    sections = open_sections(page)
    assert "measured" in sections and all(sections.values())
    assert body(page).count(BITS) >= 2 and "left out" not in body(page)


def test_a_page_needs_no_other_file_and_no_network():
    text = body(html_report.render(record(MIXED)))
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text) and "https://" not in text


def test_the_chart_has_every_finding_with_its_interval_and_its_margins():
    figure = html_report.forest(record(MIXED), MIXED)
    points = {trace["name"]: trace for trace in figure["data"]}
    assert points["regression"]["x"] == [1.4] and points["regression"]["y"] == [RATE]
    bars = points["regression"]["error_x"]
    assert abs(bars["array"][0] - 0.02) < 1e-12 and abs(bars["arrayminus"][0] - 0.02) < 1e-12
    assert points["improvement"]["marker"]["symbol"] == ["diamond"] and points["improvement"]["x"] == [0.9]
    for level in ("warning", "critical"):
        trace = points[f"{level} above"]
        wanted = [1 + getattr(SUITE.margin(name), level) for name in trace["y"]]
        assert trace["y"] == [each.series for each in MIXED] and trace["x"] == wanted
    assert figure["line"] == 1.0 and figure["layout"]["xaxis"]["type"] == "log"


def test_ratios_that_a_logarithm_lacks_are_in_the_table_alone_and_huge_ones_at_the_edge():
    infinite = finding(FLOPS, "regression", "critical", float("inf"), base=0.0, head=3.0)
    gone = finding(FLOPS.replace("flops", "hlo_ops"), "improvement", worse=-1.0, low=-1.0, high=-1.0)
    huge = finding(RATE, "regression", "critical", 1e6)
    figure = html_report.forest(record([infinite, gone, huge]), [infinite, gone, huge])
    [trace] = [trace for trace in figure["data"] if trace["name"] in html_report.COLOURS]
    assert trace["y"] == [RATE] and trace["x"] == [html_report.SHOWN_RATIOS[1]]
    assert html_report.forest(record([infinite]), [infinite]) is None
    page = html_report.render(record([infinite, gone, huge]))
    assert "was 0" in body(page)
    assert json.loads(re.search(r"const FIGURES = (.*);\n", page)[1])


def test_a_run_without_a_base_shows_what_was_measured(tmp_path):
    run = record(quiet(), findings=[], sides={"head": {"commit": "c"}}, qualified=None)
    assert html_report.write(run, tmp_path) == ["report.html"]
    page = (tmp_path / "report.html").read_text()
    assert "no base to compare with" in page and list(open_sections(page))[-2:] == ["measured", "system"]
    assert "9 tokens/s to 11 tokens/s" in body(page)


def test_backticks_are_code_and_the_rest_of_a_sentence_is_escaped():
    assert html_report.code("a `<b>` <c>") == "a <code>&lt;b&gt;</code> &lt;c&gt;"


def test_a_run_of_another_tool_has_a_page():
    run = record([], sides={"head": {"commit": "c"}}, suite={}, machine={}, units={"x": ["s", False]})
    run["series"] = {"x": {"head": {"median": 0.5}}}
    assert "500 ms" in body(html_report.render(run))
