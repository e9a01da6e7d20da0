"""A profile of a command: what ran is in its table with its FLOPs, scopes, compile times and arrays."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import torch

from jaxbench import cli
from jaxbench.profiling import trace
from tests.generation import tiny
from tests.structure import ROOT
from tests.test_cli import command, shell_environment

CALLS = 4
SCRIPT = """
import sys
from jaxbench import cli

def main():
    import jax, jax.numpy as jnp
    run = jax.jit(lambda x: x @ x)
    x = jnp.ones((64, 64))
    for _ in range(2000):
        x = run(x) / 64
    x.block_until_ready()
    return FINISH

cli.run(main)
"""

TORCH_SCRIPT = """
import importlib.util, pathlib, sys
from jaxbench.profiling import trace

with trace.recorded(pathlib.Path(sys.argv[1]), library="PyTorch"):
    importlib.util.find_spec("torch")  # looking for it is no import
    import torch
    for _ in range(3):
        torch.ones(8, 8) @ torch.ones(8, 8)
assert not any(type(finder).__module__.startswith("jaxbench") for finder in sys.meta_path)
"""


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Return the folder of a profile of a small program, and what was said."""
    jax.devices()
    folder, said = tmp_path_factory.mktemp("profile") / "p", []

    def planted(x, w):
        with jax.named_scope("planted_scope"):
            return x @ w

    with trace.recorded(folder, say=said.append):
        x, w = jnp.ones((96, 160)), jnp.ones((160, 224))
        program = jax.jit(planted)
        for _ in range(CALLS):
            with jax.profiler.TraceAnnotation("planted annotation"):
                program(x, w).block_until_ready()
            with jax.profiler.StepTraceAnnotation("planted step", step_num=1):
                jax.profiler.annotate_function(len, name="planted function")("")
    return folder, said


def test_a_product_is_in_the_table_with_its_calls_and_flops(profiled):
    rows = read(profiled[0], trace.OPERATIONS)["rows"]
    (product,) = [row for row in rows if row["name"].startswith("jit_planted: dot_general")]
    assert product["calls"] == CALLS
    assert product["flops"] == CALLS * 2 * 96 * 160 * 224
    assert product["bytes"] == CALLS * 4 * (96 * 160 + 160 * 224 + 96 * 224)
    assert product["roofline"] > 0 and product["bound"] in ("compute", "memory")
    assert abs(sum(row["share"] for row in rows) - 1) < 1e-9
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)


def test_one_function_of_two_shapes_has_the_flops_of_both(tmp_path):
    program = jax.jit(lambda x: x @ x)
    with trace.recorded(tmp_path / "p", say=lambda _: None):
        for size in (48, 80):
            program(jnp.ones((size, size))).block_until_ready()
    rows = [row for row in read(tmp_path / "p", "operations.json")["rows"] if "dot_general" in row["name"]]
    assert sum(row["flops"] for row in rows) == 2 * 48**3 + 2 * 80**3


def test_scopes_are_slices_that_hold_their_operations(profiled):
    with gzip.open(profiled[0] / "scopes.json.gz", "rt") as file:
        found = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    scopes = [event for event in found if event["name"] == "planted_scope"]
    assert len(scopes) == CALLS
    held = [event for event in found if event["tid"] == scopes[0]["tid"] and event not in scopes]
    start, end = scopes[0]["ts"], scopes[0]["ts"] + scopes[0]["dur"]
    assert any(start <= event["ts"] and event["ts"] + event["dur"] <= end + 1e-3 for event in held)


def test_compile_times_are_by_function_and_memory_by_array(profiled):
    (planted,) = [row for row in read(profiled[0], trace.COMPILE) if row["function"] == "planted"]
    assert planted["programs"] == 1 and planted["lower_s"] > 0 and planted["compile_s"] > 0
    memory = read(profiled[0], trace.MEMORY)
    assert memory["peak_resident_bytes"] > 2**20 and len(memory["timeline"]) >= 2
    arrays = {row["array"]: row for row in memory["snapshot"]}
    assert arrays["float32[160, 224]"]["bytes"] >= 4 * 160 * 224


def test_the_folder_has_what_tensorboard_opens(profiled):
    assert len(list(profiled[0].glob("plugins/profile/*/*.xplane.pb"))) == 1


@pytest.mark.parametrize("error", [ValueError("bad"), OSError("bad")])
def test_a_command_that_is_refused_writes_nothing(tmp_path, error):
    with pytest.raises(type(error)), trace.recorded(tmp_path / "p", say=lambda text: None):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), cli.GateFailed("slow")])
def test_an_interrupt_and_a_failed_gate_still_write(tmp_path, error):
    with pytest.raises(type(error)), trace.recorded(tmp_path / "p", say=lambda text: None):
        raise error
    assert read(tmp_path / "p", trace.OPERATIONS)["about"]["library"] == "XLA"


def test_scopes_and_annotations_of_one_s_own_are_in_the_scope_table(profiled):
    rows = {row["name"]: row for row in read(profiled[0], trace.OPERATIONS)["scopes"]}
    assert rows.keys() == {"planted_scope", "planted annotation", "planted step", "planted function"}  # none of JAX's
    assert rows["planted step"]["count"] == rows["planted function"]["count"] == CALLS
    scope, annotation = rows["planted_scope"], rows["planted annotation"]
    product = next(row for row in read(profiled[0], trace.OPERATIONS)["rows"] if "dot_general" in row["name"])
    assert scope["kind"] == "operations" and scope["count"] == product["calls"]
    assert scope["seconds"] == pytest.approx(product["seconds"]) and 0 < scope["share"] <= 1
    assert annotation["kind"] == "clock" and annotation["count"] == CALLS
    assert 0 < annotation["seconds"] < read(profiled[0], trace.OPERATIONS)["about"]["seconds"]
    text = (profiled[0] / "operations.txt").read_text()
    assert "planted annotation" in text and "__init__" not in vars(jax.profiler.TraceAnnotation)
    main = [sys.executable, "experiments/profile.py", "operations", f"--trace={profiled[0]}"]
    shown = subprocess.run(main, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "planted_scope" in shown and "planted annotation" in shown


def test_the_backward_pass_is_in_the_forward_pass_s_scope_and_inner_scopes_in_outer_ones(tmp_path):
    def loss(w, x):
        with jax.named_scope("outer"):
            with jax.named_scope("inner"):
                y = jnp.tanh(x @ w)
            return jnp.einsum("bd,cd->bc", y, y).sum()

    with trace.recorded(tmp_path / "p", say=lambda text: None):
        program = jax.jit(jax.grad(loss))  # held: the text of a program that is gone cannot be read
        program(jnp.ones((160, 224)), jnp.ones((96, 160))).block_until_ready()
    rows = {row["name"]: row for row in read(tmp_path / "p", trace.OPERATIONS)["scopes"]}
    assert rows.keys() == {"outer", "outer/inner"}
    assert rows["outer"]["count"] > rows["outer/inner"]["count"] > 1
    assert rows["outer"]["seconds"] > rows["outer/inner"]["seconds"]


def test_pytorch_s_record_function_is_in_the_scope_table(tmp_path):
    with trace.recorded(tmp_path / "p", library="PyTorch", say=lambda text: None):
        left = torch.ones(256, 256)
        for _ in range(CALLS):
            with torch.profiler.record_function("planted outer"):
                left @ left
                with torch.profiler.record_function("planted inner"):
                    left @ left
    rows = {row["name"]: row for row in read(tmp_path / "p", trace.OPERATIONS)["scopes"]}
    assert rows.keys() == {"planted outer", "planted inner"}
    assert {row["count"] for row in rows.values()} == {CALLS} and {row["kind"] for row in rows.values()} == {"clock"}
    assert rows["planted outer"]["seconds"] > rows["planted inner"]["seconds"] > 0  # with what is inside
    assert "planted outer" in (tmp_path / "p" / "operations.txt").read_text()


def test_pytorch_is_profiled_by_its_own_profiler(tmp_path):
    said = []
    with trace.recorded(tmp_path / "p", library="PyTorch", say=said.append):
        left = torch.ones(32, 48)
        for _ in range(CALLS):
            left @ left.T
    rows = {row["name"]: row for row in read(tmp_path / "p", trace.OPERATIONS)["rows"]}
    assert rows["aten::mm"]["calls"] == CALLS and rows["aten::mm"]["flops"] == CALLS * 2 * 32 * 48 * 32
    assert read(tmp_path / "p", "trace.json")["traceEvents"]


def test_what_a_command_does_right_after_it_imports_pytorch_is_profiled(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCH_SCRIPT)
    words = [sys.executable, str(script), str(tmp_path / "p")]
    environment = shell_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["calls"] for row in read(tmp_path / "p", trace.OPERATIONS)["rows"]}
    assert rows.get("aten::mm") == 3, rows


@pytest.mark.parametrize(("finish", "code"), [("0", 0), ("1", 1)])
def test_a_command_with_the_flag_is_traced_from_its_backend_on(tmp_path, finish, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FINISH", finish))
    # A user's shell has not chosen JAX's platforms, and this command does not either: libtpu has to stay out.
    done = subprocess.run(
        [sys.executable, str(script), f"--profile={tmp_path / 'p'}"],
        cwd=ROOT, capture_output=True, text=True, env=shell_environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    rows = read(tmp_path / "p", trace.OPERATIONS)["rows"]
    assert any(row["name"] == "jit__lambda: dot_general" for row in rows), rows
    assert "profile: written to" in done.stderr and done.stdout == ""


def test_a_command_that_starts_itself_anew_is_traced_and_its_table_shown_again(tmp_path):
    for name in ("p", "temporary"):
        (tmp_path / name).mkdir()
    words = ["--prompt=a", f"--model={tiny.make(tmp_path / 'model')}", "--new_tokens=2", "--kernels=xla"]
    done = command("generate.py", *words, f"--profile={tmp_path / 'p'}", TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "temporary").glob("jaxbench-*")) == []
    shown = command("profile.py", "operations", f"--trace={tmp_path / 'p'}")
    assert shown.returncode == 0, shown.stderr
    rows = read(tmp_path / "p", trace.OPERATIONS)["rows"]
    assert any(row["name"].startswith("jit__decode: ") for row in rows)
    assert [row["name"] for row in rows if row["name"] not in shown.stdout] == [] or len(rows) > 20


def test_a_profile_of_native_kernels_alone_says_that_they_are_not_in_it(tmp_path):
    said = []
    with trace.recorded(tmp_path / "p", library="PyTorch", say=said.append):
        pass
    assert any("no operation of JAX or PyTorch" in line and "native kernels" in line for line in said), said


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="holds something already"):
        trace.check_folder(str(tmp_path))
