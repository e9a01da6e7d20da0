"""The detectors of every backend give the reference's evidence, bit for bit, in any batch shape."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_ref.watermark.detect as torch_detect
from jaxbench.watermark import detect, detection, reference
from jaxbench.watermark.config import parse_scheme
from jaxbench.watermark.keys import Key
from jaxbench.watermark.texts import Ragged

VOCAB, ROWS, LENGTH = 97, 11, 45
BACKENDS = {"flax": detect, "torch": torch_detect}


IDS = [list(range(20)), list(range(5, 40))]
BAD_ARGUMENTS = [
    ({"key": [Key(1)]}, "key has 1 keys for 2 texts, wanted one Key, or one for each text"),
    ({"key": [Key(1)] * 3}, "key has 3 keys for 2 texts"),
    ({"key": 5}, r"key is of type int \(not shown\), wanted a Key"),
    ({"key": [Key(1), 7654321]}, r"key\[1\] is of type int \(not shown\), wanted a Key"),
    ({"key": None}, "key is of type NoneType"),
    ({"payload": 1.5}, "payload=1.5, wanted 0 <= payload < 16 for this scheme, a whole number"),
    ({"payload": "3"}, "payload='3', wanted 0 <= payload < 16 for this scheme, a whole number"),
    ({"payload": 16}, "payload=16, wanted"),
    ({"prompt_lengths": 1.5}, "prompt_lengths=1.5, wanted whole numbers of tokens"),
    ({"prompt_lengths": [1.0, 2.0]}, r"prompt_lengths=\[1.0, 2.0\], wanted whole numbers"),
    ({"prompt_lengths": [[1], [2, 3]]}, r"prompt_lengths=\[\[1\], \[2, 3\]\], wanted whole numbers"),
    ({"prompt_lengths": [1, 2, 3]}, r"prompt_lengths of shape \(3,\) for 2 texts, wanted one number"),
    ({"prompt_lengths": [1]}, r"prompt_lengths of shape \(1,\) for 2 texts"),
    ({"prompt_lengths": 2**40}, "prompt_lengths holds 1099511627776, wanted a number of tokens from 0"),
    ({"prompt_lengths": 10**30}, "prompt_lengths=1000000"),
    ({"prompt_lengths": [0, -1]}, "prompt_lengths holds -1, wanted a number of tokens from 0"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "problem"), BAD_ARGUMENTS, ids=[str(change) for change, _ in BAD_ARGUMENTS])
def test_arguments_that_do_not_fit_the_texts_are_named_with_what_was_wanted(backend, change, problem):
    given = {"key": Key(1), **change}
    scheme = {"scheme": "kgw", "payload_bits": 4}
    with pytest.raises(ValueError, match=f"^detect: {problem}") as error:
        BACKENDS[backend].detect_batch(IDS, scheme, given.pop("key"), vocab_size=VOCAB, **given)
    assert "7654321" not in str(error.value)


def test_whole_numbers_of_any_kind_and_a_key_for_each_text_are_taken():
    keys, lengths = [Key(1), Key(2)], [3, 0]
    both = detect.detect_batch(IDS, "kgw", iter(keys), vocab_size=VOCAB, prompt_lengths=lengths, payload=np.int64(0))
    for row, (ids, key, length) in enumerate(zip(IDS, keys, lengths)):
        alone = detect.detect_batch([ids], "kgw", key, vocab_size=VOCAB, prompt_lengths=np.uint8(length))
        assert alone.p_value[0] == both.p_value[row] and alone.num_scored[0] == both.num_scored[row]
    assert len(detect.detect_batch([], "kgw", Key(1), vocab_size=VOCAB, prompt_lengths=[]).p_value) == 0


def rule(kind: str, width: int) -> dict:
    return {"kind": kind, "width": width}


SCHEMES = [
    *({"scheme": "kgw", "context": rule("left", width)} for width in (1, 5, 8)),
    {"scheme": "kgw", "context": rule("skip", 3), "payload_bits": 4},
    {"scheme": "kgw", "context": rule("min", 4)},
    *({"scheme": "kgw", "context": rule("self", width)} for width in (1, 4)),
    {"scheme": "unigram"},
    {"scheme": "gumbel", "payload_bits": 4},
    {"scheme": "gumbel", "dual_key_alpha": 0.1, "context": rule("min", 3)},
    {"scheme": "gumbel", "prf": "vllm"},
    {"scheme": "gumbel", "prf": "vllm", "context": rule("left", 6), "dual_key_alpha": 0.2},
    {"scheme": "synthid"},
    {"scheme": "dip"},
    {"scheme": "morphmark", "context": rule("min", 3)},
]


def name(fields: dict) -> str:
    context = fields.get("context", {})
    return "-".join(str(part) for part in (fields["scheme"], fields.get("prf", ""), *context.values()) if part)


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return repetitive tokens [B T], lengths with an empty and a full text, and prompt lengths."""
    random = np.random.default_rng(3)
    lengths = random.integers(0, LENGTH + 1, ROWS)
    lengths[:2] = 0, LENGTH
    return random.zipf(1.5, (ROWS, LENGTH)) % VOCAB, lengths, random.integers(0, 12, ROWS)


def assert_equal(found: reference.Evidence, wanted: reference.Evidence, lengths: np.ndarray) -> None:
    inside = np.arange(found.words.shape[1]) < lengths[:, None]
    assert found.words.dtype == np.uint32 and found.scored.dtype == bool
    assert (found.scored == wanted.scored).all()
    assert (found.words[inside] == wanted.words[inside]).all()
    assert (found.second_words is None) == (wanted.second_words is None)
    if wanted.second_words is not None:
        assert (found.second_words[inside] == wanted.second_words[inside]).all()
    assert (found.inputs is None) == (wanted.inputs is None)
    if wanted.inputs is not None:
        assert (found.inputs[inside] == wanted.inputs[inside]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields", SCHEMES, ids=name)
def test_evidence_equals_the_reference_with_prompts_payloads_and_a_key_for_each_text(fields, backend, batch):
    scheme, (tokens, lengths, prompts) = parse_scheme(fields), batch
    detector = BACKENDS[backend].Detector(scheme, vocab_size=VOCAB)
    payload = 11 if fields.get("payload_bits") else 0
    for key in (Key(2**63 + 12345), [Key(10**15 * row + 7) for row in range(ROWS)]):
        for prompt in (None, prompts):
            how = {"prompt_lengths": prompt, "payload": payload}
            wanted = reference.evidence(scheme, key, tokens, lengths, vocab_size=VOCAB, **how)
            assert wanted.scored.any() and not wanted.scored.all()
            assert_equal(detector.evidence(tokens, lengths, key, **how), wanted, lengths)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_payload_for_each_text_equals_one_payload_at_a_time(backend, batch):
    tokens, lengths, _ = batch
    scheme = parse_scheme({"scheme": "kgw", "payload_bits": 4})
    detector, key, payloads = BACKENDS[backend].Detector(scheme, vocab_size=VOCAB), Key(5), np.arange(ROWS)
    together = detector.evidence(tokens, lengths, key, payload=payloads)
    wanted = detection.NumpyDetector(scheme, vocab_size=VOCAB).evidence(tokens, lengths, key, payload=payloads)
    assert_equal(together, wanted, lengths)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = detector.evidence(tokens[one], lengths[one], key, payload=int(payloads[row]))
        assert_equal(alone, reference.Evidence(together.words[one], together.scored[one]), lengths[one])


@settings(max_examples=15)
@given(st.integers(1, 8), st.integers(1, 32), st.integers(0, 2**32))
def test_every_text_has_the_same_evidence_in_any_batch(rows, width, seed):
    scheme = parse_scheme({"scheme": "kgw", "context": rule("left", 2)})
    random = np.random.default_rng(seed)
    tokens, lengths = random.integers(0, 5, (rows, width)), random.integers(0, width + 1, rows)
    wanted = reference.evidence(scheme, Key(seed), tokens, lengths, vocab_size=VOCAB)
    for module in BACKENDS.values():
        found = module.Detector(scheme, vocab_size=VOCAB).evidence(tokens, lengths, Key(seed))
        assert_equal(found, wanted, lengths)


def test_a_repeat_of_a_prompt_token_counts_and_a_later_repeat_does_not():
    tokens = np.array([[7, 8, 7, 8, 7, 8]])
    scheme = parse_scheme("kgw")
    for module in BACKENDS.values():
        detector = module.Detector(scheme, vocab_size=VOCAB)
        whole = detector.evidence(tokens, np.array([6]), Key(1)).scored[0]
        assert whole.tolist() == [False, True, True, False, False, False]
        behind = detector.evidence(tokens, np.array([6]), Key(1), prompt_lengths=3).scored[0]
        assert behind.tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize("least", [0, 2**14])
def test_repeats_are_found_in_slabs_and_in_one_piece(least, monkeypatch):
    monkeypatch.setattr(detect, "SLAB_TOKENS", least)
    random = np.random.default_rng(0)
    seeds, tokens = random.integers(0, 4, (10, 33, 2)), random.integers(0, 4, (10, 33))
    valid = random.random((10, 33)) < 0.8
    inputs = tuple(x.T.astype(np.uint32) for x in (seeds[..., 0], seeds[..., 1], tokens))
    found = np.asarray(jax.jit(detect._is_first)(inputs, valid.T)).T & valid
    assert (found == reference.is_first(seeds, tokens, valid)).all() and 0 < found.sum() < valid.sum()


def test_long_texts_are_sorted_on_the_host(monkeypatch, batch):
    tokens, lengths, prompts = batch
    scheme = parse_scheme({"scheme": "kgw", "payload_bits": 4})
    monkeypatch.setattr(detection, "MAX_DEVICE_LENGTH", 16)
    how = {"prompt_lengths": prompts, "payload": np.arange(ROWS)}
    found = detect.Detector(scheme, vocab_size=VOCAB).evidence(tokens, lengths, Key(1), **how)
    wanted = detection.NumpyDetector(scheme, vocab_size=VOCAB).evidence(tokens, lengths, Key(1), **how)
    assert_equal(found, wanted, lengths)


def test_keys_are_arguments_of_the_compiled_program():
    tokens = np.zeros((4, 20), np.int32) + np.arange(20, dtype=np.int32)
    detector = detect.Detector(parse_scheme("gumbel"), vocab_size=VOCAB)
    before = detect._evidence._cache_size()
    rows = [detector.evidence(tokens, np.full(4, 20), Key(key)).words[0] for key in (1, 2)]
    detect.Detector(parse_scheme("gumbel"), vocab_size=VOCAB).evidence(tokens, np.full(4, 20), Key(3))
    assert detect._evidence._cache_size() <= before + 1
    assert (rows[0] != rows[1]).any()


# From texts to p-values


@pytest.mark.parametrize("backend", BACKENDS)
def test_detect_batch_takes_lists_arrays_and_ragged_ids(backend, batch):
    tokens, lengths, prompts = batch
    scheme, module = parse_scheme("gumbel"), BACKENDS[backend]
    lists = [row[:length].tolist() for row, length in zip(tokens, lengths)]
    in_numpy = detection.NumpyDetector(scheme, vocab_size=VOCAB)
    wanted = detection.detect(in_numpy, Ragged.from_lists(lists), Key(9), prompt_lengths=prompts)
    assert wanted.p_value.min() < 1 == wanted.p_value[0]
    for given_ids in (lists, Ragged.from_lists(lists)):
        found = module.detect_batch(given_ids, scheme, Key(9), vocab_size=VOCAB, prompt_lengths=prompts)
        np.testing.assert_allclose(found.p_value, wanted.p_value, rtol=1e-12)
        assert (found.num_scored == wanted.num_scored).all() and (found.reason == wanted.reason).all()
    whole = module.detect_batch(tokens, scheme, Key(9), vocab_size=VOCAB)
    assert (whole.num_scored > 0).all()


def test_texts_of_many_lengths_keep_their_order(monkeypatch):
    monkeypatch.setattr(detection, "MANY_TEXTS", 10)
    monkeypatch.setattr(detection, "FEW_ROWS", 4)
    monkeypatch.setattr(detection, "BATCH_TOKENS", 256)
    random = np.random.default_rng(0)
    lists = [random.integers(0, VOCAB, n).tolist() for n in random.integers(0, 90, 40)]
    detector = detection.NumpyDetector(parse_scheme("kgw"), vocab_size=VOCAB)
    together = detection.detect(detector, Ragged.from_lists(lists), [Key(i) for i in range(40)])
    for i, ids in enumerate(lists):
        alone = detection.detect(detector, Ragged.from_lists([ids]), Key(i))
        assert (together.p_value[i], together.num_scored[i]) == (alone.p_value[0], alone.num_scored[0])
    sizes = [tokens.shape for _, tokens, _ in detection.batches(Ragged.from_lists(lists))]
    assert len(sizes) > 3 and all(rows * columns <= 256 for rows, columns in sizes)


def test_no_texts_give_no_detections():
    found = detect.detect_batch([], parse_scheme("kgw"), Key(1), vocab_size=VOCAB)
    assert [len(column) for column in found] == [0] * len(found)


# Bad input


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_is_named(backend):
    scheme, module = parse_scheme("kgw"), BACKENDS[backend]
    detector = module.Detector(scheme, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"token 97 \(row 1, position 0\) is outside \[0, 97\)"):
        detector.evidence(np.array([[1, 2], [97, 3]]), np.array([2, 2]), Key(1))
    with pytest.raises(ValueError, match="lengths 3..3 do not fit 2 columns"):
        detector.evidence(np.array([[1, 2]]), np.array([3]), Key(1))
    with pytest.raises(ValueError, match="3 keys for 2 texts"):
        detector.evidence(np.array([[1, 2], [1, 3]]), np.array([2, 2]), [Key(1)] * 3)
    with pytest.raises(ValueError, match="2 texts came without a tokenizer"):
        module.detect_batch(["a", "b"], scheme, Key(1), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="one string of 5 characters"):
        module.detect_batch("a bcd", scheme, Key(1), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="vocab_size=99999999999, wanted a whole number from 2 to 16,777,216"):
        module.detect_batch([[1, 2]], scheme, Key(1), vocab_size=99_999_999_999)
    with pytest.raises(ValueError, match="unigram with gamma=0.001 has lists of none of 97 tokens, .* at least 0.0103"):
        module.detect_batch([[1, 2]], {"scheme": "unigram", "gamma": 0.001}, Key(1), vocab_size=97)
    with pytest.raises(ValueError, match=r"got \[1, 2, \[3\]\] as a text, wanted a list of token ids"):
        module.detect_batch([[1, 2, [3]]], scheme, Key(1), vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"got 1 as a text, wanted a list of token ids"):
        module.detect_batch([1, 2, 3], scheme, Key(1), vocab_size=VOCAB)
    for batched in ([np.ones((1, 4), int)], np.ones((2, 1, 4), int), [[[1, 2]]]):  # a batch of one text each
        with pytest.raises(ValueError, match=r"of shape \(1, \d\) as a text, wanted a list of token ids"):
            module.detect_batch(batched, scheme, Key(1), vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"got \[1.5\] as a text"):
        module.detect_batch([[1.5]], scheme, Key(1), vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"got \[1099511627776\] as a text"):
        module.detect_batch([[2**40]], scheme, Key(1), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="got list and str in one list"):
        module.detect_batch(["a", [1]], scheme, Key(1), vocab_size=VOCAB, tokenizer=object())
    with pytest.raises(ValueError, match="--device=tpu"):
        module.detect_batch([[1, 2]], scheme, Key(1), vocab_size=VOCAB, device="tpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["kgw", "kgw_markllm"])
def test_a_scheme_is_given_by_its_name(name, backend):
    module, ids = BACKENDS[backend], np.arange(40).reshape(2, 20)
    found = module.detect_batch(ids, name, Key(1), vocab_size=VOCAB)
    wanted = module.detect_batch(ids.tolist(), parse_scheme(name), Key(1), vocab_size=VOCAB)
    assert found.p_value.tolist() == wanted.p_value.tolist() and (found.num_scored == 19).all()
    assert found.payload.tolist() == [-1, -1]


@pytest.mark.parametrize("scheme", ["kgw", "gumbel"])
def test_a_text_without_a_scored_token_has_no_payload_but_the_one_looked_for(scheme):
    fields, texts = {"scheme": scheme, "payload_bits": 4, "context": rule("left", 1)}, [[3], [], [3, 4, 5]]
    found = detect.detect_batch(texts, fields, Key(3), vocab_size=VOCAB)
    assert found.payload[:2].tolist() == [-1, -1] and 0 <= found.payload[2] < 16
    assert detect.detect_batch(texts, fields, Key(3), vocab_size=VOCAB, payload=7).payload.tolist() == [7, 7, 7]
