"""Outputs of a launch's arms: every sample's tokens and the losses of two steps are compared, near ties are excused."""

import types

import pytest

from jaxbench.bench import agreement, arm_outputs
from jaxbench.bench.suite import Suite
from jaxbench.measure.records import Record, Workload

DECODE = Workload(kind="decode", dtype="float32", batch=1, prompt_tokens=2, new_tokens=3)
TRAIN = Workload(kind="train", dtype="float32", batch=1, prompt_tokens=4)
PLAN = types.SimpleNamespace(
    suite=Suite(arms=("flax", "torch_eager")), device="cpu", inputs={DECODE: [[5, 6]], TRAIN: [[1, 2, 3, 4, 5]]}
)
LOGITS = [0.0, 1.0, 1.0 + 1e-6, 0.0]  # tokens 1 and 2 tie


def compared(workload, *answers, logits=None):
    """Return each arm's record of its output after these (arm, answer) in order."""
    outputs = arm_outputs.ArmOutputs(PLAN, logits or (lambda arm, tokens: None))
    for arm, answer in answers:
        outputs.note(arm, workload, answer)
    return {
        arm: Record(metric="tokens", value=float(is_same), arm=arm, workload=workload, detail=detail)
        for arm, is_same, detail in outputs.compared(workload)
    }


def tokens(*ids):
    return {"tokens": [list(ids)]}


def test_a_later_sample_that_differs_is_a_difference_of_its_arm():
    found = compared(
        DECODE, ("torch_eager", tokens(1, 1, 1)), ("flax", tokens(1, 1, 1)), ("flax", tokens(1, 3, 1)),
        ("torch_eager", tokens(1, 1, 1)), ("flax", tokens(1, 1, 1)),
    )  # fmt: skip
    assert (found["flax"].value, found["torch_eager"].value) == (0.0, 1.0)
    assert agreement.failures(list(found.values())) == [
        "tokens: flax from torch_eager on decode float32 b1 p2 n3 at prompt 0 step 1: token 3, torch_eager's 1"
    ]


def test_a_near_tie_of_one_sample_excuses_no_other_sample():
    def logits(arm, context):
        assert context[:2] == [5, 6]
        return [value + 1e-6 * (arm == "flax") for value in LOGITS]

    base, tie, wrong = tokens(1, 1, 1), tokens(1, 2, 1), tokens(1, 3, 1)
    excused = compared(DECODE, ("torch_eager", base), ("flax", tie), logits=logits)
    assert excused["flax"].detail["near_tie"] and agreement.failures(list(excused.values())) == []
    for first, second in ((tie, wrong), (wrong, tie)):
        found = compared(DECODE, ("torch_eager", base), ("flax", first), ("flax", second), logits=logits)
        assert found["flax"].detail["token"] == 3 and len(agreement.failures(list(found.values()))) == 1


def test_a_baseline_that_differs_from_itself_is_measured_by_what_two_arms_differ_by():
    logits = lambda arm, context: [value + 1e-6 * (arm == "flax") for value in LOGITS]
    found = compared(
        DECODE, ("torch_eager", tokens(1, 1, 1)), ("flax", tokens(1, 1, 1)), ("torch_eager", tokens(1, 2, 1)),
        logits=logits,
    )  # fmt: skip
    assert found["torch_eager"].value == 0.0 and found["torch_eager"].detail["near_tie"]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0, 3.5, 3.2], None),
        ([4.0, 4.0, 4.0], "loss after 1 update 4, torch_eager's 3.5"),  # forward alone is right, nothing is updated
        ([4.1, 3.5], "first loss 4.1, torch_eager's 4"),
        ([4.0], None),  # it failed after one step, which is a record of its own
    ],
)
def test_losses_of_two_steps_are_compared_so_that_an_arm_without_its_update_is_found(losses, said):
    answers = [("torch_eager", {"loss": loss}) for loss in (4.0, 3.5, 3.1)]
    found = compared(TRAIN, *answers, *(("flax", {"loss": loss}) for loss in losses))
    failures = agreement.failures(list(found.values()))
    assert failures == ([] if said is None else [f"tokens: flax from torch_eager on train float32 b1 p4: {said}"])
