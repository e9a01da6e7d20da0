"""llama.cpp measured by its own benchmarks, llama-bench and llama-batched-bench, on the model's GGUF file.

This is its fastest form: built for this machine, weights repacked, no Python between tokens, and the file read into
malloc's memory, which is backed by huge pages (a mapped file is not: docs/xla_cpu.md, rule 8). Each sample is a process
that loads the file, warms up and measures; only the measured part counts. It makes up its tokens, so its text is not
compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from jaxbench.bench.arms import contract
from jaxbench.measure import process
from jaxbench.measure.records import Workload

FOLDER = Path(__file__).resolve().parents[3] / ".venvs" / "llama.cpp"  # where `make peers` builds
TIMEOUT_S = 280


class LlamaBenchArm(contract.Arm):
    """llama-bench for one row, llama-batched-bench for several."""

    name = "llama_bench"
    packages = ("python",)
    holds_model = False

    def start(self) -> str:
        """Find the programs and check that the model is a GGUF file."""
        folder = Path(os.environ.get("JAXBENCH_LLAMA_CPP") or FOLDER)
        self.bench, self.batched = (folder / name for name in ("llama-bench", "llama-batched-bench"))
        if missing := [str(path) for path in (self.bench, self.batched) if shutil.which(path) is None]:
            return f"no {' and no '.join(missing)}: `make peers` builds them, or JAXBENCH_LLAMA_CPP names their folder"
        return "" if self.file.endswith(".gguf") else f"needs a GGUF file, the model is {self.file}"

    def load(self, dtype: str, *, num_layers: int | None, train: dict | None) -> None:
        """Note the dtype only: each sample loads the file itself."""
        self.dtype = dtype

    def prepare(self, workload: Workload) -> dict:
        """Compile nothing; return the file's size, or why this arm skips the workload."""
        if workload.kind == "train":
            return {"skip": "llama.cpp has no train step"}
        if workload.dtype != "float32":
            return {"skip": f"has the file's own weights, listed under float32, not {workload.dtype}"}
        return {"weight_bytes": Path(self.file).stat().st_size}

    def measure(self, workload: Workload, inputs: list, *, limit: int | None = None) -> dict:
        """Run one process of the benchmark: seconds of the prompt, seconds of the tokens after it."""
        if workload.batch > 1:
            return self._batched(workload)
        lengths = ["-p", str(workload.prompt_tokens), "-n", "0"]
        if workload.kind == "decode":
            lengths = ["-p", "0", "-n", str(workload.new_tokens - 1), "-d", str(workload.prompt_tokens)]
        [result] = self._run(self.bench, "-r", "1", *lengths, "-o", "json")
        seconds = result["samples_ns"][0] / 1e9
        return {"first_s": seconds, "rest_s": 0.0} if workload.kind == "prefill" else {"rest_s": seconds}

    def token_seconds(self, workload: Workload, inputs: list) -> list[float]:
        """Return an empty list: the benchmarks do not time single tokens."""
        return []

    def _batched(self, workload: Workload) -> dict:
        new_tokens = max(workload.new_tokens - 1, 1)
        lengths = {"npp": workload.prompt_tokens, "ntg": new_tokens, "npl": workload.batch}
        context = workload.batch * (workload.prompt_tokens + new_tokens) + 64
        flags = [part for name, value in lengths.items() for part in (f"-{name}", str(value))]
        lines = self._run(self.batched, "-c", str(context), *flags, "--output-format", "jsonl")
        result = lines[-1]
        return {"first_s": result["t_pp"], "rest_s": result["t_tg"]}

    def _run(self, program: Path, *flags: str) -> list[dict]:
        threads = ["-t", str(self.threads)] + (["-tb", str(self.threads)] if program == self.batched else [])
        command = [str(program), "-m", self.file, "--load-mode", "none", *threads, *flags]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise ValueError(f"{program.name}: exit {done.returncode}: {process.last_line(done.stderr)}")
        if program == self.bench:
            return json.loads(done.stdout)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def unload(self) -> None:
        """Do nothing: the arm holds no model."""


class LlamaBenchOneArm(LlamaBenchArm):
    """LlamaBenchArm on one thread, its better choice where other processes occupy the cores."""

    name = "llama_bench_one"

    def start(self) -> str:
        """Start as LlamaBenchArm does, with one thread."""
        self.threads = 1
        return super().start()
