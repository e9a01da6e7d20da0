"""Write vllm.json, words and detections of vLLM 0.33.0 itself; needs an environment with vLLM, on a CPU:

python tests/watermark/golden/make_vllm.py
"""

import json
from pathlib import Path

import torch
from vllm.v1.watermarking import (
    DualKeyGumbelWatermarkDetector,
    GumbelWatermarkDetector,
    GumbelWatermarker,
    PhiloxPRF,
)

KEYS = (42, 2**64 - 1, 0x0123456789ABCDEF)


def uniforms(generator: torch.Generator) -> list[dict]:
    """Return uniforms of random contexts of several widths, some places of which lie before the text (-1)."""
    rows = []
    for width in (1, 3, 4, 5, 8):
        for key in KEYS:
            contexts = torch.randint(-1, 49152, (8, width), generator=generator)
            tokens = torch.randint(0, 49152, (8,), generator=generator)
            found = PhiloxPRF(key).uniform(contexts, tokens[:, None])[:, 0]
            rows.append(
                {"key": key, "contexts": contexts.tolist(), "tokens": tokens.tolist(), "uniforms": found.tolist()}
            )
    return rows


def detections(generator: torch.Generator) -> list[dict]:
    """Return detections of random texts, of texts with repeated contexts, and of watermarked ones."""
    rows = []
    for key in KEYS:
        repeated = torch.randint(0, 3, (60,), generator=generator).tolist()
        texts = [torch.randint(0, 997, (40,), generator=generator).tolist(), repeated, watermarked(key, generator), [5]]
        for tokens in texts:
            for alpha in (None, 0.1, 0.5):
                if alpha is None:
                    found = GumbelWatermarkDetector(key).detect(tokens)
                else:
                    found = DualKeyGumbelWatermarkDetector(key, alpha=alpha).detect(tokens)
                values = {"score": found.score, "p_value": found.p_value, "num_scored": found.num_scored_tokens}
                rows.append({"key": key, "alpha": alpha, "tokens": tokens, **values})
    return rows


def watermarked(key: int, generator: torch.Generator) -> list[int]:
    """Return 40 tokens drawn by vLLM's watermark from flat logits over 997 tokens."""
    watermarker, tokens = GumbelWatermarker(key), [-1] * 4
    for _ in range(40):
        logits = torch.randn(1, 997, generator=generator)
        tokens.append(int(watermarker.sample(logits, torch.tensor([tokens[-4:]])).token_ids[0]))
    return tokens[4:]


def samples(generator: torch.Generator) -> list[dict]:
    """Return draws: logits i * i * 37 % 101 / 25 of token i after a context."""
    tokens = torch.arange(499)
    logits = (tokens * tokens * 37 % 101) / 25
    rows = []
    for key in KEYS:
        contexts = torch.randint(-1, 499, (8, 4), generator=generator)
        drawn = GumbelWatermarker(key).sample(logits.expand(8, -1), contexts).token_ids
        rows.append({"key": key, "contexts": contexts.tolist(), "tokens": drawn.tolist()})
    return rows


if __name__ == "__main__":
    source = torch.Generator().manual_seed(2)
    found = {"uniforms": uniforms(source), "detections": detections(source), "samples": samples(source)}
    Path(__file__).with_name("vllm.json").write_text(json.dumps(found) + "\n")
