"""A trace of requests played on an engine: joins, a cancellation, preemptions; and what each was answered."""


def played(engine, trace, *, cancelled, preempted):
    """Return the events of every request of a trace of (step, request).

    cancelled: (step, id). preempted: steps at which the request of the first rank loses its blocks.
    """
    events, waiting, step = {request.id: [] for _, request in trace}, list(trace), 0
    while waiting or engine.is_busy:
        while waiting and waiting[0][0] <= step and len(engine.scheduler.waiting) < engine.limits.max_waiting:
            engine.add(waiting.pop(0)[1])
        if step == cancelled[0]:
            events[cancelled[1]].append(engine.cancel(cancelled[1]))
            assert events[cancelled[1]][-1] is not None, "it had ended"
        if step in preempted and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])
        for event in engine.step():
            events[event.id].append(event)
        engine.scheduler.check()
        step += 1
    return events


def answers(events):
    """Return (token, log-probabilities) of every token, by request."""
    return {
        name: [(each.token, each.logprobs) for each in found if each.token is not None]
        for name, found in events.items()
    }


class Unfinished:
    """An array of a program that still runs."""

    was_waited_for = False

    def block_until_ready(self):
        self.was_waited_for = True
        return self
