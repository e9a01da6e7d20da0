"""Write a history as a folder of pages that opens from disk and from any web host, without a network (S file).

Data flow: runs -> content -> pages by templates, and data as scripts of one series or one run each, which a page loads
when it shows them, so that the first paint does not grow with the history.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from jaxbench import outputs
from jaxbench.measure import page
from jaxbench.regress.history import History
from jaxbench.regress.qualify import Share
from jaxbench.regress.site import content as contents

HERE = Path(__file__).parent
PAGES = {
    "overview": "Overview", "trends": "Trends", "compare": "A against B", "parity": "Parity", "alerts": "Alerts",
    "live": "Live", "machine": "Machine",
}  # fmt: skip
TITLES = {"overview": "Performance over time", "compare": "Head against base", "live": "This machine now"}
STATIC = (HERE / "site.css", HERE / "site.js", page.SHELL.with_name("page.css"), page.SHELL.with_name("page.js"))
MARK = "jaxbench-site"  # the file that marks a folder as a site of ours


def write(folder: Path, history: History, *, layers: Sequence[dict[str, Any]] = ()) -> contents.Content:
    """Write the site, whole or not at all; an existing site is replaced.

    Args:
      layers: results of the parity command (case, backend, passed), each with the `figure` of its layers.

    Raises:
      ValueError: the history contains no run, or something other than a site is in the folder's place.
    """
    check(folder)
    found = contents.gather(history)
    old = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    with outputs.whole_folder(folder) as made:
        for name, text in texts(found, layers).items():
            path = made / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path in STATIC:
            shutil.copyfile(path, made / path.name)
        (made / "plotly.js").write_text(plotly(), encoding="utf-8")
        (made / MARK).touch()
        if folder.exists():
            folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)
    return found


def check(folder: Path) -> None:
    """Check that a folder may become a site.

    Raises:
      ValueError: something other than a site is there.
    """
    is_free = not folder.exists() or (folder.is_dir() and ((folder / MARK).exists() or not any(folder.iterdir())))
    if not is_free:
        raise ValueError(f"--output={folder} is there and no site of ours; wanted a new folder, or a site to replace")


def texts(found: contents.Content, layers: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """Return every file of a site that comes from the history, by its path."""
    loader = jinja2.FileSystemLoader([HERE, page.SHELL.parent])
    pages = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    pages.filters["share"] = lambda pair: str(Share(*pair))
    made = {}
    for name, words in PAGES.items():
        values = {"page": name, "pages": PAGES, "title": TITLES.get(name, words), "content": found, "layers": layers}
        file = "index.html" if name == "overview" else f"{name}.html"
        made[file] = pages.get_template(f"{name}.html").render(values)
    made["data/index.js"] = _assigned("series", [each._asdict() for each in found.series])
    made["data/notes.js"] = _assigned("notes", found.notes)
    for file, columns in found.points.items():
        made[f"data/series-{file}.js"] = _assigned(f"points[{json.dumps(file)}]", columns)
    for id, record in found.records.items():
        made[f"data/run-{id}.js"] = _assigned(f"runs[{json.dumps(id)}]", record)
    if layers:
        made["data/layers.js"] = _assigned("layers", [result["figure"] for result in layers])
    return made


def _assigned(name: str, value: Any) -> str:
    value = outputs.finite(value)
    return f"BENCH.{name} = {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))};\n"


def plotly() -> str:
    """Return the script that draws charts."""
    from plotly import offline

    return offline.get_plotlyjs()
