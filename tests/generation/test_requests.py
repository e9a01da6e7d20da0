"""Lines of a file as token ids: prompts, messages in the chat template, and what is refused."""

from __future__ import annotations

import pytest

from jaxbench.generation import requests


def read(tmp_path, text, *lines, **how):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return requests.parsed(path.read_bytes(), path, text, **how)


def shown(text, found):
    return [text.decode(request.ids) for request in found]


def test_prompts_stay_as_they_are_and_messages_go_through_the_template(tmp_path, text):
    lines = ['{"prompt": "Caf\\u00e9", "id": 7}', "", '{"messages": [{"role": "user", "content": "Hi"}]}']
    found = read(tmp_path, text, *lines)
    assert shown(text, found) == ["Café", "[user]Hi[assistant]"]
    assert [request.row for request in found] == [0, 1] and found[0].fields == {"prompt": "Café", "id": 7}
    assert found[1].place.endswith("in.jsonl line 3")


def test_chat_puts_prompts_through_the_template_and_a_system_message_in_front(tmp_path, text):
    own = '{"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]}'
    found = read(tmp_path, text, '{"prompt": "Hi"}', own, chat=True, system="Be brief.")
    assert shown(text, found) == ["[system]Be brief.[user]Hi[assistant]", "[system]Own.[user]Hi[assistant]"]


def test_a_developers_message_is_a_system_message(tmp_path, text):
    own = '{"messages": [{"role": "developer", "content": "Own."}, {"role": "user", "content": "Hi"}]}'
    assert shown(text, read(tmp_path, text, own)) == ["[system]Own.[user]Hi[assistant]"]
    with pytest.raises(ValueError, match="begin with a system message"):
        read(tmp_path, text, own, system="Be brief.")


def test_a_system_message_that_no_line_would_have_is_refused(tmp_path, text):
    own = '{"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]}'
    chat = '{"messages": [{"role": "user", "content": "Hi"}]}'
    plain = '{"prompt": "Hi"}'
    mixed = read(tmp_path, text, plain, own, chat, system="Be brief.")
    assert shown(text, mixed)[::2] == ["Hi", "[system]Be brief.[user]Hi[assistant]"]
    for lines in ((plain,), (plain, own), (own,)):
        with pytest.raises(ValueError, match=f"--system='Be brief.' does nothing with .*: its {len(lines)} requests"):
            read(tmp_path, text, *lines, system="Be brief.")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("{broken", "line 2: not JSON: .* at column 2"),
        (b'{"prompt": "\xff"}', "line 2: not UTF-8"),
        ("[1]", "line 2 holds a list, wanted"),
        ("{}", "line 2 has neither prompt nor messages"),
        ('{"prompt": "a", "messages": []}', "line 2 has prompt and messages"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"prompt": 5}', "line 2: prompt is a int"),
        ('{"prompt": "\\ud800"}', "line 2: prompt has a lone surrogate"),
        ('{"messages": []}', "line 2: messages is an empty list"),
        ('{"messages": "Hi"}', "line 2: messages is a str"),
        ('{"messages": ["Hi"]}', "line 2: message 1 is a str"),
        ('{"messages": [{"role": "user"}]}', "line 2: content of message 1 is missing"),
        ('{"messages": [{"role": 1, "content": "Hi"}]}', "line 2: role of message 1 is a int"),
        ('{"messages": [{"role": "wizard", "content": "Hi"}]}', "line 2: role of message 1 is 'wizard'"),
        ('{"messages": [{"role": "user", "content": "Hi", "name": "a"}]}', "line 2: message 1 has 'name'"),
        ('{"messages": [{"role": "user", "content": "", "thinking": "a"}]}', "thinking of message 1 .* role user"),
        ('{"messages": [{"role": "assistant", "content": "", "reasoning": 5}]}', "reasoning of message 1 is a int"),
        ('{"messages": [{"role": "assistant", "content": "", "reasoning": "\\ud800"}]}', "reasoning .* lone surrogate"),
        ('{"prompt": "a", "ids": []}', "line 2 has the key 'ids', which the output writes; rename it"),
        ('{"prompt": ' + "[" * 50_000, "line 2: "),
        ('{"prompt": "a", "prompt": "b"}', "line 2 has the key 'prompt' twice, wanted once"),
        ('{"prompt": "a", "tag": [{"b": 1, "\\u0062": 1}]}', "line 2 has the key 'b' twice, wanted once"),
        ('{"prompt": "a", "tag": ' + "[" * 100 + "]" * 100 + "}", "line 2 has objects or lists nested more than 100"),
    ],
)
def test_a_line_that_is_no_request_is_named(line, wanted, tmp_path, text):
    with pytest.raises(ValueError, match=wanted):
        read(tmp_path, text, '{"prompt": "fine"}', line)


def test_a_file_without_a_request_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="holds no request"):
        read(tmp_path, text, "", " ")


def test_what_does_not_fit_says_how_many_tokens_would():
    requests.check_room([1] * 100, "--prompt", new_tokens=28, context=128)
    with pytest.raises(ValueError, match="--prompt has 100 tokens.*context of 128; pass --new_tokens=28 or less"):
        requests.check_room([1] * 100, "--prompt", new_tokens=29, context=128)
    with pytest.raises(ValueError, match="context of 128; shorten it"):
        requests.check_room([1] * 128, "--prompt", new_tokens=1, context=128)
