"""The background card of SVG pictures, written by hand: no dependency, same numbers give the same bytes (S file).

README pages show a picture on white and on black, so the SVG has its own background and follows the reader's colour
scheme, which a plotting library's file does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, GAP, MARGIN = 960, 24, 24
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  .title { fill: #1f2328; font: 600 19px system-ui, -apple-system, 'Segoe UI', sans-serif; }
  .note { fill: #59636e; font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; }
  .head { fill: #1f2328; font: 600 14px system-ui, -apple-system, 'Segoe UI', sans-serif; }
  .arm { fill: #59636e; font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; }
  .number { fill: #1f2328; font: 600 12px system-ui, -apple-system, 'Segoe UI', sans-serif; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d; }
    .title, .head, .number { fill: #f0f6fc; }
    .note, .arm { fill: #9198a1; }
  }
"""


def element(tag: str, words: str = "", **attributes: float | str) -> str:
    """Return one SVG element: words are escaped, floats rounded to a tenth, `_` in an attribute's name becomes `-`."""
    shown = {name: f"{value:.1f}" if isinstance(value, float) else value for name, value in attributes.items()}
    named = " ".join(f'{name.strip("_").replace("_", "-")}="{value}"' for name, value in shown.items())
    return f"<{tag} {named}>{escape(words)}</{tag}>" if words else f"<{tag} {named}/>"


def card(title: str, note: str, body: Sequence[str], *, height: float, style: str = "") -> str:
    """Return a whole SVG file: title and note on a card of WIDTH x `height`, and the elements of `body`."""
    heading = element("text", title, class_="title", x=MARGIN, y=44)
    content = "\n".join([heading, element("text", note, class_="note", x=MARGIN, y=66), *body])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n<style>{STYLE}{style}</style>\n'
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>\n{content}\n</svg>\n'
    )
