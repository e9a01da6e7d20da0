"""Rewriting: blocks of sentences, cleaned replies, and a tiny model that answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.watermark.attack import attacks, rewrite
from jaxbench.watermark.study import evaluate_models

TEXT = "First one is short. The second one is longer, says who? A third: yes! And a last one without an end"


@given(text=st.text("ab. !?\n\"'", max_size=80), words=st.integers(1, 20))
def test_blocks_joined_are_the_text(text, words):
    assert "".join(rewrite.blocks(text, words)) == text


def test_blocks_end_after_sentences_and_stay_near_their_size():
    assert rewrite.blocks(TEXT, 12) == [
        "First one is short. The second one is longer, says who?",
        " A third: yes! And a last one without an end",
    ]
    assert len(rewrite.blocks(TEXT, 1)) == 4
    assert rewrite.blocks("one long sentence of seven words here", 2) == ["one long sentence of seven words here"]


def test_a_list_without_a_full_stop_is_cut_where_a_long_sentence_is_not():
    sentence, listed = " ".join(["word"] * rewrite.LONGEST), "  ".join(["item"] * (rewrite.LONGEST + 25)) + " \n"
    assert rewrite.blocks(sentence, 48) == [sentence]
    found = rewrite.blocks(listed, 48)
    assert [len(block.split()) for block in found] == [48] * 8 + [41] and "".join(found) == listed
    behind = rewrite.blocks(f"A sentence. {listed}", 48)
    assert behind[0] == "A sentence." and len(behind) == 10 and "".join(behind) == f"A sentence. {listed}"


def test_a_block_that_the_model_cannot_take_is_named_by_its_text(rewriter):
    tools = attacks.Tools(rewrite=rewriter)
    with pytest.raises(ValueError, match="text 7 .* has a block of .* more than the model's context of 512"):
        attacks.apply({"attack": "paraphrase", "block_words": 400}, ["a", "b " * 399], seed=0, tools=tools,
                      indices=[3, 7])  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ('"A text."', "A text."),
        ("Sure, here is the text:\n\nA text: so.", "A text: so."),
        ("Here's a rewritten version: A text.", "A text."),
        ("  A text. ", "A text."),
        ("", ""),
    ],
)
def test_replies_lose_quotation_marks_and_lead_ins(reply, text):
    assert rewrite.clean(reply) == text


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    evaluate_models.make_tiny(folder)
    return rewrite.Rewriter(folder, batch_size=4)


WORDS = "the object is a list of values and the name of the class is not in this module. " * 3


@pytest.mark.parametrize("name", ["paraphrase", "back_translate"])
def test_a_rewritten_text_depends_on_seed_and_index_and_not_on_its_batch(rewriter, name):
    attack = {"attack": name, "block_words": 20}
    tools = attacks.Tools(rewrite=rewriter)
    together = attacks.apply(attack, [WORDS, WORDS, ""], seed=1, tools=tools)
    alone = attacks.apply(attack, [WORDS], seed=1, tools=tools, indices=[1])
    assert alone.texts[0] == together.texts[1] != together.texts[0]
    assert together.texts[2] == ""
    assert together.word_edits[0] > 0.5
    other = attacks.apply(attack, [WORDS], seed=2, tools=tools, indices=[1])
    assert other.texts[0] != alone.texts[0]


def test_a_reply_is_as_long_beside_a_longer_block_as_alone_and_follows_all_bits_of_the_seed(rewriter):
    attack, tools = {"attack": "paraphrase", "block_words": 100}, attacks.Tools(rewrite=rewriter)
    short = "the object is a list of values."
    alone = attacks.apply(attack, [short], seed=1, tools=tools, indices=[4]).texts[0]
    assert alone == attacks.apply(attack, [short, WORDS], seed=1, tools=tools, indices=[4, 5]).texts[0]
    assert alone != attacks.apply(attack, [short], seed=1 + 2**32, tools=tools, indices=[4]).texts[0]


def test_a_block_whose_translation_back_has_no_reply_stays_as_it_was(monkeypatch):
    def answers(self, prompts, originals, row_ids, *, seed, temperature):
        if "into French" in prompts[0]:
            return [f"Voila: {text}" for text in originals]
        return ["" if "second" in text else "Back." for text in originals]

    monkeypatch.setattr(rewrite.Rewriter, "_answer", answers)
    attack = attacks.parse_attack({"attack": "back_translate", "block_words": 8})
    text = "The first block has just eight words here.\n The second block has just eight words too."
    assert rewrite.Rewriter(None)(attack, [text], seed=0) == ["Back.\n The second block has just eight words too."]


def test_a_rewriting_step_has_draws_of_its_own_in_each_place_of_a_chain():
    seeds = []
    tools = attacks.Tools(rewrite=lambda attack, texts, *, seed, indices: seeds.append(seed) or list(texts))
    chain = {"attack": "chain", "steps": [{"attack": "paraphrase"}, {"attack": "back_translate"}] * 2}
    attacks.apply(chain, ["a text"], seed=7, tools=tools)
    attacks.apply({"attack": "paraphrase"}, ["a text"], seed=7, tools=tools)
    assert seeds[0] == seeds[4] == 7 and len(set(seeds)) == 4


def test_strength_is_the_share_of_blocks(rewriter):
    tools = attacks.Tools(rewrite=rewriter)
    text = "".join(f"Sentence number {i} is here and it has some more words in it. " for i in range(12))
    made = attacks.apply({"attack": "paraphrase", "strength": 0.5, "block_words": 8}, [text], seed=3, tools=tools)
    kept = sum(f"Sentence number {i} is here" in made.texts[0] for i in range(12))
    assert 2 <= kept <= 10
    weak = attacks.apply({"attack": "paraphrase", "strength": 0.0}, [text], seed=3, tools=tools)
    assert weak.texts == [text]
