"""Ray actors that share work: an item that kills its actor is given up and named."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.structure import ROOT
from tests.test_cli import shell_environment

# A process of its own: Ray starts others, which JAX in the tests' process warns about.
CODE = """
import os
import jax
from jaxbench import cli, ray_pool

def work(item):
    if item == "killer":
        os._exit(1)
    if item == "bad":
        raise ValueError("bad: item cannot be done")
    return item

if __name__ == "__main__":
    jax.devices()
    for items in ([*"abc", "killer", *"defghi"], ["bad"]):
        try:
            for each in ray_pool.results(work, items, processes=2):
                print(each)
        except Exception as error:
            print(type(error).__name__, cli.explain(error))
"""


def test_an_item_that_kills_its_actor_is_given_up_and_named(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "script.py").write_text(CODE)
    environment = shell_environment(PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0", JAX_PLATFORMS="cpu")
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = [line for line in done.stdout.splitlines() if "(raylet)" not in line]  # Ray's own, of actors that ended
    *found, killed, bad = lines
    assert {"a", "c"} <= set(found) <= set("abcdefghi") and len(set(found)) == len(found), done.stdout
    assert re.match("ChildProcessError a worker process was killed: .*killer.* ended its Ray actor 4 times", killed)
    assert bad == "ValueError bad: item cannot be done"
