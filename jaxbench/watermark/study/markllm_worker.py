"""MarkLLM 0.1.5 as a worker of the benchmark, in an environment of its own (`make peers`).

Started as `.venvs/markllm/bin/python -m jaxbench.watermark.study.markllm_worker markllm 1`. Of jaxbench it imports only
what needs no package.
"""

from __future__ import annotations

import json
import tempfile

from jaxbench.measure import worker


class Session:
    """MarkLLM's KGW and Unigram over one tokenizer."""

    def __init__(self, _: str, threads: int):
        self.threads = threads

    def start(self, *, tokenizer: str, vocab_size: int) -> dict:
        """Import MarkLLM and load the tokenizer of a folder."""
        import torch
        import transformers

        torch.set_num_threads(self.threads)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        self.vocab_size, self.schemes = vocab_size, {}
        versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "markllm": _version("markllm"),
        }
        return {"versions": versions}

    def load(self, *, path: str) -> dict:
        """Read the texts and ids that will be measured."""
        with open(path) as file:
            content = json.load(file)
        self.texts, self.ids = content["texts"], content["ids"]
        return {"texts": len(self.texts)}

    def measure(self, *, scheme: dict, part: str, count: int, repeats: int) -> dict:
        """Time MarkLLM's own detection of the first `count` texts, one by one as it offers it; part: text or ids."""
        import torch

        found = self._scheme(scheme)
        tensors = [torch.tensor(ids) for ids in self.ids[:count]]

        def detect() -> None:
            if part == "text":
                for text in self.texts[:count]:
                    found.detect_watermark(text)
            else:
                for ids in tensors:
                    found.utils.score_sequence(ids)

        return worker.timed(detect, repeats, warmup=0) | {"texts": len(tensors)}

    def detect(self, *, scheme: dict, ids: list) -> dict:
        """z, green tokens, scored tokens and verdict of texts given as ids."""
        import torch

        found, rows = self._scheme(scheme), []
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
        processors = LogitsProcessorList([self._scheme(scheme).logits_processor])
        settings = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": new_tokens}
        settings |= {"min_new_tokens": new_tokens, "pad_token_id": 0}
        rows = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=mask, logits_processor=processors, **settings)
            rows.append(found[0, len(prompt) :].tolist())
        return {"ids": rows}

    def _scheme(self, scheme: dict):
        """MarkLLM's object of a configuration, {"algorithm_name": ..., ...}, made once."""
        import importlib

        from markllm.utils.transformers_config import TransformersConfig

        key = json.dumps(scheme, sort_keys=True)
        if key not in self.schemes:
            name = scheme["algorithm_name"]
            algorithm = getattr(importlib.import_module(f"markllm.watermark.{name.lower()}"), name)
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                file.write(key)
                file.flush()
                model = TransformersConfig(None, self.tokenizer, vocab_size=self.vocab_size, device="cpu")
                self.schemes[key] = algorithm(file.name, model)
        return self.schemes[key]


def _version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


if __name__ == "__main__":
    worker.serve(Session)
