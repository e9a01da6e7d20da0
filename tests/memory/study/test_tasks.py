"""The tasks: what is asked can be answered from the row, and nothing else decides a row but its seed."""

import numpy as np
import pytest

from jaxbench.memory.study import tasks
from jaxbench.memory.study.tasks import ASK, FILLER, FIRST, MARK, UNSCORED, TaskConfig

KINDS = ("recall", "copy", "selective_copy", "passkey", "key_value")


def rows_of(task, length=48, batch_size=40, **update):
    config = TaskConfig(**{"task": task, "length": length, "items": 4, "queries": 3, "vocab_size": 40} | update)
    return config, tasks.batch(config, seed=1, step=2, batch_size=batch_size)


def answers(row):
    return row[1][row[1] != UNSCORED].tolist()


@pytest.mark.parametrize("task", KINDS)
def test_the_fact_stands_where_the_distance_says(task):
    for length in (48, 8 * 48):
        config, found = rows_of(task, length)
        rows, places = np.nonzero(found.targets != UNSCORED)
        facts = found.tokens[rows, places - found.distance[rows, places]]
        np.testing.assert_array_equal(facts, found.targets[rows, places])
        assert (found.distance[found.targets == UNSCORED] == 0).all() and found.distance[rows, places].min() > 0
        assert found.tokens.shape == (40, length) and found.tokens.max() < 40
        assert len(rows) == 40 * (3 if task == "recall" else 4)
        assert found.distance.max() > 0.7 * length
    assert config.least <= 48


@pytest.mark.parametrize("task", KINDS)
def test_a_row_is_a_function_of_seed_step_and_row(task):
    config, found = rows_of(task)
    few = tasks.batch(config, seed=1, step=2, batch_size=3)
    for one, other in zip(found, few):
        np.testing.assert_array_equal(one[:3], other)
    for other in (tasks.batch(config, seed=2, step=2, batch_size=3), tasks.batch(config, seed=1, step=3, batch_size=3)):
        assert (other.tokens != few.tokens).any(axis=1).all()
    assert len({row.tobytes() for row in found.tokens}) == 40


@pytest.mark.parametrize("task", KINDS)
def test_no_held_out_row_is_drawn_as_a_row_of_a_run(task):
    """numpy pads entropy: the words of (2**40, 3, 0) are those of (0, 256, 3) and a zero."""
    config, _ = rows_of(task)
    for held_out in (tasks.HELD_OUT, tasks.TEST):
        for step in range(2):
            others = tasks.batch(config, seed=held_out, step=step, batch_size=4).tokens
            own = tasks.batch(config, seed=0, step=held_out >> 32, batch_size=4).tokens
            assert not (others[:, None] == own[None]).all(axis=2).any()


def test_recall_is_answered_by_a_dictionary_of_the_pairs():
    _, found = rows_of("recall")
    for tokens, targets in zip(found.tokens, found.targets):
        pairs = dict(tokens[:8].reshape(-1, 2))
        asked = targets != UNSCORED
        assert [pairs[key] for key in tokens[asked]] == targets[asked].tolist()
        assert len(pairs) == 4 and set(tokens[8:][~asked[8:]]) == {FILLER}


def test_every_pair_is_asked_for_once_before_one_is_again():
    _, found = rows_of("recall", queries=10)
    for tokens, targets in zip(found.tokens, found.targets):
        _, times = np.unique(tokens[targets != UNSCORED], return_counts=True)
        assert sorted(times) == [2, 2, 3, 3]


def test_copies_are_the_symbols_in_order():
    for task in ("copy", "selective_copy"):
        _, found = rows_of(task)
        for row in zip(*found):
            before = row[0][:-5]
            assert before[before != FILLER].tolist() == answers(row) and row[0][-5] == ASK
            assert set(row[0][-4:]) == {FILLER}


def test_the_passkey_follows_its_mark_and_answers_are_read_one_behind():
    _, found = rows_of("passkey")
    for row in zip(*found):
        mark, again = np.flatnonzero(row[0] == MARK)
        assert row[0][mark + 1 : mark + 5].tolist() == answers(row)
        assert again == len(row[0]) - 4 and row[0][-3:].tolist() == answers(row)[:3]


def test_a_key_that_is_asked_for_has_one_value():
    config, found = rows_of("key_value", 90, batch_size=60)
    config = TaskConfig(task="key_value", length=200, items=1, vocab_size=8)
    single = tasks.batch(config, seed=0, step=0, batch_size=60)
    for rows, n in ((found, 4), (single, 1)):
        for tokens, targets in zip(rows.tokens, rows.targets):
            key = tokens[-2 * n + 1 : len(tokens) - n + 1]
            pairs = [tokens[i + 1 : i + 1 + 2 * n] for i in np.flatnonzero(tokens == MARK)]
            values = [pair[n:].tolist() for pair in pairs if (pair[:n] == key).all()]
            assert values == [targets[targets != UNSCORED].tolist()] and tokens[-2 * n] == ASK


def test_longer_rows_ask_for_as_much():
    config, found = rows_of("passkey")
    longer = config.at_length(16)
    assert longer.length == 16 * 48
    far = tasks.batch(longer, seed=1, step=2, batch_size=40)
    assert (far.targets != UNSCORED).sum() == (found.targets != UNSCORED).sum()


def test_guessing_is_right_as_often_as_there_are_answers():
    assert rows_of("recall")[0].chance == 1 / 18 and rows_of("copy")[0].chance == 1 / (40 - FIRST)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"length": 8}, "length=8 is below the 9 tokens that copy takes"),
        ({"task": "recall", "items": 40}, "items=40 pairs need as many keys, vocab_size=40 has 18"),
        ({"task": "recall", "queries": 41}, "length=48 is below the 49 tokens that recall takes"),
        ({"task": "key_value", "length": 17}, "length=17 is below the 18"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(update, message):
    with pytest.raises(ValueError, match=message):
        TaskConfig(**{"task": "copy", "length": 48, "items": 4, "queries": 3, "vocab_size": 40} | update)
