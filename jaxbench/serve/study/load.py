"""Load any server with OpenAI's /v1/completions, and record what clients see, from one light process (S file).

Closed loop: so many clients, each with one request in flight. Open loop: requests at random times (Poisson), however
many are in flight. Streams are read line by line from the socket; a token's time is when its event arrives.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbench.pretrained import assets


class Ask(NamedTuple):
    """One request."""

    prompt: str
    prompt_tokens: int
    new_tokens: int


class Seen(NamedTuple):
    """What a client saw of a request; times are seconds from its sending."""

    status: int  # of HTTP; 0 = the connection failed
    tokens: int  # that the server counted
    first: float | None  # to the first event with text
    between: tuple[float, ...]  # from an event to the next
    whole: float
    is_whole: bool  # the stream came to its end, with as many tokens as were asked for


def drawn(
    tokenizer: Any, count: int, *, prompt: tuple[int, int] = (64, 512), new: tuple[int, int] = (32, 128), seed: int = 0
) -> list[Ask]:
    """Draw requests whose prompts are pieces of the default text; lengths, in tokens, are uniform between bounds."""
    ids = tokenizer.encode(assets.default_text(), add_special=False)
    draw, found = random.Random(seed), []
    while len(found) < count:
        length = draw.randint(*prompt)
        start = draw.randrange(len(ids) - length)
        piece = tokenizer.decode(ids[start : start + length])
        found.append(Ask(piece, len(tokenizer.encode(piece)), draw.randint(*new)))
    return found


def copying(tokenizer: Any, count: int, *, passage: int = 256, new: int = 128, seed: int = 0) -> list[Ask]:
    """Draw requests whose answers copy: each has a passage of the default text, and the beginning of its repetition."""
    found = []
    for ask in drawn(tokenizer, count, prompt=(passage, passage), new=(new, new), seed=seed):
        words = ask.prompt.split(" ")
        prompt = f"{ask.prompt}\n\nThe same passage once more:\n\n{' '.join(words[:12])}"
        found.append(Ask(prompt, len(tokenizer.encode(prompt)), new))
    return found


async def send(host: str, port: int, model: str, ask: Ask, *, timeout_s: float, temperature: float = 0.0) -> Seen:
    """Send one request, and read its stream."""
    body = {
        "model": model, "prompt": ask.prompt, "max_tokens": ask.new_tokens, "temperature": temperature,
        "seed": ask.prompt_tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    started, times, tokens, status, is_whole = time.perf_counter(), [], 0, 0, False
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                status = int((await reader.readline()).split()[1])
                while line := await reader.readline():
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        is_whole = tokens == ask.new_tokens
                        break
                    event = json.loads(line[6:])
                    if event.get("usage"):
                        tokens = event["usage"]["completion_tokens"]
                    if any(choice.get("text") for choice in event.get("choices", ())):
                        times.append(time.perf_counter() - started)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, IndexError):
        is_whole = False
    gaps = tuple(float(each) for each in np.diff(times))
    first = times[0] if times else None
    return Seen(status, tokens, first, gaps, time.perf_counter() - started, is_whole)


async def closed(
    host: str, port: int, model: str, asks: Sequence[Ask], *, clients: int, timeout_s: float = 600.0,
    temperature: float = 0.0, progress: Callable[[int], Any] = lambda count: None,
) -> tuple[list[Seen], float]:  # fmt: skip
    """Send all requests by so many clients, each with one in flight; return what was seen, and total seconds."""
    waiting, found = iter(asks), []

    async def client() -> None:
        for ask in waiting:
            found.append(await send(host, port, model, ask, timeout_s=timeout_s, temperature=temperature))
            progress(1)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return found, time.perf_counter() - started


async def poisson(
    host: str, port: int, model: str, asks: Sequence[Ask], *, rate: float, seconds: float, seed: int = 0,
    timeout_s: float = 600.0,
) -> list[Seen]:  # fmt: skip
    """Send requests at random times, `rate` a second on average, for `seconds`; return what was seen of all."""
    draw, tasks, until = random.Random(seed), [], time.perf_counter() + seconds
    number = 0
    while (now := time.perf_counter()) < until:
        await asyncio.sleep(min(draw.expovariate(rate), until - now))
        tasks.append(asyncio.create_task(send(host, port, model, asks[number % len(asks)], timeout_s=timeout_s)))
        number += 1
    return list(await asyncio.gather(*tasks))


def summary(seen: Sequence[Seen], seconds: float) -> dict[str, Any]:
    """Count requests; of whole answers, return tokens a second and percentiles of first, between and total times."""
    good = [each for each in seen if each.is_whole]

    def percentiles(values: Sequence[float]) -> dict[str, float]:
        if not len(values):
            return {}
        return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}

    return {
        "requests": len(seen), "answered": len(good), "refused": sum(each.status in (429, 503) for each in seen),
        "lost": sum(not each.is_whole and each.status not in (429, 503) for each in seen),
        "tokens_a_second": sum(each.tokens for each in good) / seconds, "seconds": seconds,
        "first_s": percentiles([each.first for each in good if each.first is not None]),
        "between_s": percentiles([gap for each in good for gap in each.between]),
        "whole_s": percentiles([each.whole for each in good]),
    }  # fmt: skip
