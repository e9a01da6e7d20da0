"""Ray actors that share work: an item that kills its actor is given up and named."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from jaxbench import worker_pool
from tests.structure import ROOT
from tests.test_cli import shell_environment

# A process of its own: Ray starts others, which JAX in the tests' process warns about.
CODE = """
import os, pathlib, sys, time
import jax
from jaxbench import cli, ray_pool

MEETING = pathlib.Path(sys.argv[0]).parent

def work(item):
    if item.startswith("meeting"):  # ends where two are at work at once
        (MEETING / item).touch()
        until = time.monotonic() + 60
        while len(list(MEETING.glob("meeting*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        return len(list(MEETING.glob("meeting*")))
    if item == "killer":
        os._exit(1)
    if item == "bad":
        raise ValueError("bad: item cannot be done")
    return item

if __name__ == "__main__":
    jax.devices()
    print(*ray_pool.results(work, ["meeting-1", "meeting-2"], processes=2))
    for items in ([*"abc", "killer", *"defghi"], ["bad"]):
        try:
            for each in ray_pool.results(work, items, processes=2):
                print(each)
        except Exception as error:
            print(type(error).__name__, cli.explain(error))
"""


FEWER = """
import ray
from jaxbench import ray_pool

def work(item):
    return 2 * item

if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    print(sorted(ray_pool.results(work, range(7), processes=3)), list(ray_pool.results(work, [], processes=2)))
"""


def ran(code, tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "script.py").write_text(code)
    environment = shell_environment(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0", JAX_PLATFORMS="cpu")
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "(raylet)" not in line]  # Ray's own, of actors that ended


def test_a_cluster_with_fewer_cores_than_processes_does_all_the_work(tmp_path):
    assert ran(FEWER, tmp_path) == ["[0, 2, 4, 6, 8, 10, 12] []"]


def test_few_items_lie_on_as_many_actors_and_one_that_kills_its_actor_is_given_up_and_named(tmp_path):
    met, *found, killed, bad = ran(CODE, tmp_path)
    assert met == "2 2"
    assert "a" in found and set(found) <= set("abcdefghi") and len(set(found)) == len(found), found
    named = re.match("ChildProcessError a worker process was killed: (.*) ended its Ray actor 4 times", killed)
    lost = named[1].split(" or ")
    assert "killer" in lost and len(lost) <= worker_pool.IN_FLIGHT and not set(lost) & set(found), killed
    assert bad == "ValueError bad: item cannot be done"
