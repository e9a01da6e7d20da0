"""report.html of an evaluation: one page that opens offline, with plotly's script inside (S file)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxbench.measure.page import CSS, SCRIPT
from jaxbench.watermark import evaluate_figures as figures

TOKEN_CSS = """
.text { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; margin: 10px 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; line-height: 1.9; }
.text b { display: block; font-size: 13px; margin-bottom: 4px; } .text i { font-style: normal; border-radius: 3px;
  padding: 1px 0; } .key i { padding: 1px 8px; border-radius: 3px; font-style: normal; }
details { margin: 8px 0; } summary { cursor: pointer; font-weight: 600; }
"""


def render(content: dict[str, Any], shown: dict[str, list[dict]]) -> str:
    """Return the page.

    Args:
      content: what results.json holds.
      shown: texts of each scheme with their tokens and shades.
    """
    from plotly import offline

    charts: dict[str, Any] = {}
    sections = [
        _tradeoff(content, charts),
        _power(content, charts),
        _robustness(content, charts),
        _quality(content),
        _spoofing(content),
        _tokens(content, shown),
        _settings(content),
    ]
    sections = [section for section in sections if section]
    contents = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    data = json.dumps(charts, allow_nan=False).replace("</", "<\\/")
    title = f"Watermarks: {', '.join(content['summary']['schemes'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>jaxbench: {escape(title)}</title>\n<style>{CSS}{TOKEN_CSS}</style></head>\n<body><main>\n"
        f"<h1>{escape(title)}</h1>{_about(content)}<nav>{contents}</nav>\n"
        + "\n".join(f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' for name, title, body in sections)
        + f"\n</main>\n<script>{offline.get_plotlyjs()}</script>\n"
        f"<script>const FIGURES = {data};\n{SCRIPT}</script>\n</body></html>\n"
    )


def _about(content: dict) -> str:
    settings = content["settings"]
    made = settings["generate"]
    facts = (
        f"{made['prompts']} texts of at most {made['new_tokens']} tokens for each scheme, model {settings['model']}, "
        f"temperature {made['temperature']:g}, {settings['num_keys']} keys; human text: {content['data']['source']}, "
        f"{content['data']['human_texts']} texts"
    )
    cards = ""
    middle = _middle(content)
    for name, own in content["summary"]["schemes"].items():
        clean = own["attacks"]["none"]["tpr"][middle]
        figure = "-" if clean["value"] is None else f"{100 * clean['value']:.0f} %"
        what = f"found at a false positive rate of {float(middle):g}, {settings['attack_tokens']} tokens"
        cards += f'<div class="card"><b>{figure}</b><span>{escape(name)}</span><small>{escape(what)}</small></div>'
    return (
        f'<p class="soft">{escape(facts)}. Configuration <code>{escape(content["config_id"])}</code></p>'
        f"<div class='cards'>{cards}</div>"
    )


def _middle(content: dict) -> str:
    """Return the level that headline and heat map use: the middle one."""
    levels = [str(fpr) for fpr in content["settings"]["detect"]["fprs"]]
    return levels[len(levels) // 2]


def _chart(charts: dict, name: str, figure: Any) -> str:
    charts[name] = figure
    return f'<div class="chart" id="{name}" style="min-height:{figure["layout"]["height"]}px"></div>'


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _tradeoff(content: dict, charts: dict) -> tuple[str, str, str]:
    judge = content["settings"]["quality"]
    context = "after its prompt" if judge["context"] == "prompt" else "without its prompt"
    text = (
        f"<p>How much a text of {content['settings']['attack_tokens']} tokens speaks for its mark, against its "
        f"perplexity under model {escape(judge['model'])} in {judge['dtype']}, unmarked, each text {context}. Right is "
        "easier to detect, down is more fluent. The dotted line joins the schemes that no other beats in both.</p>"
    )
    return (
        "tradeoff",
        "Detectability against quality",
        text + _chart(charts, "chart-pareto", figures.pareto(content["summary"])),
    )


def _power(content: dict, charts: dict) -> tuple[str, str, str]:
    summary, lines = content["summary"], []
    for name, own in summary["schemes"].items():
        for length, part in own["lengths"].items():
            for fpr, rate in part["tpr"].items():
                human = part["human_fpr"][fpr]
                spread = "" if human["value"] is None else (
                    f"<small>keys {_percent(human['least'])} to {_percent(human['most'])}</small>"
                )  # fmt: skip
                lines.append([
                    escape(name), length, f"{float(fpr):.0e}", _rate(rate), f"{_percent(human['value'])}{spread}",
                    _percent(part["unmarked_fpr"][fpr]["value"]), _number(part["auroc"], 4), str(part["texts"]),
                ])  # fmt: skip
    needed = [
        [escape(name), *(_number(tokens, 0, "more than tested") for tokens in own["tokens_needed"].values())]
        for name, own in summary["schemes"].items()
    ]
    levels = [f"{float(fpr):.0e}" for fpr in content["settings"]["detect"]["fprs"]]
    head = ("scheme", "tokens", "level", "found", "human text flagged", "unmarked text flagged", "AUROC", "texts")
    body = (
        "<p>A text is found where its exact p-value is at or below the level. Bars are 95 % intervals over texts; "
        "texts that ended earlier are left out of a length.</p>"
        + _chart(charts, "chart-length", figures.by_length(summary))
        + "<p>Tokens of which half the texts are found, out of the lengths tested:</p>"
        + _table(("scheme", *levels), needed)
        + "<p>True against false positive rate as the threshold on p moves:</p>"
        + _chart(charts, "chart-roc", figures.roc(summary))
        + f"<details><summary>All lengths and levels</summary>{_table(head, lines)}</details>"
    )
    return "power", "Detection", body


def _robustness(content: dict, charts: dict) -> tuple[str, str, str]:
    fpr, lines = _middle(content), []
    for name, own in content["summary"]["schemes"].items():
        for part in own["attacks"].values():
            quality = part["quality"] or {}
            lines.append([
                escape(name), escape(part["label"]), *(_rate(rate) for rate in part["tpr"].values()),
                _number(part["auroc"], 4), _percent(part["word_edits"]), _percent(part["character_edits"]),
                _number(quality.get("perplexity"), 2),
            ])  # fmt: skip
    levels = [f"found at {float(level):.0e}" for level in content["settings"]["detect"]["fprs"]]
    head = ("scheme", "attack", *levels, "AUROC", "words edited", "characters edited", "perplexity")
    text = (
        f"<p>Share of attacked texts (first {content['settings']['attack_tokens']} tokens) found at a false positive "
        f"rate of {float(fpr):g}, in percent.</p>"
    )
    chart = _chart(charts, "chart-robustness", figures.robustness(content["summary"], fpr))
    table = f"<details><summary>All levels, edit rates and perplexity</summary>{_table(head, lines)}</details>"
    return "robustness", "Robustness", text + chart + table


def _quality(content: dict) -> tuple[str, str, str]:
    summary, lines = content["summary"], []
    arms = [("human", summary["human"]), ("unmarked", summary["unmarked"]), *summary["schemes"].items()]
    for name, own in arms:
        quality, made, ending = own["quality"], own.get("generation", {}), own.get("ending", {})
        lines.append([
            escape(name), _number(quality["perplexity"], 2), _number(made.get("divergence"), 3),
            _number(made.get("excess"), 3), _number(made.get("entropy"), 2), _number(quality["distinct_1"], 3),
            _number(quality["distinct_2"], 3), _number(quality["distinct_3"], 3), _percent(quality["repetition"]),
            _number(ending.get("mean_tokens"), 1), _percent(ending.get("cap_hits")),
        ])  # fmt: skip
    head = ("text", "perplexity", "KL", "excess", "entropy", "distinct 1", "distinct 2", "distinct 3", "repetition",
            "tokens", "cut off")  # fmt: skip
    text = (
        "<p>KL is the divergence of the marked from the unmarked next-token distribution along the texts, in nats, "
        "for schemes that change logits under a given key; schemes that replace the draw leave it unchanged on average "
        "over keys. Excess is -log p of the drawn tokens minus the entropy, in nats: 0 in expectation where the text "
        "follows the model's own distribution at temperature 1. Distinct n-grams and repeated 4-grams are of words.</p>"
    )
    return "quality", "Quality", text + _table(head, lines)


def _spoofing(content: dict) -> tuple[str, str, str] | None:
    lines = []
    for name, own in content["summary"]["schemes"].items():
        spoof = own["spoof"]
        if not spoof:
            continue
        best = spoof["guesses"][0] if spoof["guesses"] else None
        guess = "-" if best is None else f"{escape(best['name'])}, corrected p = {best['corrected_p']:.2g}"
        accepted = spoof["forged"].get("accepted", {})
        lines.append(
            [escape(name), guess, str(spoof["forged"]["learnt_from_tokens"]), *(_rate(r) for r in accepted.values())]
        )
    if not lines:
        return None
    levels = [f"forgeries accepted at {float(level):.0e}" for level in content["settings"]["detect"]["fprs"]]
    text = (
        "<p>Guessing: common numbers, published defaults and weak passphrases as keys. Forging: n-grams of marked "
        "texts of one key, chained without a model; the owner's detector then judges them. What is accepted there was "
        "never made by the owner.</p>"
    )
    head = ("scheme", "best guessed key", "marked tokens seen", *levels)
    return "spoofing", "Guessed keys and forged text", text + _table(head, lines)


def _tokens(content: dict, shown: dict[str, list[dict]]) -> tuple[str, str, str] | None:
    parts = []
    for name, texts in shown.items():
        blocks = "".join(_one_text(text) for text in texts)
        if blocks:
            state = " open" if not parts else ""
            parts.append(f"<details{state}><summary>{escape(name)}</summary>{blocks}</details>")
    if not parts:
        return None
    key = (
        f'<p class="key">{_shaded("speaks for the mark", 1.0)} {_shaded("neutral", 0.5)} '
        f'{_shaded("speaks against it", 0.0)} <span class="soft">without colour: not scored (a repeated input, or no '
        "full context). Point at a token for its value.</span></p>"
    )
    return "tokens", "Token by token", key + "".join(parts)


def _one_text(text: dict) -> str:
    tokens = "".join(_shaded(token, shade) for token, shade in zip(text["tokens"], text["shades"]))
    p = f"p = {text['p_value']:.2g}, {text['num_scored']} tokens scored"
    return f'<div class="text"><b>{escape(text["kind"])} text {text["text"] + 1}: {p}</b>{tokens}</div>'


def _shaded(token: str, shade: float | None) -> str:
    if shade is None:
        return escape(token)
    hue, strength = (140, 2 * shade - 1) if shade >= 0.5 else (0, 1 - 2 * shade)
    style = f"background:hsla({hue},60%,45%,{0.45 * strength:.2f})"
    return f'<i style="{style}" title="{shade:.2f}">{escape(token)}</i>'


def _settings(content: dict) -> tuple[str, str, str]:
    facts = content["environment"]
    about = {
        "command": content["command"],
        "configuration": content["config_id"],
        "commit": facts.get("commit") or "-",
        "processor": f"{facts.get('cpu', '-')}, {facts.get('cores', '-')} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items()) or "-",
        "data": f"{content['data']['source']}, sha256 {content['data']['sha256']}",
        "models": ", ".join(f"{name}: sha256 {digest}" for name, digest in content["models"].items()),
    }
    lines = "".join(
        f'<tr><td>{escape(name)}</td><td class="left wrap">{escape(str(value))}</td></tr>'
        for name, value in about.items()
    )
    whole = escape(json.dumps(content["settings"], indent=1))
    return (
        "settings",
        "Settings and environment",
        f'<div class="wide"><table><tbody>{lines}</tbody></table></div>'
        f'<details><summary>The whole configuration</summary><div class="text">{whole}</div></details>',
    )


def _rate(rate: dict) -> str:
    if rate["value"] is None:
        return "-"
    return f"{_percent(rate['value'])}<small>{100 * rate['low']:.0f} to {100 * rate['high']:.0f}</small>"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _number(value: float | None, digits: int, missing: str = "-") -> str:
    return missing if value is None else f"{value:.{digits}f}"
