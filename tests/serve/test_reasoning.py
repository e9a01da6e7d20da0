"""Reasoning in answers: tags learned from templates, the text parted however it comes, variables that turn it off."""

import asyncio
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import openai
import pytest
from hypothesis import given
from tokenizers import AddedToken

from jaxbench.pretrained import small_tokenizers
from jaxbench.pretrained.tokenizer import load_tokenizer
from jaxbench.serve import constraint, intake, reasoning, stream, tools
from jaxbench.serve.protocol import ChatBody
from tests.serve.asking import MESSAGES, SERVICE, asked
from tests.serve.calling import BARE, CHATML, LOOK, SEA, SPECIAL, TAGGED, TAGS, Templated, Told, accepted
from tests.serve.test_tools import told

THINK = reasoning.Tags("<think>", "</think>")
# After Qwen 3's: the reasoning of an answer is shown, and an empty one turns it off; after its form that always reasons
SHOWN = CHATML.replace("@", "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}")
SWITCHED = SHOWN.replace("assistant\n{% endif %}", "assistant\n{% if enable_thinking is defined and not enable_thinking"
                         " %}<think>\n\n</think>\n\n{% endif %}{% endif %}")  # fmt: skip
BEGUN = SHOWN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
OFF = {"enable_thinking": False}
# After DeepSeek R1's, which cuts earlier reasoning off
CUT = CHATML.replace("@{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize(("template", "special", "wanted"), [
    (SHOWN, (), THINK), (SWITCHED, (), THINK), (BEGUN, (), THINK), (CUT, (), THINK),
    (SHOWN.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), (), reasoning.Tags("[THINK]", "[/THINK]")),
    (SHOWN, ("</think>",), None),  # not in an answer's text
    (CHATML.replace("@", ""), (), None), (CHATML.replace("@", "{{ m.reasoning_content }}: "), (), None),
    ("{{ fail }", (), None),
], ids=["shown", "switched", "begun", "cut", "brackets", "special", "none", "no tags", "broken"])  # fmt: skip
def test_the_tags_are_learned_from_the_template(template, special, wanted):
    assert reasoning.learned(Templated(template, (*SPECIAL, *special))) == wanted


@pytest.mark.parametrize(("text", "is_begun", "wanted"), [
    ("<think>\nIt is\nso.\n</think>\n\nYes. ", False, ("It is\nso.", "Yes. ")),
    ("\n<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
    ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")), ("<think>\n a \n", False, ("a", "")),
    ("a</think>b", True, ("a", "b")), ("<think>a</think>b", True, ("a", "b")), ("a </thin", True, ("a </thin", "")),
    *((text, False, ("", text)) for text in ("", " Yes.", "<thin", "Yes <think>a</think>", "a</think>b", "\n")),
])  # fmt: skip
def test_reasoning_in_front_of_an_answer_is_parted_from_it(text, is_begun, wanted):
    assert reasoning.Finder(THINK, is_begun=is_begun).update(text, is_whole=True) == wanted


PARTS = ["<think>", "</think>", "\n", " ", "<", "/", "a", "</thi", "Yes."]


@given(
    st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans()
)  # fmt: skip
def test_a_text_that_comes_in_pieces_has_the_reasoning_and_the_content_of_the_whole(parts, sizes, is_begun):
    text, at, found, finder = "".join(parts), 0, [], reasoning.Finder(THINK, is_begun=is_begun)
    for i in range(len(text) + 1):
        piece = text[at : at + sizes[i % len(sizes)]]
        at += len(piece)
        found.append(finder.update(piece, is_whole=at == len(text)))
        if at == len(text):
            break
    whole = reasoning.Finder(THINK, is_begun=is_begun).update(text, is_whole=True)
    assert tuple("".join(each) for each in zip(*found)) == whole


def form(template, **body):
    return stream.Chat("r", "tiny", Told(template), intake.checked({"messages": MESSAGES} | body, ChatBody))


def streamed(made, text, prompt="", ended="stop"):
    """What OpenAI's client is told of an answer: reasoning, content, calls, and why it ended."""
    events = asyncio.run(told(made, text, ended, tuple(map(ord, prompt))))
    chunks = [openai.types.chat.ChatCompletionChunk.model_validate(each).choices[0] for each in events]
    thought = "".join(getattr(each.delta, "reasoning_content", None) or "" for each in chunks)
    calls = [call.function.name for each in chunks for call in each.delta.tool_calls or []]
    return thought, "".join(each.delta.content or "" for each in chunks), calls, chunks[-1].finish_reason


def test_an_answers_reasoning_has_a_field_of_its_own_also_in_front_of_calls():
    assert streamed(form(SHOWN), "<think>\nSo.\n</think>\n\nYes.") == ("So.", "Yes.", [], "stop")
    assert streamed(form(BEGUN), "So.\n</think>\nYes.", "assistant\n<think>\n") == ("So.", "Yes.", [], "stop")
    assert streamed(form(BEGUN), "So", "assistant\n<think>\n", "length") == ("So", "", [], "length")
    assert streamed(form(CHATML.replace("@", "")), "<think>So.</think>") == ("", "<think>So.</think>", [], "stop")
    called = f"<think>I look: <tool_call>\n</think>\n<tool_call>\n{SEA}\n</tool_call>"
    assert streamed(form(SHOWN, tools=[LOOK]), called) == ("I look: <tool_call>", "", ["look"], "tool_calls")


def test_a_whole_answer_that_was_cut_off_in_its_reasoning_has_no_content():
    made, prompt = form(BEGUN), tuple(map(ord, "assistant\n<think>\n"))
    made.attend([SimpleNamespace(request=SimpleNamespace(prompt=prompt))])
    assert made.choice(0, "So", None, "length")["message"] == {
        "role": "assistant", "content": None, "reasoning_content": "So",
    }  # fmt: skip


@pytest.fixture
def service(monkeypatch):
    """Return a service whose template has a switch for reasoning."""
    monkeypatch.setattr(
        SERVICE, "tokenizer", Told(SWITCHED.replace("<|im_start|>", "{{ tools if tools }}<|im_start|>"))
    )
    monkeypatch.setattr(SERVICE, "about", SERVICE.about | {"max_seq_len": 5000, "cache_tokens": 5000, "grammars": True})


def test_variables_of_the_template_reach_it_and_others_are_refused(service):
    (plain,), (off,) = (asked(messages=MESSAGES, **body) for body in ({}, {"chat_template_kwargs": OFF}))
    assert off.prompt == plain.prompt + tuple(map(ord, "<think>\n\n</think>\n\n"))
    for variables in ({"enable_thinkng": False}, {"messages": []}, {"add_generation_prompt": False}, {"eos_token": ""}):
        error = asked(messages=MESSAGES, chat_template_kwargs=variables)
        assert (error.status, error.param) == (400, "chat_template_kwargs")
        said = (
            f"{next(iter(variables))!r} is no variable that the model's template reads; wanted one of enable_thinking"
        )
        assert said in str(error)
    assert asked(messages=MESSAGES, chat_template_kwargs=[]).param == "chat_template_kwargs"


def test_a_variable_that_only_the_template_for_tools_reads_is_taken_with_tools(service, monkeypatch, tmp_path):
    tokenizer = added(tmp_path)
    tokenizer.chat_template, tokenizer.tool_template = CHATML, SWITCHED.replace("<|im_start|>", "{{ tools }}")
    monkeypatch.setattr(SERVICE, "tokenizer", tokenizer)
    (off,) = asked(messages=MESSAGES, tools=[LOOK], chat_template_kwargs=OFF)
    assert tokenizer.decode(off.prompt).endswith("</think>\n\n")
    assert asked(messages=MESSAGES, chat_template_kwargs=OFF).param == "chat_template_kwargs"


def test_an_answer_that_has_to_be_a_call_begins_as_the_template_writes_it_with_these_variables(service):
    for variables in ({}, OFF):
        (forced,) = asked(messages=MESSAGES, tools=[LOOK], tool_choice="required", chat_template_kwargs=variables)
        assert "".join(map(chr, forced.prompt)).endswith("assistant\n<think>\n\n</think>\n\n<tool_call>\n")
    assert tools.learned(SERVICE.tokenizer).prefill != tools.learned(SERVICE.tokenizer, OFF).prefill == "<tool_call>\n"


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["n"]}}}


@pytest.mark.parametrize(("body", "good", "bad"), [
    ({"response_format": SCHEMA}, '{"n": 3}', '{"m": 3}'), ({"regex": r"[a/\n]+\/\."}, "a/\n/.", "a/"),
    ({"regex": "a\nb"}, "a\nb", "ab"), ({"regex": r"\s*<?[^/{<]+"}, "<so>", "{"),
    ({"choice": ["yes", 'n"o']}, 'n"o', "no"),
    ({"response_format": SCHEMA, "tools": [LOOK]}, f"<tool_call>{SEA}</tool_call>", "So"),
], ids=["schema", "regex", "line", "any", "choice", "calls"])  # fmt: skip
def test_a_grammar_holds_behind_the_reasoning(service, monkeypatch, body, good, bad):
    for variables, reasoned in (({}, True), (OFF, False)):
        follows = accepted(asked(messages=MESSAGES, chat_template_kwargs=variables, **body)[0].grammar)
        assert follows(good) and not follows(bad)
        for thought in ("", "So {\n", f"<think>{good}"):
            assert follows(f"<think>{thought}</think>\n\n{good}") is reasoned
            assert not follows(f"<think>{thought}</think>\n\n{bad}") and not follows(f"<think>{thought}{good}")
    monkeypatch.setattr(SERVICE, "tokenizer", Told(BEGUN.replace("<|im_start|>", "{{ tools if tools }}<|im_start|>")))
    follows = accepted(asked(messages=MESSAGES, **body)[0].grammar)
    assert follows(f"So {{\n</think>{good}") and not follows(good) and not follows(f"So</think>{bad}")


def test_an_expression_that_has_the_opening_tag_says_itself_what_the_reasoning_is(service):
    follows = accepted(asked(messages=MESSAGES, regex=r"<think>[^<]{0,9}</think>\n(yes|no)")[0].grammar)
    assert follows("<think>So.</think>\nno") and not follows("<think>So.</think>\n<think>So.</think>\nno")


STRICT = {"type": "function", "function": LOOK["function"] | {"strict": True}}


@pytest.mark.parametrize("notation", [TAGGED, BARE], ids=["tagged", "bare"])
@pytest.mark.parametrize("template", [SHOWN, BEGUN], ids=["shown", "begun"])
def test_strict_calls_hold_behind_the_reasoning_in_which_there_is_none(service, monkeypatch, template, notation):
    shown = template.replace("<|im_start|>", "{{ tools if tools }}<|im_start|>").replace(TAGGED, notation)
    monkeypatch.setattr(SERVICE, "tokenizer", Told(shown))
    follows = accepted(asked(messages=MESSAGES, tools=[STRICT])[0].grammar)
    begin = "<think>" if template == SHOWN else ""
    opening, closing, call = "<tool_call>", "</tool_call>", SEA
    if notation == BARE:
        opening, closing, call = "", "", SEA.replace("arguments", "parameters")
    good, bad = (f"{opening}{each}{closing}" for each in (call, call.replace("sea", "moon")))
    for thought in ("So", f"{{ I use {opening} or not.\n", good, bad):
        for answer, holds in ((good, True), ("Yes.", True), ("", True), (bad, False)):
            assert follows(f"{begin}{thought}</think>\n\n{answer}") is holds
        assert not follows(f"{begin}{thought}") and not follows(f"{begin}{thought}{good}")
    assert follows(good) is (template == SHOWN)


def test_reasoning_and_strict_calls_whose_tags_are_tokens_are_written_with_them(tmp_path):
    tokenizer = added(tmp_path, "<think>", "</think>", "<tool_call>", "</tool_call>")
    notation = TAGS._replace(opening_parts=(259,), closing_parts=(260,))
    for begun in (False, True):
        thought = THINK.of_grammar(tokenizer, tokenizer.encode("a<think>" if begun else "a"))
        grammar = notation.grammar([STRICT["function"]], reasoning=thought)
        state = constraint.Grammars(tokenizer, 261).begin(grammar)
        for token in tokenizer.encode("<think>I call.\n</think>\n\n")[begun:]:
            state.accept(token)
        assert np.isfinite(state.masked(np.zeros(261, np.float32)))[[0, 259]].all()  # text, or a call
        for token in tokenizer.encode(f"<tool_call>\n{SEA}\n</tool_call>"):
            state.accept(token)
        state = constraint.Grammars(tokenizer, 261).begin(grammar)
        for token in tokenizer.encode("<think>I call.")[begun:]:
            state.accept(token)
        assert np.isfinite(state.masked(np.zeros(261, np.float32)))[256:].tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("name", ["<think>", "[THINK]"])
def test_tags_that_are_tokens_of_the_model_are_followed_as_tokens(tmp_path, name):
    tokenizer = added(tmp_path, name, closing := name.replace("<", "</").replace("[", "[/"))
    tags = reasoning.Tags(name, closing)
    for begun in (False, True):
        thought = tags.of_grammar(tokenizer, tokenizer.encode(f"a{name}" if begun else "a"))
        assert thought == constraint.Reasoning(name, closing, begun, (257, 258))
        state = constraint.Grammars(tokenizer, 259).begin(constraint.of_choices(["yes"], thought))
        for token in tokenizer.encode(f"{'' if begun else name}So.{closing}\nyes"):
            assert not state.is_over
            state.accept(token)
        assert state.is_over
        state = constraint.Grammars(tokenizer, 259).begin(constraint.of_choices(["yes"], thought), [257][begun:])
        assert np.isfinite(state.masked(np.zeros(259, np.float32)))[:128].all()  # the reasoning is free
        *front, last = closing.encode()  # as a text it would end the reasoning for readers, and not for the grammar
        for token in front:
            state.accept(token)
        assert not np.isfinite(state.masked(np.zeros(259, np.float32))[last])
    assert tags.of_grammar(tokenizer, tokenizer.encode(f"a{name}\n\n{closing}\n\n")) is None


def added(folder, *names):
    """A tokenizer of bytes with further tokens."""
    small_tokenizers.ByteTokenizer().save(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.core.add_tokens([AddedToken(name, special=False) for name in names])
    return tokenizer
