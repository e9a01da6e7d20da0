"""Gate P9: a table of bugs injected into the PyTorch twin, every one of which the float64 gates must catch.

The first thirteen are those of a published trial of other projects' checks, which caught 0 to 8 of them; the rest came
with the gates that first needed them. Each bug is a context manager around the unchanged twin.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from jaxbench import rotary
from jaxbench.parity import cases, evidence, gates
from jaxbench.training.step_config import OptimizerConfig
from torch_ref import attention, functional, nn, prng, sample, train, transformer
from torch_ref.training import optimizer_step

Change = contextlib.AbstractContextManager[Any]


class Mutation(NamedTuple):
    """One bug and where it shows."""

    name: str
    case: str  # parity case it is injected into
    change: Callable[[], Change]
    module: str | None = None  # module that teacher forcing must blame; None = not a module's output
    is_published: bool = False  # one of the thirteen of the trial


class Outcome(NamedTuple):
    """Gates that one mutation made fail."""

    name: str
    caught_by: tuple[str, ...]  # failed gates

    @property
    def is_caught(self) -> bool:
        """True where at least one gate failed."""
        return bool(self.caught_by)


def _replace(target: Any, name: str, bug: Callable[..., Any]) -> Change:
    """Context in which a call of target.name is bug(original, the call's arguments)."""
    original = getattr(target, name)
    return mock.patch.object(target, name, lambda *args, **options: bug(original, *args, **options))


def _rms_eps() -> Change:
    def forward(original: Callable[..., Any], self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(self, "eps", 0.1 * self.eps):
            return original(self, x)

    return _replace(nn.RMSNorm, "forward", forward)


def _gelu_erf() -> Change:
    return _replace(F, "gelu", lambda original, x, approximate="none": original(x))


def _rope_base() -> Change:
    def angles(original: Callable[..., Any], positions: Any, frequencies: tuple[float, ...], **options: Any) -> Any:
        return original(positions, rotary.frequencies(2 * len(frequencies), 1e6, None), **options)

    return _replace(functional, "rotary_angles", angles)


def _rope_interleaved() -> Change:
    def rotate(original: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cosine, sine = cosine[:, :, None], sine[:, :, None]
        return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1).flatten(-2)

    return _replace(functional, "rotate", rotate)


def _rope_not_on_keys() -> Change:
    def rotate(original: Callable[..., Any], x: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
        return x if x.shape[2] == cases.LLAMA.num_kv_heads else original(x, *angles)

    return _replace(functional, "rotate", rotate)


@contextlib.contextmanager
def _qk_norm_after_rotary() -> Iterator[None]:
    """Let the norms of queries and keys, whose inputs alone have four axes, wait for the rotation."""
    waiting: list[nn.RMSNorm] = []

    def postponed(original: Callable[..., Any], self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 4:
            return original(self, x)
        waiting.append(self)
        return x

    norm = nn.RMSNorm.forward
    rotate_first = lambda original, x, *angles: norm(waiting.pop(0), original(x, *angles))
    with _replace(nn.RMSNorm, "forward", postponed), _replace(functional, "rotate", rotate_first):
        yield


def _qk_norm_of_all_heads() -> Change:
    """Divide queries and keys by the root mean square of all heads together."""

    def forward(original: Callable[..., Any], self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 4:
            return original(self, x)
        mean_square = torch.mean(torch.square(x), dim=(-2, -1), keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.scale

    return _replace(nn.RMSNorm, "forward", forward)


def _causal_leak() -> Change:
    def mask(original: Callable[..., Any], spans: attention.Spans, sliding_window: int | None) -> torch.Tensor:
        return original(spans._replace(query_positions=spans.query_positions + 1), sliding_window)

    return _replace(attention, "attention_mask", mask)


def _window_longer() -> Change:
    longer = lambda original, spans, window: original(spans, window and window + 1)
    return _replace(attention, "attention_mask", longer)


def _segments_ignored() -> Change:
    ignored = lambda original, spans, window: original(spans._replace(query_segments=None), window)
    return _replace(attention, "attention_mask", ignored)


def _attention_scale() -> Change:
    """Scale the scores of the last layer by 1.03."""
    layer = {"index": 0}

    def scaled(original: Callable[..., Any], query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        layer["index"] += 1
        is_last = layer["index"] % cases.LLAMA.num_layers == 0
        return original(query * 1.03 if is_last else query, *args, **options)

    return _replace(transformer, "attention", scaled)


def _softmax_bfloat16() -> Change:
    def dense(original: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        scores = attention._scores(query, key, mask).masked_fill(~mask[:, None, None], -1e30)
        weights = torch.softmax(scores.bfloat16(), dim=-1).to(value.dtype)
        weights = weights * mask.any(-1)[:, None, None, :, None]
        return torch.einsum("BKGTS,BKSH->BKGTH", weights, value)

    return _replace(attention, "_dense", dense)


class _Adam(torch.optim.Optimizer):
    """AdamW by hand, with eps inside the root, or the second moment not corrected for its start."""

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


def _optimizer(build: Callable[[Any, OptimizerConfig], torch.optim.Optimizer]) -> Change:
    return mock.patch.object(
        optimizer_step, "_optimizer", lambda model, step_config: build(model, step_config.optimizer)
    )


def _adam_eps_inside() -> Change:
    return _optimizer(lambda model, o: _Adam(model, o, eps_inside=True, is_corrected=True))


def _adam_uncorrected() -> Change:
    return _optimizer(lambda model, o: _Adam(model, o, eps_inside=False, is_corrected=False))


def _adam_eps() -> Change:
    return _optimizer(lambda model, o: torch.optim.AdamW(model.parameters(), **_adamw(o) | {"eps": 1e-6}))


def _adamw(o: OptimizerConfig) -> dict[str, Any]:
    return {"lr": 0.0, "betas": (o.b1, o.b2), "eps": o.eps, "weight_decay": o.weight_decay}


def _l2_decay() -> Change:
    return _optimizer(lambda model, o: torch.optim.Adam(model.parameters(), **_adamw(o)))


def _no_decay_on_norms() -> Change:
    def build(model: Any, o: OptimizerConfig) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if not name.endswith(".scale")], "weight_decay": o.weight_decay},
            {"params": [p for name, p in named if name.endswith(".scale")], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, **_adamw(o))

    return _optimizer(build)


def _norm_scale_ignored() -> Change:
    return _replace(nn.RMSNorm, "forward", lambda original, self, x: original(self, x) / self.scale)


def _head_groups_swapped() -> Change:
    def swapped(original: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        groups = query.shape[2] // key.shape[1]
        order = torch.arange(query.shape[2]).reshape(groups, -1).T.flatten()
        return original(query[:, :, order], key, *args, **options)[:, :, torch.argsort(order)]

    return _replace(transformer, "attention", swapped)


def _dropout_not_rescaled() -> Change:
    def unscaled(original: Callable[..., Any], x: torch.Tensor, rate: float, stream: Any, **site: Any) -> torch.Tensor:
        return original(x, rate, stream, **site) * (1.0 if stream is None else 1.0 - rate)

    return _replace(functional, "dropout", unscaled)


def _dropout_one_mask() -> Change:
    return _replace(prng, "words", lambda original, key, *, step, **where: original(key, step=0, **where))


def _tied_gradient_lost() -> Change:
    def attend(original: Any, self: nn.Embed, x: torch.Tensor) -> torch.Tensor:
        return functional.matmul(x, self.embedding.detach(), transposed=True)

    return _replace(nn.Embed, "attend", attend)


def _decode_position_late() -> Change:
    def features(original: Any, self: Any, tokens: Any, positions: Any, *, cache: Any = None, **options: Any) -> Any:
        return original(self, tokens, positions if cache is None else positions + 1, cache=cache, **options)

    return _replace(transformer.Transformer, "features", features)


def _loss_mask_ignored() -> Change:
    unmasked = lambda original, logits, targets, mask: original(logits, targets, torch.ones_like(mask))
    return _replace(train, "cross_entropy", unmasked)


def _rope_scaling_ignored() -> Change:
    def angles(original: Callable[..., Any], positions: Any, frequencies: tuple[float, ...], **options: Any) -> Any:
        unscaled = rotary.frequencies(2 * len(frequencies), cases.LLAMA.rope_theta, None)
        return original(positions, unscaled, **options)

    return _replace(functional, "rotary_angles", angles)


def _temperature_squared() -> Change:
    def filtered(original: Callable[..., Any], logits: torch.Tensor, sampling: Any) -> torch.Tensor:
        return original(logits / math.sqrt(sampling.temperature), sampling)

    return _replace(sample, "filter_logits", filtered)


_LLAMA, _GPT2, _ATTENTION = "transformer/llama-grouped", "transformer/gpt2", "layers.0.attention"
_QWEN3 = "transformer/qwen3"
MUTATIONS: tuple[Mutation, ...] = (
    Mutation("rms-norm-eps", _LLAMA, _rms_eps, "layers.0.attention_norm", True),
    Mutation("gelu-erf-for-tanh", _GPT2, _gelu_erf, "layers.0.mlp", True),
    Mutation("rope-base", _LLAMA, _rope_base, "model", True),
    Mutation("rope-interleaved", _LLAMA, _rope_interleaved, _ATTENTION, True),
    Mutation("rope-not-on-keys", _LLAMA, _rope_not_on_keys, _ATTENTION, True),
    Mutation("causal-mask-leaks-one", _LLAMA, _causal_leak, _ATTENTION, True),
    Mutation("attention-scale-3-percent-in-one-layer", _LLAMA, _attention_scale, "layers.1.attention", True),
    Mutation("softmax-in-bfloat16", _LLAMA, _softmax_bfloat16, _ATTENTION, True),
    Mutation("adam-eps-inside-root", _LLAMA, _adam_eps_inside, None, True),
    Mutation("adam-eps-1e-6", _LLAMA, _adam_eps, None, True),
    Mutation("adam-second-moment-not-corrected", _LLAMA, _adam_uncorrected, None, True),
    Mutation("l2-for-decoupled-decay", _LLAMA, _l2_decay, None, True),
    Mutation("no-decay-on-norms", _LLAMA, _no_decay_on_norms, None, True),
    Mutation("norm-scale-ignored", _LLAMA, _norm_scale_ignored, "layers.0.attention_norm"),
    Mutation("query-heads-grouped-in-another-order", _LLAMA, _head_groups_swapped, _ATTENTION),
    Mutation("window-one-longer", "transformer/llama-window", _window_longer, _ATTENTION),
    Mutation("segments-ignored", "transformer/llama-packed", _segments_ignored, _ATTENTION),
    Mutation("rope-scaling-ignored", "transformer/llama-rope-linear", _rope_scaling_ignored, "model"),
    Mutation("qk-norm-after-rotary", _QWEN3, _qk_norm_after_rotary, "layers.0.attention.q_norm"),
    Mutation("qk-norm-of-all-heads", _QWEN3, _qk_norm_of_all_heads, "layers.0.attention.q_norm"),
    Mutation("dropout-not-rescaled", _LLAMA, _dropout_not_rescaled, "layers.0"),
    Mutation("dropout-same-mask-every-step", _LLAMA, _dropout_one_mask),
    Mutation("tied-head-passes-no-gradient", _LLAMA, _tied_gradient_lost),
    Mutation("decode-position-one-late", _LLAMA, _decode_position_late),
    Mutation("loss-mask-ignored", _LLAMA, _loss_mask_ignored),
    Mutation("sampling-temperature-off", _LLAMA, _temperature_squared),
)


@contextlib.contextmanager
def injected(name: str) -> Iterator[Mutation]:
    """Break the PyTorch twin in one named way while the context is open.

    Raises:
      ValueError: there is no such mutation.
    """
    table = {mutation.name: mutation for mutation in MUTATIONS}
    if name not in table:
        raise ValueError(f"mutation {name!r} is not one of {', '.join(table)}")
    with table[name].change():
        yield table[name]


def score(say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """Gates that every mutation makes fail in float64, and those of each case as it is ("none": there must be none)."""
    from jaxbench.parity import run

    outcomes = []
    for case_id in dict.fromkeys(mutation.case for mutation in MUTATIONS):
        case = cases.find(case_id)
        config, params = cases.load(case)
        with run.pinned("float64"), run.torch_threads(case):
            side, _ = run.sides(case, config, params, dtype="float64", backend="flax")
            mine = [mutation for mutation in MUTATIONS if mutation.case == case_id]
            # Where every bug sits in a module, outputs, gradients and decoding must do without training and sampling.
            gather = functools.partial(
                evidence.gather, case=case, config=config, gradients=True,
                is_quick=all(mutation.module for mutation in mine),
            )  # fmt: skip
            flax_evidence = gather(side)
            for mutation in (None, *mine):
                with mutation.change() if mutation else contextlib.nullcontext():
                    _, other = run.sides(case, config, params, dtype="float64", backend="flax")
                    torch_evidence = gather(other)
                judged = evidence.judge(flax_evidence, torch_evidence).gates
                failed = [f"{row.id} {row.what}" for row in judged if not row.passed]
                outcomes.append(Outcome(mutation.name if mutation else f"none ({case_id})", tuple(failed)))
                say(f"{outcomes[-1].name}: {', '.join(failed) or 'no gate failed'}")
    return outcomes


def gate(outcomes: list[Outcome]) -> gates.Gate:
    """Gate P9: every mutation caught, and no gate fails on the twin as it is."""
    wrong = [o.name for o in outcomes if o.is_caught == o.name.startswith("none")]
    injected_bugs = [o for o in outcomes if not o.name.startswith("none")]
    caught = sum(o.is_caught for o in injected_bugs)
    note = f"{caught} of {len(injected_bugs)} injected bugs caught"
    return gates.Gate("P9", "mutation score", not wrong, float(len(wrong)), 0.0, ", ".join(wrong), note)
