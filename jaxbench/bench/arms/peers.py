"""Arms of other projects: Hugging Face transformers' `generate`, and llama.cpp (long suite, `peers` extra).

They are measured as a user would call them; nothing of ours runs inside but a clock after each token.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np

from jaxbench.bench.arms import contract
from jaxbench.bench.arms.torch_arms import TorchBase
from jaxbench.measure.records import Workload


class TransformersArm(TorchBase):
    """`AutoModelForCausalLM.generate`, greedy, with its own dynamic cache and SDPA attention."""

    name = "transformers"
    packages = ("transformers", "torch", "numpy", "python")

    def start(self) -> str:
        """Import transformers and torch."""
        reason = super().start()
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.transformers = transformers
        return reason

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Load the checkpoint folder with from_pretrained."""
        import torch

        self.dtype = dtype
        config = self.transformers.AutoConfig.from_pretrained(self.checkpoint)
        if num_layers is not None:
            config.num_hidden_layers = min(num_layers, config.num_hidden_layers)
        self.model = self.transformers.AutoModelForCausalLM.from_pretrained(
            self.checkpoint, config=config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model.to(self.torch_device)
        self._finish_loading(train)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Run the model on one row, without a cache."""
        import torch

        with torch.inference_mode():
            scores = self.model(input_ids=torch.tensor([tokens], device=self.torch_device), use_cache=False).logits
        return scores[0, -1].float().cpu().numpy()

    def _loss(self, inputs, wanted, positions):
        import torch.nn.functional as F

        logits = self.model(input_ids=inputs.long(), use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten().long())

    def _generate(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        import torch

        clock = _Clock(self)
        tokens = torch.tensor(inputs, device=self.torch_device)
        new_tokens = min(max(workload.new_tokens, 1), limit or workload.new_tokens + 1)
        settings = self.transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        start = time.perf_counter()
        output = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=settings,
            stopping_criteria=self.transformers.StoppingCriteriaList([clock]),
        )
        generated = output[:, tokens.shape[1] :]
        if generated.shape[1] != new_tokens:
            raise ValueError(f"transformers: generated {generated.shape[1]} tokens, wanted {new_tokens}")
        first, last = clock.stamps[0], clock.stamps[-1]
        return {"first_s": first - start, "rest_s": last - first, "tokens": contract.as_lists(generated.cpu())}


class _Clock:
    """A stopping criterion that never stops: it notes the time of each token (first and last synchronised)."""

    def __init__(self, arm: TorchBase):
        self.arm, self.stamps = arm, []

    def __call__(self, input_ids, scores, **_):
        """Note the time."""
        import torch

        self.arm.synchronize()
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class LlamaCppArm(contract.Arm):
    """llama.cpp through llama-cpp-python on the model's own GGUF file (Q4_1): other weights, reported as it is."""

    name = "llama_cpp"
    packages = ("llama-cpp-python", "numpy", "python")

    def start(self) -> str:
        """Import llama_cpp, or say why not."""
        if importlib.util.find_spec("llama_cpp") is None:
            return "llama-cpp-python is not installed (pip install 'jaxbench[peers]')"
        from jaxbench.pretrained import assets

        self.path = assets.default_model_path()
        if not Path(self.path).exists():
            return f"needs the GGUF file {self.path}"
        return ""

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Open the GGUF file; the weights stay Q4_1 whatever the dtype of the rows."""
        import llama_cpp

        self.model = None
        if train is None:
            threads = {"n_threads": self.threads, "n_threads_batch": self.threads}
            self.model = llama_cpp.Llama(str(self.path), n_ctx=2048, verbose=False, **threads)

    def prepare(self, workload: Workload) -> dict:
        """Nothing to compile; say which rows this arm has no part in."""
        if workload.kind == "train":
            return {"skip": "llama.cpp has no train step"}
        if workload.dtype != "float32":
            return {"skip": f"llama.cpp computes with its Q4_1 weights, listed under float32, not {workload.dtype}"}
        if workload.batch != 1:
            return {"skip": f"llama-cpp-python generates one row at a time, not {workload.batch}"}
        return {}

    def measure(self, workload: Workload, inputs: list) -> dict:
        """Evaluate the prompt, then greedy tokens one by one."""
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(inputs[0])
        tokens = [int(self.model.sample(temp=0.0))]
        first = time.perf_counter()
        for _ in range(max(workload.new_tokens, 1) - 1):
            self.model.eval(tokens[-1:])
            tokens.append(int(self.model.sample(temp=0.0)))
        return {"first_s": first - start, "rest_s": time.perf_counter() - first, "tokens": [tokens]}

    def unload(self) -> None:
        """Close the model."""
        self.model = None
