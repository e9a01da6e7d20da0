"""`jaxbench pair FILE`, the pytest plugin, and the files of experiments/pairs, as a user runs them."""

import importlib.util
import json
import runpy
import subprocess
import sys

import pytest

from jaxbench.pair import proof, public_types
from tests.structure import ROOT
from tests.test_cli import shell_environment

PAIRS = ROOT / "experiments" / "pairs"
RESULTS = {  # the same function, or words of the causes that must be named
    "equinox_gru": (), "lax_conv": (), "linen_dense": (), "linen_lstm": (), "optax_ctc": (), "haiku_encoder": (),
    "inner_states": ("0.25 times PyTorch's",), "nnx_attention": ("cast to float32",),
    "gpt2_block": ("eps: 1e-06", "gelu (erf)"), "haiku_resnet18": ("padding is (2, 3)",),
    "linen_conv_transpose": ("weight is flipped",), "flax_bert": (), "transformers_llama": (),
    "transformers_gpt2": (),
    "equimo_vit": ("eps of norm1: 1e-05", "tanh form", "cast to float32"),
    "equimo_convnext": ("gelu (tanh)", "cast to float32"),
}  # fmt: skip
NEEDS = {
    "haiku_encoder": ("haiku",), "haiku_resnet18": ("haiku", "torchvision"),
    "flax_bert": ("transformers.models.bert.modeling_flax_bert",), "equimo_vit": ("equimo", "timm"),
    "equimo_convnext": ("equimo", "timm"),
}  # fmt: skip

UNCALLABLE = """
import numpy as np, torch, jaxbench
x = np.ones((2, 4))
def pair(): return jaxbench.Pair(lambda x: x, torch.nn.Linear(4, 4), {})
"""

pytest_plugins = ["pytester"]


def command(*words, cwd):
    line = [sys.executable, "-m", "jaxbench", *words]
    environment = shell_environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def test_a_file_is_compared_and_its_page_written(tmp_path):
    result = command("pair", str(PAIRS / "optax_adamw.py"), "--workdir=out", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "NOT the same function: 2 of" in result.stdout and "kernel" in result.stdout
    values = json.loads((tmp_path / "out" / "pair.json").read_text(encoding="utf-8"))
    assert not values["passed"] and ["kernel", "weight, axes (1, 0)", "only one of its shape"] in values["weights"]
    assert "NOT the same function" in (tmp_path / "out" / "pair.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("x = 1", "defines no function pair()"),
        ("def pair(): return 3", "returns a int"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("import not_there", "needs the package of not_there"),
        ("raise SystemExit('a script')", "SystemExit: a script"),
        ("def pair(): raise SystemExit(3)", "pair() fails: SystemExit: 3"),
        ("def pair(): return {}['key']", "pair() fails: KeyError: 'key'"),
        ("import jaxbench\ndef pair(): return jaxbench.Pair(speeed=1)", "pair() fails: TypeError"),
        (UNCALLABLE.format("x[:, :3]"), "the PyTorch module cannot be called on the inputs"),
        (UNCALLABLE.format("x, weights='mine'"), "weights='mine'"),
    ],
)
def test_a_file_that_describes_no_pair_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "mine.py").write_text(content, encoding="utf-8")
    result = command("pair", "mine.py", cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_file_may_import_modules_beside_it_from_any_folder(tmp_path):
    (tmp_path / "modelle").mkdir()
    (tmp_path / "modelle" / "meine_schicht.py").write_text("def layer(x):\n    return x + 1.0\n", encoding="utf-8")
    lines = (
        "import numpy as np, torch, jaxbench", "from meine_schicht import layer",
        "class Add(torch.nn.Module):", "    def forward(self, x):", "        return layer(x)",
        "def pair():", "    return jaxbench.Pair(layer, Add(), np.arange(3.0), quick=True)",
    )  # fmt: skip
    (tmp_path / "modelle" / "größe.py").write_text("\n".join(lines), encoding="utf-8")
    result = command("pair", "modelle/größe.py", cwd=tmp_path)
    assert result.returncode == 0 and "the same function" in result.stdout, result.stderr


@pytest.mark.parametrize("name", RESULTS)
def test_published_pairs_come_out_as_their_files_say(name):
    missing = [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which jaxbench does not")
    pair = runpy.run_path(str(PAIRS / f"{name}.py"))["pair"]()
    result = proof.run(public_types.checked(pair._replace(quick=True)))
    assert result.passed == (not RESULTS[name])
    for words in RESULTS[name]:
        assert any(words in cause for cause in result.causes.values()), result.causes


def test_the_fixture_shows_where_two_functions_part(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        """
        import numpy as np, torch

        def test_equal(same_function):
            same_function(lambda x: x + 1.0, Add(1.0), np.ones(3), quick=True)

        def test_other(same_function):
            same_function(lambda x: x + 1.0, Add(2.0), np.ones(3), quick=True)

        class Add(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.value = value

            def forward(self, x):
                return x + self.value
        """
    )
    result = pytester.runpytest_subprocess("-p", "jaxbench.pair.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*NOT the same function*", "*jaxbench: weights and modules*"])
