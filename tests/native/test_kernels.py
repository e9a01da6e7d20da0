"""Kernels of every instruction set that this machine has, held to double precision: kernels_check.c says what is asked.

More cases: build it by hand as `_compile` does and run it with another seed and number. Faults of memory and races:
sanitize.sh.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxbench.native import build

FOLDER = Path(__file__).parent
CASES = 48
FEWER_CASES = {"portable": 12}
# The plain loops of the portable set take a compiler long to optimise. What a matrix unit reads and writes is assembly,
# around which the compiler must not move anything: optimised as the library is.
OPTIMISED = {"portable": "-O0", "amx": "-O3"}
# On a machine with other work no call may go alone because it waited.
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-w", "-DLOSS_NS=1000000000000")


def _sets() -> list[str]:
    known = build.NEEDED_FLAGS.items()
    return [name for name, needed in known if set(needed) <= build.cpu_flags()] + ["portable"]


def _compile(instructions: str, folder: Path, *flags: str) -> Path | str:
    """The program, or why there is none."""
    compilers = build.compilers()
    if not compilers:
        return "no C compiler here"
    files = [FOLDER / "kernels_check.c", *(build.SOURCES / f"{name}.c" for name in (instructions, "team", "common"))]
    output = folder / instructions
    command = [*compilers[0], *FLAGS, *flags, OPTIMISED.get(instructions, "-O1"), f"-I{build.SOURCES}"]
    command += [f"-DINSTRUCTION_SET=kernels_{instructions}", *map(str, files), "-o", str(output), "-lpthread", "-lm"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode and instructions != "portable" and "target" in done.stderr:
        return f"the compiler does not know {instructions}"
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[..., str]:
    """Runs the program of an instruction set and returns what it prints; all are compiled at once."""
    folder = tmp_path_factory.mktemp("kernels")
    with ThreadPoolExecutor(2) as pool:
        programs = dict(zip(_sets(), pool.map(lambda name: _compile(name, folder), _sets()), strict=True))

    return lambda instructions, *arguments: _run(programs[instructions], *arguments)


def _run(program: Path | str, *arguments: object) -> str:
    if isinstance(program, str):
        pytest.skip(program)
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _hashes(printed: str) -> list[str]:
    """Of products of bfloat16, and of everything else."""
    return re.findall(r"hash ([0-9a-f]{16})", printed)


@pytest.mark.parametrize("instructions", _sets())
def test_every_instruction_set_computes_what_double_precision_does(instructions, run):
    cases = FEWER_CASES.get(instructions, CASES)
    printed = run(instructions, 1, cases, "only")
    assert f"{instructions}: {cases} cases from seed 1, 0 wrong" in printed
    if cases == CASES:
        narrow, many = map(int, re.search(r"blocks of bfloat16: (\d+), with many rows: (\d+)", printed).groups())
        assert narrow > 5 and many > 0, "not all of attention in bfloat16 was asked for"


def test_sets_with_fused_multiply_adds_give_the_same_bits(run):
    hashes = {name: _hashes(run(name, 2, 6, "only"))[1] for name in _sets() if name != "portable"}
    if not hashes:
        pytest.skip("this machine has the portable set alone")
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.skipif(
    "avx512bf16" not in _sets(), reason="this machine has no AVX-512 with bfloat16, which amx needs too"
)
def test_where_linux_refuses_the_matrix_unit_vectors_compute_all(run, tmp_path):
    refused = _compile("amx", tmp_path, "-DARCH_REQ_XCOMP_PERM=0")
    assert _hashes(_run(refused, 2, 12, "only")) == _hashes(run("avx512bf16", 2, 12, "only"))


def test_late_helpers_callers_at_once_and_forks_change_nothing(run):
    run(_sets()[0], 0, 0)
