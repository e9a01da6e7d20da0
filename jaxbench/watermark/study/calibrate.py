"""Check the p-values: realised false-positive rates on human text, by scheme and context rule (S file).

A test is exact if, for any fixed text, a random key gives p <= alpha with probability at most alpha. So keys are random
and texts are fixed; but under one key, two texts share pseudo-random values wherever they share n-grams, so the N x K
verdicts are not independent draws.

**What is averaged.** phi[i, k] is the probability that the randomised test rejects text i under key k at level alpha:
1 if p <= alpha, 0 if P(T > t) > alpha, and (alpha - P(T > t)) / P(T = t) otherwise. Its mean over keys is exactly alpha
for every text if the test is exact. It needs no random numbers: it is the randomised test's verdict averaged over its
random number. The exact p-value rejects if p <= alpha, where phi = 1, so its rate is never above phi's.

**The band** at confidence c around nominal alpha is

    alpha +- t(K - 1; c) * sqrt(deff * alpha * (1 - alpha) / (N * K)),
    deff = max(1, (V_texts + V_keys - V_cells) / V_cells),

where V_texts = var_i(mean_k phi) / N is the variance of the mean if texts are resampled, V_keys = var_k(mean_i phi)
/ K if keys are, and V_cells = var(phi) / (N * K) if verdicts are: the two-way clustered variance (Cameron, Gelbach
and Miller 2011, J. Bus. Econ. Stat. 29(2), section 2.3). It enters as a factor on the binomial variance, so that the
band's width is that of the nominal rate, not of the realised one. t is Student's quantile: K keys give K - 1 degrees of
freedom. The pigeonhole bootstrap, which resamples texts and keys simultaneously, counts the cells' variance three times
(Owen 2007, Ann. Appl. Stat. 1(2)), so its band is too wide by a factor of up to 1.7, and at rare levels it has no upper
tail if nothing was rejected; test_calibrate.py simulates the coverage of the band used here.

**The gate** of a row: the exact test's rate is not above the band's upper end, and the randomised test's rate lies in
the band. Of R rows, R * (1 - c) fail by chance if every test is exact; the report gives that number and the number of
rows outside.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field
from scipy import stats

from jaxbench import outputs, store
from jaxbench.config import Base, config_id
from jaxbench.measure import page
from jaxbench.measure.page import Section
from jaxbench.text import packing, passages
from jaxbench.watermark import config, green_lists, reference, significance
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme

LARGEST_HASH_KEY = 2**31 - 1


class Calibration(Base):
    """What a calibration run measures: configs/watermark/calibrate.yaml."""

    schemes: dict[str, config.Scheme] = Field(min_length=1)  # name of a row -> scheme
    num_texts: int = Field(default=1000, ge=2)  # passages of human text
    num_tokens: int = Field(default=200, ge=1)  # tokens of each
    per_text: int | None = Field(default=None, ge=1)  # maximum passages per document; unset = all
    num_keys: int = Field(default=100, ge=2)
    num_list_keys: int = Field(default=20, ge=2)  # for kgw_markllm, kgw_transformers: lists take seconds per key
    levels: tuple[config.Level, ...] = Field(default=(1e-2, 1e-3), min_length=1)  # nominal false-positive rates
    confidence: float = Field(default=0.99, gt=0, lt=1)  # of the band
    passphrase: str = Field(default="calibration", min_length=1)  # the keys are derived from it


class Band(NamedTuple):
    """The band in which the rate of an exact test lies."""

    low: float
    high: float
    design_effect: float  # variance of the mean over that of independent verdicts, >= 1


class Row(NamedTuple):
    """One scheme at one nominal level."""

    name: str
    level: float
    rate: float  # of the exact test
    randomized_rate: float
    band: Band
    key_rates: tuple[float, float, float]  # the exact test's, over keys: least, median, greatest
    num_texts: int
    num_keys: int
    seconds: float  # of the scheme, for all levels

    @property
    def passed(self) -> bool:
        """True if the exact rate is not above the band and the randomised rate lies inside."""
        return bool(self.rate <= self.band.high and self.band.low <= self.randomized_rate <= self.band.high)


def rejection(p_value: np.ndarray, mid_p: np.ndarray, level: float) -> np.ndarray:
    """Return the probability that the randomised test rejects at a level, from exact and mid p-values of any shape."""
    tie = 2.0 * (p_value - mid_p)  # P(T = t)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(tie > 0, (level - (p_value - tie)) / tie, 0.0)
    return np.where(p_value <= level, 1.0, np.clip(share, 0.0, 1.0))


def band(phi: np.ndarray, level: float, *, confidence: float = 0.99) -> Band:
    """Compute the band around a nominal level from the rejections phi [N K], as the module docstring defines it.

    Raises:
      ValueError: fewer than two texts or keys.
    """
    num_texts, num_keys = phi.shape
    if min(phi.shape) < 2:
        raise ValueError(f"band: {num_texts} texts x {num_keys} keys, wanted at least 2 of each")
    texts = phi.mean(axis=1).var(ddof=1) / num_texts
    keys = phi.mean(axis=0).var(ddof=1) / num_keys
    cells = phi.var() / phi.size
    effect = max(1.0, (texts + keys - cells) / cells) if cells > 0 else 1.0
    quantile = stats.t.ppf(0.5 + confidence / 2, num_keys - 1)
    half = quantile * np.sqrt(effect * level * (1.0 - level) / phi.size)
    return Band(max(0.0, float(level - half)), float(level + half), float(effect))


def p_values(scheme: Scheme, tokens: np.ndarray, keys: list[Key], *, vocab_size: int, **how: Any) -> np.ndarray:
    """Return exact and mid p-values [2 N K] of passages [N T] under every key; `how` goes to reference.evidence."""
    values = []
    for key in keys:
        keyed = under(scheme, key)
        lists = green_lists.lists_of(keyed, vocab_size=vocab_size)
        evidence = reference.evidence(keyed, key, tokens, vocab_size=vocab_size, green_lists=lists, **how)
        scored = significance.score(keyed, evidence, vocab_size=vocab_size)
        values.append((scored.p_value, scored.mid_p))
    return np.moveaxis(np.array(values, np.float64), 0, -1)


def under(scheme: Scheme, key: Key) -> Any:
    """Return the scheme with its key field, if it has one, set from a key."""
    if scheme.key_field is None:
        return scheme
    return scheme.model_copy(update={scheme.key_field: 1 + key.halves[0] % LARGEST_HASH_KEY})


def judge(name: str, values: np.ndarray, *, level: float, confidence: float) -> Row:
    """Compute the row of one scheme at one level from its p-values [2 N K]."""
    phi = rejection(*values, level)
    exact = values[0] <= level
    by_key = exact.mean(axis=0)
    spread = (float(by_key.min()), float(np.median(by_key)), float(by_key.max()))
    limits = band(phi, level, confidence=confidence)
    return Row(name, level, float(exact.mean()), float(phi.mean()), limits, spread, *phi.shape, 0.0)


def rows(
    settings: Calibration, tokens: np.ndarray, *, vocab_size: int, folder: Path, **how: Any
) -> Iterator[tuple[Row, bool]]:
    """Yield the rows of every scheme and level for passages, and whether each was measured before.

    Finished schemes are files in `folder` and are not measured again; `how` goes to reference.evidence.
    """
    root = Key.from_passphrase(settings.passphrase)

    def measured(name: str, scheme: Scheme) -> list[dict[str, Any]]:
        start = time.monotonic()
        count = settings.num_keys if scheme.key_field is None else settings.num_list_keys
        keys = [root.derive(f"key {k}") for k in range(count)]
        values = p_values(scheme, tokens, keys, vocab_size=vocab_size, **how)
        judged = [judge(name, values, level=level, confidence=settings.confidence) for level in settings.levels]
        return [_to_json(row._replace(seconds=time.monotonic() - start)) for row in judged]

    for name, scheme in settings.schemes.items():
        values, is_kept = store.kept(folder / f"{config_id(scheme)}.json", functools.partial(measured, name, scheme))
        yield from ((_from_json(name, value), is_kept) for value in values)


def _to_json(row: Row) -> dict[str, Any]:
    return row._asdict() | {"band": row.band._asdict(), "passed": row.passed}


def _from_json(name: str, value: dict[str, Any]) -> Row:
    fields = {key: value[key] for key in Row._fields}
    return Row(**fields | {"name": name, "band": Band(**value["band"]), "key_rates": tuple(value["key_rates"])})


def run(
    settings: Calibration,
    tokenizer: Any,
    *,
    path: str | Path | None = None,
    workdir: str | Path,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure every row, write calibration.json and calibration.html into workdir, and return what the JSON holds.

    Args:
      path: human texts (passages.read_texts); None = the packaged default text.
      workdir: finished schemes are files in its folder `rows` and are not measured again.

    Raises:
      ValueError: there is too little text, or workdir holds the rows of another configuration.
    """
    workdir = Path(workdir)
    human = passages.cut(
        tokenizer,
        passages.read_texts(path),
        num_tokens=settings.num_tokens,
        max_passages=settings.num_texts,
        per_text=settings.per_text,
    )
    sha256 = packing.text_sha256(path)
    shared = {"text_sha256": sha256, "vocab_size": tokenizer.vocab_size}
    store.claim(workdir / "rows", config_id(settings, exclude=("schemes",), extra=shared))
    measured = []
    for row, is_kept in rows(settings, human.tokens, vocab_size=tokenizer.vocab_size, folder=workdir / "rows"):
        measured.append(row)
        say(line(row) + "  (kept)" * is_kept)
    outside = [row for row in measured if not row.passed]
    result = {
        "passed": not outside,
        "num_outside": len(outside),
        "expected_outside": round(len(measured) * (1.0 - settings.confidence), 2),
        "num_texts": len(human.tokens),
        "num_documents": len(set(human.documents.tolist())),
        "text_sha256": sha256,
        "config_id": config_id(settings, extra={"text_sha256": sha256}),
        "config": settings.model_dump(mode="json"),
        "rows": [_to_json(row) for row in measured],
    }
    outputs.write_json(workdir / "calibration.json", result)
    outputs.write_text(workdir / "calibration.html", charts(measured, result))
    return result


# Text and charts


def line(row: Row) -> str:
    """Format one row as text."""
    least, median, most = row.key_rates
    limits = f"{row.band.low:.2e} .. {row.band.high:.2e}"
    return (
        f"{row.name:<28} {row.level:<6g} exact {row.rate:.2e}  randomised {row.randomized_rate:.2e}  band {limits}  "
        f"by key {least:.1e} / {median:.1e} / {most:.1e}  {'pass' if row.passed else 'FAIL'}"
    )


def charts(measured: list[Row], result: dict[str, Any]) -> str:
    """Render the page: for each level, the band, the spread over keys and both rates of every scheme."""
    levels = sorted({row.level for row in measured}, reverse=True)
    sections = [Section(f"level-{i}", f"Nominal {level:g}") for i, level in enumerate(levels)]
    figures = {
        f"chart-{part.name}": figure([row for row in measured if row.level == level])
        for part, level in zip(sections, levels)
    }
    lead = (
        f"{result['num_outside']} of {len(measured)} rows outside their band, {result['expected_outside']} expected by "
        f"chance; {result['num_texts']} passages of {result['config']['num_tokens']} tokens of human text."
    )
    return page.render("Realised false-positive rates", sections, figures, name="Calibration", lead=lead)


def figure(measured: list[Row]) -> page.Figure:
    """Build the plotly figure of one level's rows; the line marks the level."""
    names, spread = [row.name for row in measured], [row.key_rates for row in measured]

    def bars(low: list[float], high: list[float], label: str, width: float, colour: str) -> page.Figure:
        spans = [b - a for a, b in zip(low, high)]
        own = {"type": "bar", "orientation": "h", "y": names, "x": spans, "base": low, "width": width, "name": label}
        return own | {"marker": {"color": colour}, "hoverinfo": "skip"}

    def dots(values: list[float], label: str, symbol: str, colour: str) -> page.Figure:
        marker = {"symbol": symbol, "color": colour, "size": 9}
        return {"type": "scatter", "mode": "markers", "y": names, "x": values, "name": label, "marker": marker}

    data = [
        bars([s[0] for s in spread], [s[2] for s in spread], "single keys, least to greatest", 0.2, "#c9ced6"),
        bars([r.band.low for r in measured], [r.band.high for r in measured], "band", 0.6, "rgba(13,159,140,.35)"),
        dots([r.rate for r in measured], "exact test", "circle", "#3b82f6"),
        dots([r.randomized_rate for r in measured], "randomised test", "line-ns-open", "#c93a3a"),
    ]
    layout = {
        "barmode": "overlay", "height": 160 + 24 * len(names), "margin": {"l": 220, "t": 30},
        "yaxis": {"autorange": "reversed"}, "xaxis": {"title": {"text": "realised false-positive rate"}},
    }  # fmt: skip
    return {"data": data, "layout": layout, "line": measured[0].level}
