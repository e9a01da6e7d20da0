"""Calls of tools: tags beside other text, long answers, and the grammars of their arguments."""

import json
from types import SimpleNamespace
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest
from tokenizers import AddedToken

from jaxbench.pretrained import small_tokenizers
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.serve import constraint, tools
from tests.serve.calling import CALL, CHATML, FIND, LISTED, SEA, TAGGED, TAGS, TURN, Templated, accepted, split

THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
BEGUN = '{% for c in m.tool_calls %}{{ "<calls>[" if loop.first else ", " }}' + CALL
BEGUN += '{{ "]</calls>" if loop.last }}{% endfor %}'
ADJACENT = "{% for c in m.tool_calls %}<tool_call>" + CALL + "</tool_call>{% endfor %}"


@pytest.mark.parametrize(("template", "opening", "closing", "prefill"), [
    (THINKING.replace("@", ""), "<tool_call>", "</tool_call>", None),  # a prompt that ends with <think>, as QwQ's
    (THINKING.replace("@", "").replace(TAGGED, BEGUN), "<calls>", "</calls>", None),  # Nemotron's
    (CHATML.replace("@", "").replace(TAGGED, BEGUN), "<calls>", "</calls>", "<calls>["),
    (CHATML.replace("@", "").replace(TAGGED, ADJACENT), "<tool_call>", "</tool_call>", "<tool_call>"),
    (CHATML.replace("@", "").replace(TAGGED, ADJACENT).replace("<|im_end|>", "<end>"), "<tool_call>", "</tool_call>",
     "<tool_call>"),
    (CHATML.replace("@{{ m.content }}", "<think>{{ m.content }}</think>").replace(TAGGED, ADJACENT), "<tool_call>",
     "</tool_call>", "<think></think><tool_call>"),
], ids=["reasoning", "reasoning and a list", "list", "adjacent", "visible end", "thoughts"])  # fmt: skip
def test_the_tags_of_a_notation_are_learned_whole_whatever_text_is_next_to_them(template, opening, closing, prefill):
    found = tools.learned(Templated(template))
    assert (found.opening, found.closing, found.prefill) == (opening, closing, prefill)


@pytest.mark.parametrize("pieces", [
    ['<tool_call>{"name": "look", "arguments": {"at": ["sky"', *[', {"sea": []}'] * 1000, "]}}</tool_call>"],
    ["<tool_call>{x} is "] * 1000, ["<tool_call>", SEA, "</tool_call>"] * 300, ["<tool_call>[["] * 1000,
], ids=["long call", "repeated openings", "many calls", "nested"])  # fmt: skip
def test_an_answer_that_comes_in_many_pieces_is_not_parsed_anew_with_each_of_them(pieces, monkeypatch):
    parsed, decoder = [], tools._DECODER
    counted = SimpleNamespace(raw_decode=lambda text, at: parsed.append(text) or decoder.raw_decode(text, at))
    monkeypatch.setattr(tools, "_DECODER", counted)
    finder = tools.Finder(TAGS, {"look"}, most=None, is_begun=False)
    text = "".join(pieces)
    content = "".join(finder.update(piece, is_whole=False)[0] for piece in pieces) + finder.update("", is_whole=True)[0]
    assert sum(map(len, parsed)) < 40 * len(text)
    assert (content, [(each.name, each.arguments) for each in finder.calls]) == split(text)


def test_half_a_character_that_a_model_escapes_stays_an_escape_so_that_the_answer_can_be_sent():
    half, whole = r'{"at": "\ud83d \u00e9"}', '{"at": "\N{SLIGHTLY SMILING FACE}"}'
    written = [f'<tool_call>{{"name": "look", "arguments": {each}}}</tool_call>' for each in (half, whole)]
    _, calls = split("".join(written))
    assert [arguments for _, arguments in calls] == [half, whole]
    assert "".join(arguments for _, arguments in calls).encode()
    named = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
    assert split(named) == (named, [])


def test_numbers_of_a_call_are_those_that_the_model_wrote_also_where_a_float_cannot_hold_them():
    numbers = '{"at": [1e999, -1E+400, 0.10, 12345678901234567890.123456789, 7], "is": {"a": [], "b": null, "c": true}}'
    assert split(f'<tool_call>{{"name": "look", "arguments": {numbers}}}</tool_call>') == ("", [("look", numbers)])


@pytest.mark.parametrize("depth", [100, 600, 900, 5000])
def test_arguments_that_are_too_deep_to_be_written_are_content(depth):
    written = '<tool_call>{"name": "look", "arguments": {"at": ' + "[" * depth + "1.5" + "]" * depth + "}}</tool_call>"
    content, calls = split(written)
    assert (content, len(calls)) == (("", 1) if depth == 100 else (written, 0))


class Item(pydantic.BaseModel):
    """One that refers to itself."""

    color: Literal["red", "blue"]
    inner: list["Item"]


class Order(pydantic.BaseModel):
    """One that refers to another."""

    items: list[Item]
    note: str | None = pydantic.Field(default=None, description="What else.")


@pytest.mark.parametrize("model", [Item, Order])
@pytest.mark.parametrize("how", ["required", "strict", "listed", "arguments first"])
def test_references_in_a_functions_schema_are_followed_as_pydantic_writes_them(model, how):
    item = {"color": "red", "inner": [{"color": "blue", "inner": []}]}
    given = item if model is Item else {"items": [item], "note": None}
    own = {"name": model.__name__, "parameters": model.model_json_schema()}
    functions = [openai.pydantic_function_tool(each)["function"] for each in (Item, Order)]
    notation = TAGS._replace(opening_parts=("<tool_call>",), closing_parts=("</tool_call>",), is_listed=how == "listed")
    if how == "arguments first":
        notation = notation._replace(keys=("arguments", "name"))
    for described in ([own], functions):
        follows = accepted(notation.grammar(described, is_forced=how == "required"))
        for color in ("red", "moon"):
            call = {"name": model.__name__, "arguments": given}
            text = json.dumps({key: call[key] for key in notation.keys}).replace("red", color)
            text = f"[{text}]" if how == "listed" else text
            assert follows(text if how == "required" else f"<tool_call>{text}</tool_call>") is (color == "red")


def test_a_call_has_the_functions_name_as_it_is():
    name = 'l"o\\o\x7fk \u00e9\u2028\U0001f600'
    call = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    assert accepted(TAGS.grammar([{"name": name}], is_forced=True))(call)
    with pytest.raises(ValueError, match="lone surrogate"):
        TAGS.grammar([{"name": "\ud800"}], is_forced=True)


def test_arguments_that_are_too_large_to_be_followed_are_refused_before_they_reach_the_engine():
    large = {"type": "string", "pattern": "^(a{1000}){1000}{1000}$"}
    parameters = {"type": "object", "properties": {"a": large}, "required": ["a"]}
    for is_forced in (True, False):
        with pytest.raises(ValueError, match="too large to be followed"):
            TAGS.grammar([FIND["function"], {"name": "compute", "parameters": parameters}], is_forced=is_forced)


def test_a_schema_that_cannot_be_followed_is_refused_by_its_functions_name():
    odd = {"name": "compute", "parameters": {"type": "object", "properties": {"a": {"format": "odd"}}}}
    with pytest.raises(ValueError, match="^tools: function 'compute': Unknown format: odd$"):
        TAGS.grammar([FIND["function"], odd], is_forced=True)


def test_calls_behind_a_token_that_no_text_shows_are_guided_only_where_they_are_found(tmp_path):
    small_tokenizers.ByteTokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.core.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.chat_template = TURN.replace("@", LISTED)
    notation = tools.learned(tokenizer)
    assert (notation.opening, notation.opening_parts) == ("", (257,))
    grammar, call = notation.grammar([FIND["function"]]), '{"name": "find", "arguments": {}}'
    for text, is_allowed in (("", True), ("So ", False)):
        state = constraint.Grammars(tokenizer, 258).begin(grammar, tokenizer.encode(text))
        assert np.isfinite(state.masked(np.zeros(258, np.float32))[257]) == is_allowed
    for text in (f"[TOOL_CALLS] [{call}]", f"[TOOL_CALLS][{call}, {call}]", "So [ {"):
        assert constraint.Grammars(tokenizer, 258).begin(grammar, tokenizer.encode(text))
