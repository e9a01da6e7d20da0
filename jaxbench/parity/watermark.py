"""Parity of the watermarks, which have no weights: the same bits, tokens and p-values in numpy, JAX and PyTorch.

For one scheme: the evidence of texts (words and scored positions, with prompts, padding and one key per row) is
bit-identical in reference.py and both detectors; scores and p-values computed from it agree to 1e-12; and both
generators sample the same tokens from one model, with marked and unmarked rows in one batch, in float32.
"""

from __future__ import annotations

import numpy as np

from jaxbench import initial, sample, transformer
from jaxbench.parity import cases, gates
from jaxbench.watermark import detect, logits_processor, reference, significance
from jaxbench.watermark.green_lists import lists_of
from jaxbench.watermark.keys import Key
from jaxbench.watermark.schemes.contract import Scheme

TOLERANCE = 1e-12  # of float64 scores and p-values, relative
NUM_TEXTS, NUM_NEW = 12, 24
KEYS = [Key.from_passphrase("parity").derive(str(i)) for i in range(NUM_TEXTS)]


def gates_of_evidence(scheme: Scheme, *, vocab_size: int, seed: int) -> list[gates.Gate]:
    """Gates of words, scored positions, scores and p-values."""
    from torch_ref.watermark import detect as torch_detect

    tokens, lengths, prompts = texts(vocab_size, seed)
    lists = lists_of(scheme, vocab_size=vocab_size)
    in_numpy = reference.evidence(
        scheme, KEYS, tokens, lengths, vocab_size=vocab_size, prompt_lengths=prompts, green_lists=lists
    )
    wanted = significance.score(scheme, in_numpy, vocab_size=vocab_size)
    found = []
    for name, library in (("flax", detect), ("torch", torch_detect)):
        detector = library.Detector(scheme, vocab_size=vocab_size, green_lists=lists)
        evidence = detector.evidence(tokens, lengths, KEYS, prompt_lengths=prompts)
        found.append(_equal(f"{name}: scored positions", evidence.scored, in_numpy.scored))
        pairs = [(evidence.words, in_numpy.words)]
        if in_numpy.second_words is not None:
            pairs.append((evidence.second_words, in_numpy.second_words))
        mine, theirs = (np.stack([np.where(in_numpy.scored, pair[i], 0) for pair in pairs]) for i in (0, 1))
        found.append(_equal(f"{name}: words of scored tokens", mine, theirs))
        scores = significance.score(scheme, evidence, vocab_size=vocab_size)
        found.append(_equal(f"{name}: counts", scores.num_scored, wanted.num_scored))
        for field in ("statistic", "score", "p_value", "mid_p", "randomized_p"):
            found.append(_close(f"{name}: {field}", getattr(scores, field), getattr(wanted, field)))
    return found


def gates_of_generation(scheme: Scheme, *, seed: int) -> list[gates.Gate]:
    """Gate of generated tokens: every second row is marked, each with its own key."""
    import torch_ref.transformer
    from torch_ref import sample as torch_sample
    from torch_ref.watermark import logits_processor as torch_logits_processor

    shape = cases.LLAMA
    params = initial.initial_params(shape, seed, distinct=True)
    tokens, _, _ = texts(shape.vocab_size, seed)
    given = [row[: 5 + i % 4].tolist() for i, row in enumerate(tokens[:6])]
    keys = [KEYS[i] if i % 2 == 0 else None for i in range(len(given))]
    drawn = {}
    for name, models, sampling, marks in (
        ("flax", transformer, sample, logits_processor),
        ("torch", torch_ref.transformer, torch_sample, torch_logits_processor),
    ):
        lists = lists_of(scheme, vocab_size=shape.vocab_size)
        watermark = marks.Watermark(scheme, vocab_size=shape.vocab_size, green_lists=lists)
        generator = sampling.Generator(
            models.build(shape, params),
            eos_id=None,
            sampling=sampling.SamplingParams(temperature=1.0),
            processors=[watermark],
        )
        states = [watermark.state(keys, seed=seed)]
        drawn[name] = np.asarray(generator(given, max_new_tokens=NUM_NEW, seed=seed, processor_states=states).tokens)
    return [gates.sampling(drawn)._replace(what="generated tokens, float32")]


def texts(vocab_size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random tokens [B T] with repetitions, lengths [B] from 0 on, and prompt lengths [B]; all int32."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab_size, (NUM_TEXTS, 40), dtype=np.int32)
    tokens[:, 20:30] = tokens[:, 5:15]
    tokens[::3] %= 3
    lengths = np.linspace(0, 40, NUM_TEXTS).astype(np.int32)
    return tokens, lengths, random.integers(0, 12, NUM_TEXTS).astype(np.int32)


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """Gates of a case, whose configuration is the scheme."""
    found = gates_of_evidence(case.config, vocab_size=cases.LLAMA.vocab_size, seed=case.seed)
    return found if case.config.is_detection_only else found + gates_of_generation(case.config, seed=case.seed)


def _equal(what: str, value: np.ndarray, reference: np.ndarray) -> gates.Gate:
    value, reference = np.asarray(value), np.asarray(reference)
    if value.shape != reference.shape:
        return gates.Gate("P6", what, False, float("inf"), 0.0, f"{value.shape}, wanted {reference.shape}")
    wrong = np.argwhere(value != reference)
    where = f"at {tuple(int(i) for i in wrong[0])}" if len(wrong) else ""
    return gates.Gate("P6", what, not len(wrong), float(len(wrong)), 0.0, where, f"{value.size} values, bit for bit")


def _close(what: str, value: np.ndarray, reference: np.ndarray) -> gates.Gate:
    scale = np.maximum(np.abs(reference), np.finfo(np.float64).tiny)
    error = np.where(value == reference, 0.0, np.abs(value - reference) / scale)
    worst = int(np.argmax(error))
    return gates.Gate("P1", what, bool(error[worst] <= TOLERANCE), float(error[worst]), TOLERANCE, f"text {worst}")
