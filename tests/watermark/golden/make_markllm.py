"""Write markllm.json, green lists and detections of MarkLLM 0.1.5 itself:

make peers
.venvs/markllm/bin/python tests/watermark/golden/make_markllm.py
"""

import itertools
import json
import tempfile
from pathlib import Path

import torch
from markllm.utils.transformers_config import TransformersConfig
from markllm.watermark.kgw import KGW

SIZES = {"left": (97, 600), "self": (29,)}
TOKENS = 48


def load(vocab_size: int, **parameters) -> KGW:
    """Return MarkLLM's KGW with these parameters; detection by ids needs no model and no tokenizer."""
    content = {"algorithm_name": "KGW", "delta": 2.0, "z_threshold": 4.0, **parameters}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        return KGW(file.name, TransformersConfig(None, None, vocab_size=vocab_size, device="cpu"))


def rows():
    """Yield one entry for each set of parameters: parameters, ids, flags (-1 no context), list of the last context."""
    generator = torch.Generator().manual_seed(1)
    schemes = itertools.product(("time", "additive", "skip", "min"), ("left", "self"), (1, 2, 4))
    for f_scheme, window_scheme, prefix_length in schemes:
        for vocab_size, gamma, hash_key in itertools.product(SIZES[window_scheme], (0.25, 0.5), (15485863, 2**33 + 7)):
            parameters = {
                "gamma": gamma,
                "hash_key": hash_key,
                "f_scheme": f_scheme,
                "window_scheme": window_scheme,
                "prefix_length": prefix_length,
            }
            kgw = load(vocab_size, **parameters)
            ids = torch.randint(vocab_size, (TOKENS,), generator=generator)
            z_score, flags = kgw.utils.score_sequence(ids)
            green = sorted(int(token) for token in kgw.utils.get_greenlist_ids(ids))
            yield {
                **parameters,
                "vocab_size": vocab_size,
                "ids": ids.tolist(),
                "flags": flags,
                "z": z_score,
                "green": green,
            }


if __name__ == "__main__":
    found = [json.dumps(row) for row in rows()]
    Path(__file__).with_name("markllm.json").write_text("[\n" + ",\n".join(found) + "\n]\n")
