"""Show the speed table of a pair as plain text, on a terminal and as a page (S file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxbench import outputs, terminal
from jaxbench.measure import page, verdicts

HEAD = ("part", "type", "arm", "seconds a call", "times torch_eager's speed [95 %]", "", "a call's memory")
FIRST_HEAD = ("part", "type", "arm", "first two calls, cold", "from the cache")


def cells(result: Any) -> list[tuple[str, ...]]:
    """Return the rows of the table as text."""
    return [
        (row["part"].replace("_", " + "), row["dtype"], row["arm"], seconds(row["seconds"]), ratio(row["ratio"]),
         row["verdict"], "" if row["bytes"] is None else f"{row['bytes'] / 2**20:,.1f} MiB")
        for row in result.rows
    ]  # fmt: skip


def first_cells(result: Any) -> list[tuple[str, ...]]:
    """Return the rows of the first two calls, which trace and compile, as text."""
    return [
        (row["part"].replace("_", " + "), row["dtype"], row["arm"], seconds(row["first_cold_s"]),
         seconds(row["first_warm_s"]))
        for row in result.rows
    ]  # fmt: skip


def seconds(value: float | None) -> str:
    """Format a time in a suitable unit."""
    if value is None:
        return ""
    unit, scale = next(pair for pair in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if value >= pair[1] or pair[0] == "us")
    return f"{value / scale:.3g} {unit}"


def ratio(values: list[float | None] | None) -> str:
    """Format a ratio with its interval, if that is informative."""
    if values is None:
        return ""
    point, low, high = values
    is_known = low is not None and high is not None and verdicts.is_informative(low, high)
    return f"{point:.2f} [{low:.2f}, {high:.2f}]" if is_known else f"{point:.2f} (too few launches)"


def remarks(result: Any) -> list[str]:
    """Return the sentences below the tables."""
    about = result.about
    mode = "training" if about["is_training"] else "evaluation"
    ran = f"{about['launches']} launches, {about['cpu']}, {about['threads']} threads; backward in {mode} mode"
    note = (
        f"not judged: for {about['waiting']:.0%} of the time something waited for a core here, so other work ran too, "
        "and threads that wait for each other suffer most; measure on a quiet machine"
    )
    return [ran, *([note] if not about["is_judged"] else []), *result.notes]


def tables(result: Any) -> list[Any]:
    """Return both tables, for a rich console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = []
    for title, head, rows in (("speed", HEAD, cells(result)), ("first calls", FIRST_HEAD, first_cells(result))):
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for name in head:
            table.add_column(name, justify="left" if name in head[:3] else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        made.append(table)
    return made


def show(result: Any, *, console: Any = None) -> None:
    """Print the tables and remarks."""
    console = console or terminal.console()
    for table in tables(result):
        console.print(table)
    for sentence in remarks(result):
        console.print(sentence, markup=False, highlight=False)


def text(result: Any) -> str:
    """Return what `show` prints, without colours."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=140, no_color=True)
    show(result, console=console)
    return console.file.getvalue().rstrip()


def write_page(path: str | Path, result: Any, *, name: str) -> None:
    """Write one self-contained HTML page atomically."""
    sections = (page.Section("speed", "Speed"), page.Section("first", "First calls"))
    own = {
        "tables": {"speed": (HEAD, cells(result)), "first": (FIRST_HEAD, first_cells(result))},
        "remarks": remarks(result), "template": Path(__file__).with_suffix(".html"),
    }  # fmt: skip
    outputs.write_text(path, page.render(f"{name}: speed", sections, {}, **own))
