"""One of several processes that decode together: prints the tokens of every case, and what it holds, as JSON.

Started by test_torch_decoding.py, or by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from jaxbench import initial
from jaxbench.gpu import packed_weights
from jaxbench.parity.cases import GPT2, LLAMA
from torch_ref import sample, transformer
from torch_ref.parallel import decoding
from torch_ref.quantization import weight_only

NEW = 12
WIDE = {"vocab_size": 512, "d_model": 64, "d_ff": 128, "num_layers": 3, "num_heads": 8, "num_kv_heads": 4}
CONFIG = LLAMA.model_copy(update=WIDE)
GEMMA = {  # every part that a decoder may have and Llama lacks
    "qk_norm": True, "post_norms": True, "attention_softcap": 20.0, "logit_softcap": 10.0, "sliding_window": 6,
    "global_every": 2, "activation": "geglu", "embedding_scale": 8.0, "qkv_bias": True,
}  # fmt: skip
CONFIGS = {
    "llama": CONFIG,
    "untied": CONFIG.model_copy(update={"tie_embeddings": False}),
    "gpt2": GPT2.model_copy(update=WIDE | {"num_kv_heads": 8}),
    "gemma": CONFIG.model_copy(update=GEMMA),
    "odd": CONFIG.model_copy(update={"d_model": 33, "d_ff": 65, "vocab_size": 511, "tie_embeddings": False}),
}
# case: (configuration, rows, sampling)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, one row": ("llama", 1, {}),
    "llama, three rows of two lengths": ("llama", 3, {}),
    "llama, drawn": ("llama", 2, {"temperature": 1.0, "top_p": 0.9}),
    "head of its own": ("untied", 1, {}),
    "gpt2, biases": ("gpt2", 2, {}),
    "gemma's parts": ("gemma", 2, {}),
    "sizes that the processes do not divide": ("odd", 2, {"temperature": 1.0}),
}
PACKED = ("int8", "int4")


def prompts(rows: int) -> list[list[int]]:
    """Rows of one length and another."""
    random = np.random.default_rng(0)
    return [random.integers(0, 500, 11 + row % 2).tolist() for row in range(rows)]


def tokens_of(generator: Any, rows: int) -> list[list[int]]:
    """Tokens of a generator after the prompts."""
    return np.asarray(generator(prompts(rows), max_new_tokens=NEW, seed=3).tokens).tolist()


def decoded(case: str, devices: Any = None) -> list[list[int]]:
    """Tokens of a case in float64: by one process, or by those of `devices` together."""
    name, rows, sampling = CASES[case]
    config, options = CONFIGS[name], {"eos_id": None, "sampling": sample.SamplingParams(**sampling)}
    params = initial.initial_params(config, 0, distinct=True)
    if devices is None:
        return tokens_of(sample.Generator(transformer.build(config, params, dtype="float64"), **options), rows)
    return tokens_of(decoding.Generator(decoding.build(config, params, devices, dtype="float64"), **options), rows)


def decoded_packed(bits: str, devices: Any = None) -> list[list[int]]:
    """Tokens of a decoder whose weights stay integers."""
    config, options = CONFIG.model_copy(update={"num_layers": 1}), {"eos_id": None, "sampling": sample.SamplingParams()}
    model = weight_only.build(packed_weights.random_model(config, bits), dtype="float64")
    if devices is None:
        return tokens_of(sample.Generator(model, **options), 1)
    decoding.split(model, config, devices)
    return tokens_of(decoding.Generator(model, **options), 1)


def refusals(devices: Any) -> dict[str, str]:
    """What is refused, and in which words."""
    params, found = initial.initial_params(CONFIG, 0), {}
    whole, odd = transformer.build(CONFIG, params), CONFIG.model_copy(update={"num_heads": 6, "num_kv_heads": 3})
    grouped = packed_weights.random_model(CONFIG.model_copy(update={"d_ff": 96, "num_layers": 1}), "int4")
    compiled = transformer.build(CONFIG, params)
    compiled.torch_compile = "step"
    tries = {
        "whole": lambda: decoding.Generator(whole, eos_id=None, sampling=sample.SamplingParams()),
        "heads": lambda: decoding.build(odd, initial.initial_params(odd, 0), devices),
        "groups": lambda: decoding.split(weight_only.build(grouped), grouped.config, devices),
        "compiled": lambda: decoding.split(compiled, CONFIG, devices),
        "twice": lambda: [decoding.split(whole, CONFIG, devices) for _ in range(2)],
        "count": lambda: decoding.attached("cpu", 5),
        "name": lambda: decoding.shardings({"layers.0.memory.kernel": torch.zeros(2)}, CONFIG, devices),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    return found


def main() -> None:
    """Decode every case, and print what this process found."""
    torch.set_num_threads(1)
    devices = decoding.attached("cpu", int(sys.argv[1]))
    found = {"tokens": {case: decoded(case, devices) for case in CASES}}
    found["packed"] = {bits: decoded_packed(bits, devices) for bits in PACKED}
    model = decoding.build(CONFIG, initial.initial_params(CONFIG, 0), devices)
    found["shapes"] = {name: list(part.shape) for name, part in model.named_parameters()}
    found["sums"] = count_collectives(model)
    found["refusals"] = refusals(devices)
    print(json.dumps(found))


def count_collectives(model: Any) -> dict[str, int]:
    """Collectives of one decode step, by name."""
    generator = decoding.Generator(model, eos_id=None, sampling=sample.SamplingParams())
    state, counted = generator.prefill(prompts(1), max_new_tokens=NEW, seed=0), {"all_reduce": 0, "all_gather": 0}
    for name in counted:
        real = getattr(decoding.dist, name)

        def counting(*arguments: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            counted[name] += 1
            return real(*arguments, **options)

        setattr(decoding.dist, name, counting)
    generator.decode(state, 2)
    return counted


if __name__ == "__main__":
    main()
