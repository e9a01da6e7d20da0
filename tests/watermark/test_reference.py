"""The definitions in numpy: known answers, rules written out by hand, lists, orders, evidence and its deduplication."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import philox
from jaxbench.pretrained import tokenizer
from jaxbench.text import packing
from jaxbench.watermark import config, reference
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes import dip
from tests.watermark import vocabulary

VOCAB = 97
KEY = Key(0xFEDCBA9876543210)
TEXT = np.random.default_rng(0).integers(0, VOCAB, (1, 30))


def block(counter, key=KEY, site=None):
    low, high = key.halves
    return [int(w) for w in philox.philox4x32(counter, (low, high if site is None else high ^ philox.site_id(site)))]


def test_vllms_uniform_is_open_on_both_sides():
    ends = config.Gumbel(prf="vllm").shade(np.array([0, 2**32 - 1], np.uint32))
    assert ends == pytest.approx([1 / (2**24 + 1), 2**24 / (2**24 + 1)], rel=1e-8)
    assert 0 < ends[0] and ends[1] < 1


@pytest.mark.parametrize("width", [1, 3, 4, 5, 8])
def test_the_seed_of_a_context_is_a_chain_of_blocks(width):
    context = [11, 12, 13, 14, 15, 16, 17, 18][:width]
    words = [0, 0, 0, 0]
    for start in range(0, width, 4):
        part = (context[start : start + 4] + [0xFFFFFFFF] * 4)[:4]
        words = block(tuple(a ^ b for a, b in zip(part, words)), site="watermark/context")
    seeds = reference.context_seeds(reference.ContextRule(width=width), KEY, np.array([[*context, 5]]))
    assert seeds[0, width].tolist() == words[:2]


def test_skip_uses_only_the_oldest_token_of_its_window():
    rule, alone = reference.ContextRule(kind="skip", width=3), reference.ContextRule(kind="left", width=1)
    skipped = reference.context_seeds(rule, KEY, TEXT)
    np.testing.assert_array_equal(skipped[0, 3:], reference.context_seeds(alone, KEY, TEXT)[0, 1:-2])


def test_min_uses_the_token_with_the_smallest_hash():
    seeds = reference.context_seeds(reference.ContextRule(kind="min", width=4), KEY, TEXT)
    site = philox.site_id("watermark/min")
    for place in (4, 10, 29):
        window = [int(token) for token in TEXT[0, place - 4 : place]]
        token = min(window, key=lambda x: (block((x, 0, 0, site))[0], x))
        one = reference.context_seeds(reference.ContextRule(width=1), KEY, np.array([[token, 0]]))
        assert seeds[0, place].tolist() == one[0, 1].tolist()


def test_self_takes_the_least_word_over_window_and_candidate():
    seeds = reference.context_seeds(reference.ContextRule(kind="self", width=3), KEY, TEXT)
    site = philox.site_id("watermark/self")
    for place in (2, 29):
        token = int(TEXT[0, place])
        window = [int(x) for x in TEXT[0, place - 2 : place]] + [token]
        least = min(block((token >> 2, x, 0, site))[token & 3] for x in window)
        assert seeds[0, place].tolist() == [least, 0]


@pytest.mark.parametrize("scheme", ["kgw", "gumbel", "synthid"])
def test_a_word_comes_from_the_block_of_four_tokens_and_payloads_shift_it(scheme):
    scheme, seeds = config.parse_scheme(scheme), np.array([[7, 8]], np.uint32)
    for token, payload in ((0, 0), (50, 3), (96, 2)):
        shifted = (token + payload) % VOCAB
        expected = block((shifted >> 2, 7, 8, reference.site_of(scheme)))[shifted & 3]
        words = reference.token_words(
            scheme, reference.halves(KEY, 1), seeds, np.array([token]), vocab_size=VOCAB, payload=payload
        )
        assert words.tolist() == [expected]


SCHEMES = [
    config.Kgw(),
    config.Kgw(context=reference.ContextRule(kind="min", width=4), payload_bits=4),
    config.Kgw(context=reference.ContextRule(kind="self", width=4), payload_bits=4),
    config.Gumbel(payload_bits=4),
    config.Gumbel(prf="vllm"),
    config.SynthId(),
    config.Dip(),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.scheme} {s.context.kind}")
def test_the_word_of_a_token_in_a_text_is_its_word_in_the_vocabulary(scheme):
    payload = 9 if getattr(scheme, "payload_bits", 0) else 0
    found = reference.evidence(scheme, KEY, TEXT, np.array([30]), vocab_size=VOCAB, payload=payload)
    width = scheme.context.length
    for place in (width, 20, 29):
        context = TEXT[:, place - width : place]
        words = vocabulary.words(scheme, KEY, context, vocab_size=VOCAB, payload=payload)
        assert words[0, TEXT[0, place]] == found.words[0, place]


@given(st.integers(0, 2**64 - 1), st.floats(0.01, 0.99))
def test_unigrams_list_has_exactly_its_share(value, gamma):
    green = config.Unigram(gamma=gamma).green_list(Key(value), VOCAB)
    assert green.sum() == int(gamma * VOCAB)


def test_a_green_list_holds_gamma_of_the_words_on_average():
    contexts = np.arange(400)[:, None]
    scheme = config.Kgw(gamma=0.25)
    green = scheme.is_green(vocabulary.words(scheme, KEY, contexts, vocab_size=VOCAB))
    assert abs(green.mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / green.size)


@given(st.integers(2, 10), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_the_keyed_order_is_a_permutation(half, value, seed):
    bits = 2 * min(half, 5)
    keys = dip.round_keys(reference.halves(Key(value), 1), np.array([[seed, 1]], np.uint32))
    values = np.arange(2**bits, dtype=np.uint32)
    images = dip.permute(values, keys, bits)
    assert sorted(images.tolist()) == values.tolist()


def test_a_tokens_place_in_the_keyed_order_is_uniform_over_keys():
    seeds = np.stack([np.arange(8000), np.zeros(8000)], axis=-1).astype(np.uint32)
    keys = dip.round_keys(reference.halves(KEY, 1), seeds)
    for value in (0, 1, 7):
        counts = np.bincount(dip.permute(np.full(8000, value, np.uint32), keys, 4), minlength=16)
        assert ((counts - 500) ** 2 / 500).sum() < 44  # chi-square with 15 degrees of freedom, p = 1e-4


def test_orders_have_an_even_number_of_bits_that_hold_the_vocabulary():
    assert [dip.order_bits(v) for v in (2, 4, 5, 16, 17, 49152, 65536, 65537)] == [2, 2, 4, 4, 6, 16, 16, 18]


# Evidence


@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.sampled_from(["left", "min", "skip", "self"]))
def test_each_function_input_is_scored_once_at_its_first_place(ids, kind):
    scheme, tokens = config.Kgw(context=reference.ContextRule(kind=kind, width=2)), np.array([ids])
    found = reference.evidence(scheme, KEY, tokens, np.array([len(ids)]), vocab_size=VOCAB)
    seeds, seen = reference.context_seeds(scheme.context, KEY, tokens), set()
    for place, token in enumerate(ids):
        entry = (*seeds[0, place].tolist(), token)
        is_new = place >= scheme.context.length and entry not in seen
        assert found.scored[0, place] == is_new
        if place >= scheme.context.length:
            seen.add(entry)


def test_unigram_scores_each_token_once():
    found = reference.evidence(config.Unigram(), KEY, np.array([[5, 6, 5, 7, 6]]), np.array([5]), vocab_size=VOCAB)
    assert found.scored[0].tolist() == [True, True, False, True, False]
    green = config.Unigram().green_list(KEY, VOCAB)
    assert ((found.words[0] == 0) == green[[5, 6, 5, 7, 6]]).all()


def test_prompts_are_context_and_are_not_scored():
    found = reference.evidence(config.Kgw(), KEY, TEXT, np.array([30]), vocab_size=VOCAB, prompt_lengths=10)
    assert not found.scored[0, :10].any() and found.scored[0, 10]
    whole = reference.evidence(config.Kgw(), KEY, TEXT, np.array([30]), vocab_size=VOCAB)
    np.testing.assert_array_equal(found.words, whole.words)


def test_vllms_contexts_start_with_the_continuation():
    scheme = config.Gumbel(prf="vllm")
    whole = reference.evidence(scheme, KEY, TEXT, np.array([30]), vocab_size=VOCAB, prompt_lengths=10)
    alone = reference.evidence(scheme, KEY, TEXT[:, 10:], np.array([20]), vocab_size=VOCAB)
    np.testing.assert_array_equal(whole.words[:, 10:], alone.words)
    assert whole.scored[0, 10] and alone.scored[0, 0]


def test_each_row_is_read_under_its_own_key_up_to_its_length():
    tokens, keys = np.concatenate([TEXT, TEXT]), [KEY, Key(2)]
    both = reference.evidence(config.Gumbel(), keys, tokens, np.array([30, 12]), vocab_size=VOCAB)
    for row, key in enumerate(keys):
        alone = reference.evidence(config.Gumbel(), key, TEXT, np.array([30]), vocab_size=VOCAB)
        np.testing.assert_array_equal(both.words[row, :12], alone.words[0, :12])
    assert not both.scored[1, 12:].any() and both.scored[0, 12:].any()


def test_dual_keys_give_two_words_under_vllms_derivation():
    found = reference.evidence(
        config.Gumbel(dual_key_alpha=0.1), KEY, TEXT, np.array([30]), vocab_size=VOCAB
    )  # fmt: skip
    for words, label in ((found.words, "key_a"), (found.second_words, "key_b")):
        single = reference.evidence(config.Gumbel(), KEY.derive(label), TEXT, np.array([30]), vocab_size=VOCAB)
        np.testing.assert_array_equal(words, single.words)


@pytest.mark.parametrize("kind", ["left", "min"])
def test_a_repeat_under_either_of_two_keys_is_not_scored(kind):
    scheme = config.Gumbel(dual_key_alpha=0.5, context={"kind": kind, "width": 4})
    tokens = np.random.default_rng(3).zipf(1.3, (8, 80)) % VOCAB
    found = reference.evidence(scheme, KEY, tokens, vocab_size=VOCAB)
    for label in ("key_a", "key_b"):
        seeds = reference.context_seeds(scheme.context, KEY.derive(label), tokens)
        for row in range(len(tokens)):
            used = [(*seeds[row, i], tokens[row, i]) for i in np.flatnonzero(found.scored[row])]
            assert 20 < len(used) == len(set(used))


def new_seeds(tokens, **rule):
    """Return the share of positions whose seed no earlier position of the text has: what schemes that draw can mark."""
    rule, shares = reference.ContextRule(**rule), []
    for number, row in enumerate(tokens):
        seeds = reference.context_seeds(rule, Key(number + 1), row[None])[0][rule.length :]
        shares.append(len(np.unique(seeds, axis=0)) / len(seeds))
    return float(np.mean(shares))


def test_the_rule_min_gives_few_new_seeds_and_fewer_in_text_that_repeats_its_tokens():
    human = np.array(packing.real_prompts(tokenizer.load_tokenizer(), [200] * 60, packing.load_text()))
    other = np.random.default_rng(0).integers(0, 49152, human.shape)
    assert new_seeds(other, kind="min", width=4) == pytest.approx(2 / 5, abs=0.02)
    # the figures of docs/watermark.md, "Marked share"
    assert [round(100 * new_seeds(human[:, :size], kind="min", width=4)) for size in (50, 200)] == [34, 25]
    assert [round(100 * new_seeds(human, kind="left", width=width)) for width in (1, 4)] == [55, 97]


def test_texts_shorter_than_their_context_have_no_scored_position():
    for scheme, length in itertools.product(SCHEMES[:2] + SCHEMES[5:], (0, 1, 2)):
        found = reference.evidence(scheme, KEY, TEXT[:, :4], np.array([length]), vocab_size=VOCAB)
        assert found.scored.sum() == max(0, length - scheme.context.length)


def test_tokens_outside_the_vocabulary_and_missing_tables_are_named():
    with pytest.raises(ValueError, match=r"token 97 \(row 0, position 1\) is outside \[0, 97\)"):
        reference.evidence(config.Kgw(), KEY, np.array([[1, 97]]), np.array([2]), vocab_size=97)
    with pytest.raises(ValueError, match="kgw_markllm needs the tables"):
        reference.evidence(config.MarkLlmKgw(), KEY, TEXT, np.array([30]), vocab_size=97)
