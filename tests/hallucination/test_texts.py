"""Data, layout, lexical evidence, sentences, copying heads."""

import json
import time
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import initial
from jaxbench.config import TransformerConfig
from jaxbench.hallucination import copy_heads, layout, lexical, pooled, ragtruth, sentences
from tests.hallucination import small


def test_a_folder_is_read_with_sources_and_spans(tmp_path):
    data = ragtruth.load(small.write(tmp_path))
    assert [response.id for response in data.responses] == ["r1", "r2", "r3", "r4"]
    assert data.responses[1].response[slice(16, 20)] == "1850"
    assert data.source(data.responses[3]).asked.startswith("Summarize")
    assert data.source(data.responses[0]).asked == "when was the mill built"


EVIDENT = {"label_type": "Evident Conflict"}


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            "responses",
            {"source_id": "s9"},
            "responses.jsonl line 1: response r1 names source s9, which is not in .*sources.jsonl",
        ),
        ("responses", {"labels": [{"start": 3, "end": 99, "label_type": "Evident Conflict"}]}, "3..99 is outside"),
        ("responses", {"labels": [{"start": 0, "end": 2, "label_type": "Lie"}]}, "labels.0.label_type"),
        (
            "responses",  # places of UTF-16 units: one behind, after a letter outside of the first plane
            {"response": "\U0001f600 In 1850.", "labels": [{"start": 6, "end": 10, "text": "1850"} | EVIDENT]},
            "line 1: .*label 6..10 is on '850.', and its text is '1850'; wanted places in characters",
        ),
        ("responses", {"id": "r2"}, "id r2 is there twice"),
        ("responses", {"response": None}, "response: Input should be a valid string"),
        ("responses", {"response": "?! \u2026"}, "responses.jsonl line 1: response: .*has no letter and no digit"),
        ("responses", {"response": ""}, "responses.jsonl line 1: response: .*'' has no letter and no digit"),
        ("responses", {"response": "Cut \ud83d"}, r"line 1: response: .*'Cut \\ud83d' has a lone surrogate"),
        ("sources", {"context": " \n"}, "sources.jsonl line 1: context: .* is empty"),
        ("sources", {"question": "\udc00"}, "sources.jsonl line 1: question: .*has a lone surrogate"),
        ("sources", {"task": "Poem"}, "task: Input should be"),
        ("sources", {"source_id": "s2"}, "id s2 is there twice"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, name, change, match):
    path = small.write(tmp_path) / f"{name}.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | change), *others]))
    with pytest.raises(ValueError, match=match):
        ragtruth.load(tmp_path)


def test_a_number_that_python_does_not_read_is_named_by_file_and_line(tmp_path):
    path = small.write(tmp_path) / "responses.jsonl"
    path.write_text(path.read_text().replace('"start": 16', '"start": ' + "1" * 5000))
    with pytest.raises(ValueError, match=r"responses\.jsonl line 2: no JSON \(Exceeds the limit"):
        ragtruth.load(tmp_path)


def test_responses_without_labels_are_no_answers_without_hallucinations(tmp_path):
    path = small.write(tmp_path) / "responses.jsonl"
    first, *others = path.read_text().splitlines()
    bare = {name: value for name, value in json.loads(first).items() if name != "labels"}
    ragtruth.check_labels(ragtruth.load(tmp_path), tmp_path)
    path.write_text("\n".join([json.dumps(bare), *others]))
    data = ragtruth.load(tmp_path)  # their features can be read
    assert data.responses[0].labels is None and data.responses[2].labels == ()
    with pytest.raises(ValueError, match="1 of 4 responses have no `labels`, first r1"):
        ragtruth.check_labels(data, tmp_path)


def test_files_cut_in_half_and_missing_ones_are_named(tmp_path):
    import gzip

    folder = small.write(tmp_path)
    text = (folder / "responses.jsonl").read_bytes()
    (folder / "responses.jsonl").unlink()
    with pytest.raises(ValueError, match="0 responses"):
        ragtruth.load(folder)
    (folder / "responses.jsonl.gz").write_bytes(gzip.compress(text)[:120])
    with pytest.raises(ValueError, match="responses.jsonl.gz: cannot be read behind line"):
        ragtruth.load(folder)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(8, 64))
def test_packing_keeps_every_response_once_and_fits(lengths, capacity):
    rows = layout.pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= capacity for row in rows)


def test_a_packed_row_holds_no_more_responses_than_asked():
    rows = layout.pack([20] * 25, 512, max_responses=16)
    assert sorted(map(len, rows)) == [9, 16] and len(layout.pack([20] * 25, 512)) == 1


def test_a_context_reaching_the_last_token_and_an_empty_response_are_refused():
    with pytest.raises(ValueError, match="ends before the last"):
        layout.prompt_arrays([layout.Text([1, 2, 3], range(1, 3))], share=0.1)
    with pytest.raises(ValueError, match=r"got \[\[2, 0\]\]"):
        layout.response_arrays([layout.Text([1, 2, 3], range(0, 1))], [[[1, 2], []]])


def test_a_folder_without_a_response_is_refused(tmp_path):
    path = small.write(tmp_path) / "responses.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"--data=.*: responses\.jsonl: 0 responses; wanted some"):
        ragtruth.load(tmp_path)


@given(st.text(alphabet="ab .!?\n1", max_size=60))
def test_sentences_are_in_order_and_hold_every_letter(text):
    found = sentences.sentences(text)
    assert all(a < b for a, b in found) and all(x[1] <= y[0] for x, y in zip(found, found[1:]))
    kept = "".join(text[a:b] for a, b in found)
    assert [c for c in kept if c.isalnum()] == [c for c in text if c.isalnum()]


@pytest.mark.parametrize("after", ["", "\n", " ", "\n\n "])
def test_the_last_sentence_ends_with_its_last_letter(after):
    assert sentences.sentences("It is open. It is red" + after) == [(0, 11), (12, 21)]


def test_abbreviations_and_numbered_lines_end_no_sentence():
    text = "1. Dr. Reed met J. Smith at 5 p.m. today. It rained!\n2. He left."
    assert [text[a:b] for a, b in sentences.sentences(text)] == [
        "1. Dr. Reed met J. Smith at 5 p.m. today.", "It rained!", "2. He left.",
    ]  # fmt: skip
    for number in ("5551234", "18005551234", "9780306406157"):  # of a telephone, of a book
        assert sentences.sentences(f"Call {number}. He left.") == [
            (0, 6 + len(number)),
            (7 + len(number), 15 + len(number)),
        ]


def test_a_long_run_of_marks_is_looked_at_once():
    text, started = "." * 50_000 + "x. It rained.", time.process_time()
    assert [text[a:b] for a, b in sentences.sentences(text)] == [text[:50_002], "It rained."]
    assert time.process_time() - started < 20  # over a minute by the square of the run's length


def test_a_token_with_the_space_before_its_word_is_of_the_words_sentence():
    text = "It burned. I saw. A cat ran.\n\n東京です。人です。"
    tokens = [(0, 2), (2, 9), (9, 10), (10, 12), (12, 16), (16, 17), (17, 19), (19, 23), (23, 27), (27, 30)]
    tokens += [(30, 32), (32, 34), (34, 35), (35, 36), (35, 36), (36, 39)]  # two tokens of one character
    found = sentences.tokens_of(sentences.sentences(text), np.array(tokens))
    assert found.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_sentences_end_at_the_marks_of_other_scripts():
    text = "東京は大きい。「本当ですか？」人口は多い！！ 彼は言った。क्या है। हाँ"
    assert [text[a:b] for a, b in sentences.sentences(text)] == [
        "東京は大きい。", "「本当ですか？」", "人口は多い！！", "彼は言った。", "क्या है।", "हाँ",
    ]  # fmt: skip


def test_counts_see_new_words_numbers_and_names_and_forgive_endings():
    lexicon = lexical.Lexicon("The mills were built in 1820 by Jonas Reed.")
    mine = lexical.counts(lexical.tokens("The mill, built by Jonas Reed in 1820, burns."), lexicon)
    assert dict(zip(lexical.COUNTS, mine))["novel_words"] == 1
    wrong = dict(zip(lexical.COUNTS, lexical.counts(lexical.tokens("Built in 1850 by Anna Holm."), lexicon)))
    assert (wrong["novel_numbers"], wrong["novel_names"], wrong["novel_words"]) == (1, 2, 3)


SPOKEN = "The café of Zürich serves crème brûlée, Ångström's 3 piñatas."


def test_a_word_with_a_raised_digit_is_a_word_and_new_if_the_context_lacks_it():
    lexicon = lexical.Lexicon("The mill has 3 wheels and gives off CO₂.")
    carbon, area = lexical.tokens("CO₂ km²")
    assert not carbon.is_number and not lexical.is_novel(carbon, lexicon)
    assert not area.is_number and lexical.is_novel(area, lexicon)


def test_a_text_in_another_unicode_form_says_nothing_new():
    composed, taken_apart = (unicodedata.normalize(form, SPOKEN) for form in ("NFC", "NFD"))
    assert len(taken_apart) > len(composed)
    for context, response in ((composed, taken_apart), (taken_apart, composed)):
        found, known = lexical.tokens(response), lexical.tokens(context)
        assert lexical.counts(found, lexical.Lexicon(context)).tolist() == [10, 0, 0, 0, 0, 0, 0]
        assert [token._replace(start=0, end=0) for token in found] == [
            token._replace(start=0, end=0) for token in known
        ]
        words = [unicodedata.normalize("NFC", response[token.start : token.end]) for token in found]
        assert words == ["The", "café", "of", "Zürich", "serves", "crème", "brûlée", "Ångström's", "3", "piñatas"]


def test_marks_that_no_letter_is_composed_with_are_of_their_word():
    text = "हिन्दी भाषा, q\u0307r's"
    assert [text[token.start : token.end] for token in lexical.tokens(text)] == ["हिन्दी", "भाषा", "q\u0307r's"]


def test_pooling_by_sentence_averages_to_the_response():
    random, text = np.random.default_rng(0), "It rained. Anna left in 1850."
    size = len(text)
    features = {name: random.random((2, 3, size)).astype(np.float16) for name in pooled.HEADS}
    features |= {name: random.random(size) for name in ("loss", "entropy", "loss_without", "entropy_without")}
    features |= {"states": random.random((size, 4)), "parametric": random.random((4, 2))}
    features |= {"parametric_slots": np.array([1, 5, 12, 20]), "offsets": np.array([(i, i + 1) for i in range(size)])}
    whole, parts = (pooled.pool(features, text, lexical.Lexicon("It rained."), by_sentence=by) for by in (False, True))
    assert parts.spans == [(0, 10), (11, 29)] and whole.spans == [(0, 29)]
    counts = np.array([11, 18])  # the space between belongs to what stands before
    for name in ("external", "states"):
        np.testing.assert_allclose(counts @ parts.families[name] / 29, whole.families[name][0])
    assert parts.families["lexical"][:, 3].tolist() == [0, 1] and whole.families["parametric"].shape == (1, 2)
    assert all(np.isfinite(value).all() for value in parts.families.values())


CONFIG = TransformerConfig(
    vocab_size=40, d_model=16, d_ff=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, max_seq_len=16,
    tie_embeddings=False,
)  # fmt: skip


def test_a_planted_copying_head_is_first_and_traces_are_those_of_whole_circuits():
    params = initial.initial_params(CONFIG, 0, distinct=True)
    embedding = params["embed.embedding"]
    directions = np.linalg.svd(embedding)[2][:6].T
    params["head.kernel"] = embedding.T
    params["layers.1.attention.v_proj.kernel"][:, 6:] = directions
    params["layers.1.attention.o_proj.kernel"][18:] = 30 * directions.T
    ranked = copy_heads.ranked(CONFIG, params, num_rows=None)
    assert (ranked[0].layer, ranked[0].head) == (1, 3) and len(ranked) == 8
    made = copy_heads.circuit(CONFIG, params, 1, 3)
    dense = made.left.astype(float) @ made.right
    assert copy_heads.trace(made) == pytest.approx(np.trace(dense), rel=1e-5)
    radius = np.abs(dense).sum(1) - np.abs(np.diag(dense))
    ends = np.concatenate([np.diag(dense) - radius, np.diag(dense) + radius])
    np.testing.assert_allclose(copy_heads.disc_ends(made, np.arange(40)), ends, rtol=1e-4)
    assert copy_heads.num_outliers(np.array([1.0, 2, 3, 4, 50])) == 1
