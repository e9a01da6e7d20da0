"""Power: prompts, resumption, bars, and the law of a Gumbel score."""

import json

import numpy as np
import pytest
from scipy import special

from jaxbench import config as configs
from jaxbench import initial, transformer
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import tokenizer
from jaxbench.watermark import config
from jaxbench.watermark.detector import train_detector
from jaxbench.watermark.keys import Key
from jaxbench.watermark.study import detectability, power
from tests.watermark import vocabulary

TINY = TransformerConfig(
    vocab_size=512, d_model=16, d_ff=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_seq_len=256
)
SETTINGS = power.Power.model_validate(
    {
        "schemes": {"kgw": {"scheme": "kgw", "gamma": 0.25, "delta": 6.0}, "gumbel": {"scheme": "gumbel"}},
        "num_texts": 6,
        "prompt_tokens": 5,
        "lengths": [10, 40],
        "levels": [0.01],
        "batch_size": 4,
        "bars": [{"scheme": "gumbel", "num_tokens": 40, "level": 0.01, "rate": 0.5}],
    }
)


@pytest.fixture(scope="module")
def model():
    return transformer.build(TINY, initial.initial_params(TINY, 0))


@pytest.fixture(scope="module")
def given():
    return np.random.default_rng(0).integers(0, TINY.vocab_size, (6, 5), dtype=np.int32)


@pytest.fixture(scope="module")
def made(model, given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("power")
    return folder, {
        name: power.generate(SETTINGS, name, given, model=model, workdir=folder) for name in SETTINGS.schemes
    }


def test_marked_texts_are_found_and_a_reached_bar_is_said(made, given):
    for name, tokens in made[1].items():
        assert tokens.shape == (6, 40) and tokens.min() >= 0
        found = list(power.cells(SETTINGS, name, given, tokens, vocab_size=TINY.vocab_size))
        assert [cell.rate.value for cell in found if cell.num_tokens == 40] == [1.0, 1.0]
        assert not any(power.is_missed(cell) for cell in found)
    assert "bar 0.5 reached" in power.line(found[1])


def test_texts_of_two_prompts_reach_no_bar_that_two_texts_do_not(made, given):
    twice, tokens = np.tile(given[:2], (40, 1)), np.tile(made[1]["gumbel"][:2], (40, 1))
    settings = SETTINGS.model_copy(update={"passphrase": "other"})
    keys = [power.text_keys(SETTINGS, "gumbel", 6)[row % 2] for row in range(80)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(power, "text_keys", lambda *_: keys)
        found = list(power.cells(settings, "gumbel", twice, tokens, vocab_size=TINY.vocab_size))
    cell = next(cell for cell in found if cell.num_tokens == 40 and cell.sees_prompt)
    assert cell.rate.value == 1 and cell.rate.count == 80 and cell.rate.low == detectability.rate(2, 2).low
    assert power.is_missed(cell) and "bar 0.5 MISSED" in power.line(cell)


def test_the_prompt_as_context_gives_every_token_a_score(made, given):
    found = list(power.cells(SETTINGS, "gumbel", given, made[1]["gumbel"], vocab_size=TINY.vocab_size))
    with_prompt, alone = (next(c for c in found if c.sees_prompt == sees) for sees in (True, False))
    assert with_prompt.num_scored == pytest.approx(10, abs=0.2) and alone.num_scored <= 6  # four tokens of context


def test_finished_batches_are_read_back(made, given):
    folder, tokens = made
    again = power.generate(SETTINGS, "kgw", given, model=None, workdir=folder)  # no model: nothing may be generated
    np.testing.assert_array_equal(again, tokens["kgw"])


@pytest.mark.parametrize("kind", ["power", "training"])
def test_schemes_whose_batches_would_be_the_same_files_are_refused(kind):
    schemes = {"kgw 1": {"scheme": "gumbel"}, "kgw-1": {"scheme": "kgw"}}
    with pytest.raises(ValueError, match="schemes 'kgw 1' and 'kgw-1' would share the files kgw-1-"):
        if kind == "power":
            power.Power(schemes=schemes, lengths=(10,), levels=(0.01,))
        else:
            train_detector.Training(train_schemes=schemes, test_schemes={"dip": {"scheme": "dip"}})


def test_a_text_does_not_depend_on_how_many_others_there_are(model, given, tmp_path, made):
    fewer = power.generate(SETTINGS, "gumbel", given[:4], model=model, workdir=tmp_path)
    np.testing.assert_array_equal(fewer, made[1]["gumbel"][:4])


def test_prompts_keep_their_place_when_more_are_asked_for():
    encoder = tokenizer.load_tokenizer()
    few, many = (
        power.prompts(SETTINGS.model_copy(update={"num_texts": n, "prompt_tokens": 32}), encoder, None)
        for n in (20, 3000)
    )
    np.testing.assert_array_equal(few, many[:20])
    assert len(np.unique(few, axis=0)) == 20 and many.shape == (3000, 32)


def test_a_bar_on_a_cell_that_is_not_measured_is_refused():
    values = SETTINGS.model_dump() | {"bars": [{"scheme": "kgw", "num_tokens": 11, "level": 0.01, "rate": 0.9}]}
    with pytest.raises(ValueError, match="names no measured cell"):
        power.Power.model_validate(values)


def test_a_bar_counts_the_lower_end_of_the_interval():
    cell = power.Cell("kgw", 50, 1e-3, True, detectability.rate(95, 100), 47.0, 0.93)
    assert power.is_missed(cell) and cell.rate.value > 0.93 > cell.rate.low
    assert not power.is_missed(cell._replace(bar=0.85))
    assert not power.is_missed(cell._replace(sees_prompt=False))


def test_the_committed_configuration_has_the_bars_of_the_tables():
    loaded = configs.load("configs/watermark/power.yaml", (), power.Power)
    assert {(b.scheme, b.num_tokens, b.level, b.rate) for b in loaded.bars} == {
        ("kgw", 50, 1e-3, 0.92), ("kgw", 100, 1e-5, 0.98), ("gumbel", 25, 1e-5, 0.97),
    }  # fmt: skip
    json.dumps(loaded.model_dump(mode="json"))


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_the_mean_gumbel_score_of_a_token_of_probability_p_is_a_harmonic_number(p):
    # E[-log(1 - u) | the token has probability p and was drawn] = H(1/p) (vLLM pull request 56122).
    scheme, vocab_size, count = config.parse_scheme("gumbel"), 16, 40_000
    probabilities = np.full(vocab_size, (1 - p) / (vocab_size - 1))
    probabilities[3] = p
    contexts = np.random.default_rng(1).integers(0, 2**16, (count, 4))
    words = vocabulary.words(scheme, Key(7), contexts, vocab_size=vocab_size)
    u = ((words >> np.uint32(8)) + 0.5) * 2.0**-24
    drawn = np.argmax(np.log(probabilities) - np.log(-np.log(u)), axis=1) == 3
    scores = -np.log1p(-u[drawn, 3])
    expected = special.digamma(1 / p + 1) + np.euler_gamma
    assert drawn.mean() == pytest.approx(p, abs=4 * np.sqrt(p / count))
    assert scores.mean() == pytest.approx(expected, abs=4 * scores.std() / np.sqrt(drawn.sum()))
