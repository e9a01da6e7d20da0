"""Native kernels under the watermark commands: one text on every backend, found again, never mixed with xla's."""

from __future__ import annotations

import hashlib
import importlib
import json

import numpy as np
import pytest

from jaxbench import config as configs
from jaxbench.generation import decoder
from jaxbench.generation.decoder import Options
from jaxbench.native import build, library
from jaxbench.watermark import commands, config, detection, generate
from jaxbench.watermark.attack import attacks, rewrite
from jaxbench.watermark.keys import Key
from jaxbench.watermark.study import benchmark, decode_overhead, evaluate, evaluate_config, evaluate_parts, power
from jaxbench.watermark.texts import Ragged
from tests.generation import tiny
from tests.structure import ROOT

MARKS = [
    {"name": "kgw", "scheme": {"scheme": "kgw", "delta": 5.0}},
    {"name": "gumbel", "scheme": {"scheme": "gumbel"}},
]
KEYS = [Key(1), Key(2)]
BACKENDS = {
    "flax": (),
    "equinox": (*tiny.MODULES["equinox"][:2], "jaxbench.watermark.logits_processor", tiny.MODULES["equinox"][2]),
    "torch": (*tiny.MODULES["torch"][:2], "torch_ref.watermark.logits_processor", tiny.MODULES["torch"][2]),
}
XLA, NATIVE, AUTO = Options("xla"), Options("native"), Options("auto")
KERNELS = ("kernels", "weights", "cache", "activations")
needs_native = pytest.mark.skipif(not tiny.has_native(), reason=tiny.NEEDS_NATIVE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def no_compiler(monkeypatch):
    def load(*_):
        raise build.NotAvailable("native kernels: no C compiler here; install a C compiler (cc)")

    monkeypatch.setattr(library, "load", load)


def made(folder, path, options, backend="flax", **how):
    settings = generate.GenerateConfig.model_validate(
        {"marks": MARKS, "model": str(folder), "num_prompts": 4, "prompt_tokens": 9, "new_tokens": 40}
    )
    modules = generate.Backend(*map(importlib.import_module, BACKENDS[backend]))
    generate.run(settings, path, keys=KEYS, backend=modules, options=options, **how)
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(path):
    return json.loads(path.with_name(f"{path.name}.run.json").read_text())


@pytest.fixture(scope="module")
def flax_native(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "out.jsonl"
    return path, made(folder, path, NATIVE)


@pytest.fixture(scope="module")
def flax_xla(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("xla") / "out.jsonl"
    return path, made(folder, path, XLA)


# generate


@needs_native
@pytest.mark.parametrize("backend", ["equinox", "torch"])
def test_marked_texts_of_native_kernels_are_the_same_tokens_on_every_backend(folder, flax_native, tmp_path, backend):
    found = made(folder, tmp_path / "out.jsonl", NATIVE, backend)
    assert [row["ids"] for row in found] == [row["ids"] for row in flax_native[1]]


@needs_native
def test_marked_texts_of_native_kernels_are_found_under_their_own_key_alone(flax_native):
    for place, (mark, key) in enumerate(zip(MARKS, KEYS)):
        rows = [row for row in flax_native[1] if row["mark"] == mark["name"]]
        detector = detection.NumpyDetector(config.parse_scheme(mark["scheme"]), vocab_size=tiny.CONFIG.vocab_size)
        ids, prompts = Ragged.from_lists([row["ids"] for row in rows]), np.array([row["prompt_tokens"] for row in rows])
        own = detection.detect(detector, ids, key, prompt_lengths=prompts).p_value
        other = detection.detect(detector, ids, KEYS[1 - place], prompt_lengths=prompts).p_value
        assert len(rows) == 2 and own.max() < 1e-3 and own.min() < 1e-20 and other.min() > 0.01, mark["name"]


@needs_native
def test_rows_of_one_kind_of_kernels_are_not_gone_on_with_by_the_other(folder, flax_native, flax_xla):
    differing = "holds rows made with other kernels and weights and cache and activations; go on with --kernels="
    cases = (flax_native, XLA, "native"), (flax_xla, NATIVE, "xla"), (flax_xla, AUTO, "xla")
    for (path, rows), options, held in cases:
        before = path.read_bytes()
        with pytest.raises(ValueError, match=f"{differing}{held}, name another file, or pass --overwrite"):
            made(folder, path, options)
        assert path.read_bytes() == before and len(rows) == 4
    with pytest.raises(ValueError, match="holds rows made with other cache; name another file"):
        made(folder, flax_native[0], NATIVE._replace(cache="int8"))


@needs_native
def test_the_number_of_threads_may_change_between_two_starts(folder, flax_native):
    said = []
    assert made(folder, flax_native[0], AUTO._replace(threads=1), say=said.append) == flax_native[1]
    assert said == [f"{flax_native[0]} has all 4 rows"]


def test_a_run_of_xla_has_the_id_that_it_had_before_there_were_native_kernels(folder, flax_xla):
    path, rows = flax_xla
    held = record(path)
    assert [held[name] for name in KERNELS] == [None] * 4
    old = {name: value for name, value in held.items() if name not in KERNELS}
    text = {name: value for name, value in old.items() if name not in ("run", "salt", "keys")}
    text = json.dumps(text, sort_keys=True, separators=(",", ":"))
    assert {row["run"] for row in rows} == {hashlib.sha256(text.encode()).hexdigest()[:12]}
    path.with_name(f"{path.name}.run.json").write_text(json.dumps(old))  # a record of that time
    assert made(folder, path, XLA) == rows


def test_without_a_compiler_auto_takes_xla_and_says_why_and_native_is_refused(folder, no_compiler, flax_xla, tmp_path):
    said = []
    assert made(folder, flax_xla[0], AUTO, say=said.append) == flax_xla[1]
    assert said[0] == "kernels: xla, because native kernels: no C compiler here; install a C compiler (cc)"
    with pytest.raises(build.NotAvailable, match="^--kernels=native: native kernels: no C compiler here"):
        made(folder, tmp_path / "out.jsonl", NATIVE)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_xla_stand_over_the_dtype_and_are_part_of_the_run(folder, flax_xla):
    with pytest.raises(ValueError, match="holds rows made with other kernels and weights;"):
        made(folder, flax_xla[0], Options("xla", weights="bfloat16"))


# power, train-detector


@needs_native
def test_batches_of_power_belong_to_their_kernels(folder, tmp_path):
    settings = power.Power.model_validate(
        {"schemes": {"kgw": {"scheme": "kgw", "delta": 6.0}}, "model": str(folder), "num_texts": 2,
         "prompt_tokens": 9, "lengths": [40], "levels": [0.01], "batch_size": 2}
    )  # fmt: skip
    native = power.run(settings, workdir=tmp_path, options=AUTO)
    assert native["kernels"]["kernels"] == "native" and native["cells"][0]["rate"]["value"] == 1.0
    assert native["config_id"].endswith("-native-file-float32-float32")
    with pytest.raises(ValueError, match="holds the work of configuration .*-native-file-float32-float32, this is"):
        power.run(settings, workdir=tmp_path, options=XLA)
    with pytest.raises(ValueError, match="power: batch_size=2: native kernels decode at most 1 rows at once"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "MAX_ROWS", 1)
            power.run(settings, workdir=tmp_path, options=AUTO)


# evaluate, attack


def evaluation(*changes):
    return configs.load(ROOT / "configs/watermark/evaluate-tiny.yaml", changes, evaluate_config.Evaluate)


@needs_native
def test_stages_of_an_evaluation_belong_to_their_kernels(tmp_path):
    settings = evaluation()
    xla, native = (evaluate_parts.choose(settings, options) for options in (XLA, AUTO))
    evaluate.prepare(settings, tmp_path, choices=native)
    evaluate.prepare(settings, tmp_path, choices=native)
    with pytest.raises(ValueError, match="holds the stages of configuration .*-native-file-float32-float32, this is"):
        evaluate.prepare(settings, tmp_path, choices=xla)
    plain = tmp_path / "plain"
    evaluate.prepare(settings, plain)  # as before there were native kernels
    evaluate.prepare(settings, plain, choices=xla)


@needs_native
def test_weights_for_rewriting_alone_are_another_evaluation():
    settings = evaluation("rewriting.dtype=bfloat16")
    found = {
        evaluate_parts.choose(settings, options).suffix(settings)
        for options in (XLA, Options("xla", weights="bfloat16"), Options("xla", weights="float32"), NATIVE,
                        Options("native", weights="bfloat16"), Options("native", weights="float32"))
    }  # fmt: skip
    assert len(found) == 6 and "" in found
    assert {"-native-file-float32-float32-native-bfloat16-float32-float32", "-xla-bfloat16"} < found


@needs_native
def test_the_generating_model_judges_its_own_texts_and_xla_those_of_all(tmp_path):
    settings = evaluation()
    parts = evaluate_parts.Parts(settings, tmp_path, choices=evaluate_parts.choose(settings, NATIVE))
    judge = parts.scorer("tiny", "float32")
    assert judge is not parts.own_scorer
    rows = [list(range(2, 40)), list(range(100, 125))]
    own, other = (scorer(rows, prompt_lengths=[4, 4]) for scorer in (parts.own_scorer, judge))
    np.testing.assert_allclose(own.nll, other.nll, rtol=1e-5)
    np.testing.assert_allclose(own.entropy, other.entropy, rtol=1e-5)
    plain = evaluate_parts.Parts(settings, tmp_path)
    assert plain.scorer("tiny", "float32") is plain.own_scorer  # a model is not loaded twice


@needs_native
def test_native_kernels_rewrite_and_a_rewritten_text_does_not_depend_on_its_batch(folder, monkeypatch):
    attack, text = attacks.parse_attack({"attack": "paraphrase"}), "Some words."
    tools = commands.attack_tools(attack, human=None, model=str(folder), options=AUTO)
    choice = decoder.choose(NATIVE, "cpu")
    assert tools.rewrite._choice == choice
    monkeypatch.setattr(rewrite, "PARAPHRASE", "Say: {text}")  # the tiny model's context is short
    together = tools.rewrite(attack, [text, "Other words."], seed=1)
    alone = rewrite.Rewriter(folder, choice=choice, batch_size=1)(attack, ["Other words."], seed=1, indices=[1])
    assert together[1:] == alone and together[0] != text


# benchmark


def test_the_kernels_are_part_of_a_benchmark_where_something_is_decoded():
    only = {"detection": {"schemes": [{"scheme": "kgw"}]}}
    assert benchmark.choose(benchmark.Benchmark.model_validate(only), NATIVE) == decoder.XLA
    with pytest.raises(ValueError, match="^--cache=int8 is for native kernels alone"):
        decodes = {"generation": {"schemes": [{"scheme": "kgw"}]}}
        benchmark.choose(benchmark.Benchmark.model_validate(decodes), XLA._replace(cache="int8"))


@needs_native
def test_what_a_watermark_adds_is_measured_on_a_native_step(folder):
    session = decode_overhead.Generation()
    session.start(model=str(folder), choice=decoder.choose(NATIVE, "cpu")._asdict())
    sizes = {"new_tokens": 3, "rounds": 1, "loop_steps": 2, "loop_rounds": 1}
    found = session.overhead(scheme=MARKS[0]["scheme"], prompts=[[1, 2, 3]], **sizes)
    assert found.keys() == {"plain_step", "marked_step", "plain_loop", "marked_loop"}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found.values())
