"""Whether arms generate the same: where outputs part, and when a difference is rounding."""

import numpy as np
import pytest

from jaxbench.bench import agreement
from jaxbench.measure.records import Record, Workload

DECODE = Workload(kind="decode", dtype="float32", batch=1)
TRAIN = Workload(kind="train", dtype="float32", batch=1)


def tokens(arm: str, workload: Workload = DECODE, **detail) -> Record:
    """Return an arm's record, which differs from the reference's where `first_difference` is given."""
    same = 0.0 if detail else 1.0
    return Record(metric="tokens", arm=arm, workload=workload, value=same, detail={"reference": "torch_eager"} | detail)


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], []),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], [[1, 1]]),
        ([[1, 2, 3]], [[1, 2]], [[0, 2]]),
        ([[1]], [[1], [2]], [[1, 0]]),
        ([[2.0]], [[float("nan")]], [[0, 0]]),
        ([[1, 2], [5], [3, 4]], [[1, 9], [5], [0, 0]], [[0, 1], [2, 0]]),
    ],
)
def test_the_first_difference_of_each_row_is_named_by_row_and_step(left, right, wanted):
    assert agreement.differences(left, right) == wanted


def test_a_near_tie_in_one_row_excuses_no_other_row():
    reference, other = [[1, 2], [1, 2], [1, 2]], [[1, 3], [0, 0], [3, 3]]
    tied, apart = [0.0, 1.0, 5.0, 5.0 - 1e-7], [0.0, 9.0, 1.0, 1.0]
    logits = {(0, 1): tied, (1, 0): apart, (2, 0): apart}
    asked = []

    def logits_at(row, step):
        asked.append((row, step))
        return logits[row, step], [each + 1e-6 for each in logits[row, step]]

    places = agreement.differences(reference, other)
    found = agreement.deciding_difference(reference, other, places, logits_at)
    assert (found["first_difference"], found["token"], found["reference_token"]) == ([1, 0], 0, 1)
    assert len(agreement.failures([tokens("flax", **found)])) == 1 and asked == [(0, 1), (1, 0)]
    found = agreement.deciding_difference(reference, other, places[:1], logits_at)
    assert found["first_difference"] == [0, 1] and agreement.failures([tokens("flax", **found)]) == []
    assert "near_tie" not in agreement.deciding_difference(reference, other, places, None)
    assert agreement.deciding_difference([[1]], [[1], [2]], [[1, 0]], logits_at) == {"first_difference": [1, 0]}


def test_a_token_far_from_the_best_is_not_excused_by_a_tie_of_two_others():
    reference = np.array([10.0, 10.0 - 1e-7, 0.0])
    found = {token: agreement.near_tie(reference, reference + 1e-6, tokens=(0, token)) for token in (1, 2, 9)}
    assert {token: each["near_tie"] for token, each in found.items()} == {1: True, 2: False, 9: False}
    [said] = agreement.failures([tokens("flax", first_difference=[0, 3], **found[2])])
    wanted = "top-two margin 1.0e-07, logits differ by 1.0e-06, the worse token is 1.0e+01 below the best"
    assert said.endswith(f"(no tie: {wanted})")


def test_margin_and_errors_are_those_of_the_definition():
    found = agreement.near_tie([3.0, 4.0, 0.0, 0.0], [3.0, 4.0, 0.0, 0.5], tokens=(1, 2))
    wanted = {"margin": 1.0, "token_margin": 4.0, "logit_error": 0.5, "logit_error_relative": 0.1, "near_tie": False}
    assert found == wanted


@pytest.mark.parametrize(("errors", "is_tie"), [(9, True), (11, False)])
def test_a_tie_has_a_margin_under_ten_errors(errors, is_tie):
    margin = 1e-4
    reference = np.array([100.0, 100.0 + margin])
    assert agreement.near_tie(reference, reference + [margin / errors, 0.0], tokens=(0, 1))["near_tie"] is is_tie


@pytest.mark.parametrize("nothing", [None, float("nan")], ids=["from the file", "in the run"])
def test_outputs_that_are_no_numbers_are_failures_in_words(nothing):
    train = tokens("flax", TRAIN, first_difference=[0, 0], loss=nothing, reference_loss=4.0)
    [said] = agreement.failures([train])
    assert said.endswith("on train float32 b1: first loss no number, torch_eager's 4")
    parted = {"token": 1, "reference_token": 2, "near_tie": False, "margin": nothing, "logit_error": nothing}
    [said] = agreement.failures([tokens("flax", first_difference=[0, 3], **parted)])
    assert said.endswith("(no tie: top-two margin no number, logits differ by no number)")


def test_a_wrong_program_does_not_excuse_itself_by_its_own_error():
    assert not agreement.near_tie([1.0, 1.001], [0.0, 5.0], tokens=(0, 1))["near_tie"]


def test_products_in_a_narrower_type_are_no_rounding_of_float32():
    tf32 = 1 + np.array([2.0**-11, -(2.0**-11)])  # what a GPU's default rounds float32 factors by, which no arm uses
    logits = np.array([10.0, 10.001])
    assert not agreement.near_tie(logits, logits * tf32, tokens=(0, 1))["near_tie"]
    assert agreement.near_tie(logits, logits + [1.2e-4, -1.2e-4], tokens=(0, 1))["near_tie"]


def test_notes_say_which_arms_agree_and_where_one_parts():
    assert agreement.notes([tokens("flax"), tokens("torch_eager")]) == [
        "decode float32 b1: equal on Flax NNX, PyTorch eager"
    ]
    assert agreement.notes([tokens("flax", first_difference=[0, 3]), tokens("torch_eager")]) == [
        "decode float32 b1: differs: flax from torch_eager on decode float32 b1 at prompt 0 step 3"
    ]
    assert agreement.notes([tokens("flax")]) == []


def test_differences_in_narrower_types_and_near_ties_are_no_failures():
    narrow = DECODE.model_copy(update={"dtype": "bfloat16"})
    parts = {"first_difference": [1, 2]}
    assert agreement.failures([tokens("flax", narrow, **parts), tokens("llama_cpp", **parts)]) == []
    tie = parts | {"margin": 1e-6, "logit_error": 1e-6, "near_tie": True}
    assert agreement.failures([tokens("flax", **tie)]) == []
    lost = {"first_difference": [0, 0], "loss": 2.0, "reference_loss": 2.5}
    assert agreement.failures([tokens("equinox", TRAIN, **lost)]) == [
        "tokens: equinox from torch_eager on train float32 b1: first loss 2, torch_eager's 2.5"
    ]
