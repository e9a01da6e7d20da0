"""Attacks: the same every time, as strong as asked, undone by the canonical form where that is its work."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxbench import config, philox
from jaxbench.watermark import canonical
from jaxbench.watermark.attack import attacks, character_level, random_draws, word_level
from jaxbench.watermark.study.evaluate_config import Evaluate

TEXT = (
    "The quick brown fox jumped over the lazy dog, while three governments announced big plans.\n\nEveryone carried on "
    "quickly; nobody complained about the movie, and the new company (a small one) made more money than before!"
)
HUMAN = [f"Human text number {i} has a few plain words in it, and it says nothing of interest." for i in range(40)]
PLAIN = ["delete:0.3", "insert:0.3", "substitute:0.3", "swap:0.5", "synonym:0.9", "typo:0.5", "case:0.4",
         "homoglyph:0.3", "zero_width:0.2", "emoji:0.3", "truncate:0.5", "copy_paste:0.75"]  # fmt: skip
TOOLS = attacks.Tools(human=HUMAN)
# A false alarm of a binomial test once in a million: the examples are fixed, so it never comes and goes.
ALPHA = 1e-6


class Letters:
    """A tokenizer whose tokens are characters."""

    vocab_size = 128

    def encode(self, text, *, add_special=True):
        return [ord(letter) % 128 for letter in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


@pytest.mark.parametrize("name", PLAIN)
def test_an_attack_is_a_function_of_seed_and_index_and_not_of_its_batch(name):
    together = attacks.apply(name, [TEXT] * 4, seed=3, tools=TOOLS)
    alone = attacks.apply(name, [TEXT], seed=3, tools=TOOLS, indices=[2])
    assert alone.texts[0] == together.texts[2]
    assert attacks.apply(name, [TEXT] * 4, seed=3, tools=TOOLS).texts == together.texts
    assert together.texts[0] != TEXT
    if name != "truncate:0.5":  # which leaves nothing to chance
        assert len(set(together.texts)) > 1
        assert attacks.apply(name, [TEXT] * 4, seed=4, tools=TOOLS).texts != together.texts


@pytest.mark.parametrize("name", PLAIN)
def test_an_empty_text_stays_empty_and_strength_zero_changes_nothing(name):
    made = attacks.apply(name, ["", " \n"], seed=0, tools=TOOLS)
    assert made.texts == ["", " \n"] and made.word_edits.tolist() == [0, 0]
    weak = attacks.apply(name.partition(":")[0] + ":0", [TEXT], seed=0, tools=TOOLS)
    assert weak.texts == [TEXT] and weak.character_edits.tolist() == [0]


def is_binomial(successes, count, probability):
    return stats.binomtest(successes, count, probability).pvalue > ALPHA


@given(strength=st.floats(0.02, 0.98), seed=st.integers(0, 2**32))
def test_deletion_insertion_and_swap_are_as_strong_as_asked(strength, seed):
    words = [f"w{i}" for i in range(400)]
    text = " ".join(words)

    def run(name):
        return attacks.apply({"attack": name, "strength": strength}, [text], seed=seed, tools=TOOLS).texts[0].split()

    assert is_binomial(400 - len(run("delete")), 400, strength)
    assert is_binomial(len(run("insert")) - 400, 400, strength)
    assert is_binomial(sum(one != other for one, other in zip(run("substitute"), words)), 400, strength)
    assert is_binomial(sum(one != other for one, other in zip(run("swap"), words)) // 2, 200, strength)
    assert sorted(run("swap")) == sorted(words)


@given(strength=st.floats(0.02, 0.98), seed=st.integers(0, 2**32))
def test_edits_of_token_ids_are_as_strong_as_asked(strength, seed):
    ids = list(range(500))

    def run(name):
        draws = random_draws.Draws(seed, step=0, site=name, row=1)
        return word_level.edit(name, ids, strength, draws, pool=range(500))

    assert is_binomial(500 - len(run("delete")), 500, strength)
    changed = run("substitute")
    assert is_binomial(sum(one != other for one, other in zip(changed, ids)), 500, strength)
    assert all(0 <= token < 500 for token in changed)


def test_characters_are_compared_only_where_somebody_asks():
    # in time that grows with the square of a text's length: half a minute for 60,000 characters
    asked, plain = (attacks.apply("typo:0.5", [TEXT], seed=3, counts_characters=each) for each in (True, False))
    assert plain.texts == asked.texts and plain.word_edits == asked.word_edits
    assert asked.character_edits[0] > 0 and np.isnan(plain.character_edits).all()


@given(strength=st.floats(0.02, 0.98), seed=st.integers(0, 2**32))
def test_character_edits_are_as_strong_as_asked(strength, seed):
    text = "some plain ascii words " * 20

    def run(name):
        return attacks.apply({"attack": name, "strength": strength}, [text], seed=seed).texts[0]

    assert is_binomial(len(run("zero_width")) - len(text), len(text), strength)
    places = sum(letter in character_level.HOMOGLYPHS for letter in text)
    assert is_binomial(sum(not letter.isascii() for letter in run("homoglyph")), places, strength)
    assert is_binomial(sum(one != other for one, other in zip(run("case").split(), text.split())), 80, strength)
    assert run("case").lower() == text
    assert is_binomial(sum(letter in character_level.EMOJI for letter in run("emoji")), 80, strength)


@given(share=st.floats(0.0, 1.0), seed=st.integers(0, 2**32))
@pytest.mark.parametrize(("name", "most"), [("homoglyph", 0.5), ("zero_width", 1.0)])
def test_the_canonical_form_undoes_look_alikes_and_invisible_characters(name, most, share, seed):
    # With more than half of the letters replaced, a word of look-alikes only may be meant as it is written.
    strength = most * share
    attacked = attacks.apply({"attack": name, "strength": strength}, [TEXT], seed=seed).texts[0]
    assert canonical.canonicalize(attacked).text == TEXT


@given(strength=st.sampled_from([0.1, 0.5, 0.75, 0.9]), seed=st.integers(0, 2**32))
def test_copy_paste_keeps_the_marked_text_whole_and_has_the_share_asked_for(strength, seed):
    attack = attacks.CopyPaste(strength=strength)
    marked = " ".join(f"m{i}" for i in range(60))
    made = attacks.apply(attack, [marked], seed=seed, tools=attacks.Tools(human=HUMAN * 10)).texts[0]
    assert marked in made
    words = made.split()
    assert abs(sum(word[0] != "m" or not word[1:].isdigit() for word in words) / len(words) - strength) < 0.01


@given(spans=st.integers(2, 16), seed=st.integers(0, 2**32))
def test_copy_paste_in_pieces_keeps_every_piece_and_their_order(spans, seed):
    marked = [f"m{i}" for i in range(64)]
    attack = attacks.CopyPaste(strength=0.5, spans=spans)
    made = attacks.apply(attack, [" ".join(marked)], seed=seed, tools=TOOLS).texts[0].split()
    assert [word for word in made if word in set(marked)] == marked
    breaks = sum(one in marked and other not in marked for one, other in zip(made, [*made[1:], ""]))
    assert breaks <= spans


@pytest.mark.parametrize(("side", "kept"), [("end", "a b c d e"), ("start", " f g h i j")])
def test_truncation_cuts_the_side_asked_for(side, kept):
    attack = attacks.Truncate(strength=0.5, side=side)
    assert attacks.apply(attack, ["a b c d e f g h i j"], seed=0).texts[0] == kept


def test_truncation_on_both_sides_keeps_a_window():
    attack = attacks.Truncate(strength=0.7, side="both")
    found = {attacks.apply(attack, ["a b c d e f g h i j"], seed=seed).texts[0].strip() for seed in range(40)}
    assert {"a b c", "h i j", "d e f"} <= found and all(one in "a b c d e f g h i j" for one in found)


def test_a_typo_is_one_slip_of_the_keyboard():
    words = ["keyboard"] * 300
    made = attacks.apply("typo:1", [" ".join(words)], seed=5).texts[0].split()
    kinds = set()
    for word in made:
        if len(word) == 8 and sorted(word) != sorted("keyboard"):
            ((right, wrong),) = [(one, other) for one, other in zip("keyboard", word) if one != other]
            assert wrong in character_level.NEIGHBOURS[right]
            kinds.add("neighbour")
        else:
            kinds.add(len(word))
            assert abs(len(word) - 8) <= 1
    assert kinds == {"neighbour", 7, 8, 9}
    assert character_level.NEIGHBOURS["s"] == "weadzx"


def test_a_chain_runs_its_steps_in_order_with_streams_of_their_own():
    chain = attacks.compose(["delete:0.2", "delete:0.2", "case:1"])
    made = attacks.apply(chain, [TEXT * 5], seed=1)
    once = attacks.apply("delete:0.2", [TEXT * 5], seed=1)
    assert made.word_edits[0] > once.word_edits[0]  # the second step did not delete at the same places again
    assert set(made.texts[0].lower().split()) <= set(once.texts[0].lower().split())
    assert attacks.label(chain) == "delete 20 % + delete 20 % + case 100 %"
    assert attacks.compose([chain, "typo:0.1"]).steps == (*chain.steps, attacks.parse_attack("typo:0.1"))


def test_an_evaluation_takes_one_attack_at_two_sides_and_temperatures():
    given = [
        "truncate:0.5",
        {"attack": "truncate", "strength": 0.5, "side": "start"},
        {"attack": "truncate", "strength": 0.25, "side": "both"},
        {"attack": "paraphrase", "block_words": 32},
        {"attack": "paraphrase", "block_words": 32, "temperature": 0},
    ]
    settings = config.load("configs/watermark/evaluate-tiny.yaml", (f"attacks={json.dumps(given)}",), Evaluate)
    names = settings.named_attacks()
    assert list(names) == [
        "truncate-50",
        "truncate-50-start",
        "truncate-25",  # alone: the name that files of earlier runs have
        "paraphrase-100-blocks-of-32-words",
        "paraphrase-100-temperature-0-blocks-of-32-words",
    ]
    assert [attacks.label(attack) for attack in names.values()] == [
        "truncate 50 %",
        "truncate 50 %, start",
        "truncate 25 %, both",
        "paraphrase 100 %, blocks of 32 words",
        "paraphrase 100 %, temperature 0, blocks of 32 words",
    ]


def test_token_edits_go_through_the_tokenizer():
    attack = {"attack": "delete", "strength": 0.5, "unit": "token"}
    made = attacks.apply(attack, [TEXT], seed=0, tools=attacks.Tools(tokenizer=Letters())).texts[0]
    assert 0.3 * len(TEXT) < len(made) < 0.7 * len(TEXT)
    with pytest.raises(ValueError, match="'delete' with unit='token' needs Tools"):
        attacks.apply(attack, [TEXT], seed=0)


def test_rewriting_is_handed_to_the_model_in_one_call():
    calls = []

    def rewrite(attack, texts, *, seed, indices):
        calls.append((attack.attack, list(indices), seed))
        return [text.upper() for text in texts]

    made = attacks.apply("paraphrase", ["a b", "c d"], seed=7, tools=attacks.Tools(rewrite=rewrite), indices=[4, 9])
    assert made.texts == ["A B", "C D"] and calls == [("paraphrase", [4, 9], 7)]
    assert made.word_edits.tolist() == [1, 1]


def distance(one, other):
    """Levenshtein's distance by its reference."""
    if not one or not other:
        return len(one) + len(other)
    return min(
        distance(one[1:], other) + 1, distance(one, other[1:]) + 1, distance(one[1:], other[1:]) + (one[0] != other[0])
    )


@given(one=st.text("abc", min_size=1, max_size=5), other=st.text("abc", max_size=5))
def test_the_realised_edit_rate_is_levenshteins_distance(one, other):
    assert attacks.edit_rate(one, other) == pytest.approx(distance(one, other) / len(one))


def test_draws_of_one_text_do_not_repeat():
    draws = random_draws.Draws(0, step=0, site="test", row=1)
    first, second = draws.uniform(50), draws.uniform(50)
    assert not np.intersect1d(first, second).size
    expected = philox.uniform(philox.words(0, step=0, site="test/0", rows=np.array([1]), num_elements=50)[0])
    np.testing.assert_array_equal(first, expected)


@pytest.mark.parametrize(
    ("given_attack", "message"),
    [
        ("delet:0.3", "'delet' is unknown, the nearest is delete"),
        ("qqqq", "'qqqq' is unknown, wanted one of delete, insert"),
        ("delete:1.5", "strength is 1.5: input should be less than or equal to 1"),
        ("delete:-0.1", "strength is -0.1: input should be greater than or equal to 0"),
        ("copy_paste:1", "strength is 1.0: input should be less than 1"),
        ("delete:much", "strength 'much' is not a number"),
        ("delete", "strength"),
        ({"attack": "typo", "strength": 0.1, "side": "end"}, "side is 'end'"),
        ({"strength": 0.1}, "attack None is unknown"),
    ],
)
def test_a_wrong_attack_is_refused_with_its_value(given_attack, message):
    with pytest.raises(ValueError, match=message):
        attacks.parse_attack(given_attack)


def test_what_an_attack_lacks_is_named():
    with pytest.raises(ValueError, match="0 human texts have 0 words, 99 are wanted"):
        attacks.apply("copy_paste:0.75", ["w " * 33], seed=0)
    with pytest.raises(ValueError, match="'paraphrase' needs a language model"):
        attacks.apply("paraphrase", [TEXT], seed=0)
    with pytest.raises(ValueError, match="1 indices for 2 texts"):
        attacks.apply("case:1", [TEXT, TEXT], seed=0, indices=[0])
    with pytest.raises(ValueError, match="wanted at least one attack"):
        attacks.compose([])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attacks=[delet:0.3]", "the nearest is delete"),
        ("attacks=[delete:1.3]", "less than or equal to 1"),
        ("attacks=[typo:0.3, typo:0.3]", "'typo-30' is given twice"),
        ("schemes.x={scheme: kgww}", "'kgww' is unknown, the nearest is kgw"),
        ("schemes={human: {scheme: kgw}}", "the name 'human' is taken"),
        ("detect.lengths=[50, 25]", "wanted ascending numbers"),
        ("detect.fprs=[1.5]", "wanted numbers in"),
        ("generate.promts=3", "the nearest is generate.prompts"),
    ],
)
def test_a_wrong_configuration_is_refused_with_its_place(override, message):
    with pytest.raises(ValueError, match=message):
        config.load("configs/watermark/evaluate-tiny.yaml", (override,), Evaluate)
