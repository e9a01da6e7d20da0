"""The running batch: requests in, tokens out, one step at a time (S file).

engine = Engine(runner)
engine.add(Request("a", prompt, max_new_tokens=32))
while engine.is_busy:
    for event in engine.step(): ...

A runner computes logits; which requests share a step never changes a token. After a step that raises, all running
requests are recomputed from their texts alone; a request that was in two such steps ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxbench.serve import marking, sampler
from jaxbench.serve.batch_rows import Batch, Rows, Runner, batch_of
from jaxbench.serve.blocks import BlockPool
from jaxbench.serve.constraint import Grammars
from jaxbench.serve.drafting import Drafter
from jaxbench.serve.marking import Watermarks
from jaxbench.serve.request import Ended, Request, RequestState, TokenLogprobs
from jaxbench.serve.scheduler import Limits, Part, Plan, Scheduler

MAX_FAILURES = 2  # failed steps after which a request ends with an error
SHARED = ("num_blocks", "block_size", "vocab_size", "sizes", "max_wanted")  # must be equal for a runner and its draft


class Event(NamedTuple):
    """What happened to a request: a token, its end, or both."""

    id: str
    token: int | None
    logprobs: TokenLogprobs | None
    ended: Ended | None
    error: str | None = None
    num_cached: int = 0  # tokens of the prompt that were found in the cache


class QueueFull(Exception):
    """The engine holds as many requests as may run and wait."""


class Engine:
    """A runner and the requests that it serves."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits = Limits(),
        *,
        grammars: Grammars | None = None,
        watermarks: Watermarks | None = None,
        draft: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Make an engine without requests.

        grammars, watermarks: for requests that ask for one; None = such requests are refused. draft: runner of a
        smaller model, which guesses where the text itself has no guess; it equals the runner in all of SHARED.

        Raises:
          ValueError: the runner does not take steps of these limits, or the draft does not match the runner.
        """
        if runner.sizes[-1] < limits.max_batch_tokens or runner.max_wanted < limits.max_logits:
            raise ValueError(
                f"max_batch_tokens={limits.max_batch_tokens}, max_running={limits.max_running}, max_guessed="
                f"{limits.max_guessed}: the runner takes {runner.sizes[-1]} rows, {runner.max_wanted} with logits"
            )
        self.runner, self.limits, self._clock = runner, limits, clock
        self._grammars, self._watermarks = grammars, watermarks
        self._marks = None if watermarks is None else watermarks.marks(runner.vocab_size)
        if runner.segment is not None:
            limits.check_segment(runner.segment)
        self.scheduler = Scheduler(BlockPool(runner.num_blocks, runner.block_size), limits, segment=runner.segment)
        self._drafter = None
        if draft is not None:
            differing = [name for name in SHARED if getattr(draft, name) != getattr(runner, name)]
            if differing:
                name = differing[0]
                raise ValueError(f"draft: {name} is {getattr(draft, name)}, and the model's {getattr(runner, name)}")
            self._drafter = Drafter(draft)
            self.scheduler.draft = self._drafter.guess
        self._states: dict[str, RequestState] = {}
        self._arrivals = 0
        self.num_steps = self.num_guessed = self.num_right = 0

    @property
    def has_grammars(self) -> bool:
        """True where it takes requests with a grammar."""
        return self._grammars is not None

    @property
    def is_busy(self) -> bool:
        """True while any request waits or runs."""
        return bool(self._states)

    def add(self, request: Request) -> None:
        """Add a request to the queue.

        Raises:
          ValueError: it has no token, one outside the vocabulary, or more than the model or the blocks take; or its id
            is in use, its grammar is invalid, or its watermark is unknown here.
          QueueFull: the engine holds as many requests as may run and wait.
        """
        self.check(request)
        if request.id in self._states:
            raise ValueError(f"request {request.id!r}: the id is in use")
        if len(self._states) >= self.limits.max_requests:
            raise QueueFull(f"{len(self._states)} requests are here, no more may be")
        state = RequestState(request, self._arrivals)
        if request.grammar is not None and self._grammars is not None:
            state.constraint = self._grammars.begin(request.grammar)
        if request.watermark is not None and self._marks is not None:
            state.marker = self._marks.begin(request)
        self._arrivals += 1
        self._states[request.id] = state
        self.scheduler.add(state)

    def state(self, id: str) -> RequestState:
        """Return the state of a request in the engine."""
        return self._states[id]

    def check(self, request: Request) -> None:
        """Check that a request can be served if it is the only one.

        Raises:
          ValueError: as `add`, except for the id and for an invalid grammar.
        """
        prompt, size = request.prompt, self.runner.vocab_size
        if not prompt or min(prompt) < 0 or max(prompt) >= size:
            shown = f"tokens from {min(prompt)} to {max(prompt)}" if prompt else "no token"
            raise ValueError(f"request {request.id!r}: the prompt has {shown}; wanted some, each from 0 to {size - 1}")
        total = len(prompt) + request.max_new_tokens
        if request.max_new_tokens < 1 or total > self.runner.max_seq_len:
            raise ValueError(
                f"request {request.id!r}: {len(prompt)} tokens of the prompt and max_new_tokens="
                f"{request.max_new_tokens}; wanted at least 1 new one and {self.runner.max_seq_len} together at most"
            )
        if not self.scheduler.fits(total):
            raise ValueError(
                f"request {request.id!r}: {total} tokens; the cache has room for "
                f"{(self.runner.num_blocks - 1) * self.runner.block_size}"
            )
        if request.grammar is not None and self._grammars is None:
            raise ValueError(f"request {request.id!r}: the engine follows no grammars; it needs llguidance")
        marking.check(request, self._watermarks)
        odd = [token for token in request.sampling.logit_bias if token >= size]
        if odd:
            raise ValueError(f"request {request.id!r}: logit_bias of token {odd[0]}; wanted tokens below {size}")

    def cancel(self, id: str, ended: Ended = "cancelled") -> Event | None:
        """End a request now and return its event; None where no request has this id."""
        return self._end(self._states[id], ended) if id in self._states else None

    def step(self) -> list[Event]:
        """Compute one step, and return the events of all requests."""
        now = self._clock()
        late = [each for each in self._states.values() if each.request.deadline <= now]
        events = [self._end(state, "deadline") for state in late]
        plan = self.scheduler.plan()
        if not plan.parts:
            return events
        self.num_steps += 1
        try:
            logits = self.runner.run(self._batch(plan))
        except Exception as error:  # any error of a runner: the texts are still known, the content of its cache is not
            return events + self._start_over(plan, error)
        if self._drafter is not None:
            self._drafter.follow(plan)
        at = 0
        for part in plan.parts:
            if not part.is_last:
                self.scheduler.computed(part)
                continue
            rows = logits[at : at + 1 + len(part.guess)]
            at += len(rows)
            events += self._next_tokens(part, rows)
        return events

    def _next_tokens(self, part: Part, logits: Float[np.ndarray, "M V"]) -> list[Event]:
        """Return the tokens that follow from a part, as events: one, and another for every right guess."""
        state, guess, events = part.state, part.guess, []
        for number, row in enumerate(logits):
            self.scheduler.computed(part, number)  # before the request may end, so that others find its text
            events.append(self._next_token(state, row))
            token = events[-1].token
            if events[-1].ended or number == len(guess) or token != guess[number]:
                break
        right = len(events) - 1
        if guess:
            self.num_guessed, self.num_right = self.num_guessed + len(guess), self.num_right + right
            state.lookup.record(len(guess), right, len(state.tokens))
        return events

    def _batch(self, plan: Plan) -> Batch:
        rows = [
            Rows(part.state.blocks, part.tokens, part.start, 1 + len(part.guess) if part.is_last else 0)
            for part in plan.parts
        ]
        return batch_of(self.runner, rows, np.array(plan.copies, np.int32).reshape(-1, 2))

    def _next_token(self, state: RequestState, logits: Float[np.ndarray, " V"]) -> Event:
        request = state.request
        try:
            token, logprobs = sampler.choose(state, logits)
            is_over = token in request.end_ids
            if state.constraint is not None and not is_over:
                state.constraint.accept(token)
                is_over = state.constraint.is_over
        except Exception as error:
            return self._end(state, "error", error=f"{type(error).__name__}: {error}")
        state.tokens.append(token)
        if is_over or state.num_new == request.max_new_tokens:
            ended: Ended = "stop" if is_over else "length"
            return self._end(state, ended)._replace(token=token, logprobs=logprobs)
        return Event(request.id, token, logprobs, None, None, state.num_cached or 0)

    def _end(self, state: RequestState, ended: Ended, *, error: str | None = None) -> Event:
        state.ended = ended
        if ended == "error":
            for block in state.blocks:
                self.scheduler.pool.invalidate(block)
        self.scheduler.remove(state)
        del self._states[state.request.id]
        return Event(state.request.id, None, None, ended, error, state.num_cached or 0)

    def _start_over(self, plan: Plan, error: Exception) -> list[Event]:
        """Recover from a failed step: every running request waits again, with an empty cache."""
        events = []
        for state in [part.state for part in plan.parts]:
            state.failures += 1
            if state.failures >= MAX_FAILURES:
                events.append(self._end(state, "error", error=f"{type(error).__name__}: {error}"))
        for state in list(self.scheduler.running):
            self.scheduler.preempt(state)
        self.scheduler.pool.invalidate_all()
        self.runner.reset()
        if self._drafter is not None:
            self._drafter.reset()
        return events

    def generate(self, requests: Iterable[Request]) -> dict[str, list[Event]]:
        """Run requests to their end, added one by one as room allows; return events by id, of earlier requests too.

        Raises:
          ValueError: as `add`.
        """
        found: dict[str, list[Event]] = {}
        waiting = iter(requests)
        more: Request | None = next(waiting, None)
        while more is not None or self.is_busy:
            while more is not None and len(self._states) < self.limits.max_requests:
                self.add(more)
                found[more.id] = []
                more = next(waiting, None)
            for event in self.step():
                found.setdefault(event.id, []).append(event)
        return found

    def stats(self) -> dict[str, Any]:
        """Return current counts: running and waiting requests, blocks, preemptions, steps, guesses."""
        pool = self.scheduler.pool
        return {
            "running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting),
            "blocks": pool.num_blocks - 1, "blocks_available": pool.num_available, "blocks_known": pool.num_known,
            "preempted": self.scheduler.num_preempted, "steps": self.num_steps,
            "guessed": self.num_guessed, "guessed_right": self.num_right,
        }  # fmt: skip
