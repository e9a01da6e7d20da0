"""Generation here against the peers' own lists and draws: what is marked here is what they would have marked."""

import json
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_ref.watermark.logits_processor
from jaxbench.watermark import green_lists, logits_processor, reference, significance
from jaxbench.watermark.config import Gumbel, MarkLlmKgw, TransformersKgw
from jaxbench.watermark.keys import Key
from tests.watermark import vocabulary

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "watermark" / "golden"
MARKLLM = json.loads((GOLDEN / "markllm.json").read_text())
VLLM = json.loads((GOLDEN / "vllm.json").read_text())
FIELDS = ("gamma", "hash_key", "f_scheme", "window_scheme", "prefix_length")
LEFT = [row for row in MARKLLM if row["window_scheme"] == "left" and row["vocab_size"] == 97]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXBENCH_CACHE", str(tmp_path))


def biased(backend: str, scheme, lists: green_lists.GreenLists, contexts: np.ndarray) -> np.ndarray:
    """Return which tokens a backend's processor raises after contexts [B n], bool [B V]."""
    module, array = (
        (logits_processor, jnp.asarray) if backend == "jax" else (torch_ref.watermark.logits_processor, torch.asarray)
    )
    watermark = module.Watermark(scheme, vocab_size=lists.vocab_size, green_lists=lists)
    state = watermark.state([Key(0)] * len(contexts))
    rows, length = contexts.shape
    logits = array(np.zeros((rows, lists.vocab_size), np.float32))
    context = (array(contexts.astype(np.int32)), array(np.full(rows, length, np.int32)), array(np.int32(0)))
    _, logits = watermark.apply((watermark.shared, state), logits, *context)
    return np.asarray(logits) > 0


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("f_scheme", ["time", "additive", "skip", "min"])
def test_raised_tokens_are_markllms_list(f_scheme, backend):
    rows = [row for row in LEFT if row["f_scheme"] == f_scheme]
    if backend == "jax":  # one compilation an operation and shape: three widths are enough
        rows = [row for row in rows if row["gamma"] == 0.25 and row["hash_key"] == 15485863]
    assert {row["prefix_length"] for row in rows} == {1, 2, 4}
    for row in rows:
        scheme = MarkLlmKgw(**{name: row[name] for name in FIELDS})
        lists = green_lists.GreenLists(scheme, vocab_size=97)
        found = biased(backend, scheme, lists, np.array([row["ids"]]))
        assert np.flatnonzero(found[0]).tolist() == row["green"]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_raised_tokens_are_those_of_transformers(backend):
    from transformers.generation.logits_process import WatermarkLogitsProcessor

    contexts = np.array([[5, 7, 9], [96, 0, 1]])
    processor = WatermarkLogitsProcessor(97, "cpu", 0.25, 2.0, context_width=2)
    wanted = processor(torch.tensor(contexts), torch.zeros(2, 97)).numpy() > 0
    scheme = TransformersKgw(context_width=2)
    assert np.array_equal(biased(backend, scheme, green_lists.GreenLists(scheme, vocab_size=97), contexts), wanted)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_drawn_tokens_are_those_of_vllm(backend):
    module, array = (
        (logits_processor, jnp.asarray) if backend == "jax" else (torch_ref.watermark.logits_processor, torch.asarray)
    )
    watermark = module.Watermark(Gumbel(prf="vllm", deduplicate=False), vocab_size=499)
    tokens = np.arange(499)
    logits = (tokens * tokens * 37 % 101).astype(np.float32) / 25
    for row in VLLM["samples"]:
        whole = [(context, token) for context, token in zip(row["contexts"], row["tokens"]) if -1 not in context]
        assert len(whole) >= 4
        contexts, wanted = np.array([pair[0] for pair in whole], np.int32), [pair[1] for pair in whole]
        state = watermark.state([Key(row["key"])] * len(whole))
        context = (array(contexts), array(np.full(len(whole), 4, np.int32)), array(np.int32(4)))
        _, drawn = watermark.draw(state, array(np.tile(logits, (len(whole), 1))), *context, None)
        assert np.asarray(drawn).tolist() == wanted


def test_markllm_detects_what_is_marked_with_its_lists_here():
    python = ROOT / ".venvs" / "markllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("MarkLLM is not installed: run `make peers`")
    scheme, size = MarkLlmKgw(), 600
    lists, random = green_lists.GreenLists(scheme, vocab_size=size), np.random.default_rng(0)
    marked, human = [int(random.integers(1, size))], random.integers(0, size, 120).tolist()
    while len(marked) < 120:  # a green token in three of four places
        green = vocabulary.words(scheme, Key(0), [[marked[-1]]], vocab_size=size, green_lists=lists)[0] == 0
        marked.append(int(random.choice(np.flatnonzero(green) if random.random() < 0.75 else np.arange(1, size))))
    code = (
        "import json, sys; sys.path.insert(0, 'tests/watermark/golden'); import make_markllm, torch\n"
        "kgw = make_markllm.load(600, gamma=0.5, hash_key=15485863, f_scheme='time', window_scheme='left',"
        " prefix_length=1)\n"
        "scores = [kgw.utils.score_sequence(torch.tensor(ids)) for ids in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[z, flags.count(1)] for z, flags in scores]))"
    )
    command = [str(python), "-c", code, json.dumps([marked, human])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    tokens = np.array([marked, human])
    found = reference.evidence(
        scheme, Key(0), tokens, np.full(2, 120), vocab_size=size, green_lists=lists, deduplicate=False
    )
    ours = significance.score(scheme, found, vocab_size=size)
    assert ours.num_green.tolist() == [green for _, green in theirs]
    assert ours.score == pytest.approx([z for z, _ in theirs], abs=1e-12)
    assert theirs[0][0] > 4 and theirs[1][0] < 4 and ours.p_value[0] < 1e-6 < ours.p_value[1]
