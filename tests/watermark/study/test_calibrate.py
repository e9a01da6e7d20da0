"""Calibration: the band's coverage, the randomised test's rejections, and the gate on human text."""

import json
import types

import numpy as np
import pytest

from jaxbench.pretrained import tokenizer
from jaxbench.text import passages
from jaxbench.watermark import config
from jaxbench.watermark.keys import Key
from jaxbench.watermark.study import calibrate

KGW = {"scheme": "kgw", "context": {"kind": "left", "width": 1}}
SCHEMES = {
    "kgw left": KGW,
    "kgw min": {"scheme": "kgw", "context": {"kind": "min", "width": 4}},
    "kgw self": {"scheme": "kgw", "context": {"kind": "self", "width": 4}},
    "kgw skip": {"scheme": "kgw", "context": {"kind": "skip", "width": 2}},
    "unigram": {"scheme": "unigram"},
    "gumbel": {"scheme": "gumbel", "context": {"kind": "left", "width": 1}},
    "gumbel vllm": {"scheme": "gumbel", "prf": "vllm"},
    "synthid": {"scheme": "synthid"},
    "dip": {"scheme": "dip"},
}
SETTINGS = calibrate.Calibration.model_validate({"schemes": SCHEMES, "num_texts": 177, "num_keys": 12})


@pytest.fixture(scope="module")
def human():
    found = passages.cut(tokenizer.load_tokenizer(), passages.read_texts(), num_tokens=200, max_passages=177)
    return found.tokens


def rows(tokens, folder, **how):
    return [row for row, _ in calibrate.rows(SETTINGS, tokens, vocab_size=49152, folder=folder, **how)]


def test_every_scheme_keeps_its_level_on_human_text(human, tmp_path):
    found = rows(human, tmp_path)
    assert len(found) == 2 * len(SCHEMES)
    assert [calibrate.line(row) for row in found if not row.passed] == []


def test_the_same_gate_rejects_when_repeated_positions_are_scored(human, tmp_path):
    failed = {row.name for row in rows(human, tmp_path, deduplicate=False) if not row.passed}
    assert {"kgw left", "unigram", "kgw self"} <= failed


@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_the_band_covers_what_it_says_when_keys_differ(spread, level):
    # Each key has a rate of its own, lognormal around the level, as shared n-grams give it one.
    random, outside, runs = np.random.default_rng(1), 0, 400
    for _ in range(runs):
        rates = level * np.exp(spread * random.standard_normal(20) - spread**2 / 2)
        phi = (random.random((400, 20)) < rates[None, :]).astype(float)
        found = calibrate.band(phi, level)
        outside += not found.low <= phi.mean() <= found.high
    assert outside <= 9  # binomial(400, 0.01): 10 or more has probability 0.8 %


def test_the_band_is_that_of_independent_draws_when_they_are():
    random = np.random.default_rng(0)
    found = [calibrate.band((random.random((500, 50)) < 0.01).astype(float), 0.01) for _ in range(40)]
    half = 2.68 * np.sqrt(0.01 * 0.99 / 25_000)  # Student's t with 49 degrees of freedom, 99 %
    assert half == pytest.approx(np.median([each.high for each in found]) - 0.01, rel=0.1)
    assert min(each.high for each in found) >= 0.01 + 0.999 * half  # never narrower than independent draws


def test_the_band_widens_with_keys_that_decide_for_all_texts():
    phi = np.zeros((200, 50))
    phi[:, 0] = 1.0
    found = calibrate.band(phi, 0.02)
    assert found.design_effect == pytest.approx(200, rel=0.05)  # one key is one draw, not 200
    assert found.low == 0.0 and found.high > 0.06


def test_a_band_of_one_key_is_refused():
    with pytest.raises(ValueError, match="5 texts x 1 keys"):
        calibrate.band(np.zeros((5, 1)), 0.01)


def test_the_randomised_test_rejects_with_exactly_the_nominal_probability():
    # A die: P(T >= t) for t = 1 .. 6, each face equally likely.
    exact = np.array([6, 5, 4, 3, 2, 1]) / 6
    for level in (0.01, 0.1, 0.3, 1 / 6, 0.9):
        phi = calibrate.rejection(exact, exact - 1 / 12, level)
        assert phi.mean() == pytest.approx(level)
        assert (phi[exact <= level] == 1).all()


def test_a_continuous_test_is_not_randomised():
    p = np.array([0.001, 0.01, 0.0101, 1.0])
    np.testing.assert_array_equal(calibrate.rejection(p, p, 0.01), [1, 1, 0, 0])


def test_a_conservative_test_passes_and_an_anticonservative_one_fails():
    random = np.random.default_rng(3)
    uniform = random.random((500, 20))
    passes = calibrate.judge("x", np.stack([uniform, uniform]), level=0.01, confidence=0.99)
    assert passes.passed
    small = uniform / 2
    fails = calibrate.judge("x", np.stack([small, small]), level=0.01, confidence=0.99)
    assert not fails.passed and fails.rate == pytest.approx(0.02, abs=0.005)


def test_lists_take_their_key_from_the_run():
    scheme = config.parse_scheme("kgw_markllm")
    first, second = (calibrate.under(scheme, Key(k)).hash_key for k in (5, 6))
    assert (first, second) == (6, 7)
    assert calibrate.under(config.parse_scheme("kgw"), Key(5)) == config.parse_scheme("kgw")


def test_a_run_writes_rows_and_page(tmp_path):
    settings = SETTINGS.model_copy(
        update={"schemes": {"kgw": config.parse_scheme(KGW)}, "num_texts": 20, "num_keys": 3}
    )
    lines = []
    result = calibrate.run(settings, tokenizer.load_tokenizer(), workdir=tmp_path, say=lines.append)
    stored = json.loads((tmp_path / "calibration.json").read_text())
    assert stored == json.loads(json.dumps(result))
    assert [row["level"] for row in stored["rows"]] == [0.01, 0.001] and len(lines) == 2
    assert stored["rows"][0]["num_keys"] == 3 and stored["num_texts"] == 20
    assert "Realised false-positive rates" in (tmp_path / "calibration.html").read_text()


def test_finished_schemes_are_kept_and_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    schemes = {"one": config.parse_scheme(KGW), "two": config.parse_scheme("unigram")}
    settings = SETTINGS.model_copy(update={"schemes": schemes, "num_texts": 20, "num_keys": 3})
    encoder, real, measured = tokenizer.load_tokenizer(), calibrate.p_values, []

    def stops(scheme, *arguments, **how):
        if scheme.scheme == "unigram" and not measured[1:]:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(scheme.scheme)
        return real(scheme, *arguments, **how)

    monkeypatch.setattr(calibrate, "p_values", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate.run(settings, encoder, workdir=tmp_path)
    assert not (tmp_path / "calibration.json").exists()
    said = []
    result = calibrate.run(settings, encoder, workdir=tmp_path, say=said.append)
    assert measured == ["kgw", "interrupted", "unigram"]
    assert [line.endswith("(kept)") for line in said] == [True, True, False, False]
    fresh = calibrate.run(settings, encoder, workdir=tmp_path / "fresh")
    for one, other in zip(result["rows"], fresh["rows"]):
        assert one | {"seconds": 0} == other | {"seconds": 0}
    with pytest.raises(ValueError, match="holds the work of configuration .* use another --workdir"):
        calibrate.run(settings.model_copy(update={"num_keys": 4}), encoder, workdir=tmp_path)


def test_json_lists_are_read_and_bad_entries_are_named(tmp_path):
    path = tmp_path / "texts.json"
    path.write_text('[{"text": "one"}, {"text": "two"}]')
    assert passages.read_texts(path) == ["one", "two"]
    path.write_text('[{"text": "one"}, {"prompt": "two"}]')
    with pytest.raises(ValueError, match="entry 1 has no 'text' string"):
        passages.read_texts(path)
    path.write_text('[{"text": "one"}, {"text": "\\ud800"}]')
    with pytest.raises(ValueError, match="entry 1: 'text' holds a lone surrogate"):
        passages.read_texts(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot read .*texts.json as JSON"):
        passages.read_texts(path)


def test_passages_have_one_length_and_know_their_document():
    found = passages.cut(
        tokenizer.load_tokenizer(), ["one two three four five six", "no"], num_tokens=2, max_passages=9
    )
    assert found.tokens.shape == (3, 2) and found.documents.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="none of 1 texts has 50 tokens"):
        passages.cut(tokenizer.load_tokenizer(), ["short"], num_tokens=50, max_passages=1)


def test_texts_behind_the_last_passage_are_not_encoded():
    encoded = []

    def encode_batch(texts, add_special):
        encoded.extend(texts)
        return [[len(text)] * 2 for text in texts]

    words = types.SimpleNamespace(encode_batch=encode_batch)
    found = passages.cut(words, ["a" * n for n in range(300)], num_tokens=1, max_passages=139)
    assert len(encoded) == 2 * passages.ENCODED
    assert found.tokens[:, 0].tolist() == found.documents.tolist() == [n // 2 for n in range(139)]
