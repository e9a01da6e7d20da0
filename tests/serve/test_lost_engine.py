"""Requests that are read while the engine is lost: they are refused for now, and none is called bad."""

import asyncio
from types import SimpleNamespace

import pytest

from jaxbench.serve import app, intake
from jaxbench.serve.metrics import Metrics
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.service import Refused, Service
from jaxbench.serve.settings import ServerConfig
from jaxbench.serve.worker import Report
from tests.serve.asking import MESSAGES, SERVICE, Bytes

MODEL = {"max_seq_len": 100, "vocab_size": 256, "cache_tokens": 1000, "grammars": True}


def service_of(tokenizer):
    """A service with a loaded model and without a worker."""
    made = SimpleNamespace(
        config=ServerConfig(), tokenizer=tokenizer, watermarks=None, metrics=Metrics(), answers={}, state="loading",
        about={}, progress={},
    )  # fmt: skip
    made.check_ready = lambda: Service.check_ready(made)
    made.submit = lambda requests, go_on: Service.submit(made, requests, go_on=go_on)
    Service._hear(made, Report("ready", about=MODEL))
    return made


def lose(service):
    """Let its worker die, and another one begin to load the model."""
    Service._hear(service, Report("died", error="exit code -9"))
    Service._hear(service, Report("loading", about={"done": 1, "total": 9}))


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize("more", [{}, {"regex": "[ab]+"}], ids=["free", "grammar"])
def test_a_request_that_is_read_while_the_engine_is_lost_is_refused_for_now(kind, more):
    class Losing(Bytes):
        """A tokenizer so slow that the engine is lost meanwhile."""

        def encode(self, text, *, add_special=True):
            lose(service)
            return super().encode(text, add_special=add_special)

        def chat(self, messages, **how):
            lose(service)
            return super().chat(messages, **how)

    service = service_of(Losing())
    body = {"prompt": "the old mill"} if kind is CompletionBody else {"messages": MESSAGES}
    with pytest.raises(Refused, match="the model is loading") as refused:
        asyncio.run(intake.submitted(service, "default", "r", intake.checked(body | more, kind)))
    assert refused.value.status == 503


def test_what_is_known_of_the_model_stays_known_while_it_is_loaded_again():
    service = service_of(SERVICE.tokenizer)
    request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=service, name="tiny")))
    shown = [asyncio.run(app.ready(request))]
    lose(service)
    shown.append(asyncio.run(app.ready(request)))
    assert app._model(request)["max_model_len"] == 100
    Service._hear(service, Report("ready", about=MODEL))
    shown.append(asyncio.run(app.ready(request)))
    assert [each.status_code for each in shown] == [200, 503, 200] and shown[0].body == shown[2].body
    assert shown[1].body == b'{"status":"loading","done":1,"total":9}'
