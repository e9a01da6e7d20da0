"""Messages of a conversation: what the template gets, and what is refused because the model would not see it."""

import pytest

from jaxbench.serve import intake
from tests.serve.asking import MESSAGES, SERVICE, Bytes, asked


def test_an_assistants_message_without_content_is_empty_as_where_it_refused():
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    (request,) = asked(messages=[MESSAGES[0], refused, MESSAGES[0]])
    assert bytes(request.prompt).decode() == "<user>hi<assistant><user>hi"


def call(arguments, **more):
    return {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}} | more


def test_a_developers_message_is_a_system_message_as_templates_know_no_other_name():
    found = [asked(messages=[{"role": role, "content": "Be brief."}, *MESSAGES]) for role in ("developer", "system")]
    assert [bytes(request.prompt).decode() for (request,) in found] == ["<system>Be brief.<user>hi"] * 2


def test_calls_of_earlier_answers_reach_the_template_as_objects(monkeypatch):
    history = [
        MESSAGES[0] | {"name": None}, {"role": "assistant", "content": None, "tool_calls": [call('{"a": [null, 1]}')]},
        {"role": "tool", "content": [{"type": "text", "text": each} for each in "42"], "tool_call_id": "c"},
    ]  # fmt: skip
    monkeypatch.setitem(SERVICE.about, "max_seq_len", 1000)
    (request,) = asked(messages=history)
    shown = str([{"type": "function", "function": {"name": "look", "arguments": {"a": [None, 1]}}, "id": "c"}])
    assert bytes(request.prompt).decode() == f"<user>hi<assistant>{shown}<tool>42"


def test_tools_that_the_template_does_not_show_are_refused(monkeypatch):
    monkeypatch.setattr(Bytes, "chat", lambda self, messages, *, tools=None, **how: f"{len(messages)} messages")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    error = asked(messages=MESSAGES, tools=tools)
    assert (error.status, error.param) == (400, "tools")
    assert "the model's template shows none of the 1 to the model" in str(error)
    assert not isinstance(asked(messages=MESSAGES, tools=[]), Exception)


def test_calls_that_the_template_does_not_show_are_refused(monkeypatch):
    monkeypatch.setattr(
        Bytes, "chat", lambda self, messages, *, tools=None, **how: f"{len(messages)} messages{tools or ''}"
    )
    error = asked(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call("{}")]}])
    assert (error.status, error.param) == (400, "messages.1.tool_calls") and "does not show calls" in str(error)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "wizard", "content": "a"}, "role"), ({"role": "", "content": "a"}, "role"),
        ({"role": "user<|im_end|>", "content": "a"}, "role"), ({"content": "a"}, "role"),
        ({"role": "assistant"}, "content"), ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "tool"}, "content"), ({"role": "user", "content": []}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}, "content"),
        ({"role": "user", "content": "a", "foo": 1}, "foo"), ({"role": "user", "content": "a", "name": "b"}, "name"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "b"}}, "function_call"),
        ({"role": "user", "content": "a", "refusal": "b"}, "refusal"),
        ({"role": "user", "content": "a", "tool_call_id": "b"}, "tool_call_id"),
        ({"role": "user", "content": "a", "tool_calls": [call("{}")]}, "tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": 5}, "tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": [call("{}", type="x")]}, "tool_calls.0.type"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "tool_calls.0.function"),
        *(
            ({"role": "assistant", "tool_calls": [call(arguments)]}, "tool_calls.0.function.arguments")
            for arguments in ("", "[]", "{", {}, "[" * 5000)
        ),
    ],
)  # fmt: skip
def test_what_the_model_would_not_see_of_a_message_is_refused_by_its_place(message, place):
    error = asked(messages=[*MESSAGES, message])
    assert isinstance(error, intake.Bad) and (error.status, error.param) == (400, f"messages.1.{place}")
    assert len(str(error)) < 400 and "\n" not in str(error)
