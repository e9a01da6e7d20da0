"""Summarise the stages of an evaluation in figures: rates, areas, medians (S file)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxbench import outputs
from jaxbench.watermark.attack import attacks
from jaxbench.watermark.study import detectability, text_quality
from jaxbench.watermark.study.evaluate_config import CLEAN, UNMARKED, Evaluate

VARIETY = text_quality.Variety._fields
CSV_COLUMNS = ("scheme", "attack", "strength", "tokens", "metric", "fpr", "value", "low", "high", "count", "config_id")


def summarize(settings: Evaluate, results: dict[str, Any]) -> dict[str, Any]:
    """Compute every figure of the report as plain JSON (None for nan and infinity).

    Intervals over texts count different prompts where texts share some (detectability.py).
    """
    found = {
        "num_prompts": results["num_prompts"],
        "schemes": {name: _scheme(settings, name, results) for name in settings.schemes},
        "unmarked": {
            "quality": _quality(results["arms"][UNMARKED]["quality"][CLEAN]),
            "generation": _means(results["arms"][UNMARKED]["generation"]),
            "ending": results["arms"][UNMARKED]["ending"],
        },
        "human": {"quality": _quality(results["human"]["quality"][CLEAN])},
    }
    return outputs.finite(found)


def _scheme(settings: Evaluate, name: str, results: dict[str, Any]) -> dict[str, Any]:
    own = results["arms"][name]
    detect, fprs, distinct = own["detect"], settings.detect.fprs, results["num_prompts"]
    marked = array(detect["marked"]["p_values"])
    unmarked = array(detect[UNMARKED]["p_values"])
    human = np.stack([array(part["p_values"]) for part in detect["human"]])  # [keys, texts, lengths + 1]
    human_short = human[:, :, -1]
    clean = array(detect["attacks"][CLEAN]["p_values"])[:, -1]
    lengths = {}
    for i, length in enumerate(detect["lengths"]):
        p, null = present(marked[:, i]), present(human[:, :, i])
        lengths[str(length)] = {
            "tpr": detectability.rates(p, fprs, distinct=distinct),
            "human_fpr": {str(f): _spread(human[:, :, i], f) for f in fprs},
            "unmarked_fpr": detectability.rates(present(unmarked[:, i]), fprs, distinct=distinct),
            "auroc": detectability.auroc(p, null),
            "median_log10_p": _median(np.log10(p)),
            "texts": int(p.size),
        }
    return {
        "scheme": settings.schemes[name].model_dump(mode="json"),
        "lengths": lengths,
        "tokens_needed": {
            str(fpr): detectability.tokens_needed(detect["lengths"], marked[:, :-1], fpr) for fpr in fprs
        },
        "roc": detectability.roc(present(clean), present(human_short)),
        "human_tests": int(present(human_short).size),
        "attacks": {slug: _attack(settings, name, slug, results, human_short) for slug in detect["attacks"]},
        "quality": _quality(own["quality"][CLEAN]),
        "generation": _means(own["generation"]),
        "ending": own["ending"],
        "spoof": _spoof(own.get("spoof")),
    }  # fmt: skip


def _attack(settings: Evaluate, name: str, slug: str, results: dict[str, Any], human: np.ndarray) -> dict[str, Any]:
    own = results["arms"][name]
    part = own["detect"]["attacks"][slug]
    p = present(array(part["p_values"])[:, -1])
    attack = settings.named_attacks().get(slug)
    realised = results["realised"][name].get(slug, {})
    judged = own["quality"].get(slug)
    return {
        "label": "no attack" if attack is None else attacks.label(attack),
        "attack": None if attack is None else attack.attack,
        "strength": 0.0 if attack is None else attack.strength,
        "tpr": detectability.rates(p, settings.detect.fprs, distinct=results["num_prompts"]),
        "auroc": detectability.auroc(p, present(human)),
        "median_log10_p": _median(np.log10(p)),
        "word_edits": mean(realised.get("word_edits", [0.0])),
        "character_edits": mean(realised.get("character_edits", [0.0])),
        "scored_tokens": mean(array(part["num_scored"])[:, -1]),
        "quality": None if judged is None else _quality(judged),
    }


def _spoof(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the guessed keys and forged texts, with the median of the longest copied passages, in tokens."""
    return found and found | {"longest_copied": _median(found["forged"].get("longest_copied", []))}


def _spread(p_values: np.ndarray, fpr: float) -> dict[str, Any]:
    """Compute the realised rate over all keys and texts [K N], and the least and greatest rate over keys.

    The interval counts texts, not texts times keys: one text under several keys is not several independent draws.
    """
    by_key = [detectability.detected(present(row), fpr).value for row in p_values]
    pooled = detectability.detected(present(p_values), fpr)
    texts = int(np.isfinite(p_values).any(axis=0).sum())
    interval = detectability.rate(round(pooled.value * texts) if texts else 0, texts)
    return pooled._asdict() | {"low": interval.low, "high": interval.high, "texts": texts,
                               "keys": len(by_key), "least": min(by_key), "most": max(by_key)}  # fmt: skip


def _quality(part: dict[str, list]) -> dict[str, float]:
    nll = array(part["nll"])
    return {"perplexity": _median(np.exp(nll)), "nll": mean(nll), "entropy": mean(part["entropy"])} | {
        key: mean(part[key]) for key in VARIETY
    }


def _means(part: dict[str, list]) -> dict[str, float]:
    return {key: mean(values) for key, values in part.items()}


def array(values: Sequence) -> np.ndarray:
    """Convert numbers to float64; None becomes nan."""
    return np.array(values, np.float64)


def present(values: np.ndarray) -> np.ndarray:
    """Return the numbers of an array, flat, without nan."""
    values = np.asarray(values, np.float64).ravel()
    return values[~np.isnan(values)]


def mean(values: Sequence) -> float:
    """Return the mean of the values that are numbers; nan if there are none."""
    found = present(array(values))
    return float(found.mean()) if found.size else math.nan


def _median(values: np.ndarray) -> float:
    found = present(values)
    return float(np.median(found)) if found.size else math.nan


def rows(summary: dict[str, Any], config_id: str) -> list[dict[str, Any]]:
    """Return the figures as one long table with the columns CSV_COLUMNS."""
    found: list[dict[str, Any]] = []

    def add(scheme: str, metric: str, value: Any, **columns: Any) -> None:
        rate = value if isinstance(value, dict) else {"value": value}
        kept = {key: rate.get(key) for key in ("value", "low", "high", "count")}
        found.append({"scheme": scheme, "metric": metric, "config_id": config_id, **kept, **columns})

    for name, own in summary["schemes"].items():
        for length, part in own["lengths"].items():
            for metric in ("tpr", "human_fpr", "unmarked_fpr"):
                for fpr, rate in part[metric].items():
                    add(name, metric, rate, tokens=length, fpr=fpr)
            add(name, "auroc", part["auroc"], tokens=length)
            add(name, "median_log10_p", part["median_log10_p"], tokens=length)
        for fpr, tokens in own["tokens_needed"].items():
            add(name, "tokens_needed", tokens, fpr=fpr)
        for part in own["attacks"].values():
            place = {"attack": part["label"], "strength": part["strength"]}
            for fpr, rate in part["tpr"].items():
                add(name, "tpr", rate, fpr=fpr, **place)
            for metric in ("auroc", "median_log10_p", "word_edits", "character_edits"):
                add(name, metric, part[metric], **place)
            for metric, value in (part["quality"] or {}).items():
                add(name, metric, value, **place)
    for name in ("unmarked", "human"):
        for metric, value in summary[name]["quality"].items():
            add(name, metric, value)
    for name, own in [*summary["schemes"].items(), ("unmarked", summary["unmarked"])]:
        for metric, value in (own["generation"] | own["ending"]).items():
            add(name, f"generation_{metric}", value)
    return found
