"""Show parity results: a table on the terminal, one HTML page with a heat map of every layer (S file).

A result is what run.run returns. The page is the jinja2 template of this name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxbench import outputs, terminal
from jaxbench.measure import page

COLUMNS = {
    "float64": "output\nfloat64",
    "gradient": "gradient\nfloat64",
    "own": "by itself\nfloat64",
    "float32": "{backend}\nfloat32",
    "float32_torch": "torch\nfloat32",
    "bfloat16": "{backend}\nbfloat16",
    "bfloat16_torch": "torch\nbfloat16",
}  # "by itself": given the twin's inputs and the twin's results of the inner modules
MAX_TERMINAL_ROWS = 60  # beyond this, modules of one layer share a row with their worst error
LOG10_RANGE = (-17.0, 0.0)  # of the heat map's colours


def summary(result: dict[str, Any]) -> str:
    """Summarise a result: passed with the worst error, or where the difference starts and the module to blame."""
    head = f"{result['case']}, {result['backend']} against torch"
    if result["passed"] and not result["layers"]:  # the case's own gates, each in its own unit
        nearest = max(result["gates"], key=lambda gate: gate["error"] / gate["limit"] if gate["limit"] else 0.0)
        found = f"{nearest['what']}, {nearest['error']:.1e} of {nearest['limit']:.1e}"
        return f"{head}: equal, {len(result['gates'])} gates passed; nearest to its limit: {found}"
    if result["passed"]:
        return f"{head}: equal, worst float64 error of an output {result['worst']:.1e}"
    failed = [gate for gate in result["gates"] if not gate["passed"]]
    parts = [f"{head}: NOT equal, {len(failed)} gates failed"]
    if result["first_divergence"]:
        parts.append(f"the difference starts at {result['first_divergence']}")
    elif result["first_divergence_backward"]:
        parts.append(f"in the backward pass, the difference starts at {result['first_divergence_backward']}")
    else:
        first = next(iter(result["first_divergence_by_kind"].items()), None)
        parts.append(f"first: {first[1]} ({first[0]})" if first else f"first: {failed[0]['what']} {failed[0]['where']}")
    if result["blame"]:
        blame = result["blame"]
        parts.append(f"the cause is in {blame['module']} ({blame['part']}, {blame['error']:.1e} by itself)")
    return "; ".join(parts)


def layer_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the modules' errors; if there are too many, one row per layer with its worst errors."""
    rows = result["layers"]
    if len(rows) <= MAX_TERMINAL_ROWS:
        return rows
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        match = re.match(r"(.*?layers\.\d+)", row["module"])
        name = match.group(1) if match else row["module"]
        into = merged.setdefault(name, {"module": name})
        for key, value in row.items():
            if key != "module" and value is not None:
                into[key] = max(value, into.get(key, 0.0))
    return list(merged.values())


def columns(result: dict[str, Any]) -> dict[str, str]:
    """Titles of the columns that this result has values for."""
    present = {key for row in result["layers"] for key, value in row.items() if value is not None}
    return {key: title.format(backend=result["backend"]) for key, title in COLUMNS.items() if key in present}


def show(result: dict[str, Any], console: Any = None) -> None:
    """Print a result: gates, every layer, and the summary."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = console or terminal.console()
    table = Table(title=f"{result['case']}  {result['backend']} against torch", box=box.SIMPLE_HEAD)
    for name in ("gate", "what", "", "error", "limit", "where"):
        is_short = name not in ("what", "where")
        justify = "right" if name in ("error", "limit") else "left"
        table.add_column(name, justify=justify, no_wrap=is_short, overflow="fold")
    for gate in result["gates"]:
        verdict = Text("pass", "green") if gate["passed"] else Text("FAIL", "bold red")
        numbers = (_number(gate["error"]), _number(gate["limit"]))
        where = gate["where"] if gate["passed"] else f"{gate['where']} {gate['note']}"
        table.add_row(gate["id"], gate["what"], verdict, *numbers, Text(where))
    console.print(table)
    if result["layers"]:
        console.print(_layer_table(result))
    style = "green" if result["passed"] else "bold red"
    console.print(Text(summary(result), style=style))


def _layer_table(result: dict[str, Any]) -> Any:
    """Terminal table of every module's errors."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    titles = columns(result)
    table = Table(title="relative error of every layer", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("module", overflow="fold")
    for title in titles.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in layer_rows(result):
        marks = _marks(result, row["module"])
        name = Text(" <- ".join([row["module"], *marks]), style="bold red" if marks else "")
        table.add_row(name, *(_number(row.get(key)) for key in titles))
    return table


def _marks(result: dict[str, Any], module: str) -> list[str]:
    blamed = (result["blame"] or {}).get("module")
    marks = {"starts here": result["first_divergence"], "cause": blamed}
    return [mark for mark, name in marks.items() if name == module]


def _number(value: float | None) -> str:
    """Text of an error with two digits, empty for None."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def heat_map(result: dict[str, Any]) -> page.Figure:
    """Plotly figure: modules as rows in order of computation, kinds of error as columns, colour = log10."""
    titles, rows = columns(result), result["layers"]
    errors = [[row.get(key) for key in titles] for row in rows]
    marked = [(row["module"], _marks(result, row["module"])) for row in rows]
    names = [f"<b>{name}</b> ({', '.join(marks)})" if marks else name for name, marks in marked]
    trace = {
        "type": "heatmap", "x": [title.replace("\n", "<br>") for title in titles.values()], "y": names,
        "z": [[None if e is None else math.log10(min(max(e, 1e-17), 1.0)) for e in line] for line in errors],
        "text": [[_number(e) for e in line] for line in errors], "texttemplate": "%{text}",
        "hovertemplate": "%{y}<br>%{x}: relative error %{text}<extra></extra>", "colorscale": "Cividis",
        "zmin": LOG10_RANGE[0], "zmax": LOG10_RANGE[1], "colorbar": {"title": {"text": "log10"}},
    }  # fmt: skip
    layout = {
        "height": 220 + 18 * len(rows), "margin": {"l": 280, "t": 60},
        "yaxis": {"autorange": "reversed", "dtick": 1}, "xaxis": {"side": "top"},
    }  # fmt: skip
    return {"data": [trace], "layout": layout}


def render(results: Sequence[dict[str, Any]]) -> str:
    """Render several results as one self-contained HTML page; failed ones are expanded."""
    failed = [result for result in results if not result["passed"]]
    figures = {f"chart-{index}": heat_map(result) for index, result in enumerate(results) if result["layers"]}
    title = f"Parity: {len(results) - len(failed)} of {len(results)} cases equal"
    own = {"filters": {"number": _number, "summary": summary}, "results": results}
    return page.render(title, (), figures, template=Path(__file__).with_suffix(".html"), **own)


def write_page(path: str | Path, results: Sequence[dict[str, Any]]) -> None:
    """Write the page atomically."""
    outputs.write_text(path, render(results))
