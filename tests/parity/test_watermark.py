"""The watermarks' parity cases: equal bits, p-values and tokens on every backend, and gates that can fail."""

import functools

import numpy as np
import pytest

import torch_ref.watermark.detect
import torch_ref.watermark.logits_processor
from jaxbench.parity import cases, report, run, watermark
from jaxbench.watermark import config, significance

EXACT = [case.id for case in cases.CASES if case.exact == "watermark"]


@functools.cache
def result(case_id):
    return run.run(cases.find(case_id))


def failures(found):
    return [gate["what"] for gate in found["gates"] if not gate["passed"]]


@pytest.mark.parametrize("case_id", EXACT)
def test_numpy_jax_and_torch_agree(case_id):
    found = result(case_id)
    assert failures(found) == [] and found["passed"]
    whats = {gate["what"] for gate in found["gates"]}
    assert {"flax: words of scored tokens", "torch: scored positions", "torch: p_value"} <= whats
    is_detection_only = cases.find(case_id).config.is_detection_only
    assert ("generated tokens, float32" in whats) == (not is_detection_only)


def test_every_scheme_and_context_rule_has_a_case():
    schemes = [cases.find(case_id).config for case_id in EXACT]
    assert {s.scheme for s in schemes} == set(config.SCHEMES)
    assert {s.context.kind for s in schemes if hasattr(s, "context")} == {"left", "min", "skip", "self"}


def test_one_wrong_bit_is_found_and_shown(monkeypatch):
    original = torch_ref.watermark.detect.Detector.evidence

    def broken(self, tokens, lengths, key, **how):
        found = original(self, tokens, lengths, key, **how)
        words = np.array(found.words)
        row, place = np.argwhere(found.scored)[7]
        words[row, place] ^= np.uint32(1)
        return found._replace(words=words)

    monkeypatch.setattr(torch_ref.watermark.detect.Detector, "evidence", broken)
    found = watermark.gates_of_evidence(cases.find("watermark/gumbel").config, vocab_size=64, seed=0)
    failed = [gate for gate in found if not gate.passed]
    assert failed[0].what == "torch: words of scored tokens" and failed[0].error == 1 and failed[0].where


def test_a_p_value_that_is_off_in_the_eleventh_digit_is_found(monkeypatch):
    calls, original = [], significance.score

    def broken(*arguments, **how):
        found = original(*arguments, **how)
        calls.append(1)
        return found._replace(p_value=found.p_value * (1 + 1e-11)) if len(calls) == 3 else found

    monkeypatch.setattr(significance, "score", broken)
    found = watermark.gates_of_evidence(cases.find("watermark/kgw").config, vocab_size=64, seed=0)
    assert [gate.what for gate in found if not gate.passed] == ["torch: p_value"]


def test_a_generator_with_another_key_draws_other_tokens(monkeypatch):
    original = torch_ref.watermark.logits_processor.Watermark.state

    def broken(self, keys, **how):
        return original(self, [None if key is None else key.derive("other") for key in keys], **how)

    monkeypatch.setattr(torch_ref.watermark.logits_processor.Watermark, "state", broken)
    found = watermark.gates_of_generation(cases.find("watermark/gumbel").config, seed=0)
    assert not found[0].passed and found[0].where.startswith("row 0")


def test_a_case_without_layers_is_reported_like_the_others(tmp_path):
    found = result(EXACT[0])
    assert "equal" in report.summary(found) and found["layers"] == []
    report.write_page(tmp_path / "parity.html", [found])
    assert "bit for bit" in (tmp_path / "parity.html").read_text()
    with pytest.raises(ValueError, match="--backend=equinox has no twin of watermark/kgw"):
        run.run(cases.find("watermark/kgw"), backend="equinox")
