"""Guesses of the next tokens by a smaller model, which keeps keys and values in blocks of the same numbers (S file).

Source: Leviathan et al. 2023, arXiv:2211.17192; a guess is kept where it equals the token that would have been drawn,
so that an answer does not depend on guesses. The smaller model reads what the engine's model reads: prompts in the same
steps, and the last tokens of an answer before it guesses. If it has not read a shared block, only its guesses suffer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxbench.serve.batch_rows import Rows, batch_of
from jaxbench.serve.request import RequestState
from jaxbench.serve.scheduler import Plan

log = logging.getLogger("jaxbench.serve")


class Drafter:
    """The draft model of an engine."""

    def __init__(self, runner: Any):
        """runner: of the engine's vocabulary, sizes and number of blocks."""
        self._runner = runner

    def guess(self, wanted: Sequence[tuple[RequestState, int]]) -> list[tuple[int, ...]]:
        """Guess the next tokens of some texts, at most so many of each; first read what is unread of each text.

        Texts have blocks for their guesses. After its runner has raised, it makes no more guesses.
        """
        if self._runner is None:
            return [()] * len(wanted)
        found: list[list[int]] = [[] for _ in wanted]
        room, reading = self._runner.sizes[-1], []
        for number, (state, most) in enumerate(wanted):
            unread = state.tokens[state.num_drafted :]
            if len(state.tokens) + most > self._runner.max_seq_len:
                continue
            if most > 0 and len(unread) <= room and len(reading) < self._runner.max_wanted:
                reading.append((number, Rows(state.blocks, unread, state.num_drafted, 1)))
                room -= len(unread)
        while reading:
            logits = self._run([rows for _, rows in reading], np.zeros((0, 2), np.int32))
            if logits is None:
                return [()] * len(wanted)
            going_on = []
            for (number, rows), row in zip(reading, logits):
                state, most = wanted[number]
                state.num_drafted = min(rows.start + len(rows.tokens), len(state.tokens))
                found[number].append(int(np.argmax(row)))
                if len(found[number]) < most:
                    place = rows.start + len(rows.tokens)
                    going_on.append((number, Rows(rows.blocks, found[number][-1:], place, 1)))
            reading = going_on
        return [tuple(each) for each in found]

    def follow(self, plan: Plan) -> None:
        """Read the parts of prompts that a step has read, and copy the blocks that it has copied."""
        if self._runner is None:
            return
        longest = self._runner.max_seq_len
        unread = [
            part for part in plan.parts
            if part.state.num_drafted == part.start and part.start + part.count <= longest
        ]  # fmt: skip
        parts = [part for part in unread if part.count > 1 or not part.is_last]  # a last token is read for the guesses
        rows = [
            Rows(part.state.blocks, part.state.tokens[part.start : part.start + part.count], part.start, 0)
            for part in parts
        ]
        copies = np.array(plan.copies, np.int32).reshape(-1, 2)
        if (rows or len(copies)) and self._run(rows, copies) is not None:
            for part in parts:
                part.state.num_drafted = part.start + part.count

    def reset(self) -> None:
        """Forget everything that was read."""
        if self._runner is not None:
            self._runner.reset()

    def _run(self, rows: Sequence[Rows], copies: np.ndarray) -> np.ndarray | None:
        if self._runner is None:
            return None
        try:
            return self._runner.run(batch_of(self._runner, rows, copies))
        except Exception as error:
            log.error("the draft model failed; no more guesses", extra={"fields": {"error": type(error).__name__}})
            self._runner = None
            return None
