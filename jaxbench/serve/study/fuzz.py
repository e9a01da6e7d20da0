"""Fuzz a busy engine: every answer is that of the request alone, under random requests and seeded faults (S file).

    python -m jaxbench.serve.study.fuzz --steps=1000000

Requests join, share beginnings, are cancelled, preempted, late, or get NaN logits; the runner fails. After every action
the invariants of the blocks are checked; every token of an answer is compared with that of a model without a cache. A
third of the engines has slots instead of blocks, and a model that remembers where its text was cut.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Sequence

from absl import flags

from jaxbench import cli, terminal
from jaxbench.serve import sampler
from jaxbench.serve.engine import Engine, Event, QueueFull
from jaxbench.serve.request import Request, RequestState, Sampling
from jaxbench.serve.scheduler import Limits
from jaxbench.serve.study.oracle import HashModel, HashRunner, SegmentModel, SlotRunner

VALUES = flags.FLAGS
VOCAB_SIZE = 11
ACTIONS = {
    "step": 60, "add": 20, "cancel": 3, "preempt": 4, "fail": 1, "spoil": 1, "pass_time": 2, "cancel_unknown": 1,
}  # fmt: skip


class Fuzz:
    """An engine, and the answers that its requests must get."""

    def __init__(self, seed: int):
        self.random, self.now = random.Random(seed), 0.0
        draw = self.random.choice
        segment, running, longest = draw((None, None, draw((2, 3, 4)))), draw((1, 2, 5)), draw((12, 30))
        budget = running + (segment or 0) + draw((0, 1, 7, 40))
        guessed = 0 if segment else draw((0, 0, 2, 5))
        limits = Limits(
            max_running=running, max_batch_tokens=budget, max_waiting=4, max_guessed=guessed,
            short_prompt_share=draw((0.0, 0.5, 0.9)),
        )  # fmt: skip
        self.draft: HashRunner | None = None
        if segment:
            self.runner: HashRunner | SlotRunner = SlotRunner(
                num_slots=draw((1, running)), segment=segment, max_seq_len=longest, vocab_size=VOCAB_SIZE,
                max_rows=budget,
            )  # fmt: skip
            self.model: HashModel | SegmentModel = SegmentModel(VOCAB_SIZE, segment)
        else:
            self.model = HashModel(VOCAB_SIZE)
            self.runner, draft = self._block_runners(longest, budget)
            self.draft = draft if guessed and draw((True, False)) else None  # right where it has read everything
        self.engine = Engine(self.runner, limits, draft=self.draft, clock=lambda: self.now)
        self.stems = [self._tokens(longest // 2) for _ in range(3)]  # that prompts share
        self.requests: dict[str, Request] = {}  # in the engine
        self.answers: dict[str, list[int]] = {}  # tokens of each so far
        self.counts: collections.Counter[str] = collections.Counter()

    def _block_runners(self, longest: int, budget: int) -> list[HashRunner]:
        """Make a runner, and one of the same sizes for a draft."""
        draw = self.random.choice
        block_size = draw((1, 2, 4, 8))
        blocks = -(-longest // block_size) + 1 + draw((0, 1, 3, 12))
        return [
            HashRunner(
                num_blocks=blocks, block_size=block_size, max_seq_len=longest, vocab_size=VOCAB_SIZE,
                sizes=(max(1, budget // 3), budget), max_wanted=budget,
            )
            for _ in range(2)
        ]  # fmt: skip

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]

    def act(self, name: str) -> None:
        """Do one action; check the invariants, and that the engine is busy exactly while requests have not ended."""
        self.counts[name] += 1
        getattr(self, name)()
        self.engine.scheduler.check()
        assert self.engine.is_busy == bool(self.requests)

    def step(self) -> None:
        """Run one step of the engine."""
        spoilt = bool(self.runner.spoilt)
        for event in self.engine.step():
            self._happened(event, is_spoilt=spoilt)

    def add(self) -> None:
        """Add a request, which may share its beginning with other prompts or with answers."""
        stem = self.random.choice([*self.stems, *list(self.answers.values())[-2:]])
        prompt = [*stem[: self.random.randint(0, len(stem))], *self._tokens(self.random.randint(1, 4))]
        longest = self.runner.max_seq_len
        prompt = prompt[-(longest - 1) :]
        name, draw = f"r{self.counts['add']}", self.random.random
        sampling = Sampling(
            temperature=self.random.choice((0.0, 0.7, 1.5)), top_k=self.random.choice((0, 3)),
            top_p=self.random.choice((1.0, 0.8)), frequency_penalty=self.random.choice((0.0, 0.5)),
            repetition_penalty=self.random.choice((1.0, 1.3)), seed=self.random.randrange(5),
        )  # fmt: skip
        request = Request(
            name, tuple(prompt), self.random.randint(1, longest - len(prompt)), sampling,
            end_ids=frozenset({0}) if draw() < 0.5 else frozenset(), priority=self.random.randint(0, 1),
            deadline=self.now + 5 if draw() < 0.1 else float("inf"),
        )  # fmt: skip
        try:
            self.engine.add(request)
        except QueueFull:
            self.counts["refused"] += 1
            return
        self.requests[name], self.answers[name] = request, []
        self.engine.state(name).lookup = Knowing(self, request)

    def cancel(self) -> None:
        """Cancel a request."""
        if self.requests:
            event = self.engine.cancel(self.random.choice(list(self.requests)))
            assert event is not None
            self._happened(event)

    def cancel_unknown(self) -> None:
        """Cancel a request that does not exist."""
        assert self.engine.cancel("nobody") is None

    def preempt(self) -> None:
        """Take a running request's blocks."""
        if running := self.engine.scheduler.running:
            self.engine.scheduler.preempt(self.random.choice(running))

    def fail(self) -> None:
        """Let the runner raise at the next step, and sometimes the draft's."""
        self.runner.fails = 1
        if self.draft is not None and self.random.random() < 0.2:
            self.draft.fails = 1

    def spoil(self) -> None:
        """Let the next step have logits that are NaN."""
        self.runner.spoilt = {0}

    def pass_time(self) -> None:
        """Advance the clock towards deadlines; sometimes set it back."""
        self.now += self.random.choice((-3.0, 1.0, 4.0))

    def drain(self) -> None:
        """Run until all requests have ended, and check that no block is held."""
        for _ in range(100_000):
            if not self.engine.is_busy:
                break
            self.step()
        assert not self.engine.is_busy and not self.requests
        assert self.engine.scheduler.pool.num_available == self.runner.num_blocks - 1

    def _happened(self, event: Event, *, is_spoilt: bool = False) -> None:
        request = self.requests[event.id]
        answer = self.answers[event.id]
        if event.token is not None:
            wanted = self.next_token(request, answer)
            assert event.token == wanted, (event, request, answer, wanted)
            answer.append(event.token)
        if event.ended is None:
            return
        self.counts[event.ended] += 1
        if event.ended == "stop":
            assert answer[-1] in request.end_ids
        elif event.ended == "length":
            assert len(answer) == request.max_new_tokens
        elif event.ended == "deadline":
            assert request.deadline <= self.now
        elif event.ended == "error":
            assert "nan" in event.error or "told to fail" in event.error, event
        del self.requests[event.id]

    def next_token(self, request: Request, answer: list[int]) -> int:
        """Return the token that the request gets when it is alone."""
        alone = RequestState(request, 0)
        alone.tokens += answer
        return sampler.choose(alone, self.model.logits(alone.tokens, len(request.prompt)))[0]


class Knowing:
    """Guesses that are often right; lookup's would hardly ever be, as the model repeats nothing."""

    def __init__(self, fuzz: Fuzz, request: Request):
        self._fuzz, self._request = fuzz, request

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """As lookup.Lookup."""
        if self._fuzz.draft is not None and self._fuzz.random.random() < 0.7:
            return ()  # the draft's turn
        answer = list(tokens[len(self._request.prompt) :])
        for _ in range(self._fuzz.random.randint(0, max(most, 0))):
            is_right = self._fuzz.random.random() < 0.8
            right = self._fuzz.next_token(self._request, answer)
            answer.append(right if is_right else self._fuzz.random.randrange(VOCAB_SIZE))
        return tuple(answer[len(tokens) - len(self._request.prompt) :])

    def may_guess(self, length: int) -> bool:
        """As lookup.Lookup."""
        return True

    def record(self, num_guessed: int, num_right: int, length: int) -> None:
        """As lookup.Lookup."""
        self._fuzz.counts["guessed"] += num_guessed
        self._fuzz.counts["guessed right"] += num_right


def main() -> int:
    """Act until the wanted number of steps is reached; return the exit code."""
    started, steps, seed = time.monotonic(), 0, VALUES.seed
    total: collections.Counter[str] = collections.Counter()
    names, weights = list(ACTIONS), list(ACTIONS.values())
    with terminal.progress(VALUES.steps) as advance:
        while steps < VALUES.steps:
            fuzz = Fuzz(seed)
            try:
                for _ in range(VALUES.actions):
                    fuzz.act(fuzz.random.choices(names, weights)[0])
                fuzz.drain()
            except Exception:
                print(f"seed {seed}: failed; --seed={seed} does it again")
                raise
            steps, seed = steps + fuzz.engine.num_steps, seed + 1
            advance(fuzz.engine.num_steps)
            total += fuzz.counts
            total["preempted"] += fuzz.engine.scheduler.num_preempted
    counts = ", ".join(f"{name} {count}" for name, count in sorted(total.items()))
    print(f"{steps} steps of {seed - VALUES.seed} engines in {time.monotonic() - started:.0f} s: {counts}")
    return cli.EXIT_OK


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 1_000_000, "of engines, at least", lower_bound=1)
    flags.DEFINE_integer("actions", 300, "of one engine", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of the first engine", lower_bound=0)
    cli.run(main, about=__doc__)
