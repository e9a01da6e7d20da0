"""A page that opens offline: its shell, and the parts that pages are made of (S file).

A page is sections of text, tables and plotly charts under one style, with plotly's script inside. What goes into a part
is escaped; markup is a `Markup`, made by these functions or by `Markup("<p>{}</p>").format(text)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

Figure = dict[str, Any]  # plotly's data and layout, with a height; "line": x of a vertical line in the theme's colour


class Section(NamedTuple):
    """A part of the page with a place in its contents."""

    name: str  # the anchor
    title: str
    body: Markup


class Cell(Markup):
    """A whole cell of a table, <td> or <th>."""


class Group(NamedTuple):
    """A line of a table that heads the lines below it."""

    title: str


def render(
    title: str, lead: Markup, sections: Sequence[Section], figures: Mapping[str, Figure], *, name: str = ""
) -> str:
    """A whole page.

    Args:
      title: its heading.
      lead: what stands below the heading, before the contents.
      sections: in order.
      figures: id of a `chart` -> what it draws.
      name: the browser's title (unset: the heading).
    """
    from plotly import offline

    data = json.dumps(figures, allow_nan=False).replace("</", "<\\/")
    scripts = {"plotly": Markup(offline.get_plotlyjs()), "data": Markup(data), "script": Markup(SCRIPT)}
    parts = {"title": title, "lead": lead, "sections": sections, "name": name or title, "style": Markup(CSS)}
    return _SHELL.render(**parts, **scripts)


def chart(name: str, figure: Figure) -> Markup:
    """The place of a figure, which `render` is given under the same name."""
    height = figure["layout"]["height"]
    return Markup('<div class="chart" id="{}" style="min-height:{}px"></div>').format(name, height)


def items(sentences: Iterable[str]) -> Markup:
    """A list; nothing without sentences."""
    listed = Markup("").join(Markup("<li>{}</li>").format(sentence) for sentence in sentences)
    return Markup("<ul>{}</ul>").format(listed) if listed else Markup("")


def cards(figures: Iterable[tuple[str, str, str]]) -> Markup:
    """Headline figures: (figure, what it is, remark)."""
    one = Markup('<div class="card"><b>{}</b><span>{}</span><small>{}</small></div>')
    return Markup('<div class="cards">{}</div>').format(Markup("").join(one.format(*figure) for figure in figures))


def table(head: Sequence[str | Cell], lines: Iterable[Sequence[Any] | Group]) -> Markup:
    """A table of lines of cells; a Group heads the lines below it."""
    rows = []
    for line in lines:
        if isinstance(line, Group):
            rows.append(Markup('<tr class="head">{}</tr>').format(cell(line.title, span=len(head))))
        else:
            cells = (part if isinstance(part, Cell) else cell(part) for part in line)
            rows.append(Markup("<tr>{}</tr>").format(Markup("").join(cells)))
    names = Markup("").join(name if isinstance(name, Cell) else Markup("<th>{}</th>").format(name) for name in head)
    top = Markup("<thead><tr>{}</tr></thead>").format(names) if head else ""
    whole = Markup('<div class="wide"><table>{}<tbody>{}</tbody></table></div>')
    return whole.format(top, Markup("").join(rows))


def facts(about: Mapping[str, Any]) -> Markup:
    """A table of names and what they are."""
    return table((), ((name, cell(str(value), "left wrap")) for name, value in about.items()))


def cell(content: Any, style: str = "", *, span: int = 1, hint: str = "") -> Cell:
    """A cell with classes of the style, over several columns, or with a text that shows when pointed at."""
    attributes = {"class": style, "colspan": "" if span == 1 else span, "title": hint}
    shown = (Markup(' {}="{}"').format(name, value) for name, value in attributes.items() if value)
    return Cell("<td{}>{}</td>").format(Markup("").join(shown), content)


def note(content: Any, style: str = "") -> Markup:
    """A small line below a number."""
    return Markup("<small{}>{}</small>").format(Markup(' class="{}"').format(style) if style else "", content)


CSS = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f8fa; --line: #d8dee4; --text: #1f2328; --soft: #59636e;
  --grid: #e4e8ec; --good: #1a7f45; --bad: #c93a3a; --link: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --card: #151b23; --line: #30363d; --text: #e6edf3;
  --soft: #9198a1; --grid: #262c36; --good: #4ac27b; --bad: #ff7b72; --link: #7ab7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 21px; margin: 52px 0 6px; padding-top: 18px; border-top: 1px solid var(--line); }
p { margin: 6px 0 14px; max-width: 76ch; } p.soft, .soft { color: var(--soft); }
nav { margin: 18px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px; margin: 26px 0 10px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.card b { display: block; font-size: 25px; line-height: 1.2; letter-spacing: -0.01em; }
.card span { display: block; font-weight: 600; margin-top: 4px; } .card small { color: var(--soft); font-size: 13px; }
.wide { overflow-x: auto; margin: 10px 0 18px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; } td { white-space: nowrap; }
th:first-child, td:first-child, .left { text-align: left; } td.wrap { white-space: normal; }
tr.head td { font-weight: 600; background: var(--card); text-align: left; }
td small { display: block; color: var(--soft); font-size: 12px; } .faster { color: var(--good) !important; }
.slower { color: var(--bad) !important; } ul { padding-left: 20px; max-width: 84ch; } li { margin: 3px 0; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace; background: var(--card); padding: 2px 5px;
  border-radius: 5px; }
.chart { margin: 8px 0 4px; min-height: 120px; }
details { margin: 8px 0; } summary { cursor: pointer; font-weight: 600; }
"""
SCRIPT = """
const shade = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function themed(figure) {
  const layout = structuredClone(figure.layout), text = shade('--text'), grid = shade('--grid');
  Object.assign(layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, -apple-system, Segoe UI, sans-serif', size: 13, color: text},
    hoverlabel: {font: {size: 13}}});
  for (const axis of ['xaxis', 'yaxis'])
    Object.assign(layout[axis], {gridcolor: grid, linecolor: grid, zerolinecolor: grid, fixedrange: true});
  if (figure.line) layout.shapes = [{type: 'line', xref: 'x', yref: 'paper', x0: figure.line, x1: figure.line, y0: 0,
    y1: 1, layer: 'below', line: {color: shade('--soft'), width: 1.5, dash: 'dot'}}];
  return layout;
}
function draw() {
  for (const [name, figure] of Object.entries(FIGURES))
    Plotly.react(name, figure.data, themed(figure), {displayModeBar: false, responsive: true});
}
draw();
for (const part of document.querySelectorAll('details')) part.addEventListener('toggle', draw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
"""
_SHELL = jinja2.Template(
    """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}</title>
<style>{{ style }}</style></head>
<body><main>
<h1>{{ title }}</h1>{{ lead }}
{% if sections | length > 1 %}
<nav>{% for part in sections %}<a href="#{{ part.name }}">{{ part.title }}</a>{% endfor %}</nav>
{% endif %}
{% for part in sections %}
<section id="{{ part.name }}"><h2>{{ part.title }}</h2>{{ part.body }}</section>
{% endfor %}
</main>
<script>{{ plotly }}</script>
<script>const FIGURES = {{ data }};
{{ script }}</script>
</body></html>
""",
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
