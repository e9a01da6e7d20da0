"""Answers that follow a grammar, whatever the logits say."""

import json
import re

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.serve import constraint
from jaxbench.serve.engine import Engine
from jaxbench.serve.request import Request, Sampling
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.service import Answer
from jaxbench.serve.study.oracle import HashRunner
from tests.generation import tiny

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "age"],
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return a tokenizer of bytes."""
    return load_tokenizer(str(tiny.make(tmp_path_factory.mktemp("grammar"))))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    """Return grammars over its tokens."""
    return constraint.Grammars(tokenizer, 257)


def answered(grammars, tokenizer, requests, *, guessed=0, num_blocks=40):
    runner = HashRunner(
        num_blocks=num_blocks, block_size=4, max_seq_len=120, vocab_size=257, sizes=(4, 24), max_wanted=24
    )
    limits = Limits(max_running=3, max_batch_tokens=24, max_guessed=guessed)
    engine = Engine(runner, limits, grammars=grammars)
    found = engine.generate(requests)
    ended = {name: events[-1].ended for name, events in found.items()}
    ids = {name: [event.token for event in events if event.token is not None] for name, events in found.items()}
    return {name: tokenizer.decode(each, skip_special=True) for name, each in ids.items()}, ended


def requests(grammar, count=4):
    drawn = [Sampling(temperature=0.8 * (i % 2), seed=i) for i in range(count)]
    return [Request(f"r{i}", (i, 2, 3), 90, each, grammar=grammar) for i, each in enumerate(drawn)]


def test_an_answer_is_json_of_its_schema_in_any_company(grammars, tokenizer):
    asked = requests(constraint.of_schema(SCHEMA))
    together, ended = answered(grammars, tokenizer, asked, guessed=3, num_blocks=31)
    assert set(ended.values()) == {"stop"}
    for text in together.values():
        value = json.loads(text)
        assert set(value) == {"name", "age"} and value["name"] in ("Ada", "Grace") and 0 <= value["age"] <= 120
    alone = {}
    for each in asked:
        alone |= answered(grammars, tokenizer, [each])[0]
    assert together == alone


def spelled(grammar, begun=b"", most=1000):
    """Return what a model writes behind `begun` that writes white space wherever it may."""
    matcher, text = LLMatcher(LLTokenizer("byte"), grammar), b""
    assert matcher.try_consume_tokens([*begun]) == len(begun)
    while not matcher.is_stopped() and len(text) < most:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in (*b" ", *b'"}', *range(33, 127)) if mask >> byte & 1]
        assert matcher.consume_token(allowed[0])
        text += bytes([allowed[0]])
    return text


def test_a_model_that_writes_nothing_but_white_space_still_ends_its_value():
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"enum": [7]}}, "additionalProperties": False}
    alone = spelled(constraint.of_schema(schema))
    assert json.loads(alone) == {"n": 7} and 4 * 64 <= len(alone) < 4 * 64 + 10  # four places, 64 characters each
    behind = constraint.of_schema(schema, reasoning=constraint.Reasoning("<think>", "</think>", is_begun=True))
    assert spelled(behind, b"I think.</think>").strip() == alone
    unlimited = {**schema, "x-guidance": {"whitespace_pattern": "[ ]*"}}  # a schema's own setting
    assert spelled(constraint.of_schema(unlimited)) == b"{" + b" " * 999


@pytest.mark.parametrize("indent", [None, 2, 8])
def test_values_may_be_written_with_the_usual_indentation(indent):
    value = {"a": [{"b": [1, {"c": [2]}]}]}
    matcher = LLMatcher(LLTokenizer("byte"), constraint.of_schema({"type": "object"}))
    text = json.dumps(value, indent=indent).encode()
    assert matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()


def test_an_answer_matches_its_expression_or_is_one_of_its_choices(grammars, tokenizer):
    texts, _ = answered(grammars, tokenizer, requests(constraint.of_regex(r"[a-f]{3}-\d{2}")))
    assert all(re.fullmatch(r"[a-f]{3}-\d{2}", text) for text in texts.values()) and len(set(texts.values())) > 1
    texts, _ = answered(grammars, tokenizer, requests(constraint.of_choices(["yes", 'no "really"']), count=8))
    assert set(texts.values()) <= {"yes", 'no "really"'}
    odd = {chr(1) + "a", chr(127) + "a", "b\\" + chr(127)}  # control characters, one behind a backslash
    texts, _ = answered(grammars, tokenizer, requests(constraint.of_choices(sorted(odd)), count=8))
    assert set(texts.values()) <= odd and any(chr(127) in text for text in texts.values())


def test_tokens_that_may_not_come_get_no_probability(grammars):
    state = grammars.begin(constraint.of_choices(["ab"]))
    masked = state.masked(np.zeros(257, np.float32))
    assert np.flatnonzero(np.isfinite(masked)).tolist() == [ord("a")]
    state.accept(ord("a"))
    assert not state.is_over
    with pytest.raises(ValueError, match="token 120 may not come next"):
        state.accept(ord("x"))


@pytest.mark.parametrize("make, match", [
    (lambda: constraint.of_regex("(a"), "regex: .*"),
    (lambda: constraint.of_schema({"type": "nothing"}), "json_schema: .*"),
    (lambda: constraint.of_choices([]), "choice: 0 texts"),
    (lambda: constraint.of_choices(["a", ""]), "choice: 2 texts; wanted at least one, and none empty"),
    (lambda: constraint.of_regex("a" * 200_000), "at most 100000 are taken"),
    (lambda: constraint.of_regex("(a{1000}){1000}{1000}"), r"^regex: it is too large to be followed \([^<]*\)$"),
    (lambda: constraint.of_regex("a|(b{1000}){1000}{1000}"), r"^regex: it is too large to be followed \([^<]*\)$"),
    (lambda: constraint.of_schema({"$ref": "#"}), "^json_schema: no text follows it$"),
    (lambda: constraint.of_regex(r"[^\s\S]"), "^regex: no text follows it$"),
    (lambda: constraint.of_regex("()"), "^regex: no text but the empty one follows it$"),
    (lambda: constraint.of_regex("a\ud800"), "^regex has a lone surrogate, which is no Unicode text: 'a"),
    (lambda: constraint.of_choices(["a", "\ud800"]), "^choice.1 has a lone surrogate"),
    (lambda: constraint.of_schema({"const": "\ud800"}), "^json_schema has a lone surrogate"),
])  # fmt: skip
def test_grammars_that_cannot_be_followed_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("make", [
    lambda: constraint.of_regex("a?"),
    lambda: constraint.of_regex(r"[a-z ]{120}"),
    lambda: constraint.of_regex(r".{1,2000}"),
    lambda: constraint.of_schema({"type": "object"}),
    lambda: constraint.of_schema({}),
    lambda: constraint.of_schema({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    lambda: constraint.of_choices([f"choice number {i * 7919}" for i in range(1000)]),
])  # fmt: skip
def test_grammars_of_some_text_are_taken(make):
    assert make()


def test_a_grammar_that_grows_too_large_ends_its_answer_as_the_clients_own_error(grammars, tokenizer):
    grammar = constraint.of_regex("a(b{1000}){1000}{1000}|z")  # the text that is tried before is "z"
    bias = Sampling(logit_bias={ord("a"): 100.0})
    end_ids = frozenset(tokenizer.end_ids)
    engine = Engine(
        HashRunner(num_blocks=40, block_size=4, max_seq_len=120, vocab_size=257, sizes=(4, 24), max_wanted=24),
        Limits(max_running=3, max_batch_tokens=24), grammars=grammars,
    )  # fmt: skip
    found = engine.generate([Request("a", (1, 2), 90, bias, end_ids=end_ids, grammar=grammar)])["a"]
    assert found[-1].ended == "error"  # not a "stop" in the middle of the text
    said = constraint.told(found[-1].error)
    assert said.startswith("grammar: the answer cannot go on (lexer error") and "\n" not in said and "<" not in said
    assert constraint.told("ValueError: grammar: x") is None and constraint.told(None) is None
    answer = Answer(Request("a", (1, 2), 90), tokenizer)
    for event in found:
        answer.take(event)
    assert answer.ended == "error" and answer.is_refused


def test_a_grammar_that_fails_while_tokens_are_looked_up_allows_no_end(grammars):
    state = grammars.begin(LLMatcher.grammar_from_json_schema('{"$ref": "#"}'))  # unchecked
    with pytest.raises(constraint.Unfollowed, match="the answer cannot go on"):
        state.masked(np.zeros(257, np.float32))


def test_an_engine_without_grammars_takes_no_request_with_one(tokenizer):
    with pytest.raises(ValueError, match="the engine follows no grammars"):
        answered(None, tokenizer, requests(constraint.of_choices(["a"])))


def test_a_grammar_is_built_once_for_answers_that_do_not_disturb_one_another(tokenizer, monkeypatch):
    built, whole = [], constraint.Grammars._beginning
    monkeypatch.setattr(constraint.Grammars, "_beginning", lambda self, each: built.append(each) or whole(self, each))
    grammars, grammar = constraint.Grammars(tokenizer, 257), constraint.of_regex("ab|cd")
    first, second = grammars.begin(grammar), grammars.begin(grammar)
    first.accept(ord("a"))
    third, behind = grammars.begin(grammar), grammars.begin(grammar, answer=[ord("c")])

    def allowed(each):
        return [chr(token) for token in np.flatnonzero(np.isfinite(each.masked(np.zeros(257, np.float32))))]

    assert [allowed(each) for each in (first, second, third, behind)] == [["b"], ["a", "c"], ["a", "c"], ["d"]]
    assert built == [grammar]
    for _ in range(2):
        with pytest.raises(constraint.Unfollowed, match="grammar: "):
            grammars.begin("nonsense")
