"""The shell of every page: what is in it, and that text cannot become markup."""

from __future__ import annotations

import json
import re

import pytest
from markupsafe import Markup

from jaxbench.measure import page
from jaxbench.measure.page import Group, Section

FIGURE = {"data": [{"type": "bar", "name": "</script><b>"}], "layout": {"height": 120, "xaxis": {}, "yaxis": {}}}


def parts_of(html: str) -> str:
    return re.sub(r"<(script|style)>.*?</\1>", " ", html, flags=re.S)


def test_a_page_has_its_sections_contents_and_figures():
    body = Markup("<p>{}</p>").format("a < b") + page.chart("chart-a", FIGURE)
    sections = [Section("first", "First & best", body), Section("second", "Second", Markup(""))]
    html = page.render("Title <1>", Markup("<i>lead</i>"), sections, {"chart-a": FIGURE}, name="shown <2>")
    text = parts_of(html)
    assert html.startswith("<!doctype html>\n") and html.endswith("</html>\n")
    assert "<title>shown &lt;2&gt;</title>" in text and "<h1>Title &lt;1&gt;</h1><i>lead</i>" in text
    assert '<a href="#first">First &amp; best</a><a href="#second">' in text
    assert '<section id="first"><h2>First &amp; best</h2><p>a &lt; b</p><div class="chart" id="chart-a"' in text
    assert json.loads(re.search(r"const FIGURES = (.*);\n", html).group(1)) == {"chart-a": FIGURE}
    assert html.count("</script>") == 2 and "plotly.js v" in html


def test_a_page_without_sections_has_no_contents():
    text = parts_of(page.render("Title", Markup("<p>all</p>"), (), {}))
    assert "<nav>" not in text and "<section" not in text and "<title>Title</title>" in text


def test_a_table_escapes_cells_groups_lines_and_keeps_whole_cells():
    styled = page.cell("<", "left wrap", span=2, hint='"why"')
    below = "y" + page.note("<z>", "faster")
    head = ("a", page.Cell("<th>&amp;</th>"), ">")
    table = page.table(head, [Group("<g>"), ("x<", 2, below), (1, styled)])
    assert table == (
        '<div class="wide"><table><thead><tr><th>a</th><th>&amp;</th><th>&gt;</th></tr></thead><tbody>'
        '<tr class="head"><td colspan="3">&lt;g&gt;</td></tr>'
        '<tr><td>x&lt;</td><td>2</td><td>y<small class="faster">&lt;z&gt;</small></td></tr>'
        '<tr><td>1</td><td class="left wrap" colspan="2" title="&#34;why&#34;">&lt;</td></tr></tbody></table></div>'
    )


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (page.items(["a<", "b"]), "<ul><li>a&lt;</li><li>b</li></ul>"),
        (page.items([]), ""),
        (page.cards([("1", "<2>", "3")]), "<b>1</b><span>&lt;2&gt;</span><small>3</small>"),
        (page.facts({"<name>": None}), '<td>&lt;name&gt;</td><td class="left wrap">None</td>'),
    ],
)
def test_parts_escape_their_text(made, wanted):
    assert isinstance(made, Markup) and (wanted in made if wanted else made == wanted)
