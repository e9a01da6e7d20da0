"""Measure rates of causal attention in bfloat16, forward and with its backward pass: part of a decoder's other figures.

    python -m jaxbench.gpu.attention_rates --library=jax --output=results.jsonl       cuDNN's kernel, by XLA
    python -m jaxbench.gpu.attention_rates --library=torch --output=results.jsonl     flash and cuDNN, a row each

Without a GPU, XLA's own attention and PyTorch's flash kernel for CPUs are measured. FLOPs are those of the causal half
of the square of scores: 4 B N T T H / 2 forward, 2.5 times that backward, whatever a kernel computes. Arrays are
random, in a decoder's layout [B T N H]. Calls are queued one after another, so that launch overhead does not count; a
rate is that of the fastest of several such sequences. An unavailable kernel is reported in one line on stderr.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from jaxbench import cli, outputs, process_environment
from jaxbench.gpu import rates
from jaxbench.measure import environment, roofline
from jaxbench.measure.records import Record, RecordFile, Workload

DTYPE = "bfloat16"
COUNTED = "4 B N T T H / 2 forward (the causal half), 2.5 times that backward"
FLOPS_OF_PASSES = {"forward": 1.0, "forward_backward": 3.5}  # relative to the forward pass
KERNELS = {  # library -> device -> kernels
    "jax": {"gpu": ("cudnn",), "cpu": ("xla",), "tpu": ("xla",)},
    "torch": {"gpu": ("flash", "cudnn"), "cpu": ("flash",)},
}


class Shape(NamedTuple):
    """Heads of one attention."""

    num_heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """Short name, used in the arm's."""
        grouped = "" if self.kv_heads == self.num_heads else f" kv{self.kv_heads}"
        return f"{self.num_heads}x{self.head_dim}{grouped}"


SHAPES = (Shape(12, 12, 64), Shape(16, 4, 128))  # of configs/lm/gpt2_124m.yaml and llama_1b.yaml


class Case(NamedTuple):
    """One measurement: kernel, heads and rows."""

    kernel: str
    shape: Shape
    batch: int
    tokens: int

    def flops(self, passes: str) -> float:
        """FLOPs of a call, the causal half of the square; passes: a key of FLOPS_OF_PASSES."""
        scores = self.batch * self.shape.num_heads * self.tokens**2 / 2
        return 4.0 * scores * self.shape.head_dim * FLOPS_OF_PASSES[passes]

    def sizes(self) -> list[tuple[int, int, int, int]]:
        """Shapes of query, key, value and the output's gradient, [B T N H]."""
        heads = (self.shape.num_heads, self.shape.kv_heads, self.shape.kv_heads, self.shape.num_heads)
        return [(self.batch, self.tokens, number, self.shape.head_dim) for number in heads]


class Rate(NamedTuple):
    """One measured rate."""

    case: Case
    passes: str  # a key of FLOPS_OF_PASSES
    work: float  # FLOPs of one sequence of calls
    seconds: list[float]  # of each sequence


def jax_arrays(case: Case) -> list[Any]:
    """Return random query, key, value and gradient of the output."""
    import jax

    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, size, DTYPE) for key, size in zip(keys, case.sizes(), strict=True)]


def jax_call(case: Case, passes: str) -> Callable[..., Any]:
    """Return one call as a compiled function of jax_arrays: the output, and with the backward pass three gradients.

    jaxbench.fused_attention makes the same call of cuDNN after a transpose from the cache's layout, which is not part
    of this rate.
    """
    import jax

    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=case.kernel)

    def forward(query, key, value, _):
        return attend(query, key, value)

    def forward_backward(query, key, value, gradient):
        output, pull = jax.vjp(attend, query, key, value)
        return output, *pull(gradient)

    return jax.jit(forward if passes == "forward" else forward_backward)


def jax_seconds(case: Case, passes: str, device: str) -> list[float]:
    """Seconds of each sequence of calls by XLA, on JAX's default device."""
    import jax

    call, arrays = jax_call(case, passes), jax_arrays(case)
    return rates.timed(lambda: [call(*arrays) for _ in range(rates.IN_A_ROW)], jax.block_until_ready)


def torch_arrays(case: Case, place: str) -> list[Any]:
    """Return random query, key, value and gradient of the output: views [B N T H] of arrays stored as [B T N H]."""
    import torch

    generator = torch.Generator(place).manual_seed(0)
    made = (torch.randn(size, generator=generator, device=place).to(torch.bfloat16) for size in case.sizes())
    return [each.transpose(1, 2) for each in made]


def torch_call(case: Case, passes: str) -> Callable[..., Any]:
    """Return one call as a function of torch_arrays, with the outputs of jax_call."""
    import torch
    import torch.nn.functional as F

    grouped = {"enable_gqa": True} if case.shape.kv_heads != case.shape.num_heads else {}

    def forward(query, key, value, _):
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **grouped)

    def forward_backward(query, key, value, gradient):
        inputs = [each.detach().requires_grad_() for each in (query, key, value)]
        output = F.scaled_dot_product_attention(*inputs, is_causal=True, **grouped)
        return output.detach(), *torch.autograd.grad(output, inputs, gradient)

    return forward if passes == "forward" else forward_backward


def torch_backend(kernel: str) -> Any:
    """Return a context in which PyTorch uses only this kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[kernel])


def torch_seconds(case: Case, passes: str, device: str) -> list[float]:
    """Seconds of each sequence of calls by PyTorch."""
    import torch

    place = "cuda" if device == "gpu" else "cpu"
    call, arrays = torch_call(case, passes), torch_arrays(case, place)

    def row() -> None:
        for _ in range(rates.IN_A_ROW):
            call(*arrays)

    with torch_backend(case.kernel):
        return rates.timed(row, lambda _: torch.cuda.synchronize() if place == "cuda" else None)


SECONDS = {"jax": jax_seconds, "torch": torch_seconds}


def measured(library: str, device: str, cases: Sequence[Case]) -> Iterator[Rate]:
    """Yield the rates of a library's kernels; one that fails is a line on stderr, and the others continue."""
    for case in cases:
        for passes in FLOPS_OF_PASSES:
            with warnings.catch_warnings(record=True) as notes:  # PyTorch's warnings say why it has no kernel
                try:
                    seconds, said = SECONDS[library](case, passes, device), []
                except Exception as error:  # noqa: BLE001 - a library's error about a kernel may be of any type
                    seconds, said = [], [str(error)]
            said += [str(note.message).split(" (Triggered")[0] for note in notes]
            if said:
                reason = " ".join("; ".join(said).split())[:400]
                print(f"{library} {case.kernel} {case.shape.name} {passes}: {reason}", file=sys.stderr)
            if seconds:
                yield Rate(case, passes, case.flops(passes) * rates.IN_A_ROW, seconds)


def main() -> int:
    """Measure one library's kernels and append a record as each ends; fail if none could be measured."""
    values = flags.FLAGS
    library, device = values.library, values.device
    if device not in KERNELS[library]:
        raise ValueError(f"--library={library} has no --device={device}, wanted one of {', '.join(KERNELS[library])}")
    output = outputs.check_file(values.output, overwrite=True)
    process_environment.ensure(device, library="PyTorch" if library == "torch" else "XLA")
    cases = [
        Case(kernel, shape, values.batch, values.tokens) for kernel in KERNELS[library][device] for shape in SHAPES
    ]
    common = {"device": device, "commit": environment.commit(), "versions": environment.versions()}
    workload = Workload(kind="attention", dtype=DTYPE, batch=values.batch, prompt_tokens=values.tokens)
    found = 0
    for rate in measured(library, device, cases):
        value, case = roofline.rate(rate.work, rate.seconds), rate.case
        record = Record(
            metric=f"attention_{rate.passes}_flops_per_s", value=value, unit="FLOP/s", workload=workload,
            arm=f"{library} {case.kernel} {case.shape.name}", samples=tuple(rate.work / each for each in rate.seconds),
            detail=case.shape._asdict() | {"flops": case.flops(rate.passes), "counted": COUNTED}, **common,
        )  # fmt: skip
        RecordFile(output).append(record)
        found += 1
        print(f"{record.arm} {rate.passes}: {value / 1e12:.3g} TFLOP/s", flush=True)
    if not found:
        raise cli.GateFailed(f"none of {len(cases)} attentions of {library} could be measured on --device={device}")
    return cli.EXIT_OK


if __name__ == "__main__":
    cli.define_device("gpu")
    flags.DEFINE_enum("library", "jax", list(KERNELS), "whose kernels are measured")
    flags.DEFINE_integer("batch", 8, "rows", lower_bound=1)
    flags.DEFINE_integer("tokens", 2048, "tokens of a row", lower_bound=1)
    flags.DEFINE_string("output", "out/gpu-attention-rates/results.jsonl", "file that records are appended to")
    cli.run(main, about=__doc__)
