"""The rules of the tree, read from syntax trees: S files, imports, messages, docstrings, sizes, configs, the map."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys

import pytest

from jaxbench import config
from tests.structure import (
    PACKAGES,
    ROOT,
    circles,
    forbidden_imports,
    long_functions,
    module_name,
    named_modules,
    relative,
    silent_raises,
    sources,
    tree_of,
    undocumented,
)

FILE_LINES = 400
FUNCTION_LINES = 60
FRAMEWORKS = ("jax", "jaxlib", "flax", "equinox", "optax", "torch")
# These core files must be S files; any other file becomes one by saying `(S file` in its docstring.
CORE_S = (
    "config",
    "pretrained.assets",
    "pretrained.weights",
    "pretrained.tokenizer",
    "text.packing",
    "philox",
    "initial",
    "cli",
    "process_environment",
    "measure.verdicts",
)
# Which model reads the YAML files of a folder under configs/, or one file of it; a new folder is a new row.
CONFIG_MODELS = {
    "alerts": "jaxbench.regress.alert_config:Alerts",
    "benchmarks": "jaxbench.regress.suite:Suite",
    "compress": "jaxbench.compress.train_config:TrainingConfig",
    "gpu": "jaxbench.gpu.stages:Stages",
    "hallucination": "jaxbench.hallucination.reader_settings:ReaderSettings",
    "hallucination/mitigation": "jaxbench.hallucination.mitigation:Mitigation",
    "lm": "jaxbench.training.train_config:TrainConfig",
    "lm/memory_124m": "jaxbench.memory.train_config:MemoryTrainConfig",
    "ltm": "jaxbench.memory.train_config:MemoryTrainConfig",
    "memory": "jaxbench.memory.study.arms:Arms",
    "memory/cost": "jaxbench.memory.study.cost:Cost",
    "memory/speed": "jaxbench.memory.study.speed:Speed",
    "memory/stability": "jaxbench.memory.study.stability:Stability",
    "presets": "jaxbench.presets:Preset",
    "quantization": "jaxbench.quantization.study.quality:Quality",
    "serve": "jaxbench.serve.settings:ServerConfig",
    "suites": "jaxbench.bench.suite:Suite",
    "watermark": "jaxbench.watermark.generate:GenerateConfig",
    "watermark/benchmark": "jaxbench.watermark.study.benchmark:Benchmark",
    "watermark/benchmark-gpt2-medium": "jaxbench.watermark.study.benchmark:Benchmark",
    "watermark/calibrate": "jaxbench.watermark.study.calibrate:Calibration",
    "watermark/evaluate": "jaxbench.watermark.study.evaluate_config:Evaluate",
    "watermark/evaluate-robustness": "jaxbench.watermark.study.evaluate_config:Evaluate",
    "watermark/evaluate-tiny": "jaxbench.watermark.study.evaluate_config:Evaluate",
    "watermark/neural": "jaxbench.watermark.detector.train_detector:Training",
    "watermark/power": "jaxbench.watermark.study.power:Power",
}

CODE = sources(*PACKAGES, "experiments")
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def is_s_file(path) -> bool:
    return "(S file" in (ast.get_docstring(tree_of(path)) or "")


S_FILES = [path for path in sources("jaxbench") if is_s_file(path)]


def run_python(code: str) -> dict:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Imports


def test_core_s_files_say_that_they_are():
    marked = {module_name(path) for path in S_FILES}
    assert {f"jaxbench.{name}" for name in CORE_S} <= marked


def test_s_files_import_neither_jax_nor_torch():
    assert [str(place) for path in S_FILES for place in forbidden_imports(path, FRAMEWORKS)] == []


def test_importing_every_s_file_loads_neither_jax_nor_torch():
    names = [module_name(path) for path in S_FILES]
    code = f"import importlib, json, sys\nfor name in {names}: importlib.import_module(name)\n"
    loaded = run_python(code + f"print(json.dumps([n for n in {FRAMEWORKS} if n in sys.modules]))")
    assert loaded == []


def test_importing_jaxbench_loads_nothing_and_reads_no_file_of_its_own():
    code = "import json, sys\nbefore = set(sys.modules)\nimport jaxbench\n"
    assert run_python(code + "print(json.dumps(sorted(set(sys.modules) - before)))") == ["jaxbench"]


def test_importing_every_file_touches_no_device():
    names = [module_name(path) for path in sources("jaxbench") if path.name != "__main__.py"]
    names = [name for name in names if name != "jaxbench.pretrained.assets_data.make_default_text"]
    code = f"""
import importlib, json
for name in {names}:
    importlib.import_module(name)
from jax._src import xla_bridge
print(json.dumps(sorted(xla_bridge._backends)))
"""
    assert run_python(code) == []
    assert run_python(code.replace("from jax._src", "import jax; jax.devices()\nfrom jax._src")) == ["cpu"]


# The core knows no workload, and no two files need each other


PARTS = {module_name(path): path for path in sources(*PACKAGES) if path.name != "__init__.py"}
WORKLOADS, PROOFS = {"memory", "watermark"}, {"parity", "bench", "pair"}


def room(name: str) -> str:
    """Return the folder of a module below its package, "" for a file that lies flat there."""
    return name.split(".")[1] if name.count(".") > 1 else ""


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    return {name: named_modules(tree_of(path), PARTS.keys() - {name}) for name, path in PARTS.items()}


def test_the_core_and_the_comparison_name_no_workload(arrows):
    rooms = PARTS.keys() - {name for name in PARTS if room(name) in WORKLOADS | {"parity", "regress", "gpu"}}
    assert [(name, other) for name in rooms for other in arrows[name] if room(other) in WORKLOADS] == []


def test_the_core_names_neither_the_proofs_nor_the_comparison(arrows):
    core = [name for name in PARTS if room(name) not in WORKLOADS | PROOFS]
    core.remove("jaxbench.__main__")  # the program, which hands each command its flags
    for name in ("suite", "workload_cases"):
        core.remove(f"jaxbench.regress.{name}")  # a suite may run a row of the parity table over time
    assert [(name, other) for name in core for other in arrows[name] if room(other) in PROOFS] == []


def test_only_proofs_and_workers_name_the_torch_twins(arrows):
    """A main hands a workload its twin, as experiments/memory.py does; a string that names one counts as an import."""
    found = {name for name in PARTS for other in arrows[name] if name[:9] != "torch_ref" == other[:9]}
    others = {name for name in found if room(name) not in PROOFS and not name.endswith("worker")}
    # Which device a backend may have, before anything is loaded; and a process that measures one backend alone.
    assert others == {"jaxbench.watermark.checks", "jaxbench.gpu.one_arm"}


def test_no_file_leads_back_to_itself(arrows):
    assert circles(arrows) == []


# What every file keeps to


def test_every_raise_carries_a_value():
    assert [str(place) for path in CODE for place in silent_raises(tree_of(path), relative(path))] == []


def test_every_public_function_has_a_docstring():
    assert [str(place) for path in CODE for place in undocumented(tree_of(path), relative(path))] == []


def test_files_and_functions_stay_short():
    long = [f"{relative(path)} has {n} lines" for path in CODE if (n := count_lines(path)) > FILE_LINES]
    long += [str(at) for path in CODE for at in long_functions(tree_of(path), relative(path), FUNCTION_LINES)]
    assert long == []


def count_lines(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_every_config_loads_with_its_model_and_opens_with_its_command(path):
    place = path.relative_to(ROOT / "configs").with_suffix("")
    row = CONFIG_MODELS.get(str(place), CONFIG_MODELS.get(place.parts[0]))
    assert row, f"name the model of configs/{place} in CONFIG_MODELS"
    module, _, name = row.partition(":")
    model_class = getattr(importlib.import_module(module), name)
    loaded = config.load(path, (), model_class)
    assert isinstance(loaded, model_class)
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("Command:", "Expected time:", "Expected result:"):
        assert any(word in line for line in header), f"{relative(path)} does not open with a line `# {word} ...`"


def test_the_map_has_a_line_for_every_file_and_no_other():
    wanted = {relative(path) for path in CODE if path.name != "__init__.py"}
    found = {name for name in mapped((ROOT / "WORKSPACE.md").read_text(encoding="utf-8")) if name.endswith(".py")}
    assert found == wanted, "the tree in WORKSPACE.md has a line for each file of the code"


def mapped(text: str) -> list[str]:
    """Return the paths in the tree of the map: two blanks a level, folders end with a slash."""
    found, folders = [], []
    for line in text.split("```")[1].splitlines():
        if line.strip():
            depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
            folders[depth:] = [name] if name.endswith("/") else []
            found.append("".join(folders[:depth]) + name)
    return found


def test_pins_are_exact_and_portable():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.count("==") != 1 or "+" in line] == []
    assert {"torch==2.13.0", "jax==0.10.2"} <= set(lines)
    assert any(line.startswith("libtpu==") for line in lines)


# The checkers must be able to fail


def test_a_hidden_import_and_a_circle_are_found():
    code = 'def f():\n    from a import b\nload("a.c")\nTABLE = {"d": "a.d:Class"}\n"""a.e is only told of."""\n'
    assert named_modules(ast.parse(code), {"a.b", "a.c", "a.d", "a.e"}) == {"a.b", "a.c", "a.d"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('raise ValueError("bad shape")', 1),
        ("raise ValueError()", 1),
        ('raise ValueError(f"bad shape")', 1),
        ('raise ValueError("bad " + "shape")', 1),
        ('raise ValueError(f"bad shape {x}")', 0),
        ('raise ValueError("bad shape %s" % x)', 0),
        ("raise ValueError(message)", 0),
        ("raise SystemExit(2)", 0),
        ("raise", 0),
    ],
)
def test_a_raise_without_a_value_is_found(code, count):
    assert len(silent_raises(ast.parse(code), "file.py")) == count


def test_a_missing_docstring_is_found():
    code = (
        '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\ndef h():\n    """H."""\n'
    )
    assert [place.what for place in undocumented(ast.parse(code), "file.py")] == ["A.f"]
    assert [place.what for place in undocumented(ast.parse("x = 1\n"), "file.py")] == ["module"]


def test_a_long_function_is_found():
    code = "def f():\n" + "    x = 1\n" * 60
    assert [place.what for place in long_functions(ast.parse(code), "file.py", 60)] == ["f has 61 lines"]
    assert long_functions(ast.parse(code), "file.py", 61) == []


def test_the_map_is_read_level_by_level():
    text = "```\na/   first\n  b/  second\n    c.py  third\n  d.py\ne.py S fifth\n```"
    assert mapped(text) == ["a/", "a/b/", "a/b/c.py", "a/d.py", "e.py"]
