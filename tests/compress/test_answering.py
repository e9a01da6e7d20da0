"""Questions over passages: what stands in front of an answer, figures between nothing and everything, asking a text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench import initial
from jaxbench.compress import answer_run, answering, artifact, ask, auto, document, needles, questions, reading
from jaxbench.compress import config as shapes
from jaxbench.lora.config import LoraConfig
from jaxbench.parity import cases
from jaxbench.pretrained import tokenizer, weights

DECODER = cases.LLAMA.model_copy(update={"vocab_size": 49152, "num_layers": 3, "max_seq_len": 512})
CONFIG = cases.COMPRESSOR.model_copy(
    update={"decoder": DECODER, "chunk": 16, "lora": LoraConfig(rank=2, targets=("q_proj", "v_proj"))}
)
SIZE = DECODER.vocab_size
NONE = "Unanswerable."


@pytest.fixture(scope="module")
def words():
    return tokenizer.load_tokenizer(None)


@pytest.fixture(scope="module")
def held():
    params = {name: value.astype(np.float32) for name, value in initial.initial_params(DECODER, 0).items()}
    return weights.Checkpoint(DECODER, params, Path("tiny"), "tiny", "1" * 64)


@pytest.fixture(scope="module")
def compressor(held, words):
    own = shapes.initial_params(CONFIG, 3, distinct=True)
    own = {name: value.astype(np.float32) for name, value in own.items() if shapes.is_trained(name)}
    trained = artifact.Trained(CONFIG, own, held.sha256, "abc", {})
    return auto.AutoCompressor.from_weights(trained, held, words, 4, "float32")


@pytest.fixture(scope="module")
def side(compressor, held, words):
    return answer_run.side(DECODER, compressor.reader(held.params), words, "float32")


@pytest.fixture(scope="module")
def asked(words):
    def ids(text):
        return np.array(words.encode(text, add_special=False), np.int32)

    rows = [
        (
            "Mills",
            "The old mill was built in 1712 by Ann Smith, who owned the land by the river.",
            "Who built it?",
            ("Ann",),
        ),
        ("Mills", "The old mill was built in 1712 by Ann Smith, who owned the land by the river.", "Who sold it?", ()),
        (
            "Oaks",
            "Oak is hard and grows slowly; it has been used for ships since ever.",
            "What is hard?",
            ("Oak", "oak"),
        ),
    ]
    return [
        questions.Question(title, ids(passage), ids(questions.asked(what)),
                           questions.answer_ids(right[0] if right else questions.NO_ANSWER, words), right)
        for title, passage, what, right in rows
    ]  # fmt: skip


def test_each_arm_has_its_passage_in_front_of_the_question(compressor, asked):
    found = {arm: answering.prompts(compressor, asked, arm) for arm in (*answering.CLEAR_ARMS, *answering.VECTOR_ARMS)}
    for i, each in enumerate(asked):
        question, passage = each.question.tolist(), each.context.tolist()
        assert found["closed"][i].ids == [SIZE, *question]
        assert found["open"][i].ids == [SIZE, *passage, *question]
        assert found["keep"][i].ids == [SIZE, *passage[: -(-len(passage) // 4)], *question]
        own, other = found["vectors"][i], found["others"][i]
        assert len(own.vectors) == -(-len(passage) // 4) + 1 and own.ids == [
            *range(SIZE, SIZE + len(own.vectors)),
            *question,
        ]
        assert len(found["keep"][i].ids) == len(own.ids), "as many positions as vectors have"
        for prompt in (own, other, found["closed"][i]):
            np.testing.assert_array_equal(prompt.vectors[-1], compressor.tags[answering.ANSWER])
    np.testing.assert_array_equal(found["others"][0].vectors, found["vectors"][2].vectors)
    np.testing.assert_array_equal(found["others"][2].vectors, found["vectors"][0].vectors)
    with pytest.raises(ValueError, match="arm='clear'; wanted one of closed, open, keep, others, vectors"):
        answering.prompts(compressor, asked, "clear")
    with pytest.raises(ValueError, match="all questions are about 'Mills'"):
        answering.prompts(compressor, asked[:2], "others")


def test_a_prompt_of_a_row_in_training_and_of_an_answer_are_the_same(compressor, asked):
    from jaxbench.compress import rows

    one = asked[0]
    row = rows.row(one.context, one.answer, rows.ANSWER, CONFIG, 4, 2, clear=one.question)
    is_input, count = row.positions >= 0, row.groups.size
    numbers = row.inputs[is_input][: -len(one.answer) + 1]
    prompt = answering.prompts(compressor, [one], "vectors")[0]
    tag = SIZE + len(prompt.vectors) - 1
    renumbered = [tag if each == SIZE + count + rows.ANSWER else each for each in numbers.tolist()]
    assert renumbered == prompt.ids


def test_answers_of_prompts_together_are_those_of_each_alone(compressor, side, asked):
    prompts = answering.prompts(compressor, asked, "vectors")
    together = answering.answered(side.reader, side.generate, compressor.tokenizer, asked, prompts)
    for prompt, each, found in zip(prompts, asked, together):
        alone = answering.answered(side.reader, side.generate, compressor.tokenizer, [each], [prompt])[0]
        assert alone.said == found.said and alone.nats == pytest.approx(found.nats, abs=1e-4)


def test_figures_are_shares_of_what_a_passage_gives(asked):
    found = {
        "closed": [answering.Answered(4.0, "no idea"), answering.Answered(9.0, "Tom"), answering.Answered(4.0, "no")],
        "open": [answering.Answered(2.0, "Ann"), answering.Answered(9.0, NONE), answering.Answered(1.0, "Oak!")],
        "vectors-4": [answering.Answered(3.0, "ann"), answering.Answered(9.0, "Ann"), answering.Answered(2.5, NONE)],
    }  # fmt: skip
    rows = answering.figures(found, asked)
    assert rows["closed"]["recovery"][0] == 0 and rows["open"]["recovery"][0] == 1
    assert rows["open"]["exact_match"][0] == 1 and rows["vectors-4"]["exact_match"][0] == 0.5
    assert rows["vectors-4"]["recovery"][0] == pytest.approx(2.5 / 5) and rows["vectors-4"]["nats"][0] == 2.75
    assert rows["vectors-4"]["f1_retained"][0] == pytest.approx(0.5)
    assert rows["open"]["no_answer"] == {"said_where_there_is_none": 1.0, "said_where_there_is_one": 0.0}
    assert rows["vectors-4"]["no_answer"] == {"said_where_there_is_none": 0.0, "said_where_there_is_one": 0.5}
    assert answer_run.table(rows).row_count == 3


def test_a_run_keeps_each_arm_and_goes_on(compressor, side, held, asked, tmp_path):
    plain, said = answer_run.side(DECODER, held.params, compressor.tokenizer, "float32"), []
    run = (compressor, side, plain, asked, [4], tmp_path)
    rows = answer_run.run(*run, say=said.append)
    assert list(rows) == ["closed", "open", "untuned", "keep-4", "others-4", "vectors-4"]
    assert rows["vectors-4"]["positions"] == rows["keep-4"]["positions"] < rows["open"]["positions"]
    again = []
    assert repr(answer_run.run(*run, say=again.append)) == repr(rows)
    assert all("finished before" in line for line in again) and len(again) == len(said) == 6


def test_a_peer_that_keeps_more_than_it_is_asked_for_is_asked_for_less_too(compressor, side, asked, tmp_path):
    def shorten(texts, ratio):
        return [" ".join(text.split()[: 1 + len(text.split()) // ratio]) for text in texts]

    rows = answer_run.run(compressor, side, None, asked, [4], tmp_path, shorten=shorten, say=lambda line: None)
    assert [name for name in rows if name.startswith("llmlingua")] == [f"llmlingua-{r}" for r in (4, 8, 16)]
    kept = json.loads((tmp_path / "shortened-8.json").read_text())
    assert kept == shorten([compressor.tokenizer.decode(each.context.tolist()) for each in asked], 8)


def test_an_answer_is_the_one_that_is_most_probable_beside_there_is_none(compressor, side, words):
    result = compressor.compress("The old mill was built in 1712 by Ann Smith. " * 6)
    found = ask.ask(compressor, side.reader, side.generate, result, "Who built it?")
    question = np.array(words.encode(questions.asked("Who built it?"), add_special=False), np.int32)
    best = []
    for start, end in ask.blocks(result, 16):
        prompt = answering.behind(compressor, result.vectors[start:end], question)
        text = answering.generated(side.generate, words, [prompt])[0]
        logs = []
        for each in (text, questions.NO_ANSWER):
            answer = questions.answer_ids(each, words)
            row = reading.Row(np.array([*prompt.ids, *answer[:-1]], np.int32), answer, prompt.vectors)
            logs.append(-float(side.reader([row])[0].losses.sum()))
        best.append((logs[0] - logs[1], text, (int(result.spans[start, 0]), int(result.spans[end - 1, 1]))))
    margin, text, span = max(best)
    assert found.margin == pytest.approx(margin, abs=1e-3) and found.text == text and found.span == span
    with pytest.raises(ValueError, match="the question is ' '; wanted words"):
        ask.ask(compressor, side.reader, side.generate, result, " ")
    with pytest.raises(ValueError, match="made for compressor xyz, this is abc"):
        ask.ask(compressor, side.reader, side.generate, result._replace(compressor_id="xyz"), "Who?")


def test_a_text_without_an_answer_is_said_to_have_none(compressor, side, words):
    result = compressor.compress("The old mill was built in 1712.")

    class Silent:
        def __call__(self, ids, **how):
            from jaxbench import prompts

            tokens = questions.answer_ids(NONE, words)
            return prompts.Generation(np.tile(tokens, (len(ids), 1)), np.full(len(ids), len(tokens)))

    found = ask.ask(compressor, side.reader, Silent(), result, "Who sold it?")
    assert found.text is None and found.span == (0, 31)


@given(length=st.integers(1, 300), tokens=st.sampled_from([16, 32, 64]), ratio=st.sampled_from([2, 4, 8]))
def test_blocks_hold_every_vector_once_and_no_more_tokens_than_wanted(length, tokens, ratio):
    places = [first + shapes.group_positions(min(16, length - first), ratio, 16) for first in range(0, length, 16)]
    groups = [shapes.group_positions(min(16, length - first), ratio, 16) for first in range(0, length, 16)]
    positions = np.concatenate([p[g >= 0] for p, g in zip(places, groups)]).astype(np.int32)
    count = len(positions)
    result = document.CompressionResult(
        np.zeros((count, 2), np.float32), np.zeros((count, 2), np.int64), positions, ratio, length, 0.0, "", ""
    )
    found = ask.blocks(result, tokens)
    assert found[0][0] == 0 and found[-1][1] == count
    assert all(before[1] == after[0] for before, after in zip(found, found[1:]))
    assert all(a < b and positions[b - 1] - positions[a] < tokens and b - a <= tokens // ratio for a, b in found)


def test_needles_stand_at_their_depth_and_are_counted_by_kind(compressor, side, words, tmp_path):
    sentence = words.encode(" The old mill stood by the river. It had no door.", add_special=False)
    texts = [np.array(sentence * 12, np.int32)[: 120 + i] for i in range(2)]
    drawn = needles.needles(texts, words, length=100, count=2, seed=0)
    assert len(drawn) == 2 * 3 * 2 and {each.document for each in drawn} == {0, 1}
    for each in drawn:
        text = words.decode(each.ids.tolist())
        assert each.answer in text and len(each.ids) > 100
        if each.kind == "number":
            assert each.answer.isdecimal() and len(each.answer) == 5
        place = text.index("The " + ("number" if each.kind == "number" else "keeper")) / len(text)
        assert abs(place - each.depth) < 0.25
    said = []
    rows = needles.run(compressor, side, drawn, [4], tmp_path, say=said.append)
    assert list(rows) == ["clear", "vectors-4"] and len(rows["clear"]) == 6
    assert needles.run(compressor, side, drawn, [4], tmp_path, say=said.append) == rows
    assert [line.endswith("(finished before)") for line in said] == [False, False, True, True]
    right = [each.kind == "name" and each.depth == 0.5 for each in drawn]
    table = needles.figures(drawn, np.array(right, float))
    assert [row["found"][0] for row in table] == [0, 0, 0, 0, 1, 0]
    ends = [row["found"][1:] for row in table]  # Wilson's, of two texts
    assert ends[4] == pytest.approx((0.342, 1), abs=1e-3) and ends[0] == pytest.approx((0, 0.658), abs=1e-3)
    with pytest.raises(ValueError, match="the longest text has 121 tokens; wanted 500"):
        needles.needles(texts, words, length=500, count=1, seed=0)
