"""A peer as a worker of the benchmark: MarkLLM 0.1.5, or transformers' WatermarkDetector.

Started as `PYTHON -m jaxbench.watermark.study.peer_worker PEER THREADS`. MarkLLM's PYTHON is that of a separate
environment (`make peers`), so only the parts of jaxbench that need no package are imported. A scheme is a configuration
of the peer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from typing import Any

from jaxbench.measure import worker


class Session:
    """One peer with one tokenizer."""

    def __init__(self, peer: str, threads: int):
        self.peer, self.threads = peer, threads
        self._algorithms: dict[str, Any] = {}

    def start(self, *, tokenizer: str, vocab_size: int, path: str | None = None) -> dict:
        """Load a folder's tokenizer, read the texts to measure if a path is given, and return package versions."""
        import torch
        import transformers

        torch.set_num_threads(self.threads)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        self.vocab_size = vocab_size
        if path is not None:
            with open(path) as file:
                content = json.load(file)
            self.texts, self.ids = content["texts"], content["ids"]
        packages = ("transformers", "torch", self.peer)
        return {"versions": {package: importlib.metadata.version(package) for package in packages}}

    def measure(self, *, scheme: dict, part: str, count: int, repeats: int) -> dict:
        """Time the peer's own detection of the first `count` texts, one per call as in its API; part: text or ids."""
        call = self._call(scheme, part, count)
        warmup = 0 if self.peer == "markllm" else 1  # one pass of MarkLLM takes minutes
        return worker.timed(call, repeats, warmup=warmup) | {"texts": min(count, len(self.ids))}

    def memory(self, *, scheme: dict, part: str, texts: list, ids: list) -> dict:
        """Run the peer's own detection over the texts twice in this fresh process; return its memory as jaxbench's."""
        self.texts, self.ids = texts, ids
        held = worker.resident_bytes()
        return {"held_bytes": held, **worker.peaks(self._call(scheme, part, len(ids)))}

    def detect(self, *, scheme: dict, ids: list) -> dict:
        """Return MarkLLM's z, green tokens, scored tokens and verdict for texts given as ids."""
        import torch

        found, rows = self._algorithm(scheme), []
        for text in ids:
            z, flags = found.utils.score_sequence(torch.tensor(text))
            scored = [flag for flag in flags if flag >= 0]
            is_marked = bool(z > found.config.z_threshold)
            rows.append({"z": float(z), "green": sum(scored), "scored": len(scored), "is_marked": is_marked})
        return {"detections": rows}

    def generate(self, *, scheme: dict, model: str, prompts: list, new_tokens: int, seed: int) -> dict:
        """Continue prompts (ids) with MarkLLM's logits processor in transformers' generate; return the new ids."""
        import torch
        from transformers import AutoModelForCausalLM, LogitsProcessorList

        torch.manual_seed(seed)
        torch.set_num_threads(self.threads)
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        processors = LogitsProcessorList([self._algorithm(scheme).logits_processor])
        settings = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": new_tokens}
        settings |= {"min_new_tokens": new_tokens, "pad_token_id": 0}
        rows = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            with torch.inference_mode():
                output = model.generate(ids, attention_mask=mask, logits_processor=processors, **settings)
            rows.append(output[0, len(prompt) :].tolist())
        return {"ids": rows}

    def _call(self, scheme: dict, part: str, count: int) -> Callable[[], Any]:
        """Return the call that detects in the first `count` texts, one at a time; part: text or ids."""
        import torch

        of_text, of_ids = self._detectors(scheme)
        detect, given = of_text, self.texts[:count]
        if part == "ids":
            detect, given = of_ids, [torch.tensor(ids) for ids in self.ids[:count]]
        return lambda: [detect(text) for text in given]

    def _detectors(self, scheme: dict) -> tuple[Callable[[str], Any], Callable[[Any], Any]]:
        """Return the peer's functions that detect in a text and in a tensor of ids [T]."""
        if self.peer == "markllm":
            algorithm = self._algorithm(scheme)
            return algorithm.detect_watermark, algorithm.utils.score_sequence
        from types import SimpleNamespace

        from transformers import WatermarkDetector, WatermarkingConfig

        model = SimpleNamespace(vocab_size=self.vocab_size, bos_token_id=-1, is_encoder_decoder=False)
        detector = WatermarkDetector(model, "cpu", WatermarkingConfig(**scheme))
        encoded = lambda text: self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return lambda text: detector(encoded(text)), lambda ids: detector(ids[None])

    def _algorithm(self, scheme: dict) -> Any:
        """Return MarkLLM's object for a configuration {"algorithm_name": ..., ...}, created once."""
        from markllm.utils.transformers_config import TransformersConfig

        key, name = json.dumps(scheme, sort_keys=True), scheme["algorithm_name"]
        if key not in self._algorithms:
            algorithm = getattr(importlib.import_module(f"markllm.watermark.{name.lower()}"), name)
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                file.write(key)
                file.flush()
                model = TransformersConfig(None, self.tokenizer, vocab_size=self.vocab_size, device="cpu")
                self._algorithms[key] = algorithm(file.name, model)
        return self._algorithms[key]


if __name__ == "__main__":
    worker.serve(Session)
