"""Charts of an evaluation as plotly figures: plain dictionaries, coloured by the page's theme (S file)."""

from __future__ import annotations

import numpy as np

from jaxbench.measure.page import Figure

COLORS = ("#3b82f6", "#e5722a", "#0d9f8c", "#a855f7", "#d6336c", "#8a8d0f", "#64748b", "#0ea5e9")
DASHES = ("solid", "dash", "dot", "dashdot")


def level_text(fpr: str | float) -> str:
    """Return a false positive rate with all its digits, e.g. `1e-02` or `2.5e-02`: two levels never look alike."""
    return np.format_float_scientific(float(fpr), trim="-", exp_digits=2)


def color(summary: dict, name: str) -> str:
    """Return a scheme's colour."""
    return COLORS[list(summary["schemes"]).index(name) % len(COLORS)]


def pareto(summary: dict) -> Figure:
    """Evidence versus perplexity: right is easier to detect, down is more fluent; the line joins the best."""
    points = []
    for name, own in summary["schemes"].items():
        x, y = own["attacks"]["none"]["median_log10_p"], own["quality"]["perplexity"]
        if x is not None and y is not None:
            points.append((-x, y, name))
    data = [_marker(summary, *point) for point in points]
    best, front = float("inf"), []
    for x, y, _ in sorted(points, key=lambda point: (-point[0], point[1])):
        if y < best:
            front.append((x, y))
            best = y
    if len(front) > 1:
        data.append({
            "type": "scatter", "mode": "lines", "x": [x for x, _ in front], "y": [y for _, y in front],
            "line": {"dash": "dot", "width": 1.5, "color": "#8b949e"}, "hoverinfo": "skip", "showlegend": False,
        })  # fmt: skip
    for name in ("unmarked", "human"):
        level = summary[name]["quality"]["perplexity"]
        if level is not None and points:
            data.append({
                "type": "scatter", "mode": "lines", "name": f"{name} text", "x": [0, max(x for x, _, _ in points)],
                "y": [level, level], "line": {"dash": "dash" if name == "human" else "solid", "width": 1,
                                               "color": "#8b949e"},
                "hovertemplate": f"{name} text: %{{y:.2f}}<extra></extra>",
            })  # fmt: skip
    return _figure(data, "median evidence of a text, -log10 p", "median perplexity", 420)


def _marker(summary: dict, x: float, y: float, name: str) -> Figure:
    own = summary["schemes"][name]
    tpr = ", ".join(
        f"{100 * rate['value']:.0f} % at {level_text(fpr)}"
        for fpr, rate in own["attacks"]["none"]["tpr"].items()
        if rate["value"] is not None
    )
    return {
        "type": "scatter", "mode": "markers+text", "name": name, "x": [x], "y": [y], "text": [name],
        "textposition": "top center", "marker": {"size": 13, "color": color(summary, name)}, "showlegend": False,
        "hovertemplate": f"{name}: -log10 p %{{x:.1f}}, perplexity %{{y:.2f}}<br>found: {tpr}<extra></extra>",
    }  # fmt: skip


def roc(summary: dict) -> Figure:
    """True- versus false-positive rate, the latter logarithmic and measured on human text."""
    data = []
    for name, own in summary["schemes"].items():
        false, true = own["roc"]
        floor = 0.5 / max(1, own["human_tests"])  # a logarithmic axis cannot show a rate of 0
        data.append({
            "type": "scatter", "mode": "lines", "name": name, "x": [max(x, floor) for x in false], "y": true,
            "line": {"shape": "hv", "color": color(summary, name), "width": 2},
            "hovertemplate": f"{name}: true %{{y:.3f}}, false %{{x:.2g}}<extra></extra>",
        })  # fmt: skip
    figure = _figure(data, "false positive rate on human text", "true positive rate", 380)
    figure["layout"]["xaxis"] |= {"type": "log", "exponentformat": "power"}
    figure["layout"]["yaxis"] |= {"range": [-0.02, 1.02]}
    return figure


def by_length(summary: dict) -> Figure:
    """True-positive rate by length, one line per scheme and level."""
    data = []
    for name, own in summary["schemes"].items():
        levels = list(next(iter(own["lengths"].values()))["tpr"])
        for i, fpr in enumerate(levels):
            rates = [(int(length), part["tpr"][fpr]) for length, part in own["lengths"].items()]
            rates = [(length, rate) for length, rate in rates if rate["value"] is not None]
            data.append({
                "type": "scatter", "mode": "lines+markers", "name": f"{name}, {level_text(fpr)}",
                "x": [length for length, _ in rates], "y": [rate["value"] for _, rate in rates],
                "line": {"color": color(summary, name), "dash": DASHES[i % len(DASHES)], "width": 2},
                "error_y": {"type": "data", "symmetric": False, "thickness": 1, "width": 3,
                            "array": [rate["high"] - rate["value"] for _, rate in rates],
                            "arrayminus": [rate["value"] - rate["low"] for _, rate in rates]},
                "hovertemplate": f"{name} at {level_text(fpr)}, %{{x}} tokens: %{{y:.2f}}<extra></extra>",
            })  # fmt: skip
    figure = _figure(data, "tokens the detector sees", "true positive rate", 430)
    figure["layout"]["yaxis"] |= {"range": [-0.02, 1.04]}
    return figure


def robustness(summary: dict, fpr: str) -> Figure:
    """True-positive rate of each scheme under each attack."""
    names = list(summary["schemes"])
    slugs = list(next(iter(summary["schemes"].values()))["attacks"])
    labels = [summary["schemes"][names[0]]["attacks"][slug]["label"] for slug in slugs]
    cells = [[summary["schemes"][name]["attacks"][slug] for name in names] for slug in slugs]
    values = [[cell["tpr"][fpr]["value"] for cell in line] for line in cells]
    texts = [["" if value is None else f"{100 * value:.0f}" for value in line] for line in values]
    hover = [[_hover(name, cell, fpr) for name, cell in zip(names, line)] for line in cells]
    trace = {
        "type": "heatmap", "x": names, "y": labels, "z": values, "text": texts, "texttemplate": "%{text}",
        "customdata": hover, "hovertemplate": "%{customdata}<extra></extra>", "zmin": 0, "zmax": 1,
        "colorscale": [[0, "#b4323c"], [0.5, "#e8c468"], [1, "#1a7f45"]], "xgap": 2, "ygap": 2,
        "colorbar": {"title": {"text": "found"}, "tickformat": ".0%", "thickness": 14},
    }  # fmt: skip
    layout = {
        "height": 130 + 30 * len(labels), "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "yaxis": {"autorange": "reversed", "automargin": True}, "xaxis": {"automargin": True, "side": "top"},
    }  # fmt: skip
    return {"data": [trace], "layout": layout}


def _hover(name: str, cell: dict, fpr: str) -> str:
    rate = cell["tpr"][fpr]
    if rate["value"] is None:
        return f"{name}, {cell['label']}: no text"
    return (
        f"{name}, {cell['label']}: {100 * rate['value']:.1f} % [{100 * rate['low']:.0f}, {100 * rate['high']:.0f}] of "
        f"{rate['count']}<br>words edited: {100 * (cell['word_edits'] or 0):.0f} %"
    )


def _figure(data: list[Figure], x: str, y: str, height: int) -> Figure:
    return {
        "data": data,
        "layout": {
            "height": height, "margin": {"l": 10, "r": 20, "t": 20, "b": 50},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
            "xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False},
            "yaxis": {"title": {"text": y}, "automargin": True, "zeroline": False},
        },
    }  # fmt: skip
