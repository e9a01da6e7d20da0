"""Scores from a cache: the bits that scoring gives, under everything that decides them, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxbench import result_cache
from jaxbench.result_cache import LocalCache, ResultCacheConfig
from jaxbench.watermark import detection, identify, score_cache
from jaxbench.watermark.bulk import bulk_detection
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

VOCAB = 200


class Counted(detection.NumpyDetector):
    """Counts the texts that it scores."""

    scored = 0

    def evidence(self, tokens, lengths, key, **how):
        self.scored += len(tokens)
        return super().evidence(tokens, lengths, key, **how)


def texts(count: int, seed: int = 0) -> Ragged:
    random = np.random.default_rng(seed)
    return Ragged.from_lists([random.integers(0, VOCAB, random.integers(0, 40)).tolist() for _ in range(count)])


def same(one, other) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


SCHEMES = ["kgw", "gumbel", "unigram", "synthid", "dip", "morphmark", {"scheme": "kgw", "payload_bits": 3}]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_cached_scores_are_the_bits_of_computed_ones(scheme):
    detector, ids, key, cache = Counted(scheme, vocab_size=VOCAB), texts(20), Key(7), LocalCache(1000)
    plain = detection.detect(detector, ids, key, prompt_lengths=2)
    first, known = score_cache.detect(detector, ids, key, cache, prompt_lengths=2)
    detector.scored = 0
    again, all_known = score_cache.detect(detector, ids, key, cache, prompt_lengths=2)
    assert same(plain, first) and same(plain, again)
    assert (all_known, detector.scored) == (20, 0) and known < 20


def test_texts_that_are_there_twice_are_scored_once():
    detector, cache = Counted("kgw", vocab_size=VOCAB), LocalCache(10)
    twice = Ragged.from_lists([[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3]])
    found, known = score_cache.detect(detector, twice, Key(7), cache)
    assert known == 2 and detector.scored == 2 and same(found, detection.detect(detector, twice, Key(7)))


def test_what_decides_a_score_decides_its_name():
    ids, cache = texts(8), LocalCache(10_000)
    kgw = {"scheme": "kgw"}
    variants = [
        (kgw, Key(1), {}),
        (kgw, Key(2), {}),
        (kgw | {"gamma": 0.5}, Key(1), {}),
        (kgw | {"context": {"width": 2}}, Key(1), {}),
        (kgw | {"payload_bits": 2}, Key(1), {}),
        (kgw | {"payload_bits": 2}, Key(1), {"payload": 1}),
        (kgw, Key(1), {"prompt_lengths": 3}),
        ({"scheme": "unigram"}, Key(1), {}),
    ]
    for _ in range(2):  # the second time from the cache
        for scheme, key, how in variants:
            detector = detection.NumpyDetector(scheme, vocab_size=VOCAB)
            found, _ = score_cache.detect(detector, ids, key, cache, **how)
            assert same(found, detection.detect(detector, ids, key, **how)), (scheme, how)
    larger = detection.NumpyDetector(kgw, vocab_size=VOCAB + 1)
    _, known = score_cache.detect(larger, ids, Key(1), cache)
    assert known == 0


def test_texts_may_have_a_key_each():
    detector, ids, cache = Counted("gumbel", vocab_size=VOCAB), texts(6), LocalCache(100)
    keys = [Key(i % 2) for i in range(6)]
    plain = detection.detect(detector, ids, keys)
    for _ in range(2):
        assert same(score_cache.detect(detector, ids, keys, cache)[0], plain)


@pytest.mark.parametrize(
    "entry",
    [b"", b"short", b"\xff" * 64, b"\x00" * 63, bytes(40) + np.float64(1.5).tobytes() * 3, bytes(64) + b"\xff"],
)
def test_an_entry_that_is_none_is_computed(entry):
    class Spoilt(LocalCache):
        def read(self, names):
            return [entry for _ in names]

    assert score_cache.unpacked(entry) is None
    detector, ids = Counted("kgw", vocab_size=VOCAB), texts(4)
    found, known = score_cache.detect(detector, ids, Key(7), Spoilt(10))
    assert same(found, detection.detect(detector, ids, Key(7))) and known < 4


def test_bad_arguments_are_refused_as_without_a_cache():
    detector = detection.NumpyDetector("kgw", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="payload=5"):
        score_cache.detect(detector, texts(2), Key(7), LocalCache(10), payload=5)
    with pytest.raises(ValueError, match="prompt_lengths of shape"):
        score_cache.detect(detector, texts(2), Key(7), LocalCache(10), prompt_lengths=[1, 2, 3])


def test_a_bulk_run_reads_what_another_scored_and_writes_the_same_file(tmp_path, monkeypatch):
    held = LocalCache(1000)
    monkeypatch.setattr(result_cache.ResultCacheConfig, "open", lambda self: held)
    rows = [{"ids": [i % 5, 2, 3, 4, i % 3]} for i in range(30)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for scheme_names in (["kgw"], ["kgw", "gumbel"]):
        candidates = tuple(identify.Candidate(name, parse_scheme(name), Key(3)) for name in scheme_names)
        written = []
        for number, cache in enumerate((None, ResultCacheConfig(), ResultCacheConfig())):
            job = bulk_detection.Job(candidates, vocab_size=VOCAB, field="ids", cache=cache)
            output = tmp_path / f"{len(scheme_names)}-{number}.jsonl"
            summary = bulk_detection.run(str(tmp_path / "in.jsonl"), str(output), job)
            written.append((output.read_bytes(), summary["known"]))
        assert written[0][0] == written[1][0] == written[2][0]
        distinct = 15
        before = 0 if len(scheme_names) == 1 else 30  # kgw's scores are there from the first file
        first = 30 - distinct if len(scheme_names) == 1 else before + 30 - distinct
        assert [known for _, known in written] == [0, first, 30 * len(scheme_names)]
