"""The quality table: its figures by hand, its command on a model that was trained here."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxbench import initial, parameters, transformer
from jaxbench.config import TransformerConfig
from jaxbench.pretrained import assets, small_tokenizers, tokenizer, weights
from jaxbench.quantization.study import measure, methods, quality, report, windows
from jaxbench.quantization.study.quality import Estimate, Method

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TransformerConfig(
    vocab_size=257, d_model=32, d_ff=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_seq_len=64
)

W8A8 = quality.Recipe(bits=8, group_size=None, scale_dtype="float32", activations="dynamic")


def run_command(main: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a main."""
    line = [sys.executable, str(ROOT / "experiments" / main), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ, cwd=ROOT, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder on bytes whose logits differ from one another."""
    params = {n: v * 4 if v.ndim == 2 else v for n, v in initial.initial_params(CONFIG, 0).items()}
    path = tmp_path_factory.mktemp("model") / "model"
    return weights.save_checkpoint(path, CONFIG, params, tokenizer=small_tokenizers.ByteTokenizer())


def test_figures_are_those_of_a_sum_by_hand(folder):
    held = weights.load_checkpoint(folder)
    other = {name: value * 1.3 for name, value in held.params.items()}
    tokens = np.random.default_rng(0).integers(0, 256, (5, 12)).astype(np.int32)
    repeats = np.concatenate([tokens[:, :6], tokens[:, :6]], axis=1)
    given = {"text": windows.Windows(tokens, [11] * 5, repeats)}
    models = [transformer.build(CONFIG, params) for params in (other, held.params)]
    found = measure.figures(*models, given)["text"]

    def logits(model, rows):
        positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
        values = np.asarray(model(jnp.asarray(rows), jnp.asarray(positions)), np.float64)
        return values - np.log(np.exp(values).sum(axis=2, keepdims=True))

    own, reference = (logits(model, tokens)[:, :-1] for model in models)
    nll = -np.take_along_axis(own, tokens[:, 1:, None], axis=2)[:, :, 0].mean(axis=1)
    kl = (np.exp(reference) * (reference - own)).sum(axis=2).mean(axis=1)
    recall = (logits(models[0], repeats)[:, 5:-1].argmax(axis=2)[:, 1:] == repeats[:, 7:]).mean(axis=1)
    np.testing.assert_allclose(found["nll"], nll, rtol=1e-4)
    np.testing.assert_allclose(found["kl"], kl, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found["agreement"], (own.argmax(axis=2) == reference.argmax(axis=2)).mean(axis=1))
    np.testing.assert_allclose(found["recall"], recall)
    assert found["tokens"] == [11] * 5


def test_bits_per_byte_count_each_windows_bytes():
    own = {"nll": [1.0, 2.0], "kl": [0, 0], "agreement": [1, 1], "recall": [0, 1], "tokens": [8, 8], "bytes": [16, 32]}
    found = {"texts": {"t": own}, "bits_per_weight": 4.5, "bytes": 10}
    row = quality.row(found, found)["texts"]["t"]
    assert row["bits_per_byte"].mean == pytest.approx((0.5 + 0.5) / 2 / math.log(2))
    assert row["bits_added"] == Estimate(0.0, 0.0, 0.0) and row["recall"].mean == 0.5


def test_the_interval_of_a_share_ends_at_none_and_at_all():
    own = {"nll": [1.0] * 3, "kl": [0.0] * 3, "tokens": [8] * 3, "bytes": [16] * 3}
    own |= {"agreement": [1.0, 1.0, 0.9], "recall": [0.0, 0.0, 0.1]}
    found = {"texts": {"t": own}, "bits_per_weight": 4.5, "bytes": 10}
    row = quality.row(found, found)["texts"]["t"]
    assert row["agreement"].high == 1.0 and 0.8 < row["agreement"].low < row["agreement"].mean
    assert row["recall"].low == 0.0 and 0.2 > row["recall"].high > row["recall"].mean
    broken = {"texts": {"t": own | {"agreement": [math.nan] * 3}}, "bits_per_weight": 4.5, "bytes": 10}
    assert all(math.isnan(value) for value in quality.row(broken, found)["texts"]["t"]["agreement"])


def test_an_interval_covers_the_mean_in_nineteen_of_twenty():
    random = np.random.default_rng(0)
    estimates = [quality.estimate(random.normal(3.0, 2.0, 12)) for _ in range(2000)]
    assert 0.93 < np.mean([each.low < 3.0 < each.high for each in estimates]) < 0.97


def test_equal_windows_have_no_width_and_one_without_a_number_leaves_no_mean():
    assert quality.estimate([2.0, 2.0, 2.0]) == Estimate(2.0, 2.0, 2.0)
    assert all(math.isnan(value) for value in quality.estimate([1.0, math.nan, 2.0]))


def test_the_default_text_is_calibrated_on_one_half_and_measured_on_the_other():
    first, second = (windows.documents(None, second_half=half)[0] for half in (False, True))
    assert abs(len(first) - len(second)) < len(first) / 2
    pieces = [part for part in first.split("\n\n") if len(part) > 80]
    assert pieces and not any(piece in second for piece in pieces)


def test_windows_of_a_text_of_one_paragraph_are_all_different_and_do_not_meet(tmp_path):
    words, path = small_tokenizers.ByteTokenizer(), tmp_path / "one.txt"
    text = " ".join(f"word {i}" for i in range(100))
    path.write_text(text)
    found = [bytes(row.tolist()).decode() for row in windows.of_text(words, str(path), 8, 48).tokens]
    places = [text.index(each) for each in found]
    assert places[0] == 0 and places[-1] == len(text) - 48 and min(np.diff(places)) >= 48
    rows = windows.calibration(words, str(path), 8, 48)
    assert [bytes(row.tolist()).decode() for row in rows] == found
    with pytest.raises(ValueError, match=r"the text has 789 tokens \(.*one.txt\), 17 windows of 48 were wanted"):
        windows.of_text(words, str(path), 17, 48)


def test_windows_of_paragraphs_of_unlike_lengths_do_not_share_their_text(tmp_path):
    words, path = small_tokenizers.ByteTokenizer(), tmp_path / "list.txt"
    lines = [f"line {i}" for i in range(40)]
    path.write_text("\n\n".join([*lines, " ".join(f"word {i}" for i in range(1000))]))
    found = [bytes(row.tolist()).decode() for row in windows.of_text(words, str(path), 16, 64).tokens]
    places = [path.read_text().index(each) for each in found]
    assert min(np.diff(places)) >= 64
    path.write_text("\n\n".join(f"{'a' * 70}{i}" for i in range(40)))
    starts = windows.of_text(words, str(path), 16, 64).tokens[:, 0]
    assert (starts == ord("a")).all(), "of even paragraphs each window begins one"


@pytest.mark.parametrize("kind", ["bytes", "default"])
def test_a_window_that_cuts_a_character_has_the_bytes_of_its_tokens(kind, folder, tmp_path):
    words = tokenizer.load_tokenizer(folder if kind == "bytes" else None)
    path = tmp_path / "cut.txt"
    path.write_text("\n\n".join(f"{'世界你好🎉' * (i + 1)}" for i in range(60)), encoding="utf-8")
    found = windows.of_text(words, str(path), 8, 32)
    assert found.bytes == [sum(len(words.token_bytes(int(i))) for i in row[1:]) for row in found.tokens]


def test_a_pair_on_windows_that_are_all_the_same_is_undecided():
    sides = {"better": "a", "worse": "b", "text": "t"}
    widths = [(0.1, 0.05, 0.15), (-0.1, -0.15, -0.05), (0.1, -0.1, 0.3), (0.1, 0.1, 0.1), (-0.1, -0.1, -0.1)]
    table = report.pair_table([sides | Estimate(*each)._asdict() for each in widths])
    verdicts = list(table.columns[-1].cells)
    assert verdicts == ["first is better", "second is better", *["undecided"] * 3]


def test_a_table_goes_on_with_the_texts_that_it_began_with(folder, tmp_path):
    texts = {name: tmp_path / f"{name}.txt" for name in ("seen", "asked")}
    for path in texts.values():
        path.write_text("\n\n".join(f"The {i * i} mills of {path.stem} stand by the river." for i in range(20)))
    config, workdir = tmp_path / "table.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump({
        "calibration": {"data": str(texts["seen"]), "rows": 4, "length": 32}, "windows": 4, "length": 32,
        "texts": {"own": str(texts["asked"])}, "methods": {"gptq": {"recipe": {"bits": 3, "rounding": "gptq"}}},
    }))  # fmt: skip
    command = ("quality.py", f"--config={config}", f"--model={folder}", f"--workdir={workdir}")

    def gptq():
        code, out = run_command(*command)
        assert code == 0, out
        return json.loads((workdir / "summary.json").read_text())["methods"]["gptq"]["texts"]["own"]["kl"]["mean"]

    first, (part,) = gptq(), (workdir / "methods").glob("gptq-*")
    texts["seen"].write_text(texts["seen"].read_text().upper())
    assert gptq() != first and len(list((workdir / "methods").glob("gptq-*"))) == 2 and part.exists()
    texts["asked"].write_text(texts["asked"].read_text().upper())
    code, out = run_command(*command)
    assert code == 2 and "holds the work of configuration" in out


def test_no_method_stands_for_the_model_that_all_are_compared_with():
    with pytest.raises(ValueError, match="methods: float32 is the model that all are compared with"):
        quality.Quality(methods={"float32": Method(rounded="q4_0")})
    with pytest.raises(ValueError, match="methods: '../q4' is no name of a file"):
        quality.Quality(methods={"../q4": Method(rounded="q4_0")})


def test_every_way_of_rounding_has_a_line_of_its_own():
    ways = {
        "as ggml rounds": {"rounded": "q4_0"}, "torchao": {"torchao": "int4"}, "qwix": {"qwix": "int4"},
        "to nearest": {"recipe": {}}, "gptq": {"recipe": {"rounding": "gptq"}},
        **{each: {"recipe": {"equalize": each}} for each in ("awq", "smoothquant")},
        **{f"{each} and gptq": {"recipe": {"equalize": each, "rounding": "gptq"}} for each in ("awq", "smoothquant")},
    }  # fmt: skip
    settings = quality.Quality(methods={name: Method(**values) for name, values in ways.items()})
    row = {"bits_per_weight": 4.5, "texts": {"default": {"kl": Estimate(2e-3, 1e-3, 3e-3)}}}
    drawn = report.picture(settings, dict.fromkeys(ways, row))
    assert [name for name in ways if f">{name}<" not in drawn] == []


@pytest.mark.parametrize("method", [{"rounded": "q4_0"}, {"rounded": "bfloat16"}, {"recipe": {"bits": 4}}])
def test_native_kernels_and_xla_have_the_same_figures(folder, method):
    from jaxbench.native import library

    if not library.is_available():
        pytest.skip("native kernels need a C compiler")
    held = weights.load_checkpoint(folder)
    texts = {"t": windows.of_text(small_tokenizers.ByteTokenizer(), None, 4, 32)}
    reference = transformer.build(CONFIG, held.params)
    made = [methods.make(Method(**method, native=native), held, lambda: None) for native in (None, {})]
    plain, native = (measure.figures(each.model, reference, texts)["t"] for each in made)
    np.testing.assert_allclose(plain["kl"], native["kl"], rtol=1e-2, atol=1e-5)
    assert made[0].bits_per_weight == made[1].bits_per_weight


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_have_the_eight_bits_that_a_file_of_four_gives_them(tied):
    config = CONFIG.model_copy(update={"tie_embeddings": tied})
    held = weights.Checkpoint(config, initial.initial_params(config, 0), None, "", "")
    made = methods.make(Method(rounded="q4_0"), held, lambda: None)
    found = {name: np.asarray(value) for name, value in parameters.split(made.model)[1].items()}
    ends = ["embed.embedding"] if tied else ["embed.embedding", "head.kernel"]
    size = sum(held.params[name].size for name in ends) * 8.5 / 8
    for name, value in held.params.items():
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        if name in ends:
            assert 0 < error < 0.01, name
        elif value.ndim == 2:
            assert error > 0.05, name
            size += value.size * 4.5 / 8
    assert made.bytes == round(size + sum(4 * value.size for value in held.params.values() if value.ndim == 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "one of recipe, rounded, torchao and qwix, got \\[\\]"),
        ({"rounded": "q4_0", "torchao": "int4"}, "got \\['rounded', 'torchao'\\]"),
        ({"torchao": "int4", "native": {}}, "torchao=int4 with native"),
        ({"qwix": "int8", "native": {}}, "qwix=int8 with native"),
        ({"recipe": W8A8, "native": {}}, "activations=dynamic with native"),
    ],
)  # fmt: skip
def test_a_method_that_says_two_things_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Method(**values)


def test_the_command_measures_keeps_and_shows(folder, tmp_path):
    settings = {
        "calibration": {"rows": 8, "length": 32}, "windows": 4, "length": 32,
        "methods": {
            "bf16": {"rounded": "bfloat16"},
            "int3": {"recipe": {"bits": 3, "scales": "minmax"}},
            "int3-gptq": {"recipe": {"bits": 3, "rounding": "gptq"}},
            "w8a8": {"recipe": {"bits": 8, "group_size": None, "scale_dtype": "float32", "activations": "static"}},
        },
        "pairs": [["int3-gptq", "int3"]],
    }  # fmt: skip
    config, workdir = tmp_path / "table.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(settings))
    command = ("quality.py", f"--config={config}", f"--model={folder}", f"--workdir={workdir}")
    code, out = run_command(*command)
    assert code == 0 and "int3-gptq" in out and "bits per byte" in out, out
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["about"]["text_sha256"] == {"default": assets.TEXT_SHA256} and assets.TEXT_SHA256 in out
    assert summary["about"]["calibration_sha256"] == assets.TEXT_SHA256
    kl = {name: row["texts"]["default"]["kl"]["mean"] for name, row in summary["methods"].items()}
    assert kl["bf16"] < kl["w8a8"] < kl["int3"] and kl["int3-gptq"] < kl["int3"]
    for name in ("report.html", "report.svg", "results.csv"):
        assert (workdir / name).stat().st_size > 100
    (part,), (other,) = ((workdir / "methods").glob(f"{name}-????????????.json") for name in ("int3", "w8a8"))
    made = part.stat().st_mtime_ns
    other.unlink()
    assert run_command(*command)[0] == 0
    assert part.stat().st_mtime_ns == made and other.exists()
    code, out = run_command(*command, "--set=windows=6")
    assert code == 2 and "holds the work of configuration" in out


def test_a_text_that_the_model_cannot_read_is_refused_before_the_first_method(folder, tmp_path):
    config = CONFIG.model_copy(update={"vocab_size": 100})  # a tokenizer of bytes has more
    params = initial.initial_params(config, 0)
    strange = weights.save_checkpoint(tmp_path / "m", config, params, tokenizer=small_tokenizers.ByteTokenizer())
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump({"windows": 4, "length": 32, "methods": {"q4_0": {"rounded": "q4_0"}}}))
    command = ("quality.py", f"--config={path}", f"--workdir={tmp_path / 'out'}")
    code, out = run_command(*command, f"--model={strange}")
    assert code == 2 and re.search(r"texts.default .* has token ids from \d+ to 1\d\d, wanted 0 to 99", out), out
    code, out = run_command(*command, f"--model={folder}", "--set=length=65")
    assert code == 2 and "have 65 tokens, the model has 64 positions" in out, out
    assert not (tmp_path / "out").exists()
    code, out = run_command(
        "quantize.py", f"--model={strange}", "--bits=4", "--rounding=gptq", "--rows=4", "--length=16",
        f"--output={tmp_path / 'w4'}",
    )  # fmt: skip
    assert code == 2 and "the calibration text has token ids from" in out and not (tmp_path / "w4").exists(), out


def test_a_table_without_a_calibrated_method_needs_no_rows_of_calibration(folder, tmp_path):
    path = tmp_path / "table.yaml"  # calibration.length stays 256, the model has 64 positions
    path.write_text(yaml.safe_dump({"windows": 2, "length": 16, "methods": {"q4_0": {"rounded": "q4_0"}}}))
    code, out = run_command("quality.py", f"--config={path}", f"--model={folder}", f"--workdir={tmp_path / 'out'}")
    assert code == 0 and "q4_0" in out, out


def test_a_text_that_methods_were_calibrated_on_is_named(folder, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"paragraph {i} of text {name} " * 3 for i in range(30)))
    texts = {name: str(tmp_path / f"{name}.txt") for name in ("a", "b")}
    settings = {"calibration": {"data": texts["a"], "rows": 4, "length": 16}, "texts": texts, "windows": 2}
    settings |= {"length": 16, "methods": {"g": {"recipe": {"bits": 4, "rounding": "gptq"}}}}
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(settings))
    code, out = run_command("quality.py", f"--config={path}", f"--model={folder}", f"--workdir={tmp_path / 'out'}")
    assert code == 0 and re.findall(r"texts\.(\w)=\S+ is the text of calibration", out) == ["a"], out


@pytest.mark.parametrize("field", ["texts", "methods"])
def test_a_table_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}\n.*at least 1 item"):
        quality.Quality(**({"methods": {"q4_0": {"rounded": "q4_0"}}} | {field: {}}))


def test_a_number_without_an_interval_stands_alone():
    assert report.shown(Estimate(0.5, 0.5, 0.5), "{:.2f}") == "0.50"
    assert report.shown(Estimate(0.5, 0.4, 0.6), "{:+.1f}") == "+0.5 [+0.4, +0.6]"


def test_the_quantize_command_writes_what_it_says(folder, tmp_path):
    code, out = run_command(
        "quantize.py", f"--model={folder}", "--bits=3", "--group_size=16", "--zero=integer", "--rounding=gptq",
        "--rows=8", "--length=32", f"--output={tmp_path / 'w3'}",
    )  # fmt: skip
    assert code == 0 and "7 matrices rounded, relative error of products" in out, out
    assert f"8 rows of 32 tokens of the text with sha256 {assets.TEXT_SHA256}" in out, out
    read = weights.load_checkpoint(tmp_path / "w3")
    values = read.params["layers.0.mlp.up_proj.kernel"]
    groups = values.reshape(2, 16, -1)
    assert max(len(np.unique(groups[g, :, o])) for g in range(2) for o in range(8)) <= 8
    held = weights.load_checkpoint(folder)
    np.testing.assert_array_equal(read.params["embed.embedding"], held.params["embed.embedding"])
    assert "rows repeat" not in out
    code, out = run_command("quantize.py", f"--model={folder}", "--bits=3", f"--output={tmp_path / 'w3'}")
    assert code == 2 and "exists and is not an empty folder" in out


def test_rows_that_repeat_a_short_calibration_text_are_said(folder, tmp_path):
    (tmp_path / "short.txt").write_text("The mill stands by the river and turns.")
    code, out = run_command(
        "quantize.py", f"--model={folder}", "--bits=3", "--rounding=gptq", f"--data={tmp_path / 'short.txt'}",
        "--rows=8", "--length=16", f"--output={tmp_path / 'w3'}",
    )  # fmt: skip
    assert code == 0 and re.search(r"has (39|40) tokens, of which --rows and --length want 128: rows repeat", out), out


def test_a_folder_without_a_tokenizer_is_refused_before_its_matrices_are_rounded(tmp_path):
    weights.save_checkpoint(tmp_path / "bare", CONFIG, initial.initial_params(CONFIG, 0))
    groups = "--group_size=48"  # divides no row, which rounding would say
    code, out = run_command(
        "quantize.py", f"--model={tmp_path / 'bare'}", "--bits=3", groups, f"--output={tmp_path / 'w3'}"
    )
    assert code == 2 and "bare: missing tokenizer.json" in out, out
    assert not (tmp_path / "w3").exists()
