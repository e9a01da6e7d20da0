"""Report a run as a table, CSV, Markdown and JUnit XML (S file); html_report.py makes the page."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import rich.table
from rich.text import Text

from jaxbench import outputs
from jaxbench.regress import advice, judge, limits, metrics, why
from jaxbench.regress.judge import Finding
from jaxbench.regress.limits import Judged
from jaxbench.regress.qualify import Share
from jaxbench.regress.suite import Suite

ORDER = {"regression": 0, "undecided": 1, "improvement": 2, "no change": 3}
ALPHA = Suite.model_fields["alpha"].default
SHOWN = {"regression", "improvement"}  # verdicts listed in a summary; the others are only counted


def findings_of(record: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a run's record, regressions first, the worst of them first."""
    return sorted(judge.stored(record), key=lambda each: (ORDER[each.verdict], each.level != "critical", -each.worse))


def summary(record: Mapping[str, Any]) -> str:
    """Summarise the findings in one line."""
    found = findings_of(record)
    if not found:
        return (
            f"{len(record['series'])} series measured, no base to compare with{_limits_in_short(record)}"
            + _lost_in_short(record)
        )
    counts = {word: sum(each.verdict == word for each in found) for word in ORDER}
    critical = sum(each.level == "critical" for each in found)
    said = [f"{count} {word}" for word, count in counts.items() if count]
    shown = ", ".join(said) + (f"; {critical} of the regressions critical" if critical else "")
    return shown + _limits_in_short(record) + _lost_in_short(record)


def _limits_in_short(record: Mapping[str, Any]) -> str:
    count, broken = len(limits.of_run(record)), len(limits.broken(record))
    if not count:
        return ""
    return f"; {broken} of {count} limits broken" if broken else f"; {count} of {count} limits held"


def _lost_in_short(record: Mapping[str, Any]) -> str:
    lost = lost_cases(record)
    return f"; not measured: {', '.join(lost)}" if lost else ""


def table(record: Mapping[str, Any]) -> rich.table.Table:
    """Return the run as a table for a terminal."""
    sides = record["sides"]
    base = sides.get("base", {}).get("commit")
    title = f"{sides['head']['commit']}" + (f" beside {base}" if base else "") + f", {launches(record)}"
    shown = rich.table.Table(title=title)
    for column in ("series", "base", "head", f"worse by, {level(record)} each", "verdict"):
        shown.add_column(column, justify="left" if column in ("series", "verdict") else "right")
    for each in findings_of(record):
        unit = metrics.metric_of(each.series).unit
        name, values = Text(each.series), (number(each.base, unit), number(each.head, unit))
        shown.add_row(name, *values, interval(each), verdict(each))
    if not record["findings"]:
        for name, both in record["series"].items():
            value = number(both["head"]["median"], metrics.of_run(record, name).unit)
            shown.add_row(Text(name), "", value, "", "")  # pytest's parameters are in brackets, which are no markup
    return shown


def level(record: Mapping[str, Any]) -> str:
    """Return the level at which each interval of a run holds for its own series: 1 - alpha of its suite."""
    return f"{100 * (1 - record['suite'].get('alpha', ALPHA)):.4g} %"


def launches(record: Mapping[str, Any]) -> str:
    """Say how many launches the values come from, without those that confirm a critical regression."""
    if not record["findings"]:
        return f"{record['launches']} launches"
    return f"{max(each['num_pairs'] for each in record['findings'])} pairs of launches"


def limits_table(record: Mapping[str, Any]) -> rich.table.Table | None:
    """Return the limits of a run as a table for a terminal; None if its suite has none."""
    if not (found := limits.of_run(record)):
        return None
    shown = rich.table.Table(title="limits, of the median of head's launches")
    for column in ("series", "value", "wanted", "verdict"):
        shown.add_column(column, justify="right" if column == "value" else "left")
    for each in found:
        shown.add_row(*map(Text, limit_cells(each)))
    return shown


def limit_cells(each: Judged) -> tuple[str, str, str, str]:
    """Return series, value, wanted bounds and verdict of a limit, as text."""
    unit = metrics.metric_of(each.series).unit
    bounds = (("at least", each.least), ("at most", each.most))
    wanted = ", ".join(f"{word} {number(bound, unit)}" for word, bound in bounds if bound is not None)
    return each.series, "not measured" if each.value is None else number(each.value, unit), wanted, each.verdict


def broken_limits(record: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each limit that a run broke."""
    cells = [limit_cells(each) for each in limits.broken(record)]
    return [f"{series} {value}, wanted {wanted}" for series, value, wanted, _ in cells]


def lost_cases(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the cases that head cannot run, with the reasons; runs of older versions and other tools name none."""
    return record.get("lost", {})


def failures(record: Mapping[str, Any]) -> list[str]:
    """Return why a run ends with exit code 1: one phrase for each kind of failure, none if it passes."""
    kinds = {
        "critical regression of ": ", ".join(each.series for each in findings_of(record) if each.level == "critical"),
        "broken limits: ": "; ".join(broken_limits(record)),
        "this tree does not run ": "; ".join(f"{name} ({reason})" for name, reason in lost_cases(record).items()),
    }
    return [what + which for what, which in kinds.items() if which]


def number(value: float, unit: str) -> str:
    """Format a value with its unit."""
    if unit == "s":
        if value < 0.9995:
            return f"{1e3 * value:.3g} ms"
        return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    if unit in ("count", "ratio"):
        return f"{value:g}"
    return f"{value:,.4g} {unit}"


def interval(each: Finding) -> str:
    """Format how much worse a series is, with its interval; + is worse."""
    if not (math.isfinite(each.base) and math.isfinite(each.head)):
        return "not finite" if math.isfinite(each.base) else "was not finite"
    if each.low == each.high:
        return f"{100 * each.worse:+.1f} %" if each.worse != float("inf") else "was 0" if each.base == 0 else "is 0"
    return f"{100 * each.worse:+.1f} [{100 * each.low:+.1f}, {100 * each.high:+.1f}] %"


def verdict(each: Finding) -> str:
    """Return a verdict in words."""
    if each.verdict == "regression":
        return f"regression, {each.level}"
    if each.verdict == "undecided":
        return f"undecided (about {each.wanted_pairs} launches would tell)"
    return each.verdict


def explanation(record: Mapping[str, Any]) -> list[str]:
    """Return lines that explain what became worse; none if nothing did."""
    return why.sentences(record["why"]) if "why" in record else []


def worth(record: Mapping[str, Any]) -> list[str]:
    """Say how reliable this suite's verdicts are on this machine: false alarms, power, smallest detectable effects."""
    if record.get("left_out"):
        return ["verdicts of some cases alone are not qualified: `qualify` measures a whole suite"]
    if (found := record.get("qualified")) is None:
        return ["verdicts of this suite are not qualified on this machine: `qualify` measures false alarms and power"]
    real, drawn = (Share(*found[name]) for name in ("real", "drawn"))
    said = [f"on this machine: false alarms in {real} of runs, drawn from all launches {drawn}"]
    power = ", ".join(f"{round(100 * (float(r) - 1))} % slower in {Share(*s)}" for r, s in found["power"].items())
    smallest = sorted(found["smallest"].items(), key=lambda item: item[1])
    said.append(f"power: primary series are found to be {power}")
    if smallest:
        said.append("smallest effects: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in smallest[:12]))
    return said


def markdown(record: Mapping[str, Any]) -> str:
    """Return a Markdown summary for a pull request."""
    sides, found = record["sides"], findings_of(record)
    lines = [f"### Performance: {summary(record)}", ""]
    head, base = sides["head"]["commit"], sides.get("base")
    beside = f"beside `{base['commit']}` ({base['subject']})" if base else ""
    lines += [f"`{head}` {beside}, {launches(record)}.".replace(" ,", ","), ""]
    rows = [each for each in found if each.verdict in SHOWN]
    if rows:
        lines += ["| series | base | head | worse by | verdict |", "|---|---|---|---|---|"]
        for each in rows:
            unit = metrics.metric_of(each.series).unit
            cells = (each.series, number(each.base, unit), number(each.head, unit), interval(each), verdict(each))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if of_run := limits.of_run(record):
        lines += ["| limit | value | wanted | verdict |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(limit_cells(each)) + " |" for each in of_run] + [""]
    undecided = [each.series for each in found if each.verdict == "undecided"]
    if undecided:
        lines += [f"Undecided: {', '.join(undecided)}.", ""]
    if said := explanation(record):
        lines += ["Why:", "", *(f"- {line}" for line in said), ""]
    if found:
        lines += [f"{line[0].upper()}{line[1:]}." for line in worth(record)] + [""]
    if said := advice.recommendations(record):
        lines += ["What to do next:", "", *(f"- {line}" for line in said), ""]
    lines += ["Before a release:", ""]
    lines += [f"- [{'x' if item.is_done else ' '}] {item.what} ({item.detail})" for item in advice.checklist(record)]
    lines.append("")
    if record["notes"]:
        lines += [*(f"- {note}" for note in record["notes"]), ""]
    machine = record["machine"]
    lines.append(f"Machine {record['host']}: {machine['cpu']}, {machine['threads']} threads, {record['device']}.")
    return "\n".join(lines) + "\n"


def junit(record: Mapping[str, Any]) -> str:
    """Return the run as JUnit XML: an undecided series is skipped.

    A critical regression, a broken limit and a case that head cannot run are failures.
    """
    found, bounds, lost = findings_of(record), limits.of_run(record), lost_cases(record)
    total = len(found) + len(bounds) + len(lost)
    failed = sum(each.level == "critical" for each in found) + len(limits.broken(record)) + len(lost)
    skipped = sum(each.verdict == "undecided" for each in found)
    suite = ElementTree.Element(
        "testsuite", name="performance", tests=str(total), failures=str(failed), skipped=str(skipped)
    )
    properties = ElementTree.SubElement(suite, "properties")
    for line in worth(record):
        name, _, said = line.partition(": ")
        ElementTree.SubElement(properties, "property", name=name, value=said or name)
    for each in found:
        case = ElementTree.SubElement(suite, "testcase", classname="performance", name=each.series)
        said = f"{verdict(each)}: {interval(each)}"
        if each.level == "critical":
            ElementTree.SubElement(case, "failure", message=said)
        elif each.verdict == "undecided":
            ElementTree.SubElement(case, "skipped", message=said)
        else:
            ElementTree.SubElement(case, "system-out").text = said
    for each in bounds:
        case = ElementTree.SubElement(suite, "testcase", classname="limits", name=each.series)
        _, value, wanted, judged = limit_cells(each)
        if judged == "broken":
            ElementTree.SubElement(case, "failure", message=f"{value}; wanted {wanted}")
        else:
            ElementTree.SubElement(case, "system-out").text = f"{value}; wanted {wanted}"
    for name, reason in lost.items():
        case = ElementTree.SubElement(suite, "testcase", classname="cases", name=name)
        ElementTree.SubElement(case, "failure", message=f"not measured: {reason}")
    ElementTree.indent(suite)
    buffer = io.BytesIO()
    ElementTree.ElementTree(suite).write(buffer, encoding="utf-8", xml_declaration=True)
    return buffer.getvalue().decode() + "\n"


def write(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the report formats that the suite asks for, except the page, into a folder; return their names."""
    forms: Mapping[str, Callable[[], str]] = {
        "md": lambda: markdown(record), "xml": lambda: junit(record),
        "json": lambda: json.dumps(outputs.finite(_with_words(record)), indent=1, ensure_ascii=False, allow_nan=False)
        + "\n",
    }  # fmt: skip
    wanted, names = record["suite"].get("reports", ("csv", *forms)), []
    if "csv" in wanted:
        outputs.write_csv(folder / "report.csv", rows(record))
        names.append("report.csv")
    for form in (form for form in forms if form in wanted):
        outputs.write_text(folder / f"report.{form}", forms[form]())
        names.append(f"report.{form}")
    return names


def _with_words(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with the texts that the page and the Markdown show for its numbers."""
    return dict(record) | {
        "summary": summary(record),
        "explanation": explanation(record),
        "worth": worth(record) if record["findings"] else [],
        "recommendations": advice.recommendations(record),
        "checklist": [each._asdict() for each in advice.checklist(record)],
    }


def rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return table rows: findings with the smallest effect detectable on the machine; without findings, the medians.

    A series with a limit also has its bounds and verdict, in a separate row if it has no other.
    """
    smallest = record.get("qualified", {}).get("smallest", {})
    found = [each._asdict() | {"smallest_effect": smallest.get(each.series, "")} for each in findings_of(record)]
    found = found or [{"series": name, "head": both["head"]["median"]} for name, both in record["series"].items()]
    bounds = {
        each.series: {"least": each.least, "most": each.most, "limit": each.verdict} for each in limits.of_run(record)
    }
    rest = {each.series: {"series": each.series, "head": each.value} for each in limits.of_run(record)}
    for row in found:
        rest.pop(row["series"], None)
    return [row | bounds.get(row["series"], {}) for row in [*found, *rest.values()]]
