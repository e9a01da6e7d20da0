"""The token classifier: what it is told, what it says, and that it says nothing of what it was trained on."""

import numpy as np
import pytest

from jaxbench.hallucination import detector, linear, metrics, token_inputs, token_scoring, token_training, unlabelled
from jaxbench.hallucination.token_inputs import Tokens, Training

TRAINING = Training(epochs=40, batch_size=8, learning_rate=0.01, d_model=16, dilations=(1, 2))


def responses(
    num: int = 48, *, signal: float = 3.0, seed: int = 0
) -> tuple[list[Tokens], list[np.ndarray], np.ndarray]:
    """Return responses, the labels of their tokens, and their sources; one column of five knows the label."""
    random, tokens, labels = np.random.default_rng(seed), [], []
    for i in range(num):
        label = np.zeros(int(random.integers(5, 14)), bool)
        label[2:4] = i % 2
        columns = random.standard_normal((len(label), 5)) + signal * np.stack([label, *np.zeros((4, len(label)))], 1)
        ends = 3 * np.arange(1, len(label) + 1)
        tokens.append(Tokens(columns.astype(np.float16), np.stack([ends - 3, ends], 1)))
        labels.append(label)
    return tokens, labels, np.arange(num) // 3


@pytest.fixture(scope="module")
def trained() -> token_inputs.Trained:
    tokens, labels, _ = responses()
    return token_training.fit([each.columns for each in tokens], labels, TRAINING)


def test_a_token_is_labelled_where_a_mark_has_one_of_its_characters():
    tokens = Tokens(np.zeros((4, 1)), np.array([[0, 3], [3, 7], [7, 7], [7, 9]]))
    assert tokens.labels([(2, 4)]).tolist() == [True, True, False, False]
    assert tokens.labels([(7, 8)]).tolist() == [False, False, True, True]  # a token without characters of its own too
    assert tokens.labels([]).tolist() == [False] * 4 and tokens.width.tolist() == [3, 4, 0, 2]


def test_it_finds_tokens_that_it_has_not_seen(trained):
    tokens, labels, _ = responses(seed=1)
    said = token_scoring.logits([trained], tokens)
    assert metrics.auc(np.concatenate(labels), np.concatenate(said)) > 0.95
    hallucinated = np.array([label.any() for label in labels])
    assert metrics.auc(hallucinated, token_scoring.of_responses(said)[:, 0]) > 0.95


def test_neither_neighbours_in_a_batch_nor_padding_nor_the_backend_change_what_it_says(trained):
    tokens, _, _ = responses(20, seed=2)
    together = token_scoring.logits([trained], tokens)
    for i in (0, 7):
        (alone,) = token_scoring.logits([trained], [tokens[i]])
        np.testing.assert_allclose(alone, together[i], rtol=1e-5, atol=1e-5)
    torch = token_scoring.logits([trained], tokens, package="torch_ref")
    np.testing.assert_allclose(np.concatenate(torch), np.concatenate(together), rtol=1e-4, atol=1e-4)
    twice = token_scoring.logits([trained, trained], tokens)
    np.testing.assert_allclose(np.concatenate(twice), np.concatenate(together), rtol=1e-12)


def test_what_is_said_of_a_response_comes_from_classifiers_that_have_not_seen_its_source():
    tokens, labels, source = responses(30)
    nested = token_training.nested(tokens, labels, source, TRAINING, inner_folds=3)
    fold = linear.folds(source, 3, seed=0)
    mine = np.flatnonzero(fold == 0)
    turned = [~label if i in mine else label for i, label in enumerate(labels)]
    again = token_training.nested(tokens, turned, source, TRAINING, inner_folds=3)
    for i in range(len(tokens)):
        is_equal = np.array_equal(nested.logits[i], again.logits[i])
        assert is_equal == (i in mine)  # labels of a fold change what is said of all others


def test_spans_are_runs_of_marked_tokens_without_white_space_at_their_ends():
    text = "It was built  in 1850."
    offsets = np.array([[0, 2], [2, 6], [6, 12], [12, 13], [13, 16], [16, 21], [21, 22]])
    probability = np.array([0.1, 0.9, 0.9, 0.2, 0.0, 0.5, 0.4])
    found = token_scoring.spans(offsets, probability, 0.5, text)
    assert [text[a:b] for a, b in found] == ["was built", "1850"]
    assert token_scoring.spans(offsets, np.eye(7)[3], 0.5, text) == []  # white space alone
    assert token_scoring.spans(offsets, probability, 0.95, text) == []
    # the same tokens without the space before a word, as with `trim_offsets`; [14, 14]: a space
    bare = np.array([[0, 2], [3, 6], [7, 12], [14, 14], [14, 16], [17, 21], [21, 22]])
    assert token_scoring.spans(bare, probability, 0.5, text) == found
    assert token_scoring.spans(bare, np.array([0.9, 0.1, 0.9, 0.1, 0.9, 0.1, 0.1]), 0.5, text) == [
        (0, 2), (7, 12), (14, 16),
    ]  # fmt: skip
    assert token_scoring.spans(bare, np.eye(7)[3], 0.5, text) == []


def test_the_threshold_counts_characters():
    tokens = [Tokens(np.zeros((3, 1)), np.array([[0, 1], [1, 2], [2, 100]]))]
    labels, logits = [np.array([True, False, True])], [np.array([2.0, 1.0, 0.0])]
    # all three marked: 99 of 100 characters are right; the first alone is right too, but 1 of 99
    assert token_scoring.threshold(tokens, labels, logits) <= 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_columns_that_are_no_numbers_and_labels_of_one_class_are_refused(value):
    tokens, labels, _ = responses(9)
    columns = [each.columns.copy() for each in tokens]
    with pytest.raises(ValueError, match="0% of the tokens are labelled; wanted both classes"):
        token_training.fit(columns, [np.zeros_like(each) for each in labels], TRAINING)
    columns[4][1, 3] = value
    with pytest.raises(ValueError, match="column 3 of 5 is not finite"):
        token_training.fit(columns, labels, TRAINING)


def test_a_step_in_the_middle_that_is_not_finite_is_an_error_that_names_it(monkeypatch):
    tokens, labels, _ = responses(9)
    made, calls = token_inputs.padded, []

    def padded(columns, *arguments, **named):
        arrays = made(columns, *arguments, **named)
        calls.append(1)
        return arrays._replace(columns=np.full_like(arrays.columns, np.nan)) if len(calls) == 2 else arrays

    monkeypatch.setattr(token_inputs, "padded", padded)
    with pytest.raises(ValueError, match="the loss or its gradient is not finite in step 2 of .*; lower learning_rate"):
        token_training.fit([each.columns for each in tokens], labels, TRAINING)
    assert len(calls) > 2  # the last step's loss was finite


def test_the_detector_without_labels_flags_the_share_it_is_told_and_knows_its_signs():
    random = np.random.default_rng(0)
    num, label = 400, np.arange(400) % 4 == 0
    whole = {"lexical": np.zeros((num, 7)), "surprise": np.zeros((num, 10))}
    whole |= {name: random.standard_normal((num, 6)) for name in ("context_mass", "lookback")}
    whole["lexical"][:, 1] = random.poisson(2 + 3 * label)
    whole["surprise"][:, 2] = random.standard_normal(num) - label
    parts = {name: np.repeat(values, 2, axis=0) for name, values in whole.items()}
    inputs = detector.Inputs(whole, parts, np.repeat(np.arange(num), 2))
    fitted = unlabelled.fit(inputs, rate=0.25)
    found = detector.judge(fitted, inputs)
    assert metrics.auc(label, found.probability) > 0.8
    assert np.mean(found.probability >= fitted.threshold) == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match="rate=1.0: the share of responses to flag lies between 0 and 1"):
        unlabelled.fit(inputs, rate=1.0)
