"""A page that opens offline: its shell, and the parts that pages are made of (S file).

A page is sections of text, tables and plotly charts in one shell, page.html, with plotly's script inside. What goes
into a part is escaped; markup is a `Markup`, made by these functions or by `Markup("<p>{}</p>").format(text)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

SHELL = Path(__file__).with_name("page.html")
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
    values = {"title": title, "lead": lead, "sections": sections, "name": name or title}
    return template().render(values | scripts(figures))


def template(path: Path = SHELL, filters: Mapping[str, Callable[..., Any]] = {}) -> jinja2.Template:
    """A page's template: the shell, or a file that says `{% extends "page.html" %}` and fills its blocks."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, SHELL.parent]), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    pages.filters |= filters
    return pages.get_template(path.name)


def scripts(figures: Mapping[str, Figure]) -> dict[str, str]:
    """The values of the shell that draw figures: plotly's script, and the figures as JSON."""
    from plotly import offline

    data = json.dumps(figures, allow_nan=False).replace("</", "<\\/")
    return {"plotly": offline.get_plotlyjs(), "data": data}


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
