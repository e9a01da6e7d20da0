"""Suites: what cannot work as it is written is refused before anything runs."""

import pydantic
import pytest

from jaxbench.regress.suite import Suite

CASES = [{"name": "decode", "workload": "generation"}, {"name": "bits", "workload": "quality"}]
EVERY = [
    *CASES, {"name": "train", "workload": "training"}, {"name": "words", "workload": "tokenizing"},
    {"name": "found", "workload": "detection"}, {"name": "marked", "workload": "detection", "marked": 8},
    {"name": "short", "workload": "compression"}, {"name": "read", "workload": "compression", "read": 1},
]  # fmt: skip


def test_one_launch_confirms_nothing_and_is_refused():
    with pytest.raises(pydantic.ValidationError, match="confirm=1 launch confirms nothing; wanted 2 at least, or 0"):
        Suite(cases=CASES, confirm=1)
    assert [Suite(cases=CASES, confirm=count).confirm for count in (0, 2)] == [0, 2]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"margins": {"decode.tokens_per_sec": {"warning": 0.1, "critical": 0.2}}}, "decode.METRIC, metrics tokens"),
        ({"margins": {"decode": {"warning": 0.1, "critical": 0.2}}}, "margins.decode; wanted CASE.METRIC"),
        ({"margins": {"decode.prefil.flops": {"warning": 0.1, "critical": 0.2}}}, "no program prefil; wanted one of p"),
        ({"margins": {"bits.token_p50_s": {"warning": 0.1, "critical": 0.2}}}, "workload quality has no token_p50_s"),
        ({"limits": {"decode.bits_per_byte": {"most": 1}}}, "workload generation has no bits_per_byte"),
        ({"limits": {"train.first_token_s": {"most": 1}}}, "workload training has no first_token_s"),
        ({"limits": {"words.no.flops": {"most": 1}}}, "tokenizing has no program no; it compiles none that is counted"),
        ({"limits": {"found.detection_rate": {"least": 1}}}, "workload detection has no detection_rate"),
        ({"limits": {"short.retention": {"least": 1}}}, "workload compression has no retention"),
        ({"margins": {"noted": {"warning": 0.1, "critical": 0.2}}}, "margins.noted is shown and not judged"),
        ({"primary": ["decode.utilisation"]}, "primary=decode.utilisation is shown and not judged"),
        ({"primary": ["bits.tokens_per_s"]}, "primary=bits.tokens_per_s: workload quality has no tokens/s"),
        ({"primary": ["decode.bits_per_byte"]}, "primary=decode.bits_per_byte: workload generation has no bits"),
    ],
)
def test_a_series_that_no_case_can_have_is_refused_wherever_a_suite_names_it(settings, words):
    with pytest.raises(pydantic.ValidationError, match=words):
        Suite(cases=EVERY, **settings)


def test_series_that_cases_have_are_taken():
    margin, bound = {"warning": 0.1, "critical": 0.2}, {"most": 1}
    names = (
        "start.import_s",
        "decode.prefill.flops",
        "train.step.hlo_ops",
        "found.tokens_per_s",
        "marked.detection_rate",
        "short.tokens_per_vector",
        "read.retention",
        "read.answer_nll",
    )
    suite = Suite(
        cases=EVERY, margins=dict.fromkeys((*names, "load_s", "timed"), margin), limits=dict.fromkeys(names, bound),
        primary=["bits.bits_per_byte", "decode.token_p50_s"],
    )  # fmt: skip
    assert [suite.margin(name).warning for name in names] == [0.1] * 8
