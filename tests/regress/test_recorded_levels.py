"""Could times be judged against stored runs? Records of one machine say what such verdicts would have been worth."""

import json
import math
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from jaxbench.measure.environment import ROOT

HOST = "a587c2f9d59c"  # the machine that most committed comparisons were run on
OTHER = ("2026-11-29-no-avx512", "2026-11-22-aa")  # run with fewer instructions, or with every arm twice, on purpose
CONTROL = ("gemm_flops_per_s", None, '{"dtype": "float32", "kind": "gemm"}')  # a bare product: no code of ours
UNTIL = "2026-11-29"  # so that later records do not change what is counted here
LEAST = 3  # runs before the one that is judged


@pytest.fixture(scope="module")
def recorded():
    """Medians by series and run, runs in order of time: rates of PyTorch's eager model, and the control's."""
    found, times = defaultdict(lambda: defaultdict(list)), {}
    for path in (ROOT / "experiments/results").glob("*/results.jsonl"):
        about = path.with_name("environment.json")
        if path.parent.name in OTHER or not about.is_file() or json.loads(about.read_text())["host"] != HOST:
            continue
        for row in map(json.loads, path.read_text().splitlines()):
            name = (row["metric"], row.get("arm"), json.dumps(row.get("workload"), sort_keys=True))
            is_rate = row.get("arm") == "torch_eager" and row["metric"].endswith("tokens_per_s")
            if row["metric"] == "run":
                times[path.parent.name] = row["time_utc"]
            elif row.get("launch") is not None and (is_rate or name == CONTROL):
                found[name][path.parent.name].append(row["value"])
    order = sorted((run for run, time in times.items() if time < UNTIL), key=times.get)
    return {name: {run: float(np.median(runs[run])) for run in order if run in runs} for name, runs in found.items()}


def verdicts(levels):
    """Whether each run is called worse or better by the prediction interval of the runs before it."""
    x, said = np.log(levels), []
    for i in range(LEAST, len(x)):
        spread = np.std(x[:i], ddof=1) * math.sqrt(1 + 1 / i)
        gap = abs(x[i] - np.mean(x[:i]))
        said.append(2 * stats.t.sf(gap / spread, i - 1) < 0.05 and gap > math.log(1.15))
    return said


def test_such_verdicts_keep_their_level_where_runs_have_one_level():
    """The control of the test below: the rule is right, the records are not of one level."""
    random = np.random.default_rng(0)
    said = [verdicts(np.exp(0.1 * random.standard_normal(5))) for _ in range(2000)]
    assert 0.01 < np.mean(said) < 0.055


@pytest.mark.parametrize("is_divided, false", [(False, 8), (True, 4)])
def test_on_records_of_one_machine_far_more_than_five_percent_are_false_with_a_control_too(recorded, is_divided, false):
    control = recorded[CONTROL]
    said = []
    for name, runs in recorded.items():
        if name != CONTROL:
            kept = [run for run in runs if not is_divided or run in control]
            said += verdicts([runs[run] / (control[run] if is_divided else 1) for run in kept])
    assert (sum(said), len(said)) == (false, 18)
