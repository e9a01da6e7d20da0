"""The shell of every page: what is in it, that text cannot become markup, and the template of a page's own."""

from __future__ import annotations

import json
import re
import sys

import jinja2
import pytest

from jaxbench.measure import page
from jaxbench.measure.page import Section

FIGURE = {"data": [{"type": "bar", "name": "</script><b>"}], "layout": {"height": 120, "xaxis": {}, "yaxis": {}}}
OWN = """{% extends "page.html" %}
{% import "parts.html" as parts %}
{% block style %}.mine { color: red; }{% endblock %}
{% block lead %}{{ parts.cards([("1", "<2>", "3")]) }}{% endblock %}
{% block body %}
{% for part in sections %}
{% call parts.section(part) %}
{{ parts.items(sentences) }}{{ parts.items([]) }}{{ parts.facts({"<name>": none}) }}{{ parts.verdict(false) }}
{% call parts.table(("a", ">")) %}
<tr><td>{{ 2 | half }}</td></tr>
{% endcall %}
{{ parts.chart("absent", figures) }}
{% endcall %}
{% endfor %}
{% endblock %}
"""


def markup_of(html: str) -> str:
    return re.sub(r">\s+<", "><", re.sub(r"<(script|style)>.*?</\1>", " ", html, flags=re.S))


def test_the_shell_has_a_chart_for_each_section_and_its_contents():
    sections = [Section("first", "First & best"), Section("gone", "Gone", False), Section("second", "Second")]
    html = page.render("Title <1>", sections, {"chart-first": FIGURE}, name="shown <2>")
    text = markup_of(html)
    assert html.startswith("<!doctype html>\n") and html.endswith("</html>\n")
    assert "<title>shown &lt;2&gt;</title>" in text and "<h1>Title &lt;1&gt;</h1>" in text
    assert '<nav><a href="#first">First &amp; best</a><a href="#second">Second</a></nav>' in text
    assert (
        '<section id="first"><h2>First &amp; best</h2><div class="chart" id="chart-first" style="min-height:120px">'
        in text
    )
    assert '<section id="second"><h2>Second</h2></section>' in text and "Gone" not in text
    assert json.loads(re.search(r"const FIGURES = (.*);\n", html).group(1)) == {"chart-first": FIGURE}
    assert html.count("</script>") == 2 and "plotly.js v" in html


def test_a_chart_has_a_gap_where_a_number_is_not_finite():
    figure = {"data": [{"type": "bar", "y": [1.0, float("nan"), float("inf")]}], "layout": {"height": 9}}
    html = page.render("t", [Section("a", "A")], {"chart-a": figure})
    assert "[1.0, null, null]" in html and "NaN" not in html.replace(page._plotly() or "", "")


def test_a_page_without_sections_has_no_contents():
    text = markup_of(page.render("Title", (), {}))
    assert "<nav>" not in text and "<section" not in text and "<title>Title</title>" in text


def test_without_plotly_a_page_says_so_and_has_all_but_its_charts(monkeypatch):
    sections = [Section("first", "First & best"), Section("second", "Second")]
    whole = markup_of(page.render("Title", sections, {"chart-first": FIGURE}))
    assert "plotly" not in whole
    monkeypatch.setitem(sys.modules, "plotly", None)
    html = page.render("Title", sections, {"chart-first": FIGURE}, lead="<what>")
    text = markup_of(html)
    assert '<p>&lt;what&gt;</p><p class="soft">' in text
    assert text.count("plotly is not installed") == 1 and "<code>pip install plotly</code>" in text
    assert '<section id="first"><h2>First &amp; best</h2></section><section id="second">' in text
    assert "const FIGURES = {};\n" in html and len(html) < 20_000
    # A page that has no chart lacks nothing.
    assert "plotly" not in markup_of(page.render("Title", sections, {}))


def test_a_template_of_its_own_fills_the_blocks_and_is_escaped(tmp_path):
    path = tmp_path / "mine.html"
    path.write_text(OWN)
    values = {"filters": {"half": lambda number: number // 2}, "sentences": ["a<", "b"]}
    html = page.render("Title", [Section("only", "Only")], {}, template=path, **values)
    text = markup_of(html)
    assert ".mine { color: red; }" in html and "<nav>" not in text
    assert '<div class="card"><b>1</b><span>&lt;2&gt;</span><small>3</small></div>' in text
    assert "<ul><li>a&lt;</li><li>b</li></ul><div" in text and '<b class="slower">failed</b>' in text
    assert '<td>&lt;name&gt;</td><td class="left wrap">None</td>' in text
    assert "<thead><tr><th>a</th><th>&gt;</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>" in text
    assert "absent" not in text
    with pytest.raises(jinja2.UndefinedError, match="sentences"):
        page.render("Title", [Section("only", "Only")], {}, template=path, filters=values["filters"])
