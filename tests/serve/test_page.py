"""The page, in a headless browser: a conversation, its numbers, a stop, an error, markup that stays text."""

import json

import pytest

from jaxbench.native import library
from tests.browser import Browser, needs_browser
from tests.generation import tiny
from tests.serve.running import Running

pytestmark = [
    pytest.mark.skipif(not library.is_available(), reason="native kernels cannot be had here"),
    needs_browser,
]

# Pressed by the page itself: this model writes over a thousand tokens per second, a click from outside comes too late.
STOP_AT_FIRST_TEXT = """
at('temperature').value = 0;
new MutationObserver((_, observer) => {
  if (document.querySelector('.assistant')?.textContent) { observer.disconnect(); at('ask').requestSubmit(); }
}).observe(at('talk'), {childList: true, subtree: true, characterData: true});
"""

# asked to think, this model begins inside its reasoning
TEMPLATE = tiny.TEMPLATE + "{{ '<think>' if 'think' in messages[-1].content }}{# until </think> #}"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a browser that shows the page of a server with a small model."""
    folder = tmp_path_factory.mktemp("page")
    tiny.make(folder / "model", template=TEMPLATE, max_seq_len=2048)
    server = Running(folder)
    try:
        browser = Browser()
    except BaseException:
        server.end()
        raise
    browser.call("Page.navigate", url=f"{server.url}/")
    browser.wait("document.readyState === 'complete' && document.getElementById('model').textContent === 'tiny'")
    yield browser
    browser.end()
    assert server.end() == 0


def ask(page, text, tokens):
    page.run(f"at('max_tokens').value = {tokens}; at('seed').value = 3; at('text').value = {json.dumps(text)}")
    page.run("at('text').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true}))")


def shown(page, role):
    return page.run(f"[...document.querySelectorAll('.{role}')].map(each => each.textContent)")


def test_a_conversation_is_held_and_its_numbers_are_shown(page):
    ask(page, "<b>hello</b> & good day", 20)
    page.wait("document.querySelectorAll('.message.note').length === 1")
    assert shown(page, "user") == ["<b>hello</b> & good day"] and page.run("document.querySelector('#talk b')") is None
    (answer,) = shown(page, "assistant")
    assert answer and "first token after" in shown(page, "message.note")[0]
    ask(page, "again", 5)
    page.wait("document.querySelectorAll('.message.note').length === 2 && at('send').textContent === 'Send'")
    assert page.run("talk.length") == 4
    page.wait("at('numbers').innerText.includes('prompt tokens from cache')")
    page.wait("[...at('numbers').children].every(each => !/undefined|NaN/.test(each.textContent))")


def test_reasoning_is_shown_in_front_of_its_answer_and_kept_in_the_conversation(page):
    page.run("at('clear').click()")
    ask(page, "think", 20)
    page.wait("document.querySelectorAll('.message.note').length === 1")
    (thought,) = shown(page, "reasoning")
    assert thought and shown(page, "assistant") == [""]
    assert page.run("document.querySelector('.reasoning').nextSibling.className") == "message assistant"
    assert page.run("talk[1]") == {"role": "assistant", "content": "", "reasoning_content": thought}
    ask(page, "again", 5)
    page.wait("document.querySelectorAll('.message.note').length === 2")
    assert len(shown(page, "reasoning")) == 1 and shown(page, "assistant")[1]


def test_an_answer_is_stopped_and_an_error_is_said(page):
    page.run("at('clear').click()")
    page.run(STOP_AT_FIRST_TEXT)
    ask(page, "count", 1500)
    page.wait("document.querySelector('.message.note')?.textContent === 'stopped'")
    ask(page, "too much", 10**6)
    page.wait("document.querySelector('.error') !== null")
    assert "max_tokens" in shown(page, "error")[0]
    page.run("at('clear').click()")
    assert page.run("at('talk').children.length") == 0 and page.problems == []
