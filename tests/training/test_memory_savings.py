"""Memory savings: which there are, what a row says, and one that does not fit."""

import weakref
from types import SimpleNamespace

import pytest

from jaxbench import config
from jaxbench.training import memory_savings, observe
from jaxbench.training.train_config import TrainConfig
from tests.structure import ROOT

SETTINGS = config.load(ROOT / "configs/lm/tiny.yaml", ["model.vocab_size=257", "step.accumulation=2"], TrainConfig)
MODEL = SETTINGS.model.resolved(257)


class Engine:
    """Stands for an engine: its step needs the bytes that the test says, and takes no time."""

    def __init__(self, needed):
        self.needed, self.taken = needed, []

    def memory(self):
        return {"live": 0, "step": self.needed}

    def product_type(self):
        return "float32"

    def step(self, batch, rate):
        self.taken.append(batch)
        return SimpleNamespace(loss=1.0)

    def fetch(self, metrics):
        return metrics


def measured(needed, batches=("warm", "one", "two")):
    made = []

    def make(settings):
        made.append((settings, Engine(needed[len(made)])))
        return made[-1][1]

    rows = memory_savings.measure(SETTINGS, MODEL, make, list(batches), kernel="blocked", limit_bytes=100)
    return list(rows), made


def test_each_way_saves_more_than_the_one_before_and_changes_nothing_else():
    _, made = measured([9, 8, 7, 6, 5])
    steps = [settings.step for settings, _ in made]
    assert [settings.implementation for settings, _ in made] == ["dense"] + ["blocked"] * 4
    assert [step.remat.policy for step in steps] == ["none", "none", "block", "block", "offload"]
    assert [step.offload.optimizer for step in steps] == [False, False, False, True, True]
    assert [step.offload.gradients for step in steps] == [False] * 4 + [True]
    plain = {"implementation": "dense", "step": SETTINGS.step}
    same = [settings.model_copy(update=plain) for settings, _ in made]
    assert same == [SETTINGS] * 5 and {step.accumulation for step in steps} == {2}


@pytest.mark.parametrize("needed", [101, 99], ids=["one that does not fit", "one that fits"])
def test_no_state_is_on_the_device_while_the_next_is_made(needed):
    made = []

    def make(settings):
        assert all(each() is None for each in made)
        engine = Engine(needed)
        made.append(weakref.ref(engine))
        return engine

    rows = memory_savings.measure(SETTINGS, MODEL, make, ["warm", "one"], kernel="blocked", limit_bytes=100)
    assert [row.fits for row in rows] == [needed <= 100] * len(memory_savings.SAVINGS)


def test_a_way_that_does_not_fit_is_a_row_without_a_rate_and_takes_no_step():
    rows, made = measured([101, 100, 7, 6, 5])
    assert not rows[0].fits and rows[0].tokens_per_s is None and made[0][1].taken == []
    assert made[1][1].taken == ["warm", "one", "two"] and rows[1].fits
    # The peak is the configuration's: 0.1 TFLOP/s.
    work = observe.flops_per_token(MODEL, 32, is_causal=True)
    assert rows[1].mfu_causal == pytest.approx(rows[1].tokens_per_s * work / 1e11) and rows[1].mfu > rows[1].mfu_causal
    text = memory_savings.table(rows, limit_bytes=100 * 2**20)
    assert len(text.splitlines()) == 6 and "does not fit in 100.0 MiB" in text.splitlines()[1]


def test_one_batch_is_too_few():
    with pytest.raises(ValueError, match="memory ladder: 1 batches"):
        measured([1], batches=("warm",))
