"""Bugs in Equinox's own modules, which the gates between Equinox and PyTorch must catch and blame."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import Array, lax

from jaxbench import functional
from jaxbench.eqx import nn, transformer
from jaxbench.parity.injection import Mutation

CASE = "transformer/llama-grouped"


def _rms_eps(original: Callable, self: nn.RMSNorm, x: Array) -> Array:
    return functional.rms_norm(x, self.scale, eps=0.1 * self.eps)


def _gate_and_up_swapped(original: Callable, x: Array, layers: Any, *, groups: int) -> tuple[Array, ...]:
    parts = original(x, layers, groups=groups)
    return parts if len(parts) == 3 else parts[::-1]


def _residual_lost(original: Callable, self: transformer.Block, x: Array, *rest: Any) -> tuple[Array, Any]:
    stream, cached = original(self, x, *rest)
    return stream - x, cached


def _tied_gradient_lost(original: Callable, self: nn.Embed, x: Array) -> Array:
    return functional.matmul(x, lax.stop_gradient(self.embedding), transposed=True)


def decode_position_late(
    original: Callable, self: Any, tokens: Any, positions: Any, *, cache: Any = None, **options: Any
) -> Any:
    """Increase positions by one in every step that reads a cache; the PyTorch twin has the same bug."""
    late = positions if cache is None or positions is None else positions + 1  # PyTorch's rows of one length have none
    return original(self, tokens, late, cache=cache, **options)


_bug = functools.partial(Mutation, case=CASE, side="equinox")
EQUINOX_BUGS: tuple[Mutation, ...] = (
    _bug("equinox-rms-norm-eps", place=(nn.RMSNorm, "__call__"), bug=_rms_eps, module="layers.0.attention_norm"),
    _bug("equinox-gate-and-up-swapped", place=(nn, "project"), bug=_gate_and_up_swapped, module="layers.0.mlp"),
    _bug("equinox-residual-lost", place=(transformer.Block, "__call__"), bug=_residual_lost, module="layers.0"),
    _bug("equinox-tied-head-passes-no-gradient", place=(nn.Embed, "attend"), bug=_tied_gradient_lost),
    _bug("equinox-decode-position-one-late", place=(transformer.Transformer, "features"), bug=decode_position_late),
)
