"""Render self-contained HTML pages from one base template: page.html, with macros in parts.html (S file).

A page opens offline: sections of text, tables and plotly charts in one style, with plotly's script inlined. A page's
own template says `{% extends "page.html" %}` and fills the blocks; everything that it shows is escaped. Where plotly is
not installed, as on a machine that only measures, a sentence replaces the charts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from jaxbench import outputs

SHELL = Path(__file__).with_name("page.html")
Figure = dict[str, Any]  # plotly's data and layout, with a height; "line": x of a vertical line in the theme's colour


class Section(NamedTuple):
    """A section of a page, listed in its table of contents."""

    name: str  # the anchor
    title: str
    is_there: bool = True


def render(
    title: str,
    sections: Sequence[Section],
    figures: Mapping[str, Figure],
    *,
    name: str = "",
    template: Path = SHELL,
    filters: Mapping[str, Callable[..., Any]] = {},
    **values: Any,
) -> str:
    """Render a whole page.

    Args:
      title: its heading.
      sections: in order; those without `is_there` are left out of the contents and of the template's `sections`.
      figures: id of a chart -> what it draws. Without a template of its own, a page shows the chart `chart-NAME` in
        each section, and the value `lead` above them.
      name: the browser's title (unset: the heading).
      template: the page's template (unset: the shell page.html).
      filters: additional filters of the template.
      values: further values that the template shows.
    """
    script = _plotly()
    drawn = {} if script is None else figures
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SHELL.parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    pages.filters |= filters
    own = {"title": title, "sections": [section for section in sections if section.is_there], "figures": drawn}
    own |= {"name": name or title, "plotly": script or "", "is_without_charts": len(drawn) < len(figures)}
    own["data"] = json.dumps(outputs.finite(drawn), allow_nan=False).replace("</", "<\\/")
    return pages.from_string(template.read_text(encoding="utf-8")).render(own | values)


def _plotly() -> str | None:
    """Return plotly's script; None if it is not installed, as a page without charts still shows what was measured."""
    try:
        from plotly import offline
    except ImportError:
        return None
    return offline.get_plotlyjs()
