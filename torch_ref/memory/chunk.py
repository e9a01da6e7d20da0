"""One chunk of Titans' neural memory in closed form: pure functions of arrays. Twin: jaxbench/memory/chunk.py.

The formulas, whose names the code uses, and the axis letters: see the twin's module docstring.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_ref.memory.layout import _unnarrowed

GELU = (math.sqrt(2.0 / math.pi), 0.044715)  # of the tanh approximation (Hendrycks and Gimpel 2016)
ROOT_HALF, ROOT_TAU = math.sqrt(0.5), math.sqrt(2.0 * math.pi)


class Weights(NamedTuple):
    """A memory network's weights, or anything of their shape such as momentum."""

    kernels: tuple[Float[Tensor, "E I O"], ...]
    gain: Float[Tensor, "E H"] | None  # of the residual norm


class Tokens(NamedTuple):
    """Queries, keys, values and gates of a chunk's tokens."""

    query: Float[Tensor, "E T H"]
    key: Float[Tensor, "E T H"]
    value: Float[Tensor, "E T H"]
    theta: Float[Tensor, "E T"]  # inner learning rate, > 0
    log_eta: Float[Tensor, "E T"] | None  # log of the decay of momentum, <= 0; None = no momentum
    log_keep: Float[Tensor, "E T"] | None  # log(1 - alpha), alpha = share forgotten; None = no forgetting
    is_token: Bool[Tensor, "E T"] | None  # False = padding, which writes nothing; None = no padding


class Rule(NamedTuple):
    """Static settings of the inner optimisation and of the read-out."""

    activation: str  # "gelu", "gelu_erf" or "silu"
    loss_scale: float  # of the squared error: 1 = sum over the head's width, 1 / H = mean
    read: str  # weights that token t is read out at: "token" W_t, "before" W_(t-1), "chunk" A
    max_update_norm: float | None  # a token's gradient is clipped to this 2-norm; None = no clipping
    norm_eps: float


class Surprise(NamedTuple):
    """Gradients of each token's associative loss, as factors: for kernel l, inputs[l]^T deltas[l]."""

    inputs: tuple[Float[Tensor, "E T I"], ...]  # of each layer
    deltas: tuple[Float[Tensor, "E T O"], ...]  # gradients at each layer's output
    gain: Float[Tensor, "E T H"] | None  # gradient with respect to the residual norm's gain


class Coefficients(NamedTuple):
    """Coefficients of W_t and S_t in the closed form; the names are those of the module's formulas."""

    beta: Float[Tensor, "E T"] | None  # decay of W_0; None = no forgetting, all 1
    f: Float[Tensor, "E T"] | None  # weight of S_0 in W_t; None = no momentum
    p: Float[Tensor, "E T"] | None  # decay of S_0; None = no momentum
    c: Float[Tensor, "E T T"]  # weight of token i's step in W_t
    e: Float[Tensor, "E T"]  # weight of token i's step in S_T of the last token


@_unnarrowed
def coefficients(tokens: Tokens, *, read: str = "token") -> Coefficients:
    """Compute coefficients beta, f, P, C and E of a chunk's tokens from their decay gates.

    They cover every token, or with read = "chunk" only the last one, [E 1 ...] each. Ratios are exponentials of
    differences of cumulative sums of logarithms, so they never over- or underflow.
    """
    tokens = _without_padding(tokens)
    length, theta = tokens.theta.shape[1], tokens.theta
    first = length - 1 if read == "chunk" else 0
    beta, retained = _cumulative_products(tokens.log_keep, first, theta)
    retained = retained.expand(len(theta), *retained.shape[1:])
    if tokens.is_token is not None:
        # W_t adds S_t at tokens, never at padding.
        retained = torch.where(tokens.is_token[:, None, :], retained, torch.zeros((), dtype=theta.dtype))
    if tokens.log_eta is None:
        last = (torch.arange(length, device=theta.device) == length - 1).to(theta.dtype)
        return Coefficients(beta, None, None, retained, last.expand(theta.shape))
    p, e = _cumulative_products(tokens.log_eta, 0, theta)
    f = torch.sum(retained * p[:, None, :], dim=-1)
    return Coefficients(beta, f, p[:, first:], torch.matmul(retained, e), e[:, -1])


def _cumulative_products(
    log: Float[Tensor, "E T"] | None, first: int, like: Float[Tensor, "E T"]
) -> tuple[Float[Tensor, "E S"] | None, Float[Tensor, "_ S T"]]:
    """Products of decays x from their logarithms: prod_(l <= t) x_l, and prod_(i < l <= t) x_l, 0 where i > t.

    The S = T - first rows are those of t = first and later; log = None stands for x = 1 in every memory, [1 S T].
    """
    length = like.shape[1]
    is_past = torch.ones((1, length, length), dtype=torch.bool, device=like.device).tril()[:, first:]
    if log is None:
        return None, is_past.to(like.dtype)
    total = torch.cumsum(log, dim=1)
    ratio = torch.where(is_past, total[:, first:, None] - total[:, None, :], -torch.inf)
    return torch.exp(total)[:, first:], torch.exp(ratio)


def _without_padding(tokens: Tokens) -> Tokens:
    """Set the gates of padding to theta = 0, eta = 1 and alpha = 0, which change neither weights nor momentum."""
    if tokens.is_token is None:
        return tokens
    zero = tokens.theta.new_zeros(())
    gates = {name: getattr(tokens, name) for name in ("theta", "log_eta", "log_keep")}
    gates = {name: None if x is None else torch.where(tokens.is_token, x, zero) for name, x in gates.items()}
    return tokens._replace(**gates)


def activate(kind: str, z: Float[Tensor, "E T I"]) -> Float[Tensor, "E T I"]:
    """Activation by name: gelu (tanh approximation), gelu_erf (exact) or silu."""
    if kind == "silu":
        return z * torch.sigmoid(z)
    if kind == "gelu_erf":
        return z * _normal_cdf(z)
    return 0.5 * z * (1.0 + torch.tanh(GELU[0] * (z + GELU[1] * z * z * z)))


def activation_derivative(kind: str, z: Float[Tensor, "E T I"]) -> Float[Tensor, "E T I"]:
    """Derivative of `activate` with respect to its input."""
    if kind == "silu":
        gate = torch.sigmoid(z)
        return gate * (1.0 + z * (1.0 - gate))
    if kind == "gelu_erf":
        return _normal_cdf(z) + z * torch.exp(-0.5 * z * z) / ROOT_TAU
    tanh = torch.tanh(GELU[0] * (z + GELU[1] * z * z * z))
    return 0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * GELU[0] * (1.0 + 3.0 * GELU[1] * z * z)


def _normal_cdf(z: Float[Tensor, "E T I"]) -> Float[Tensor, "E T I"]:
    """Cumulative distribution function of the standard normal distribution."""
    return 0.5 + 0.5 * torch.erf(ROOT_HALF * z)


def _layer_norm(x: Float[Tensor, "E T H"], eps: float) -> tuple[Float[Tensor, "E T H"], Float[Tensor, "E T 1"]]:
    """LayerNorm over the last axis without scale or bias, and 1 / its standard deviation."""
    centred = x - torch.mean(x, dim=-1, keepdim=True)
    inverse = torch.rsqrt(torch.mean(centred * centred, dim=-1, keepdim=True) + eps)
    return centred * inverse, inverse


@_unnarrowed
def recall(weights: Weights, query: Float[Tensor, "E T H"], rule: Rule) -> Float[Tensor, "E T H"]:
    """Read-out of memories with fixed weights, M_W(q) of each query (Titans, eq. 15); nothing is written."""
    hidden = query
    for i, kernel in enumerate(weights.kernels):
        hidden = torch.matmul(activate(rule.activation, hidden) if i else hidden, kernel)
    if weights.gain is None:
        return hidden
    return _layer_norm(hidden, rule.norm_eps)[0] * (1.0 + weights.gain[:, None, :]) + query


def surprise(
    weights: Weights, key: Float[Tensor, "E T H"], value: Float[Tensor, "E T H"], rule: Rule
) -> tuple[Surprise, Float[Tensor, "E T"]]:
    """Gradient in W of each token's associative loss ||M_W(k) - v||^2 (Titans, eq. 12 and 16), and its squared norm."""
    inputs, hidden = [key], []
    for i, kernel in enumerate(weights.kernels):
        if i:
            inputs.append(activate(rule.activation, hidden[-1]))
        hidden.append(torch.matmul(inputs[-1], kernel))
    # The gradient at the network's output; with a residual norm through LayerNorm's backward pass.
    factor, gain = 2.0 * rule.loss_scale, None
    if weights.gain is None:
        delta = factor * (hidden[-1] - value)
    else:
        normal, inverse = _layer_norm(hidden[-1], rule.norm_eps)
        scale = 1.0 + weights.gain[:, None, :]
        error = factor * (normal * scale + key - value)
        gain, scaled = error * normal, error * scale
        # The part of the gradient along the mean and along the normalised output, which LayerNorm removes.
        projected = torch.mean(scaled, dim=-1, keepdim=True) + normal * torch.mean(
            scaled * normal, dim=-1, keepdim=True
        )
        delta = inverse * (scaled - projected)
    # Backpropagation through the layers.
    deltas = [delta]
    for i in reversed(range(1, len(weights.kernels))):
        back = torch.einsum("ETO,EIO->ETI", deltas[0], weights.kernels[i])
        deltas.insert(0, back * activation_derivative(rule.activation, hidden[i - 1]))
    # An outer product's squared 2-norm is the product of its factors' squared 2-norms.
    squared_norm = sum(_squared_norm(a) * _squared_norm(delta) for a, delta in zip(inputs, deltas, strict=True))
    squared_norm = squared_norm if gain is None else squared_norm + _squared_norm(gain)
    return Surprise(tuple(inputs), tuple(deltas), gain), squared_norm


def _squared_norm(x: Float[Tensor, "E T H"]) -> Float[Tensor, "E T"]:
    return torch.sum(x * x, dim=-1)


@_unnarrowed
def learn(
    anchor: Weights,
    weights: Weights,
    momentum: Weights,
    tokens: Tokens,
    rule: Rule,
    coeffs: Coefficients | None = None,
) -> tuple[Float[Tensor, "E T H"], Weights, Weights]:
    """Write a chunk's tokens into their memories (Titans, eq. 13, 14 and 16) and read each token out (eq. 15).

    Arguments, results and errors are the twin's.
    """
    gradients, squared_norm = surprise(anchor, tokens.key, tokens.value, rule)
    coeffs = coefficients(tokens, read=rule.read) if coeffs is None else coeffs
    theta = _without_padding(tokens).theta
    if rule.max_update_norm is not None:
        # Each token's gradient is clipped before the sum over tokens, which keeps read-outs causal.
        limit = rule.max_update_norm
        theta = theta * limit * torch.rsqrt(squared_norm.clamp(min=limit * limit))
    if rule.read == "chunk":
        output = recall(anchor, tokens.query, rule)
    else:
        read_coeffs = _of_previous_token(coeffs) if rule.read == "before" else coeffs
        output = _read_out(weights, momentum, tokens.query, gradients, read_coeffs, theta, rule)
    last = Coefficients(*(None if x is None else x[:, -1] for x in coeffs[:-1]), coeffs.e)
    shares = (last.c * theta, last.e * theta)
    layers = zip(weights.kernels, momentum.kernels, gradients.inputs, gradients.deltas, strict=True)
    kernels, momenta = zip(*[_write(*layer, shares, last) for layer in layers], strict=True)
    gain = (None, None)
    if gradients.gain is not None:
        ones = theta.new_ones((*theta.shape, 1))
        gain = _write(weights.gain[:, None, :], momentum.gain[:, None, :], ones, gradients.gain, shares, last)
        gain = tuple(x[:, 0] for x in gain)
    return output, Weights(kernels, gain[0]), Weights(momenta, gain[1])


def _of_previous_token(coeffs: Coefficients) -> Coefficients:
    """Shift coefficients by one token: those of W_(t-1), the weights before token t is written."""

    def shifted(x: Float[Tensor, "E T ..."] | None, first: float) -> Float[Tensor, "E T ..."] | None:
        return None if x is None else torch.cat([torch.full_like(x[:, :1], first), x[:, :-1]], dim=1)

    beta, f, p, c, e = coeffs
    return Coefficients(shifted(beta, 1.0), shifted(f, 0.0), shifted(p, 1.0), shifted(c, 0.0), e)


def _write(
    kernel: Float[Tensor, "E I O"],
    momentum: Float[Tensor, "E I O"],
    inputs: Float[Tensor, "E T I"],
    deltas: Float[Tensor, "E T O"],
    shares: tuple[Float[Tensor, "E T"], Float[Tensor, "E T"]],
    last: Coefficients,
) -> tuple[Float[Tensor, "E I O"], Float[Tensor, "E I O"]]:
    """One kernel and its momentum after the chunk's last token T: W_T and S_T of the module's formulas.

    shares: C[T, i] theta_i and E[T, i] theta_i, the weights in W_T and S_T of the gradient u_i = inputs_i^T deltas_i;
    last: the coefficients of token T, [E] each.
    """
    weight_step, momentum_step = _weighted_gradients(inputs, deltas, shares)
    decayed = kernel if last.beta is None else last.beta[:, None, None] * kernel
    if last.f is None:  # no momentum: S_T is the last token's step
        return decayed - weight_step, -momentum_step
    carried, decayed_momentum = last.f[:, None, None] * momentum, last.p[:, None, None] * momentum
    return decayed + carried - weight_step, decayed_momentum - momentum_step


def _weighted_gradients(
    inputs: Float[Tensor, "E T I"],
    deltas: Float[Tensor, "E T O"],
    shares: tuple[Float[Tensor, "E T"], Float[Tensor, "E T"]],
) -> tuple[Float[Tensor, "E I O"], Float[Tensor, "E I O"]]:
    """Sums over tokens of the gradients inputs_i^T deltas_i under two weightings."""
    first, second = (torch.einsum("ETI,ETO->EIO", inputs * share[:, :, None], deltas) for share in shares)
    return first, second


def _read_out(
    weights: Weights,
    momentum: Weights,
    query: Float[Tensor, "E T H"],
    gradients: Surprise,
    coeffs: Coefficients,
    theta: Float[Tensor, "E T"],
    rule: Rule,
) -> Float[Tensor, "E T H"]:
    """Read-out M_(W_t)(q_t) of each token at its own weights, without forming them.

    In every layer, with h its input at q_t,

        h W_t = beta_t h W_0 + f_t h S_0 - sum_i C[t, i] theta_i (h . a_i) delta_i

    whose sum is a causal attention over the chunk's tokens with keys a_i and values delta_i.
    """
    shares = coeffs.c * theta[:, None, :]  # C[t, i] theta_i

    def combined(
        decayed: Float[Tensor, "E _ O"], carried: Float[Tensor, "E _ O"], written: Float[Tensor, "E T O"]
    ) -> Float[Tensor, "E T O"]:
        decayed = decayed if coeffs.beta is None else coeffs.beta[:, :, None] * decayed
        return (decayed if coeffs.f is None else decayed + coeffs.f[:, :, None] * carried) - written

    hidden = query
    for i, (kernel, kernel_momentum) in enumerate(zip(weights.kernels, momentum.kernels, strict=True)):
        hidden = activate(rule.activation, hidden) if i else hidden
        scores = shares * torch.einsum("ETI,ESI->ETS", hidden, gradients.inputs[i])
        written = torch.matmul(scores, gradients.deltas[i])
        hidden = combined(torch.matmul(hidden, kernel), torch.matmul(hidden, kernel_momentum), written)
    if weights.gain is None:
        return hidden
    gain = combined(weights.gain[:, None, :], momentum.gain[:, None, :], torch.matmul(shares, gradients.gain))
    return _layer_norm(hidden, rule.norm_eps)[0] * (1.0 + gain) + query
