"""report.html of an evaluation: one page that opens offline, with plotly's script inside (S file).

The page is the jinja2 template of this name; here is what it shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxbench.measure import page
from jaxbench.measure.page import Section
from jaxbench.watermark.study import evaluate_figures

SECTIONS = {
    "tradeoff": "Detectability against quality", "power": "Detection", "robustness": "Robustness",
    "quality": "Quality", "spoofing": "Guessed keys and forged text", "tokens": "Token by token",
    "settings": "Settings and environment",
}  # fmt: skip


def render(content: dict[str, Any], shown: dict[str, list[dict]]) -> str:
    """The page as text, from what results.json holds, and from texts of each scheme with tokens and shades."""
    settings, summary = content["settings"], content["summary"]
    fprs = [str(fpr) for fpr in settings["detect"]["fprs"]]
    middle, levels = fprs[len(fprs) // 2], [_level(fpr) for fpr in fprs]  # headline and heat map: the middle level
    charts = {
        "chart-pareto": evaluate_figures.pareto(summary), "chart-length": evaluate_figures.by_length(summary),
        "chart-roc": evaluate_figures.roc(summary), "chart-robustness": evaluate_figures.robustness(summary, middle),
    }  # fmt: skip
    spoofed = {name: own["spoof"] for name, own in summary["schemes"].items() if own["spoof"]}
    shown = {name: texts for name, texts in shown.items() if texts}
    is_there = {"spoofing": spoofed, "tokens": shown}
    filters = {
        "colour": _colour, "level": _level, "number": _number, "percent": _percent,
        "short": lambda fpr: f"{float(fpr):g}",
    }  # fmt: skip
    title = f"Watermarks: {', '.join(summary['schemes'])}"
    return page.render(
        title, [Section(name, heading, bool(is_there.get(name, True))) for name, heading in SECTIONS.items()], charts,
        name=f"jaxbench: {title}", template=Path(__file__).with_suffix(".html"), filters=filters,
        content=content, shown=shown, spoofed=spoofed, middle=middle, levels=levels, zip=zip,
        settings=settings, summary=summary,
        found_at=[f"found at {level}" for level in levels],
        accepted_at=[f"forgeries accepted at {level}" for level in levels],
        arms=[("human", summary["human"]), ("unmarked", summary["unmarked"]), *summary["schemes"].items()],
        about=_about(content), whole=json.dumps(settings, indent=1),
    )  # fmt: skip


def _about(content: dict[str, Any]) -> dict[str, str]:
    facts = content["environment"]
    return {
        "command": content["command"],
        "configuration": content["config_id"],
        "commit": facts.get("commit") or "-",
        "processor": f"{facts.get('cpu', '-')}, {facts.get('cores', '-')} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items()) or "-",
        "data": f"{content['data']['source']}, sha256 {content['data']['sha256']}",
        "models": ", ".join(f"{name}: sha256 {digest}" for name, digest in content["models"].items()),
    }


def _colour(shade: float) -> str:
    hue, strength = (140, 2 * shade - 1) if shade >= 0.5 else (0, 1 - 2 * shade)
    return f"hsla({hue},60%,45%,{0.45 * strength:.2f})"


def _level(fpr: str) -> str:
    return f"{float(fpr):.0e}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _number(value: float | None, digits: int, missing: str = "-") -> str:
    return missing if value is None else f"{value:.{digits}f}"
