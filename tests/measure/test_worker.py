"""The loop of a worker: which operations a session has, and its clocks. The pipe is test_process.py's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxbench.measure import process, worker


class Session:
    count = 0

    def add(self, *, amount: int) -> dict:
        self.count += amount
        return {"count": self.count}

    def _hidden(self) -> dict:
        return {}


def test_a_session_s_public_methods_are_its_operations():
    session = Session()
    assert worker.answer_to(session, "add", {"amount": 2}) == {"count": 2}
    for name in ("_hidden", "count", "__init__", "missing"):
        with pytest.raises(ValueError, match=f"unknown operation '{name}', wanted one of add"):
            worker.answer_to(session, name, {})


@pytest.mark.parametrize("warmup", [0, 1])
def test_warm_up_calls_are_not_among_the_times(warmup):
    calls = []
    found = worker.timed(lambda: calls.append(1), 3, warmup=warmup)
    assert len(calls) == 3 + warmup
    assert len(found["seconds"]) == len(found["cpu_seconds"]) == 3 and min(found["seconds"]) >= 0


def test_peers_find_the_loop_without_any_package_of_jaxbench():
    """Isolated from site-packages, as in a peer's environment, which has none of jaxbench's."""
    modules = ("jaxbench.memory.study.speed_worker", "jaxbench.watermark.study.peer_worker")
    code = f"import sys; sys.path.insert(0, {str(process.ROOT)!r})\n" + "\n".join(f"import {name}" for name in modules)
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env={})
