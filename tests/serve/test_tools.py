"""Calls of tools in answers: learned from templates, found in texts however they come, asked for by a choice."""

import asyncio
import json
from types import SimpleNamespace

import hypothesis.strategies as st
import openai
import pytest
from hypothesis import example, given

from jaxbench.serve import intake, stream, tools
from jaxbench.serve.protocol import ChatBody
from jaxbench.serve.service import Piece
from tests.serve.asking import MESSAGES, SERVICE, asked
from tests.serve.calling import (
    BARE,
    CHATML,
    ELEMENTS,
    FIND,
    LISTED,
    LOOK,
    OBJECT,
    PLAIN,
    SEA,
    SKY,
    SPECIAL,
    TAGS,
    TURN,
    WRAPPED,
    Templated,
    Told,
    accepted,
    split,
)


@pytest.mark.parametrize(("template", "special", "wanted"), [
    (CHATML.replace("@", ""), (), TAGS),
    # reasoning in front of the last answer is part of how an answer begins, and of no call
    (CHATML.replace("@", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}"), (),
     TAGS._replace(prefill="<think>\n\n</think>\n\n<tool_call>\n")),
    (TURN.replace("@", BARE), (), PLAIN._replace(keys=("name", "parameters"), arguments="parameters")),
    (TURN.replace("@", LISTED), (),
     TAGS._replace(keys=("name", "arguments", "id"), opening="[TOOL_CALLS]", closing="", prefill="[TOOL_CALLS] [")),
    (TURN.replace("@", LISTED), ("[TOOL_CALLS]",),
     PLAIN._replace(keys=("name", "arguments", "id"), prefill="[TOOL_CALLS] [")),
    (TURN.replace("@", WRAPPED), (),
     TAGS._replace(opening=OBJECT, closing="}", prefill=f"{OBJECT} ")),
    (TURN.replace("@", ELEMENTS), (), None), (TURN.replace("@", "none"), (), None), ("{{ fail }", (), None),
    ("{{ messages[1].tool_calls[0].function.arguments }}", (), None),  # Python's notation, which is no JSON
], ids=["tags", "reasoning", "bare", "list", "special", "wrapped", "elements", "none", "broken", "Python"])  # fmt: skip
def test_a_notation_is_learned_from_the_template_that_shows_calls_to_the_model(template, special, wanted):
    found = tools.learned(Templated(template, (*SPECIAL, *special)))
    parts = {name: () for name in ("opening_parts", "closing_parts")}
    assert (found and found._replace(**parts, is_listed=False)) == wanted
    if found is not None:
        assert found.is_listed is (template == TURN.replace("@", LISTED))
        assert found.opening_parts == tuple(filter(None, ["[TOOL_CALLS]" if found.is_listed else found.opening]))


def both(text, notation=TAGS, **how):
    """Content and calls of a text, whole."""
    return split(text, notation, **{"names": {"look", "find"}} | how)


CALLS = [("look", '{"at": "sea"}'), ("look", '{"at": "sky"}')]


@pytest.mark.parametrize(("text", "notation", "wanted"), [
    (f"<tool_call>\n{SEA}\n</tool_call>", TAGS, ("", CALLS[:1])),
    (f"I look.\n\n<tool_call>\n{SEA}\n</tool_call>\n<tool_call>{SKY}</tool_call>\n", TAGS, ("I look.", CALLS)),
    (f"<tool_call>{SEA}</tool_call> And?", TAGS, (" And?", CALLS[:1])),
    (f"<tool_call>{SEA}", TAGS, ("", CALLS[:1])),  # an end token in place of the closing
    (f"<tool_call>[{SEA}, {SKY}]</tool_call>", TAGS, ("", CALLS)),
    ('<tool_call>{"name": "other"}</tool_call>', TAGS, ("", [("other", "{}")])),
    ('<tool_call>{"name": "look", "parameters": {"at": "</tool_call>"}}</tool_call>', TAGS,
     ("", [("look", '{"at": "</tool_call>"}')])),
    ('<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}</tool_call>', TAGS, ("", [("look", '{"at": "a\\nb"}')])),
    (SEA, TAGS, (SEA, [])), (SEA, PLAIN, ("", CALLS[:1])), (f" {SEA}; {SKY}", PLAIN, ("", CALLS)),
    (f'Not <tool_call>"{{<tool_call>{SEA}', TAGS, ('Not <tool_call>"{', CALLS[:1])),
    (f"[{SEA}, {SKY}]", PLAIN, ("", CALLS)), (f"So: {SEA}", PLAIN, (f"So: {SEA}", [])),
    (f"{SEA} So.", PLAIN, (" So.", CALLS[:1])),
    *((text, notation, (text, [])) for notation in (TAGS, PLAIN) for text in (
        "", "a < b", "{x} is a set", '{"name": "other"}', '{"at": [1, 2]} is JSON', "<tool_call>", "<tool_call>\n{",
        '<tool_call>{"name": "look", "arguments": {"at": "s', "<tool_call>" + "[" * 3000, "  a  \n",
        '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>',
        f"[{SEA}, 3]",
    )),
])  # fmt: skip
def test_calls_are_taken_out_of_a_text_and_what_only_looks_like_one_stays(text, notation, wanted):
    assert both(text, notation) == wanted


def test_no_more_calls_are_taken_than_asked_and_what_follows_them_is_dropped():
    text = f"So.\n<tool_call>{SEA}</tool_call><tool_call>{SKY}</tool_call> Well."
    assert both(text, most=1) == ("So.", CALLS[:1]) and both(f"[{SEA}, {SKY}] Well.", PLAIN, most=1) == ("", CALLS[:1])


PARTS = ["<tool_call>", "</tool_call>", "\n", " ", ";", "{", "}", "[", SEA, SKY, '{"a": tru', '"', "a", "<tool", ","]


@example(["<tool_call>", SEA, "</tool_call>", ",", "<tool_call>", SEA], TAGS, [1], False)
@given(
    st.lists(st.sampled_from(PARTS), max_size=8), st.sampled_from([TAGS, PLAIN]),
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans(),
)  # fmt: skip
def test_a_text_that_comes_in_pieces_has_the_content_and_the_calls_of_the_whole(parts, notation, sizes, is_begun):
    text, at, content, calls = "".join(parts), 0, "", []
    finder = tools.Finder(notation, {"look"}, most=None, is_begun=is_begun)
    for i in range(len(text) + 1):
        piece = text[at : at + sizes[i % len(sizes)]]
        at += len(piece)
        more, new = finder.update(piece, is_whole=at == len(text))
        content, calls = content + more, calls + new
        if at == len(text):
            break
    wanted = both(text, notation, names={"look"}, is_begun=is_begun)
    assert (content, [(each.name, each.arguments) for each in calls]) == wanted
    assert len({each.id for each in calls}) == len(calls) and all(
        len(each.id) == 9 and each.id.isalnum() for each in calls
    )


def form(**body):
    body = {"messages": MESSAGES, "tools": [LOOK]} | body
    return stream.Chat("r", "tiny", Templated(CHATML.replace("@", "")), intake.checked(body, ChatBody))


async def told(made, text, ended="stop", prompt=(1,)):
    """Events of an answer that comes by characters, parsed."""
    pieces = asyncio.Queue()
    for number, letter in enumerate(text):
        pieces.put_nowait(Piece(letter, (number,), (), ended if number == len(text) - 1 else None))
    request = SimpleNamespace(prompt=prompt)
    answer = SimpleNamespace(request=request, ids=[*text], num_cached=0, pieces=pieces, ended=None, goes_on=False)
    return [json.loads(each[6:]) for each in [event async for event in made.events([answer])][:-1]]


def test_calls_are_told_in_the_form_of_openais_clients_whole_and_as_a_stream():
    text = f"I look.\n<tool_call>\n{SEA}\n</tool_call>\n<tool_call>\n{SKY}\n</tool_call>"
    whole = openai.types.chat.chat_completion.Choice.model_validate(form().choice(0, text, None, "stop"))
    assert (whole.message.content, whole.finish_reason) == ("I look.", "tool_calls")
    assert [(each.function.name, each.function.arguments) for each in whole.message.tool_calls] == CALLS
    events = asyncio.run(told(form(), text))
    chunks = [openai.types.chat.ChatCompletionChunk.model_validate(each).choices[0] for each in events]
    assert "".join(each.delta.content or "" for each in chunks) == "I look."
    calls = [call for each in chunks for call in each.delta.tool_calls or []]
    assert [(each.index, each.function.name, each.function.arguments) for each in calls] == [
        (i, *call) for i, call in enumerate(CALLS)
    ]
    assert [each.finish_reason for each in chunks if each.finish_reason] == ["tool_calls"]
    assert not any(each["choices"][0]["delta"] == {} for each in events[:-1])  # no event without anything
    alone = form().choice(0, f"<tool_call>{SEA}</tool_call>", None, "stop")["message"]
    assert alone["content"] is None and len(alone["tool_calls"]) == 1


def test_openais_client_is_told_of_every_call_in_a_stream_before_its_end():
    from openai.lib.streaming.chat import ChatCompletionStreamState

    text = f"<tool_call>\n{SEA}\n</tool_call><tool_call>{SKY}"  # the last call is complete where the answer ends
    for body in ({}, {"tool_choice": "required"}):
        state, done = ChatCompletionStreamState(input_tools=[LOOK]), []
        for each in asyncio.run(told(form(**body), SEA if body else text)):
            found = state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(each))
            done += [each.arguments for each in found if each.type == "tool_calls.function.arguments.done"]
        assert done == [arguments for _, arguments in (CALLS[:1] if body else CALLS)]
        assert state.get_final_completion().choices[0].finish_reason == "tool_calls"


def test_an_answer_that_reached_its_length_behind_the_only_call_taken_is_no_cut_off_answer():
    text = f"<tool_call>{SEA}</tool_call><tool_call>"
    for body, ended in (({"parallel_tool_calls": False}, "tool_calls"), ({}, "length")):
        assert form(**body).choice(0, text, None, "length")["finish_reason"] == ended
    assert form(tool_choice="required").choice(0, SEA, None, "length")["finish_reason"] == "tool_calls"
    assert form(tool_choice="required").choice(0, SEA[:-1], None, "length")["finish_reason"] == "length"


def test_what_openais_client_made_of_calls_can_be_sent_back_with_the_results():
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state = ChatCompletionStreamState(input_tools=[LOOK | {"function": LOOK["function"] | {"strict": True}}])
    for each in asyncio.run(told(form(), f"So.<tool_call>{SEA}</tool_call>")):
        state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(each))
    message = state.get_final_completion().choices[0].message
    for unset in (False, True):
        given = message.model_dump(exclude_unset=unset) | {"parsed": {"a": 1}}
        assert given["tool_calls"][0]["function"]["parsed_arguments"] == {"at": "sea"}
        body = intake.checked({"messages": [*MESSAGES, given]}, ChatBody)
        (call,) = body.messages[-1].for_template["tool_calls"]
        wanted = {"type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
        assert call == wanted | {"id": message.tool_calls[0].id}


def test_an_answer_without_calls_or_cut_off_in_one_is_told_as_its_text():
    cut = '<tool_call>\n{"name": "look", "arg'
    for made, text, ended in ((form(), "No.", "stop"), (form(), cut, "length"), (form(tools=None), cut, "stop")):
        found = made.choice(0, text, None, ended)
        assert found["message"] == {"role": "assistant", "content": text} and found["finish_reason"] == ended
    for body in ({"tool_choice": "none"}, {"tools": []}):
        assert "tool_calls" not in form(**body).choice(0, f"<tool_call>{SEA}</tool_call>", None, "stop")["message"]
    one = form(parallel_tool_calls=False).choice(0, f"[{SEA}]<tool_call>[{SEA}, {SKY}]</tool_call>", None, "stop")
    assert len(one["message"]["tool_calls"]) == 1 and one["message"]["content"] == f"[{SEA}]"


@pytest.fixture
def service(monkeypatch):
    """Return a service whose model writes calls between tags, with grammars."""
    monkeypatch.setattr(SERVICE, "tokenizer", Told(CHATML.replace("@", "{{ tools if tools and loop.first }}")))
    monkeypatch.setattr(
        SERVICE, "about", SERVICE.about | {"max_seq_len": 10_000, "cache_tokens": 10_000, "grammars": True}
    )
    return SERVICE


def test_an_answer_that_has_to_be_a_call_begins_as_one_and_follows_its_schema(service):
    (plain,) = asked(messages=MESSAGES, tools=[LOOK, FIND])
    assert plain.grammar is None
    for choice, sky, find in (
        ("required", True, True),
        ({"type": "function", "function": {"name": "look"}}, True, False),
        ({"type": "function", "function": {"name": "find"}}, False, True),
    ):
        (request,) = asked(messages=MESSAGES, tools=[LOOK, FIND], tool_choice=choice)
        assert request.prompt == plain.prompt + tuple(map(ord, "<tool_call>\n"))
        follows = accepted(request.grammar)
        assert follows('{"name": "look", "arguments": {"at": "sky"}}') is sky
        assert follows('{"name": "find", "arguments": {}}') is find
        for other in (SKY, '{"name": "look", "arguments": {"at": "moon"}}', '{"name": "look"}', "{}", "text"):
            assert not follows(other)
    begun = form(tool_choice="required").choice(0, SEA, None, "stop")
    assert begun["message"]["tool_calls"][0]["function"]["name"] == "look" and begun["message"]["content"] is None


STRICT = {"type": "function", "function": LOOK["function"] | {"strict": True}}
FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["n"]}}}


def test_calls_of_a_strict_function_follow_its_schema_and_other_text_is_free(service):
    (request,) = asked(messages=MESSAGES, tools=[STRICT, FIND])
    follows, moon = accepted(request.grammar), '{"name": "look", "arguments": {"at": "moon"}}'
    good, found = '{"name": "look", "arguments": {"at": "sky"}}', '{"name": "find", "arguments": {"a": [1]}}'
    for text in ("", "a < b", "{", moon, f"So.\n<tool_call>\n{good}\n</tool_call>", f"<tool_call>{found}</tool_call>!"):
        assert follows(text), text
    for text in (
        f"<tool_call>{moon}</tool_call>",
        "<tool_call>So",
        "<tool_call>",
        SKY.join(("<tool_call>", "</tool_call>")),
    ):
        assert not follows(text), text
    (request,) = asked(messages=MESSAGES, tools=[STRICT], response_format=FORM)
    follows = accepted(request.grammar)
    assert follows('{"n": 3}') and follows(f"<tool_call>{good}</tool_call>")
    assert not any(map(follows, ("So", '{"m": 3}', f"<tool_call>{moon}</tool_call>")))
    (request,) = asked(messages=MESSAGES, tools=[LOOK], response_format=FORM)
    follows = accepted(request.grammar)
    assert follows('{"n": 3}') and follows(f"<tool_call>{moon}</tool_call>") and not follows("So")
    (request,) = asked(messages=MESSAGES, tools=[STRICT], tool_choice="none")
    assert request.grammar is None


def test_a_strict_call_of_a_model_without_an_opening_is_told_from_text_by_its_first_character(service, monkeypatch):
    template = TURN.replace("@", BARE).replace("[INST]", "[INST]{{ tools if tools }}")
    monkeypatch.setattr(SERVICE, "tokenizer", Told(template))
    follows = accepted(asked(messages=MESSAGES, tools=[STRICT])[0].grammar)
    good = '{"name": "look", "parameters": {"at": "sky"}}'
    assert (
        follows("")
        and follows("So {")
        and follows(good)
        and not follows("{")
        and not follows(good.replace("sky", "sun"))
    )


def test_an_opening_that_is_one_token_of_the_model_is_followed_as_that_token(tmp_path):
    import numpy as np
    from tokenizers import AddedToken

    from jaxbench.pretrained import small_tokenizers
    from jaxbench.pretrained.tokenizer import load_tokenizer
    from jaxbench.serve import constraint

    small_tokenizers.ByteTokenizer().save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.core.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    tokenizer.chat_template = CHATML.replace("@", "")
    notation = tools.learned(tokenizer)
    assert (notation.opening, notation.opening_parts, notation.closing_parts) == ("<tool_call>", (257,), (258,))
    state = constraint.Grammars(tokenizer, 259).begin(notation.grammar([LOOK["function"]], None))
    good = tokenizer.encode('So <tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>')
    for token in good:
        state.accept(token)
    state = constraint.Grammars(tokenizer, 259).begin(notation.grammar([LOOK["function"]], None), good[:4])
    allowed = np.flatnonzero(np.isfinite(state.masked(np.zeros(259, np.float32))))
    assert {*map(chr, allowed)} == {" ", "\n", "{"}


def test_where_no_tool_may_be_called_the_model_is_shown_none(service):
    ((without,), (other,)) = asked(messages=MESSAGES, tools=[LOOK], tool_choice="none"), asked(messages=MESSAGES)
    assert without.prompt == other.prompt != asked(messages=MESSAGES, tools=[LOOK])[0].prompt


@pytest.mark.parametrize(("body", "param"), [
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": "never"}, "tool_choice"), ({"tools": [LOOK], "tool_choice": 3}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": FIND}, "tool_choice"), ({"tools": [LOOK], "tool_choice": LOOK}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [{"a": 1}]}, "tools.0"), ({"tools": [LOOK, {"type": "custom", "function": {"name": "a"}}]}, "tools.1"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"b": {"type": "c"}}}}}],
      "tool_choice": "required"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": "required", "response_format": {"type": "json_object"}}, None),
    ({"tools": [STRICT], "regex": "a"}, None),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"properties": 3}}}]},
     "tools"),
])  # fmt: skip
def test_tools_and_choices_that_cannot_be_followed_are_refused_by_their_field(service, body, param):
    error = asked(messages=MESSAGES, **body)
    assert isinstance(error, intake.Bad) and (error.status, error.param) == (400, param)
    assert len(str(error)) < 400 and "\n" not in str(error)


def test_a_call_is_not_forced_on_a_model_whose_template_does_not_tell_how_it_begins(service, monkeypatch):
    for template, said in ((TURN.replace("@", ELEMENTS), "does not tell how"), ("{{ messages }}", "shows none of")):
        monkeypatch.setattr(SERVICE, "tokenizer", Told(template.replace("[INST]", "{{ tools }}[INST]")))
        error = asked(messages=MESSAGES, tools=[LOOK], tool_choice="required")
        assert isinstance(error, intake.Bad) and said in str(error)
        error = asked(messages=MESSAGES, tools=[STRICT])
        assert isinstance(error, intake.Bad) and error.param == "tools"
