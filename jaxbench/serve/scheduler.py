"""Which tokens of which requests are computed in a step, and in which blocks (S file).

Data flow: waiting requests by rank -> admitted where a slot and blocks for all their tokens are free, or held by a
request of lower priority -> a step has one token of every decoding request, then parts of prompts up to
max_batch_tokens; short prompts need not wait for a long one. If a decoding request finds no free block, the request
that ranks last is preempted: it waits again and is recomputed. Its text is the same, and so is its answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pydantic

from jaxbench.config import Base
from jaxbench.serve.blocks import ROOT, BlockPool
from jaxbench.serve.request import RequestState


class Limits(Base):
    """Limits of a step and of the queue."""

    max_running: int = pydantic.Field(default=32, ge=1)  # requests at once
    max_batch_tokens: int = pydantic.Field(default=256, ge=1)  # per step; at least max_running
    max_waiting: int = pydantic.Field(default=256, ge=0)  # requests; more are refused
    max_wait_ms: float = pydantic.Field(default=0.0, ge=0, le=10_000)  # that the first request waits for a fuller step
    max_guessed: int = pydantic.Field(default=0, ge=0, le=32)  # guessed tokens per request and step; 0 = none
    # Share of a step's prompt tokens for prompts that end in it but rank behind one that does not; 0 = strictly by rank
    short_prompt_share: float = pydantic.Field(default=0.5, ge=0, lt=1)

    @property
    def max_logits(self) -> int:
        """Maximum number of rows of a step whose logits are wanted."""
        return min(self.max_running * (1 + self.max_guessed), self.max_batch_tokens)

    @property
    def max_requests(self) -> int:
        """Maximum number of requests in the engine, running and waiting."""
        return self.max_running + self.max_waiting

    def check_segment(self, segment: int) -> None:
        """Check that a runner that reads prompts in segments takes steps of these limits.

        Raises:
          ValueError: a step has no room for a segment, or tokens are guessed, which a slot cannot take back.
        """
        least = self.max_running + segment
        if self.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens}: slots want at least {least}, a token of max_running="
                f"{self.max_running} requests and a segment of {segment}"
            )
        if self.max_guessed:
            raise ValueError(f"max_guessed={self.max_guessed}: slots take back no token; wanted 0")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Limits:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_running={self.max_running}: a step has a "
                "token of every running request"
            )
        return self


class Part(NamedTuple):
    """Tokens of a request that a step computes."""

    state: RequestState
    start: int  # position of the first
    count: int
    guess: tuple[int, ...] = ()  # tokens after the text, computed in the same step

    @property
    def is_last(self) -> bool:
        """True where the next token follows from the part's last one."""
        return self.start + self.count == len(self.state.tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens, including guesses."""
        return [*self.state.tokens[self.start : self.start + self.count], *self.guess]


class Plan(NamedTuple):
    """One step."""

    parts: list[Part]
    copies: list[tuple[int, int]]  # blocks (from, to), all copied at once before the step

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(part.count + len(part.guess) for part in self.parts)


# (text, maximum of tokens) of each -> guesses
Draft = Callable[[list[tuple[RequestState, int]]], list[tuple[int, ...]]]


class Scheduler:
    """Running and waiting requests, and their blocks."""

    def __init__(self, pool: BlockPool, limits: Limits, *, segment: int | None = None):
        """segment: the runner's, if any: prompts are cut at its multiples, and answers are read token by token."""
        self.pool, self.limits, self._segment = pool, limits, segment
        self.running: list[RequestState] = []  # by rank
        self.waiting: list[RequestState] = []  # by rank
        self.num_preempted = 0
        self.draft: Draft | None = None  # guesses where lookup in the text itself finds none
        self._copies: dict[int, int] = {}  # block -> source to copy from before the next step

    def add(self, state: RequestState) -> None:
        """Add a request to those waiting, by rank."""
        bisect.insort(self.waiting, state, key=lambda each: each.rank)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of waiting requests that are still to be computed."""
        return sum(state.num_uncomputed for state in self.waiting)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.pool.block_size)

    def fits(self, num_tokens: int) -> bool:
        """True where a request of `num_tokens` tokens fits if it is the only one."""
        return self.blocks_for(num_tokens) < self.pool.num_blocks

    def plan(self) -> Plan:
        """Plan the next step, admitting and preempting requests for it."""
        self._admit()
        for state in self.running:
            self._take_what_others_read(state)
        budget, parts = self.limits.max_batch_tokens, []
        for state in list(self.running):
            if state.num_uncomputed == 1 and state in self.running and self._extend(state):
                parts.append(Part(state, state.num_computed, 1))
        parts = [part for part in parts if part.state in self.running]
        budget -= len(parts)
        for state in self._prompt_order(budget):
            count = self._length(state, budget)
            if count > 0:
                parts.append(Part(state, state.num_computed, count))
                budget -= count
        if self.limits.max_guessed and budget > 0:
            parts = self._guessing(parts, budget)
        copies = [(source, block) for block, source in self._copies.items()]
        self._copies.clear()
        return Plan(parts, copies)

    def _prompt_order(self, budget: int) -> list[RequestState]:
        """Return requests with prompt left to read, by rank, but with short prompts ahead of a long one.

        The long one is the first by rank that does not end in this step. Prompts of its priority that do end go ahead
        of it, up to short_prompt_share: they need not wait for all of it, and it gets the rest of the step.
        """
        reading = [state for state in self.running if state.num_uncomputed > 1]
        ahead: list[RequestState] = []
        while reading and reading[0].num_uncomputed <= budget:
            budget -= reading[0].num_uncomputed
            ahead.append(reading.pop(0))
        if not reading:
            return ahead
        long = reading[0]
        room = min(int(budget * self.limits.short_prompt_share), budget - (self._segment or 1))
        for state in reading[1:]:
            if state.num_uncomputed <= room and state.request.priority == long.request.priority:
                room -= state.num_uncomputed
                ahead.append(state)
        return ahead + [state for state in reading if state not in ahead]

    def _length(self, state: RequestState, budget: int) -> int:
        """Return the number of tokens in a request's next part, at most `budget`."""
        count = min(state.num_uncomputed, budget)
        if self._segment is None:
            return count
        left = len(state.request.prompt) - state.num_computed
        if left <= 0:  # an answer that lost its slot, read again
            return min(count, 1)
        return left if left <= count else count // self._segment * self._segment

    def _guessing(self, parts: list[Part], budget: int) -> list[Part]:
        """Return the parts, decoding ones with guesses as far as there are rows and blocks that nobody waits for."""
        made, unguessed = [], []
        for number, part in enumerate(parts):
            state = part.state
            if part.count == 1 and part.is_last:
                most = min(self.limits.max_guessed, budget, state.request.max_new_tokens - state.num_new - 1)
                guess = state.lookup.guess(state.tokens, most)
                part = part._replace(guess=guess[: self._allocate_for_guesses(state, len(guess))])
                budget -= len(part.guess)
                if not guess and self.draft is not None and self._may_draft(state):
                    unguessed.append((number, min(most, max(0, budget))))
                    budget -= unguessed[-1][1]
            made.append(part)
        if unguessed and self.draft is not None:
            wanted = [(made[i].state, self._allocate_for_guesses(made[i].state, most)) for i, most in unguessed]
            for (number, _), guess in zip(unguessed, self.draft(wanted)):
                made[number] = made[number]._replace(guess=guess)
        return made

    def _may_draft(self, state: RequestState) -> bool:
        """True where guesses are not paused, and no block of the text is still to be copied."""
        return state.lookup.may_guess(len(state.tokens)) and not any(b in self._copies for b in state.blocks)

    def _allocate_for_guesses(self, state: RequestState, wanted: int) -> int:
        """Give a request spare blocks for tokens after its text, and return how many of the wanted ones have room."""
        size = self.pool.block_size
        while len(state.blocks) * size < len(state.tokens) + wanted:
            if self.pool.num_available <= len(self.running) + len(self.waiting):
                break
            state.blocks.append(self._allocate())
        return min(wanted, len(state.blocks) * size - len(state.tokens))

    def _admit(self) -> None:
        """Admit waiting requests by rank, up to the first that does not fit."""
        while self.waiting:
            state = self.waiting[0]
            while not self._take_blocks(state):
                last = self.running[-1] if self.running else None
                if last is None or last.request.priority <= state.request.priority or not self._is_worth_room(state):
                    return
                self.preempt(last)
            self.waiting.remove(state)
            bisect.insort(self.running, state, key=lambda each: each.rank)

    def _take_blocks(self, state: RequestState) -> bool:
        """Give a request blocks for all its tokens, sharing those that hold its text; False where too few are free.

        One block stays free for every running request that may need one, so that a request that was just admitted is
        not preempted at once.
        """
        if len(self.running) >= self.limits.max_running:
            return False
        growing = self._num_growing(self.running)
        if self.pool.num_available <= growing:  # tried in every step while a request waits: the cheap check first
            return False
        match = self.pool.acquire_prefix(state.tokens)
        needed = self.blocks_for(len(state.tokens)) - len(match.blocks)
        if self.pool.num_available < needed + growing:
            for block in reversed(match.blocks):
                self.pool.release(block)
            return False
        new = [self._allocate() for _ in range(needed)]
        state.blocks, state.digests = match.blocks + new, list(match.digests)
        state.num_computed = len(match.blocks) * self.pool.block_size + match.tail_length
        state.num_drafted = state.num_computed  # the draft has read it too; if not, its guesses are bad
        if state.num_cached is None:
            state.num_cached = state.num_computed
        if match.tail is not None and match.tail != new[0]:
            self._copies[new[0]] = match.tail
        return True

    def _is_worth_room(self, state: RequestState) -> bool:
        """True where a request is admitted once all running ones of lower priority have given way."""
        kept = [each for each in self.running if each.request.priority <= state.request.priority]
        held = {block for each in kept for block in each.blocks}
        match = self.pool.acquire_prefix(state.tokens)
        for block in reversed(match.blocks):
            self.pool.release(block)
        needed = self.blocks_for(len(state.tokens)) - len(held & {*match.blocks})
        return len(kept) < self.limits.max_running and (
            self.pool.num_blocks - 1 - len(held) >= needed + self._num_growing(kept)
        )

    def _num_growing(self, running: Sequence[RequestState]) -> int:
        """Return how many running requests may need another block."""
        return sum(len(each.blocks) < self.blocks_for(each.max_total_tokens) for each in running)

    def _take_what_others_read(self, state: RequestState) -> None:
        """Give a request the blocks that others have filled, since it was admitted, with what it would read next.

        Requests that come together are all admitted before one of them has read the beginning that they share.
        """
        size, begun = self.pool.block_size, state.num_computed
        while (end := (number := len(state.digests)) * size + size) < len(state.tokens):
            parent = state.digests[-1] if state.digests else ROOT
            found = self.pool.acquire(parent, state.tokens[end - size : end])
            if found is None:
                break
            self.pool.release(state.blocks[number])
            self._copies.pop(state.blocks[number], None)
            state.blocks[number], digest = found
            state.digests.append(digest)
            state.num_computed = max(state.num_computed, end)
        gained = state.num_computed - begun
        if gained and state.num_drafted == begun:
            state.num_drafted = state.num_computed
        if gained and not state.num_new:
            state.num_cached = min(state.num_cached + gained, len(state.request.prompt) - 1)

    def _allocate(self) -> int | None:
        """Allocate a block and drop any pending copy to it: its last owner may have been preempted in this step."""
        block = self.pool.allocate()
        self._copies.pop(block, None)
        return block

    def _extend(self, state: RequestState) -> bool:
        """Give a running request the block of its next token; False where it is preempted itself."""
        while len(state.blocks) < self.blocks_for(len(state.tokens)):
            block = self._allocate()
            if block is not None:
                state.blocks.append(block)
                continue
            last = self.running[-1]
            self.preempt(last)
            if last is state:
                return False
        return True

    def preempt(self, state: RequestState) -> None:
        """Take a running request's blocks; it waits again and keeps its answer so far."""
        self.running.remove(state)
        self._release(state)
        self.add(state)
        self.num_preempted += 1

    def remove(self, state: RequestState) -> None:
        """Remove a request, running or waiting."""
        if state in self.running:
            self.running.remove(state)
            self._release(state)
        else:
            self.waiting.remove(state)

    def computed(self, part: Part, num_right: int = 0) -> None:
        """Record that a part's keys and values are in the blocks, and publish blocks that are now full.

        num_right: guesses that are part of the text now.
        """
        state, size = part.state, self.pool.block_size
        state.num_computed = part.start + part.count + num_right
        while (len(state.digests) + 1) * size <= state.num_computed:
            number = len(state.digests)
            parent = state.digests[-1] if state.digests else ROOT
            tokens = state.tokens[number * size : (number + 1) * size]
            state.digests.append(self.pool.publish(state.blocks[number], parent, tokens))

    def _release(self, state: RequestState) -> None:
        for block in reversed(state.blocks):  # others share the beginning of a text: it is kept longest
            self.pool.release(block)
        state.blocks, state.digests, state.num_computed, state.num_drafted = [], [], 0, 0

    def check(self) -> None:
        """Check the invariants of requests and blocks.

        Raises:
          AssertionError: one does not hold.
        """
        readers = [0] * self.pool.num_blocks
        for state in self.running:
            assert len(set(state.blocks)) == len(state.blocks), state.blocks
            assert self.blocks_for(state.num_computed) <= len(state.blocks), state.blocks
            for block in state.blocks:
                readers[block] += 1
        self.pool.check(readers)
        assert all(not state.blocks for state in self.waiting)
        for group in (self.running, self.waiting):
            assert [each.rank for each in group] == sorted(each.rank for each in group)
        assert len(self.running) <= self.limits.max_running
