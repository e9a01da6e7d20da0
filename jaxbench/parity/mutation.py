"""Gate P9: a table of bugs, each of which the float64 gates or the outside oracles must catch.

The bugs of this file are injected into the PyTorch twin, those of equinox_bugs.py into Equinox's modules; those of
shared_bugs.py are in files that all backends share, where only an oracle can detect them; those of
hallucination_bugs.py are from published detectors, those of compress_bugs.py from the compressor. The first thirteen
are from a published trial of other projects' checks, which caught 0 to 8 of them; the rest were added with the gates
that first needed them. Each bug replaces one function of the unchanged code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from jaxbench import prompts, rotary
from jaxbench.parity import (
    cases,
    compress_bugs,
    equinox_bugs,
    evidence,
    gates,
    hallucination_bugs,
    sampling_bugs,
    shared_bugs,
    step_bugs,
)
from jaxbench.parity.injection import Mutation, replaced
from jaxbench.training.step_config import OptimizerConfig, StepConfig
from torch_ref import attention, functional, nn, prng, sample, sparse_attention, train, transformer
from torch_ref.lora.layers import LoraLinear
from torch_ref.training import optimizer_step


class Outcome(NamedTuple):
    """Gates that failed because of one mutation."""

    name: str
    caught_by: tuple[str, ...]  # failed gates

    @property
    def is_caught(self) -> bool:
        """True if at least one gate failed."""
        return bool(self.caught_by)


def _adapter_unscaled(original: Callable, self: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    """Omit the factor alpha / rank."""
    scale, self.lora_scale = self.lora_scale, 1.0
    try:
        return original(self, x)
    finally:
        self.lora_scale = scale


def _rms_eps(original: Callable, self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(self, "eps", 0.1 * self.eps):
        return original(self, x)


def _rope_base(original: Callable, positions: Any, frequencies: tuple[float, ...], **options: Any) -> Any:
    return original(positions, rotary.frequencies(2 * len(frequencies), 1e6, None), **options)


def _rope_scaling_ignored(original: Callable, positions: Any, frequencies: tuple[float, ...], **options: Any) -> Any:
    unscaled = rotary.frequencies(2 * len(frequencies), cases.LLAMA.rope_theta, None)
    return original(positions, unscaled, **options)


def _rope_interleaved(original: Callable, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1).flatten(-2)


def _rope_not_on_keys(original: Callable, x: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
    return x if x.shape[2] == cases.LLAMA.num_kv_heads else original(x, *angles)


def _qk_norm_after_rotary(original: Callable, self: transformer.Attention, *args: Any) -> Any:
    """Apply the norms of queries and keys, the only norms that an attention calls, after the rotation."""
    waiting: list[nn.RMSNorm] = []

    def postponed(original: Callable, norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        waiting.append(norm)
        return x

    norm = nn.RMSNorm.forward
    rotate_first = lambda original, x, *angles: norm(waiting.pop(0), original(x, *angles))
    with replaced(nn.RMSNorm, "forward", postponed), replaced(functional, "rotate", rotate_first):
        return original(self, *args)


def _qk_norm_of_all_heads(original: Callable, self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Divide queries and keys (only their norms have four-axis inputs) by the root mean square of all heads."""
    if x.ndim < 4:
        return original(self, x)
    mean_square = torch.mean(torch.square(x), dim=(-2, -1), keepdim=True)
    return x * torch.rsqrt(mean_square + self.eps) * self.scale


def _post_norm_scales_alone(original: Callable, self: transformer.Block, *args: Any) -> Any:
    norm = self.attention_post_norm
    with mock.patch.object(norm, "forward", lambda x: x * norm.scale):
        return original(self, *args)


def _causal_leak(original: Callable, spans: attention.Spans, *how: Any) -> torch.Tensor:
    return original(spans._replace(query_positions=spans.query_positions + 1), *how)


def _attention_scale(original: Callable, self: transformer.Transformer, *args: Any, **options: Any) -> Any:
    """Scale the scores of the last layer by 1.03."""
    calls = itertools.count(1)

    def scaled(original: Callable, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return original(query * 1.03 if next(calls) == len(self.layers) else query, *args, **options)

    with replaced(transformer, "attention", scaled):
        return original(self, *args, **options)


def _softmax_bfloat16(original: Callable, query: Any, key: Any, value: Any, mask: Any, softcap: Any) -> torch.Tensor:
    scores = attention._scores(query, key, mask, softcap).masked_fill(~mask[:, None, None], -1e30)
    weights = torch.softmax(scores.bfloat16(), dim=-1).to(value.dtype)
    weights = weights * mask.any(-1)[:, None, None, :, None]
    return torch.einsum("BKGTS,BKSH->BKGTH", weights, value)


def _window_of_first_part(original: Callable, query: torch.Tensor, key: Any, value: Any, mask: Any, cap: Any) -> Any:
    """Let queries of the second part on see all keys before them that any query sees."""
    [(_, end), *more] = prompts.query_parts(query.shape[3])
    if more:
        every = torch.tril(mask.any(dim=1, keepdim=True).expand_as(mask))
        mask = torch.cat((mask[:, :end], every[:, end:]), dim=1)
    return original(query, key, value, mask, cap)


def _softcap_of_first_part(original: Callable, query: torch.Tensor, key: Any, value: Any, mask: Any, cap: Any) -> Any:
    [(_, end), *_] = prompts.query_parts(query.shape[3])
    mixed = original(query, key, value, mask, cap)
    return torch.cat((mixed[:, :, :, :end], original(query, key, value, mask, None)[:, :, :, end:]), dim=3)


def _chunk_sees_itself(original: Callable, spans: attention.Spans, *how: Any) -> torch.Tensor:
    """Let the tokens of a call that reads a cache see those behind them, if there are several."""
    positions, slots = spans.query_positions, spans.key_positions.shape[1]
    if 1 < positions.shape[1] < slots:
        spans = spans._replace(query_positions=positions.amax(dim=1, keepdim=True).expand_as(positions))
    return original(spans, *how)


class _Adam(torch.optim.Optimizer):
    """AdamW by hand, with eps inside the root, or without bias correction of the second moment."""

    def __init__(self, model: Any, optimizer: OptimizerConfig, *, eps_inside: bool, is_corrected: bool):
        self._eps_inside, self._is_corrected, self._steps = eps_inside, is_corrected, 0
        super().__init__(model.parameters(), optimizer.model_dump() | {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        self._steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, self.state[p], group)

    def _update(self, p: torch.Tensor, state: dict, group: dict) -> None:
        zeros = torch.zeros_like(p)
        state["exp_avg"] = first = group["b1"] * state.get("exp_avg", zeros) + (1 - group["b1"]) * p.grad
        state["exp_avg_sq"] = second = group["b2"] * state.get("exp_avg_sq", zeros) + (1 - group["b2"]) * p.grad**2
        first = first / (1 - group["b1"] ** self._steps)
        second = second / (1 - group["b2"] ** self._steps) if self._is_corrected else second
        eps = group["eps"]
        root = (second + eps).sqrt() if self._eps_inside else second.sqrt() + eps
        p.sub_(group["lr"] * (first / root + group["weight_decay"] * p))


def _adam_eps_inside(original: Callable, model: Any, step_config: StepConfig) -> torch.optim.Optimizer:
    return _Adam(model, step_config.optimizer, eps_inside=True, is_corrected=True)


def _adam_uncorrected(original: Callable, model: Any, step_config: StepConfig) -> torch.optim.Optimizer:
    return _Adam(model, step_config.optimizer, eps_inside=False, is_corrected=False)


def _adamw(o: OptimizerConfig) -> dict[str, Any]:
    # fused: the step tells its optimiser by a tensor whether to take it, which the others refuse
    return {"lr": 0.0, "betas": (o.b1, o.b2), "eps": o.eps, "weight_decay": o.weight_decay, "fused": True}


def _adam_eps(original: Callable, model: Any, step_config: StepConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **_adamw(step_config.optimizer) | {"eps": 1e-6})


def _l2_decay(original: Callable, model: Any, step_config: StepConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), **_adamw(step_config.optimizer))


def _no_decay_on_norms(original: Callable, model: Any, step_config: StepConfig) -> torch.optim.Optimizer:
    named, o = list(model.named_parameters()), step_config.optimizer
    groups = [
        {"params": [p for name, p in named if not name.endswith(".scale")], "weight_decay": o.weight_decay},
        {"params": [p for name, p in named if name.endswith(".scale")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **_adamw(o))


def _heads_regrouped(original: Callable, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
    groups = query.shape[2] // key.shape[1]
    order = torch.arange(query.shape[2]).reshape(groups, -1).T.flatten()
    return original(query[:, :, order], key, *args, **options)[:, :, torch.argsort(order)]


def _dropout_not_rescaled(original: Callable, x: torch.Tensor, rate: float, stream: Any, **site: Any) -> torch.Tensor:
    return original(x, rate, stream, **site) * (1.0 if stream is None else 1.0 - rate)


def _tied_gradient_lost(original: Callable, self: nn.Embed, x: torch.Tensor) -> torch.Tensor:
    return functional.matmul(x, self.embedding.detach(), transposed=True)


def _temperature_squared(original: Callable, logits: torch.Tensor, sampling: Any) -> torch.Tensor:
    return original(logits / math.sqrt(sampling.temperature), sampling)


def _swapped(original: Callable, model: Any, params: dict[str, Any], **options: Any) -> Any:
    """Swap the first layer's key and value kernels, which have the same shape, on loading."""
    key, value = (f"layers.0.attention.{x}_proj.kernel" for x in "kv")
    return original(model, dict(params) | {key: params[value], value: params[key]}, **options)


_LLAMA, _GPT2, _QWEN3 = "transformer/llama-grouped", "transformer/gpt2", "transformer/qwen3"
_GEMMA2, _PARTS = "transformer/gemma2", "transformer/llama-parts"
_ATTENTION, _QUERY_NORM = "layers.0.attention", "layers.0.attention.q_norm"
_NORM, _MASK, _ATTEND = (nn.RMSNorm, "forward"), (attention, "attention_mask"), (transformer, "attention")
_ANGLES, _ROTATE, _OPTIMIZER = (functional, "rotary_angles"), (functional, "rotate"), (optimizer_step, "_optimizer")
_FEATURES = (transformer.Transformer, "features")
TORCH_BUGS: tuple[Mutation, ...] = (
    Mutation("rms-norm-eps", _LLAMA, _NORM, _rms_eps, "layers.0.attention_norm"),
    Mutation("gelu-erf-for-tanh", _GPT2, (F, "gelu"), lambda original, x, **_: original(x), "layers.0.mlp"),
    Mutation("rope-base", _LLAMA, _ANGLES, _rope_base, "model"),
    Mutation("rope-interleaved", _LLAMA, _ROTATE, _rope_interleaved, _ATTENTION),
    Mutation("rope-not-on-keys", _LLAMA, _ROTATE, _rope_not_on_keys, _ATTENTION),
    Mutation("causal-mask-leaks-one", _LLAMA, _MASK, _causal_leak, _ATTENTION),
    Mutation("attention-scale-3-percent-in-one-layer", _LLAMA, _FEATURES, _attention_scale, "layers.1.attention"),
    Mutation("softmax-in-bfloat16", _LLAMA, (attention, "_dense"), _softmax_bfloat16, _ATTENTION),
    Mutation("adam-eps-inside-root", _LLAMA, _OPTIMIZER, _adam_eps_inside),
    Mutation("adam-eps-1e-6", _LLAMA, _OPTIMIZER, _adam_eps),
    Mutation("adam-second-moment-not-corrected", _LLAMA, _OPTIMIZER, _adam_uncorrected),
    Mutation("l2-for-decoupled-decay", _LLAMA, _OPTIMIZER, _l2_decay),
    Mutation("no-decay-on-norms", _LLAMA, _OPTIMIZER, _no_decay_on_norms),
    Mutation("adapter-not-scaled", "transformer/lora", (LoraLinear, "forward"), _adapter_unscaled),
    Mutation("norm-scale-ignored", _LLAMA, _NORM, lambda original, self, x: original(self, x) / self.scale,
             "layers.0.attention_norm"),
    Mutation("query-heads-grouped-in-another-order", _LLAMA, _ATTEND, _heads_regrouped, _ATTENTION),
    Mutation("window-one-longer", "transformer/llama-window", _MASK,
             lambda original, spans, window, *how: original(spans, window and window + 1, *how), _ATTENTION),
    Mutation("segments-ignored", "transformer/llama-packed", _MASK,
             lambda original, spans, *how: original(spans._replace(query_segments=None), *how), _ATTENTION),
    Mutation("rope-scaling-ignored", "transformer/llama-rope-linear", _ANGLES, _rope_scaling_ignored, "model"),
    Mutation("qk-norm-after-rotary", _QWEN3, (transformer.Attention, "forward"), _qk_norm_after_rotary, _QUERY_NORM),
    Mutation("qk-norm-of-all-heads", _QWEN3, _NORM, _qk_norm_of_all_heads, _QUERY_NORM),
    Mutation("softcap-ignored", _GEMMA2, (functional, "softcap"), lambda original, x, *, cap: x, _ATTENTION),
    Mutation("embedding-scale-ignored", _GEMMA2, (nn.Embed, "forward"),
             lambda original, self, x: original(self, x) / self.scale, "embed"),
    Mutation("post-norm-scales-alone", _GEMMA2, (transformer.Block, "forward"), _post_norm_scales_alone,
             "layers.0.attention_post_norm"),
    Mutation("dropout-not-rescaled", _LLAMA, (functional, "dropout"), _dropout_not_rescaled, "layers.0"),
    Mutation("dropout-same-mask-every-step", _LLAMA, (prng, "words"),
             lambda original, key, *, step, **where: original(key, step=0, **where)),
    Mutation("tied-head-passes-no-gradient", _LLAMA, (nn.Embed, "attend"), _tied_gradient_lost),
    Mutation("decode-position-one-late", _LLAMA, _FEATURES, equinox_bugs.decode_position_late),
    Mutation("cached-chunk-sees-itself", _LLAMA, _MASK, _chunk_sees_itself),
    Mutation("plain-rows-count-from-one", _GPT2, (transformer.Transformer, "_plain_positions"),
             lambda original, *args: original(*args) + 1),
    Mutation("window-of-the-first-part-alone", _PARTS, (attention, "_ordered"), _window_of_first_part, _ATTENTION),
    Mutation("softcap-of-the-first-part-alone", _PARTS, (attention, "_ordered"), _softcap_of_first_part, _ATTENTION),
    Mutation("loss-mask-ignored", _LLAMA, (train, "cross_entropy"),
             lambda original, logits, targets, mask: original(logits, targets, torch.ones_like(mask))),
    Mutation("weights-swapped-on-load", _LLAMA, (nn, "load_params"), _swapped, "layers.0.attention.k_proj"),
    Mutation("sampling-temperature-off", _LLAMA, (sample, "filter_logits"), _temperature_squared),
    Mutation("block-mask-of-another-block", "sparse_attention/local", (sparse_attention, "_pair_mask"),
             lambda original, spans, rows, columns, size: original(spans, rows, rows, size)),
)  # fmt: skip


MUTATIONS = (
    *TORCH_BUGS, *equinox_bugs.EQUINOX_BUGS, *shared_bugs.SHARED_BUGS, *hallucination_bugs.HALLUCINATION_BUGS,
    *compress_bugs.COMPRESS_BUGS, *step_bugs.STEP_BUGS, *sampling_bugs.SAMPLING_BUGS,
)  # fmt: skip


def score(say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """Find the gates that fail in float64 for every mutation, and for each unchanged case ("none": none may fail)."""
    outcomes = []
    for case_id, side in dict.fromkeys((mutation.case, mutation.side) for mutation in MUTATIONS):
        case = cases.find(case_id)
        mine = [mutation for mutation in MUTATIONS if (mutation.case, mutation.side) == (case_id, side)]
        judged = _judged_by_oracles(case, mine) if case.exact else _judged_by_twins(case, mine, side)
        for mutation, rows in judged:
            failed = tuple(f"{row.id} {row.what}" for row in rows if not row.passed)
            outcomes.append(Outcome(mutation.name if mutation else f"none ({side}, {case_id})", failed))
            say(f"{outcomes[-1].name}: {', '.join(failed) or 'no gate failed'}")
    return outcomes


Judged = Iterator[tuple[Mutation | None, list[gates.Gate]]]


def _judged_by_oracles(case: cases.Case, mutations: Sequence[Mutation]) -> Judged:
    """Judge a case that has its own gates, without a bug and with each one."""
    from jaxbench.parity import run

    for mutation in (None, *mutations):
        with mutation.injected() if mutation else contextlib.nullcontext():
            yield mutation, run.exact_gates(case)[0]


def _judged_by_twins(case: cases.Case, mutations: Sequence[Mutation], name: str) -> Judged:
    """Judge two twins without a bug, and with each one in the named twin."""
    from jaxbench.parity import run

    backend = "flax" if name == "torch" else name
    config, params = cases.load(case)
    # If every bug is in a module, outputs, gradients and decoding must suffice, without training and sampling.
    is_quick = all(mutation.module for mutation in mutations) or name != "torch"
    gather = functools.partial(evidence.gather, case=case, config=config, gradients=True, is_quick=is_quick)
    sides = functools.partial(run.sides, case, config, params, dtype="float64", backend=backend)
    with run.pinned("float64"), run.torch_threads(case):
        place = int(name == "torch")  # index of the twin with the bugs; the other one is correct
        right = gather(sides()[1 - place])
        for mutation in (None, *mutations):
            with mutation.injected() if mutation else contextlib.nullcontext():
                wrong = gather(sides()[place])
            pair = (right, wrong) if place else (wrong, right)
            yield mutation, evidence.judge(*pair).gates


def gate(outcomes: list[Outcome]) -> gates.Gate:
    """Gate P9: every mutation is caught, and no gate fails on the unchanged twin."""
    wrong = [o.name for o in outcomes if o.is_caught == o.name.startswith("none")]
    injected_bugs = [o for o in outcomes if not o.name.startswith("none")]
    caught = sum(o.is_caught for o in injected_bugs)
    note = f"{caught} of {len(injected_bugs)} injected bugs caught"
    return gates.Gate("P9", "mutation score", not wrong, float(len(wrong)), 0.0, ", ".join(wrong), note)
