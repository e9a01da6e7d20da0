"""The twins: same files, same public names, same arguments in jaxbench/, torch_ref/ and jaxbench/eqx/.

Equinox has layers and a decoder of its own; functions on arrays, the generator and the step are those of Flax's side.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.structure import ROOT, differences, forbidden_imports, public_api, relative, sources, tree_of

TORCH_FILES = [path for path in sources("torch_ref") if path.name != "__init__.py"]
EQUINOX_FILES = [path for path in sources("jaxbench/eqx") if path.name != "__init__.py"]
FLAX_MODELS = ("jaxbench.nn", "jaxbench.transformer")
SHARED = ("attention", "functional", "sample", "train", "training.optimizer_step")  # by Flax and Equinox


@pytest.mark.parametrize("path", TORCH_FILES, ids=relative)
def test_every_torch_file_has_a_flax_twin_with_equal_names_and_arguments(path):
    twin = ROOT / "jaxbench" / path.relative_to(ROOT / "torch_ref")
    assert twin.is_file(), f"{relative(path)} has no twin {relative(twin)}"
    assert differences(tree_of(twin), tree_of(path)) == []


@pytest.mark.parametrize("path", EQUINOX_FILES, ids=relative)
def test_every_equinox_file_has_a_flax_twin_with_equal_names_and_arguments(path):
    twin = ROOT / "jaxbench" / path.relative_to(ROOT / "jaxbench" / "eqx")
    assert twin.is_file(), f"{relative(path)} has no twin {relative(twin)}"
    assert differences(tree_of(twin), tree_of(path)) == []


def test_the_decoder_exists_three_times():
    for name in ("nn.py", "transformer.py"):
        for folder in ("jaxbench", "jaxbench/eqx", "torch_ref"):
            assert (ROOT / folder / name).is_file(), f"{folder}/{name} is missing"
    for name in SHARED:
        assert (ROOT / "torch_ref" / f"{name.replace('.', '/')}.py").is_file() and not (
            ROOT / "jaxbench/eqx" / f"{name}.py"
        ).exists()
    assert (ROOT / "torch_ref" / "prng.py").is_file()


def test_torch_ref_never_imports_jax():
    names = ("jax", "jaxlib", "flax", "equinox", "optax", "orbax")
    assert [str(place) for path in sources("torch_ref") for place in forbidden_imports(path, names)] == []


def test_torch_and_its_reference_stay_in_proofs_studies_and_workers():
    rooms = (
        "parity",
        "pair",
        "bench",
        "memory/study",
        "serve/study",
        "watermark/study",
        "quantization/study",
        "compress/study",
        "gpu/one_arm.py",  # workers: one backend, or its rates, in a process
        "gpu/rates.py",
        "gpu/attention_rates.py",
        "gpu/randperm.py",
    )
    allowed = [ROOT / "jaxbench" / room for room in rooms]
    others = [path for path in sources("jaxbench") if not any(map(path.is_relative_to, allowed))]
    assert [str(place) for path in others for place in forbidden_imports(path, ("torch", "torch_ref"))] == []


def imported(folder: str, names: tuple[str, ...]) -> list[str]:
    places = [place for path in sources(folder) for place in forbidden_imports(path, names)]
    return [str(place) for place in places]


def test_what_measures_knows_neither_a_workload_nor_the_comparison():
    rooms = [path.name for path in (ROOT / "jaxbench").iterdir() if path.is_dir() and path.name != "measure"]
    assert {"bench", "memory", "watermark", "parity"} <= set(rooms)
    assert imported("jaxbench/measure", tuple(f"jaxbench.{room}" for room in rooms)) == []


@pytest.mark.parametrize("room", ["memory", "watermark"])
def test_a_workload_and_the_comparison_do_not_know_each_other(room):
    assert imported(f"jaxbench/{room}", ("jaxbench.bench",)) == []
    assert imported("jaxbench/bench", (f"jaxbench.{room}",)) == []


def test_equinox_shares_functions_of_arrays_and_no_modules():
    names = (*FLAX_MODELS, "flax")
    assert [str(place) for path in EQUINOX_FILES for place in forbidden_imports(path, names)] == []


def test_who_uses_equinox_does_not_pay_for_flax():
    modules = ", ".join(f"jaxbench.{name}" for name in ("eqx.transformer", *SHARED))
    code = f"import sys, {modules}; print('flax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"], found.stdout


# The checkers must be able to fail


LEFT = """
class Sampling(NamedTuple):
    temperature: float
    top_k: int
class Linear:
    def __init__(self, kernel, *, dtype): ...
    def __call__(self, x): ...
    def _private(self): ...
def attention(query, key, *, window=None): ...
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("def attention", "def attend", "attention is missing in the second"),
        ("window", "span", "attention(query, key, *window) against (query, key, *span)"),
        ("query, key", "key, query", "attention(query, key, *window) against (key, query, *window)"),
        ("key, *,", "key,", "attention(query, key, *window) against (query, key, window)"),
        ("    top_k: int\n", "", "Sampling(temperature, top_k) against (temperature)"),
        ("__call__", "apply", "Linear.__call__ is missing in the second"),
        ("_private", "public", "Linear.public is missing in the first"),
        ("self, x", "self, x, mask", "Linear.__call__(x) against (x, mask)"),
        ("kernel, *, dtype", "kernel", "Linear.__init__(kernel, *dtype) against (kernel)"),
    ],
)
def test_a_difference_between_twins_is_named(old, new, complaint):
    assert LEFT.count(old) == 1
    assert complaint in differences(ast.parse(LEFT), ast.parse(LEFT.replace(old, new)))


def test_only_forward_and_device_may_differ_between_twins():
    other = LEFT.replace("__call__", "forward").replace("dtype)", "dtype, device)")
    assert differences(ast.parse(LEFT), ast.parse(other)) == []
    assert public_api(ast.parse(LEFT))["Linear.__call__"] == ["x"]


def test_forbidden_imports_are_found_at_any_depth(tmp_path):
    path = tmp_path / "file.py"
    path.write_text("import jax.numpy as jnp\ndef f():\n    from flax import nnx\nimport jaxbench\nimport jaxtyping\n")
    assert [place.what for place in forbidden_imports(path, ("jax", "flax"))] == [
        "imports jax.numpy",
        "imports flax",
        "imports flax.nnx",
    ]
    assert [place.line for place in forbidden_imports(path, ("jax", "flax"), lazy=False)] == [1]
