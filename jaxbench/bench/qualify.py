"""Measure how reliable the verdicts are on this machine: false alarms and power, from arms that ran twice (S file).

    python experiments/compare.py --config=configs/suites/aa.yaml
    python -m jaxbench.bench.qualify --workdir=out/aa

An arm and the same arm again differ by chance alone, so every verdict between them is a false alarm. Consecutive
launches form real tables, one per arm. Further tables, of all rows, are resampled from all launches, with the two names
swapped at random in each launch. Power is the share of rows decided correctly after the second arm's rates are
multiplied by a known ratio, as a constant slow-down would do to every sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags
from jaxtyping import Float
from scipy import stats

from jaxbench import cli, outputs, terminal
from jaxbench.bench import summary
from jaxbench.bench.arms.arm_table import AGAIN
from jaxbench.bench.report import report
from jaxbench.bench.suite import Verdicts
from jaxbench.measure import moderation, verdicts
from jaxbench.measure.records import Record

RATIOS = (1.05, 1.1, 1.25, 1.5, 2.0)  # injected
MOST_SD = 0.08  # largest standard deviation of a launch's log ratio for which power is claimed


class Share(NamedTuple):
    """A share with its 95 % Clopper-Pearson interval."""

    count: int
    total: int

    def interval(self) -> tuple[float, float]:
        """Return (low, high); tables resampled from the same launches are not independent, so theirs is too narrow."""
        if not self.total:
            return 0.0, 1.0
        low, high = stats.binomtest(self.count, self.total).proportion_ci(0.95, method="exact")
        return float(low), float(high)

    def __str__(self) -> str:
        low, high = self.interval()
        share = self.count / self.total if self.total else math.nan
        return f"{100 * share:.1f} % ({self.count} of {self.total}; 95 %: {100 * low:.1f} to {100 * high:.1f})"


class Qualification(NamedTuple):
    """Outcome of `qualify`."""

    num_launches: int  # per table
    rows: dict[str, float]  # of a table: name -> standard deviation of a launch's log ratio
    real: Share  # tables of one arm's rows over consecutive launches that hold any verdict
    drawn: Share  # resampled tables that hold any verdict
    power: dict[float, Share]  # injected ratio -> correctly decided rows, of those with a deviation up to MOST_SD
    decidable: dict[str, float]  # row -> smallest ratio decided in nine of ten cases, median of real tables


def qualify(
    records: Sequence[Record], rules: Verdicts, *, num_launches: int = 5, num_drawn: int = 1000
) -> Qualification:
    """Estimate false alarms and power of tables of `num_launches` launches.

    Raises:
      ValueError: no arm ran twice, or there are fewer launches than two tables need.
    """
    names, logs = log_ratios(records)
    if not names:
        arms = sorted({record.arm for record in records})
        raise ValueError(f"qualify: no arm ran twice among {arms}; wanted some NAME and NAME{AGAIN}")
    if logs.shape[1] < 2 * num_launches:
        raise ValueError(f"qualify: {logs.shape[1]} launches, wanted at least {2 * num_launches}")
    starts = range(0, logs.shape[1] - num_launches + 1, num_launches)
    pairs = [[i for i, name in enumerate(names) if name.endswith(f" {arm}")] for arm in _arms(names)]
    tables = [logs[pair, start : start + num_launches] for start in starts for pair in pairs]
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(num_drawn):
        columns = generator.choice(logs.shape[1], num_launches, replace=False)
        drawn.append(logs[:, columns] * generator.choice([-1.0, 1.0], num_launches))
    deviations = logs.std(axis=1, ddof=1)
    is_quiet = deviations <= MOST_SD
    power = {}
    for ratio in RATIOS:
        signs = [generator.choice([-1.0, 1.0], len(names)) for _ in drawn]
        words = [
            [row.verdict for row in judge(table + sign[:, None] * math.log(ratio), rules)]
            for table, sign in zip(drawn, signs, strict=True)
        ]
        hits = (np.array(words) == np.where(np.array(signs) > 0, "faster", "slower"))[:, is_quiet]
        power[ratio] = Share(int(hits.sum()), hits.size)
    whole = [logs[:, start : start + num_launches] for start in starts]
    least = np.median([[row.decidable for row in judge(table, rules)] for table in whole], axis=0)
    return Qualification(
        num_launches=num_launches,
        rows=dict(zip(names, map(float, deviations), strict=True)),
        real=Share(sum(has_verdict(table, rules) for table in tables), len(tables)),
        drawn=Share(sum(has_verdict(table, rules) for table in drawn), len(drawn)),
        power=power,
        decidable=dict(zip(names, map(float, least), strict=True)),
    )


def log_ratios(records: Sequence[Record]) -> tuple[list[str], Float[np.ndarray, "R L"]]:
    """Return the rows that compare an arm with itself, and their log ratios in the launches that have all rows."""
    samples = {(r.metric, r.workload, r.arm, r.launch): r.samples for r in records if r.metric in summary.SPEED}
    found: dict[str, dict[int, float]] = {}
    for (metric, workload, arm, launch), again in samples.items():
        first = samples.get((metric, workload, arm.removesuffix(AGAIN), launch))
        if arm.endswith(AGAIN) and first and again:
            better = summary.COMPARED[metric]
            name = f"{metric} {workload.label()} {arm.removesuffix(AGAIN)}"
            found.setdefault(name, {})[launch] = verdicts.log_ratio(again, first, higher_is_better=better)
    whole = sorted(set.intersection(*(set(row) for row in found.values()))) if found else []
    return list(found), np.array([[row[launch] for launch in whole] for row in found.values()])


def _arms(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(" ")[2] for name in names))


def judge(table: Float[np.ndarray, "R L"], rules: Verdicts) -> list[verdicts.Judgement]:
    """Return the verdicts of a table's rows, computed as in the report."""
    options = {"confidence": rules.confidence, "margin": rules.margin}
    return verdicts.judge(moderation.intervals(list(table), **options), **options)


def has_verdict(table: Float[np.ndarray, "R L"], rules: Verdicts) -> bool:
    """Return True if any row of a table is decided."""
    return any(row.verdict != "undecided" for row in judge(table, rules))


def main() -> int:
    """Print and write the qualification of the run in --workdir."""
    from rich.table import Table

    records, suite = report.read_run(Path(flags.FLAGS.workdir))
    found = qualify(records, suite.verdicts)
    table = Table(title=f"The same arm twice, tables of {found.num_launches} launches and {len(found.rows)} rows")
    for column in ("row", "sd of a launch", "smallest ratio decided"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for name, deviation in found.rows.items():
        table.add_row(name, f"{100 * deviation:.1f} %", f"{found.decidable[name]:.2f}")
    console = terminal.console()
    console.print(table)
    lines = {"tables with a false verdict": found.real, "of tables drawn from all launches": found.drawn}
    for ratio, share in found.power.items():
        lines[f"rows of a launch's sd up to {100 * MOST_SD:.0f} % decided at a true ratio of {ratio}"] = share
    for what, share in lines.items():
        console.print(f"{what}: {share}", highlight=False, soft_wrap=True)
    content = found._asdict() | {"real": found.real._asdict(), "drawn": found.drawn._asdict()}
    content["power"] = {str(ratio): share._asdict() for ratio, share in found.power.items()}
    outputs.write_json(Path(flags.FLAGS.workdir) / "qualify.json", content)
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_workdir()
    cli.run(main, about=__doc__)
