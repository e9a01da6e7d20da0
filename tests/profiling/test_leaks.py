"""A function that keeps memory is found, one that does not is not."""

from __future__ import annotations

import random

import jax.numpy as jnp
import pytest
from scipy import stats

from jaxbench import cli
from jaxbench.profiling import leaks

kept: list = []


def leaking() -> None:
    kept.append(bytearray(10_000))


def clean() -> int:
    return len(bytearray(10_000))


@pytest.fixture(autouse=True)
def forget():
    """Let go of what a test kept."""
    yield
    kept.clear()


def test_a_leak_of_python_is_found_with_its_line():
    found = leaks.find(leaking, repeats=20)
    assert found.is_leak and found.growth["python_bytes"].verdict == "leak"
    assert 10_000 <= found.growth["python_bytes"].bytes_a_call < 11_000
    assert found.lines[0][0].startswith(__file__) and any("leak;" in line for line in leaks.report(found))


def test_a_clean_function_is_none():
    found = leaks.find(clean, repeats=20)
    assert found.growth["python_bytes"].verdict == "no leak", found


def test_names_in_pythons_cache_of_attributes_are_no_leak():
    def look_up():  # by names that are made anew, as JAX's C++ does
        return [getattr(1, "".join(("re", "al"))) for _ in range(9)]

    assert leaks.find(look_up, repeats=20).growth["python_bytes"].verdict == "no leak"


def test_arrays_that_are_kept_are_found_and_those_that_are_dropped_are_not():
    held = leaks.find(lambda: kept.append(jnp.zeros(100)), repeats=12)
    assert held.growth["array_bytes"] == (400.0, 400.0, 400.0, "leak")
    dropped = leaks.find(lambda: jnp.zeros(100), repeats=12)
    assert dropped.growth["array_bytes"].verdict == "no leak"


def test_jumps_of_an_allocator_are_no_leak_and_a_slow_rise_is():
    draw = random.Random(0)
    jumps = [1e6 * (n > 7) for n in range(40)]
    assert leaks.growth(jumps, least=4096).verdict == "no leak"
    rise = [10_000 * n + draw.gauss(0, 20_000) for n in range(40)]
    assert leaks.growth(rise, least=4096).verdict == "leak"
    noise = [draw.gauss(0, 1e6) for _ in range(12)]
    assert leaks.growth(noise, least=4096).verdict == "undecided"


def test_too_few_calls_are_refused():
    with pytest.raises(ValueError, match="3 calls"):
        leaks.growth([1.0] * 3, least=1)


def test_too_few_calls_are_refused_before_the_first():
    called = []
    for find in (leaks.find, lambda call, **rest: leaks.find_elsewhere(call, lambda: 0, warmup=0, **rest)):
        with pytest.raises(ValueError, match="3 calls"):
            find(lambda: called.append(1), repeats=3)
    assert not called


def test_many_calls_are_thinned_and_their_growth_is_still_a_calls(monkeypatch):
    taken = []
    slopes = stats.theilslopes
    monkeypatch.setattr(stats, "theilslopes", lambda y, *rest, **how: taken.append(len(y)) or slopes(y, *rest, **how))
    found = leaks.growth([5000.0 * call for call in range(100_000)], least=1)
    assert taken == [leaks.MOST_SAMPLES] and found.verdict == "leak" and found.bytes_a_call == pytest.approx(5000)


def test_another_process_is_read_by_its_resident_memory():
    sizes = iter(range(0, 10**9, 10**6))
    found = leaks.find_elsewhere(lambda: None, lambda: next(sizes), repeats=12, warmup=2)
    assert found.growth["resident_bytes"].verdict == "leak"


def test_a_function_that_fails_is_named_with_its_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def fails():\n    return {}['key']\n\n\ndef works():\n    return 3\n")
    assert leaks.load(str(file), "works")() == 3
    with pytest.raises(cli.GateFailed, match=r"--call=.*mine.py:fails: KeyError at mine.py:2: 'key'"):
        leaks.find(leaks.load(str(file), "fails"))


@pytest.mark.parametrize("code", [0, 3])
def test_a_function_that_ends_the_process_is_no_function_without_leaks(code, tmp_path):
    (tmp_path / "mine.py").write_text(f"import sys\n\n\ndef ends():\n    sys.exit({code})\n")
    with pytest.raises(cli.GateFailed, match=f"mine.py:ends: SystemExit at mine.py:5: {code}"):
        leaks.find(leaks.load(str(tmp_path / "mine.py"), "ends"))


@pytest.mark.parametrize("text", ["async def f(): pass", "def f(): yield 1", "async def f(): yield 1"])
def test_a_function_of_which_a_call_runs_nothing_is_refused(text, tmp_path):
    (tmp_path / "mine.py").write_text(text + "\n")
    with pytest.raises(ValueError, match="mine.py:f is a coroutine or generator, of which a call runs nothing"):
        leaks.load(str(tmp_path / "mine.py"), "f")
