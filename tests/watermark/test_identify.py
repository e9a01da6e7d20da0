"""Identification holds its family-wise rate, names the right candidate, and decodes payloads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

import jaxbench.watermark.detect
import torch_ref.watermark.detect
from jaxbench.watermark import detection, identify
from jaxbench.watermark.bulk import bulk_detection
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged
from tests.watermark import vocabulary

VOCAB = 211


def candidates() -> list[identify.Candidate]:
    kinds = {"kgw": parse_scheme("kgw"), "gumbel": parse_scheme({"scheme": "gumbel", "context": {"width": 1}})}
    return [identify.Candidate(f"{name}/{k}", scheme, Key(99 + k)) for name, scheme in kinds.items() for k in range(3)]


def write(candidate: identify.Candidate, length: int, seed: int, payload: int = 0) -> list[int]:
    """Return a text marked with a scheme of width 1: of eight random tokens, the one that speaks most for the mark."""
    scheme, key = candidate.scheme, candidate.key
    random, text = np.random.default_rng(seed), [1]
    while len(text) < length:
        context = np.array([text[-1:]])
        words = vocabulary.words(scheme, key, context, vocab_size=VOCAB, payload=payload)[0]
        options = random.integers(0, VOCAB, 8)
        best = options[np.argmin(words[options]) if scheme.scheme == "kgw" else np.argmax(words[options])]
        text.append(int(best))
    return text


@pytest.mark.parametrize("correction", ["holm", "bonferroni"])
def test_the_scheme_and_key_of_each_text_are_named(correction):
    family = candidates()
    ids = Ragged.from_lists([write(one, 40, seed) for seed, one in enumerate(family)])
    found = identify.identify(
        family, ids, vocab_size=VOCAB, make_detector=detection.NumpyDetector, correction=correction
    )
    assert found.best.tolist() == list(range(6)) and found.names[0] == "kgw/0"
    assert ((found.corrected <= 1e-3) == np.eye(6, dtype=bool)).all()
    np.testing.assert_allclose(found.p_value, np.minimum(1, 6 * found.p_values.min(axis=1)))


def test_texts_without_a_mark_are_accused_at_most_at_the_level():
    tokens = np.random.default_rng(1).zipf(1.3, (500, 40)) % VOCAB
    found = identify.identify(
        candidates(), Ragged.from_array(tokens), vocab_size=VOCAB, make_detector=detection.NumpyDetector
    )
    rate = (found.corrected <= 0.1).any(axis=1).mean()
    assert 0 < rate <= 0.1 + 3 * np.sqrt(0.09 / 500)
    assert ((found.p_value <= 0.1) == (found.corrected <= 0.1).any(axis=1)).all()


def test_a_payload_is_decoded_among_all_and_its_p_is_corrected():
    one = identify.Candidate("kgw", parse_scheme({"scheme": "kgw", "payload_bits": 6}), Key(3))
    detector = detection.NumpyDetector(one.scheme, vocab_size=VOCAB)
    texts = [write(one, 60, seed, payload) for seed, payload in enumerate((0, 17, 63))]
    found = detection.detect(detector, Ragged.from_lists(texts), one.key)
    assert found.payload.tolist() == [0, 17, 63]
    for row, payload in enumerate((0, 17, 63)):
        single = detection.detect(detector, Ragged.from_lists(texts[row : row + 1]), one.key, payload=payload)
        assert found.p_value[row] == pytest.approx(64 * single.p_value[0], rel=1e-6)
        assert found.num_scored[row] == single.num_scored[0]
    everything = identify.identify(
        [one], Ragged.from_lists(texts), vocab_size=VOCAB, make_detector=detection.NumpyDetector
    )
    assert (everything.p_value == found.p_value).all()


def test_a_text_without_a_payload_is_accused_at_most_at_the_level():
    scheme = parse_scheme({"scheme": "kgw", "payload_bits": 4})
    tokens = np.random.default_rng(2).integers(0, VOCAB, (300, 30))
    found = detection.detect(detection.NumpyDetector(scheme, vocab_size=VOCAB), Ragged.from_array(tokens), Key(5))
    assert (found.p_value <= 0.2).mean() <= 0.2 + 3 * np.sqrt(0.16 / 300)


PAYLOAD = parse_scheme({"scheme": "kgw", "payload_bits": 7})


def carriers(number: int = 20) -> tuple[identify.Candidate, list[list[int]], list[int]]:
    """Return a candidate, marked texts and the payload of each."""
    one = identify.Candidate("kgw", PAYLOAD, Key(3))
    payloads = [(37 * i + 5) % 128 for i in range(number)]
    return one, [write(one, 60, seed, payload) for seed, payload in enumerate(payloads)], payloads


@pytest.mark.parametrize("backend", ["numpy", "flax", "torch"])
def test_every_payload_is_found_by_the_plain_call(backend):
    one, texts, payloads = carriers(20 if backend == "numpy" else 3)
    how = {"vocab_size": VOCAB}
    if backend == "numpy":
        detector = detection.NumpyDetector(PAYLOAD, **how)
        found = detection.detect(detector, Ragged.from_lists(texts), one.key)
    else:
        library = {"flax": jaxbench.watermark.detect, "torch": torch_ref.watermark.detect}[backend]
        found = library.detect_batch(texts, PAYLOAD, one.key, **how)
    assert found.payload.tolist() == payloads and (found.p_value <= 1e-3).all()
    known = detection.detect(
        detection.NumpyDetector(PAYLOAD, **how), Ragged.from_lists(texts[:1]), one.key, payload=payloads[0]
    )
    assert known.payload.tolist() == payloads[:1]
    assert found.p_value[0] == pytest.approx(1 - (1 - known.p_value[0]) ** 128, rel=1e-6)
    assert found.statistic[0] == known.statistic[0] and found.score[0] == pytest.approx(known.score[0])


@pytest.mark.parametrize("count", [1, 2])
def test_files_and_families_of_one_find_every_payload(count, tmp_path):
    one, texts, payloads = carriers()
    family = (one, identify.Candidate("other", parse_scheme("kgw"), Key(4)))[:count]
    path, out = tmp_path / "a.jsonl", tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps({"text": ids}) + "\n" for ids in texts))
    bulk_detection.run(str(path), str(out), bulk_detection.Job(family, vocab_size=VOCAB))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["payload" if count == 1 else "payload_kgw"] for row in rows] == payloads
    assert all(row["p_value"] <= 1e-3 for row in rows)
    assert "payload_other" not in rows[0]
    found = identify.identify(family, Ragged.from_lists(texts), vocab_size=VOCAB, make_detector=detection.NumpyDetector)
    assert found.payloads[:, 0].tolist() == payloads and (found.corrected <= 1e-3)[:, 0].all()


def test_of_texts_without_a_mark_p_over_all_payloads_is_uniform_or_larger():
    keys = [Key(100 + i) for i in range(1000)]  # the keys are the random experiment: one for each text
    for name in ("gumbel", "kgw"):
        scheme = parse_scheme({"scheme": name, "payload_bits": 6, "context": {"width": 1}})
        tokens = np.random.default_rng(7).integers(0, VOCAB, (1000, 40))
        found = detection.detect(detection.NumpyDetector(scheme, vocab_size=VOCAB), Ragged.from_array(tokens), keys)
        for level in (0.01, 0.05, 0.2, 0.5):
            limit = level + 3 * np.sqrt(level * (1 - level) / 1000)
            assert (found.p_value <= level).mean() <= limit, (scheme.scheme, level)
        assert stats.kstest(found.randomized_p, "uniform").pvalue > 0.01, scheme.scheme


def test_payloads_in_one_call_or_one_by_one_are_the_same(monkeypatch):
    one, texts, payloads = carriers(3)
    detector = detection.NumpyDetector(PAYLOAD, vocab_size=VOCAB)
    together = detection.detect(detector, Ragged.from_lists(texts), [one.key] * 3)
    monkeypatch.setattr(detection, "BATCH_TOKENS", 200)
    alone = detection.detect(detector, Ragged.from_lists(texts), [one.key] * 3)
    for name, values in together._asdict().items():
        assert values.tolist() == getattr(alone, name).tolist(), name


def test_payloads_that_do_not_fit_are_named():
    detector = detection.NumpyDetector(PAYLOAD, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="payload=128, wanted 0 <= payload < 128"):
        detection.detect(detector, Ragged.from_lists([[1, 2]]), Key(1), payload=128)
    with pytest.raises(ValueError, match="more payloads than the vocabulary of 211 has tokens"):
        detection.NumpyDetector({"scheme": "kgw", "payload_bits": 8}, vocab_size=VOCAB)


def test_bad_families_are_named():
    ids, make = Ragged.from_lists([[1, 2]]), detection.NumpyDetector
    with pytest.raises(ValueError, match=r"candidates \(\)"):
        identify.identify([], ids, vocab_size=VOCAB, make_detector=make)
    with pytest.raises(ValueError, match="no name twice"):
        identify.identify([candidates()[0]] * 2, ids, vocab_size=VOCAB, make_detector=make)
    with pytest.raises(ValueError, match="correction='none'"):
        identify.identify(candidates(), ids, vocab_size=VOCAB, make_detector=make, correction="none")
