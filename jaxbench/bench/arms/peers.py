"""Arms of other projects: Hugging Face transformers' `generate`, and llama.cpp (long suite, `peers` extra).

They are measured as a user would call them; none of our code runs inside except a clock after each token.
"""

from __future__ import annotations

import importlib.util
import time

import numpy as np
from jaxtyping import Float

from jaxbench.bench.arms import contract, torch_arms
from jaxbench.bench.arms.torch_arms import TorchBase
from jaxbench.measure import inductor
from jaxbench.measure.records import Workload


class TransformersArm(TorchBase):
    """`AutoModelForCausalLM.generate`, greedy, with its own dynamic cache and SDPA attention."""

    name = "transformers"
    packages = ("transformers", "torch", "numpy", "python")
    cache: dict = {}  # settings of generate that choose cache and compilation; empty = its defaults

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
        self.dtype = dtype
        config = self.transformers.AutoConfig.from_pretrained(self.checkpoint)
        if num_layers is not None:
            config.num_hidden_layers = min(num_layers, config.num_hidden_layers)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)  # GPT-2's dropout rates, which the other arms' models do not have
        self.model = self.transformers.AutoModelForCausalLM.from_pretrained(
            self.checkpoint, config=config, dtype=getattr(self.torch, dtype), attn_implementation="sdpa"
        )
        # Otherwise `generate` would take unset options, such as a repetition penalty, from the folder's file.
        self.model.generation_config = self.transformers.GenerationConfig()
        self.model.to(self.torch_device).train(train is not None).requires_grad_(train is not None)
        if train is not None:
            parameters, rate = self.model.parameters(), train["learning_rate"]
            self.optimizer = self.torch.optim.AdamW(parameters, lr=rate, fused=True, **contract.ADAMW)
        self.synchronize()

    def unload(self) -> None:
        """Drop the model and its optimiser."""
        self.optimizer = None
        super().unload()

    def logits(self, tokens: list[int]) -> Float[np.ndarray, " V"]:
        """Logits of the token after one row, without a cache."""
        with self.torch.inference_mode():
            scores = self.model(input_ids=self.torch.tensor([tokens], device=self.torch_device), use_cache=False).logits
        return scores[0, -1].float().cpu().numpy()

    def _step(self, inputs: list) -> dict:
        tokens, targets, _ = self._on_device(inputs)
        start = time.perf_counter()
        logits = self.model(input_ids=tokens.long(), use_cache=False).logits
        loss = self.torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().long())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        self.synchronize()
        return {"step_s": time.perf_counter() - start, "loss": value}

    def token_seconds(self, workload: Workload, inputs: list) -> list[float]:
        """Seconds of each token after the first, by a clock among generate's stopping criteria."""
        with self.torch.inference_mode():
            self._generate(workload, inputs, None)
        return [float(seconds) for seconds in np.diff(self.clock.stamps)]

    def _generate(self, workload: Workload, inputs: list, limit: int | None) -> dict:
        self.clock = clock = _Clock(self)
        tokens = self.torch.tensor(inputs, device=self.torch_device)
        new_tokens = min(max(workload.new_tokens, 1), limit or workload.new_tokens + 1)
        settings = self.transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, use_cache=True, **self.cache
        )
        start = time.perf_counter()
        output = self.model.generate(
            tokens,
            attention_mask=self.torch.ones_like(tokens),
            generation_config=settings,
            stopping_criteria=self.transformers.StoppingCriteriaList([clock]),
        )
        generated = output[:, tokens.shape[1] :]
        if generated.shape[1] != new_tokens:
            raise ValueError(f"transformers: generated {generated.shape[1]} tokens, wanted {new_tokens}")
        first, last = clock.stamps[0], clock.stamps[-1]
        return {"first_s": first - start, "rest_s": last - first, "tokens": generated.cpu().tolist()}


class CompiledTransformersArm(TransformersArm):
    """`generate` with a static cache and a compiled forward pass, which it compiles by itself only on accelerators.

    Tokens per CPU second on one core of an AMD EPYC, default model in float32: at batch 1 24.0 versus 20.2 with the
    dynamic cache; at batch 8 92 versus 94. Its first call took 114 s on a busy machine, so it is for the long suite. A
    static cache without compilation gains nothing (19.2 and 98).
    """

    name = "transformers_compile"

    def start(self) -> str:
        """Also import the compiler, and check that Inductor can build code here."""
        reason = super().start() or inductor.unusable(self.device)
        settings = {"mode": "reduce-overhead" if self.device == "gpu" else "default", "fullgraph": False}
        compilation = self.transformers.CompileConfig(**settings, dynamic=False)
        compilation._compile_all_devices = True  # on CPUs too
        self.cache = {"cache_implementation": "static", "compile_config": compilation}
        return reason

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Load as without compilation, after dropping the programs of the previous model."""
        self.torch._dynamo.reset()
        super().load(dtype, num_layers=num_layers, train=train)

    def prepare(self, workload: Workload) -> dict:
        """Compile a decode workload by running it; `generate` compiles single-token passes only."""
        if workload.kind != "decode":
            return {"skip": "as transformers: generate compiles the passes of single tokens only"}
        inputs = [
            [1 + (row + column) % 64 for column in range(workload.prompt_tokens)] for row in range(workload.batch)
        ]
        before = torch_arms.compiler_seconds()
        self.measure(workload, inputs)
        return {"compile_s": torch_arms.compiler_seconds() - before}

    def warm(self, workload: Workload, inputs: list) -> dict:
        """Generate as in a measurement: with fewer tokens the cache has another size and needs another program."""
        return self.measure(workload, inputs)


class _Clock:
    """A stopping criterion that never stops: it synchronises and records the time of each token."""

    def __init__(self, arm: TorchBase):
        self.arm, self.stamps = arm, []

    def __call__(self, input_ids, scores, **_):
        """Record the time of a token."""
        torch = self.arm.torch
        self.arm.synchronize()
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class LlamaCppArm(contract.Arm):
    """llama.cpp through llama-cpp-python on the model's own GGUF file (Q4_1): other weights, shown but not judged."""

    name = "llama_cpp"
    packages = ("llama-cpp-python", "numpy", "python")

    def start(self) -> str:
        """Check that llama_cpp is installed and the model is a GGUF file; `load` imports it."""
        if importlib.util.find_spec("llama_cpp") is None:
            return "llama-cpp-python is not installed (pip install -e '.[peers]')"
        return "" if self.file.endswith(".gguf") else f"needs a GGUF file, the model is {self.file}"

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Open the GGUF file; the weights stay Q4_1 whatever the dtype of the rows."""
        import llama_cpp

        self.model = None
        if train is None:
            threads = {"n_threads": self.threads, "n_threads_batch": self.threads}
            # a mapped file is not backed by huge pages (docs/xla_cpu.md, rule 8)
            self.model = llama_cpp.Llama(self.file, n_ctx=2048, use_mmap=False, verbose=False, **threads)

    def prepare(self, workload: Workload) -> dict:
        """Compile nothing; return why this arm skips the workload, if it does."""
        if workload.kind == "train":
            return {"skip": "llama.cpp has no train step"}
        if workload.dtype != "float32":
            return {"skip": f"llama.cpp computes with its Q4_1 weights, listed under float32, not {workload.dtype}"}
        if workload.batch != 1:
            return {"skip": f"llama-cpp-python generates one row at a time, not {workload.batch}"}
        return {}

    def measure(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        """Evaluate the prompt, then greedy tokens one by one."""
        new_tokens = max(workload.new_tokens, 1) if limit is None else min(limit, max(workload.new_tokens, 1))
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(inputs[0])
        tokens = [int(self.model.sample(temp=0.0))]
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            self.model.eval(tokens[-1:])
            tokens.append(int(self.model.sample(temp=0.0)))
        return {"first_s": first - start, "rest_s": time.perf_counter() - first, "tokens": [tokens]}

    def token_seconds(self, workload: Workload, inputs: list) -> list[float]:
        """Seconds of each token after the first."""
        self.model.reset()
        self.model.eval(inputs[0])
        token, seconds = int(self.model.sample(temp=0.0)), []
        for _ in range(workload.new_tokens - 1):
            start = time.perf_counter()
            self.model.eval([token])
            token = int(self.model.sample(temp=0.0))
            seconds.append(time.perf_counter() - start)
        return seconds

    def unload(self) -> None:
        """Close the model."""
        self.model = None
