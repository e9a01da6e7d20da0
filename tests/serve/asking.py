"""Asks what an engine would get of a body, without an engine."""

import asyncio
from types import SimpleNamespace

from jaxbench.serve import intake
from jaxbench.serve.protocol import ChatBody, CompletionBody
from jaxbench.serve.settings import ServerConfig

MESSAGES = [{"role": "user", "content": "hi"}]


class Bytes:
    """A tokenizer whose tokens are bytes, and whose template writes what it is given."""

    end_ids = ()
    longest_token = None

    def encode(self, text, *, add_special=True):
        return list(text.encode())

    def decode(self, ids, *, skip_special=False):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token])

    def chat(self, messages, *, tools=None, **how):
        shown = [f"<{each['role']}>{each['content']}{each.get('tool_calls', '')}" for each in messages]
        return "".join(shown) + str(tools or "")


SERVICE = SimpleNamespace(
    config=ServerConfig(), tokenizer=Bytes(), watermarks=None, check_ready=lambda: None,
    submit=lambda made, go_on: made,
    about={"max_seq_len": 100, "vocab_size": 256, "cache_tokens": 1000, "grammars": False},
)  # fmt: skip


def asked(**body):
    """The engine's requests of a body; an Exception where it is refused."""
    kind = ChatBody if "messages" in body else CompletionBody
    try:
        return asyncio.run(intake.submitted(SERVICE, "tiny", "r", intake.checked(body, kind)))
    except intake.Bad as error:
        return error


def settings(request):
    """A request but for its seed, which is drawn where none is given."""
    return request._replace(sampling=request.sampling.model_copy(update={"seed": 0}))
