"""One chunk of Titans' neural memory in closed form: pure functions of arrays. Twin: jaxbench/memory/chunk.py.

A memory is a network M_W: one matrix, or layers with an activation between them. Each token moves its weights by the
gradient of the associative loss ||M_W(k) - v||^2, taken at the weights A of the chunk's start (Titans, eq. 16):

    u_t = grad loss(A; k_t, v_t)      S_t = eta_t S_(t-1) - theta_t u_t      W_t = (1 - alpha_t) W_(t-1) + S_t

and token t reads y_t = M_(W_t)(q_t). Unrolled, with beta_t = prod (1 - alpha), P_t = prod eta, and

    E[t, i] = eta_(i+1) ... eta_t    R[t, j] = beta_t / beta_j (j <= t)    C = R E    f = R P

    W_t = beta_t W_0 + f_t S_0 - sum_i C[t, i] theta_i u_i          S_t = P_t S_0 - sum_i E[t, i] theta_i u_i

A token's gradient by a kernel is a_i delta_i^T (the layer's input, and the gradient at its output), so the sums at the
chunk's end are two weighted products of the same a and delta, and a read at W_t is an attention over the chunk's
tokens in every layer: no W_t is formed. docs/memory.md derives this. Axis letters: E memories, a row's heads side by
side (B * N); T tokens of the chunk; I and O a kernel's in and out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

GELU = (math.sqrt(2.0 / math.pi), 0.044715)  # of the tanh approximation (Hendrycks and Gimpel 2016)
ROOT_HALF, ROOT_TAU = math.sqrt(0.5), math.sqrt(2.0 * math.pi)


class Weights(NamedTuple):
    """A memory network's weights, or anything of their shape such as momentum."""

    kernels: tuple[Float[Tensor, "E I O"], ...]
    gain: Float[Tensor, "E H"] | None  # of the residual norm


class Tokens(NamedTuple):
    """What a chunk's tokens ask of their memories."""

    query: Float[Tensor, "E T H"]
    key: Float[Tensor, "E T H"]
    value: Float[Tensor, "E T H"]
    theta: Float[Tensor, "E T"]  # learning rate
    log_eta: Float[Tensor, "E T"] | None  # log of the momentum's decay; None = no momentum
    log_keep: Float[Tensor, "E T"] | None  # log(1 - alpha); None = nothing is forgotten
    is_token: Bool[Tensor, "E T"] | None  # False = leaves its memory as it is; None = all are tokens


class Rule(NamedTuple):
    """How memories read and learn; static."""

    activation: str  # "gelu", "gelu_erf" or "silu"
    loss_scale: float  # of the squared error: 1 = sum over the width
    read: str  # "token", "before" or "chunk"
    max_update_norm: float | None
    norm_eps: float


class Surprise(NamedTuple):
    """Gradients of each token's loss, in factors: by kernel l, inputs[l] times deltas[l]."""

    inputs: tuple[Float[Tensor, "E T I"], ...]
    deltas: tuple[Float[Tensor, "E T O"], ...]
    gain: Float[Tensor, "E T H"] | None


class Coefficients(NamedTuple):
    """What each token's weights are made of; the names are those of the module's formulas."""

    beta: Float[Tensor, "E T"] | None  # None = all 1
    f: Float[Tensor, "E T"] | None  # None = no momentum, so S_0 counts nowhere
    p: Float[Tensor, "E T"] | None
    c: Float[Tensor, "E T T"]
    e: Float[Tensor, "E T"]  # of the last token


def coefficients(tokens: Tokens, *, read: str = "token") -> Coefficients:
    """Return the coefficients of a chunk: of every token, or with read = "chunk" of the last one, [E 1 ...] each.

    They come from differences of cumulated logarithms: ratios never over- or underflow.
    """
    tokens = _silenced(tokens)
    length, theta = tokens.theta.shape[1], tokens.theta
    first = length - 1 if read == "chunk" else 0
    beta, retained = _products(tokens.log_keep, first, theta)
    retained = retained.expand(len(theta), *retained.shape[1:])
    if tokens.is_token is not None:
        # Weights take in S_t at tokens only.
        retained = torch.where(tokens.is_token[:, None, :], retained, torch.zeros((), dtype=theta.dtype))
    if tokens.log_eta is None:
        last = (torch.arange(length, device=theta.device) == length - 1).to(theta.dtype)
        return Coefficients(beta, None, None, retained, last.expand(theta.shape))
    p, e = _products(tokens.log_eta, 0, theta)
    f = torch.sum(retained * p[:, None, :], dim=-1)
    return Coefficients(beta, f, p[:, first:], torch.matmul(retained, e), e[:, -1])


def _products(log: Tensor | None, first: int, like: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return prod_(l <= t) x_l [E T] and prod_(i < l <= t) x_l [E T T], 0 where i > t, from t = first on.

    None stands for x = 1.
    """
    length = like.shape[1]
    is_past = torch.ones((1, length, length), dtype=torch.bool, device=like.device).tril()[:, first:]
    if log is None:
        return None, is_past.to(like.dtype)
    total = torch.cumsum(log, dim=1)
    ratio = torch.where(is_past, total[:, first:, None] - total[:, None, :], -torch.inf)
    return torch.exp(total)[:, first:], torch.exp(ratio)


def _silenced(tokens: Tokens) -> Tokens:
    """Return tokens whose padding has theta = 0, eta = 1 and alpha = 0."""
    if tokens.is_token is None:
        return tokens
    zero = tokens.theta.new_zeros(())
    kept = {name: getattr(tokens, name) for name in ("theta", "log_eta", "log_keep")}
    kept = {name: None if x is None else torch.where(tokens.is_token, x, zero) for name, x in kept.items()}
    return tokens._replace(**kept)


def activate(kind: str, z: Float[Tensor, "E T I"]) -> Float[Tensor, "E T I"]:
    """Return GELU, in its tanh form or exact (gelu_erf), or SiLU."""
    if kind == "silu":
        return z * torch.sigmoid(z)
    if kind == "gelu_erf":
        return z * _normal_below(z)
    return 0.5 * z * (1.0 + torch.tanh(GELU[0] * (z + GELU[1] * z * z * z)))


def slope(kind: str, z: Float[Tensor, "E T I"]) -> Float[Tensor, "E T I"]:
    """Return the derivative of `activate`."""
    if kind == "silu":
        gate = torch.sigmoid(z)
        return gate * (1.0 + z * (1.0 - gate))
    if kind == "gelu_erf":
        return _normal_below(z) + z * torch.exp(-0.5 * z * z) / ROOT_TAU
    tanh = torch.tanh(GELU[0] * (z + GELU[1] * z * z * z))
    return 0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * GELU[0] * (1.0 + 3.0 * GELU[1] * z * z)


def _normal_below(z: Tensor) -> Tensor:
    """Return how much of a standard normal lies below z."""
    return 0.5 + 0.5 * torch.erf(ROOT_HALF * z)


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x standardised over its last axis, and one over the standard deviation."""
    centred = x - torch.mean(x, dim=-1, keepdim=True)
    inverse = torch.rsqrt(torch.mean(centred * centred, dim=-1, keepdim=True) + eps)
    return centred * inverse, inverse


def recall(weights: Weights, query: Float[Tensor, "E T H"], rule: Rule) -> Float[Tensor, "E T H"]:
    """Return what memories of fixed weights answer."""
    hidden = query
    for i, kernel in enumerate(weights.kernels):
        hidden = torch.matmul(activate(rule.activation, hidden) if i else hidden, kernel)
    if weights.gain is None:
        return hidden
    return _normalise(hidden, rule.norm_eps)[0] * (1.0 + weights.gain[:, None, :]) + query


def surprise(
    weights: Weights, key: Float[Tensor, "E T H"], value: Float[Tensor, "E T H"], rule: Rule
) -> tuple[Surprise, Float[Tensor, "E T"]]:
    """Return the gradient of each token's loss by the weights, and its squared length over all weights."""
    inputs, hidden = [key], []
    for i, kernel in enumerate(weights.kernels):
        if i:
            inputs.append(activate(rule.activation, hidden[-1]))
        hidden.append(torch.matmul(inputs[-1], kernel))
    factor, gain = 2.0 * rule.loss_scale, None
    if weights.gain is None:
        delta = factor * (hidden[-1] - value)
    else:
        normal, inverse = _normalise(hidden[-1], rule.norm_eps)
        scale = 1.0 + weights.gain[:, None, :]
        error = factor * (normal * scale + key - value)
        gain, scaled = error * normal, error * scale
        projected = torch.mean(scaled, dim=-1, keepdim=True) + normal * torch.mean(
            scaled * normal, dim=-1, keepdim=True
        )
        delta = inverse * (scaled - projected)
    deltas = [delta]
    for i in reversed(range(1, len(weights.kernels))):
        back = torch.einsum("ETO,EIO->ETI", deltas[0], weights.kernels[i])
        deltas.insert(0, back * slope(rule.activation, hidden[i - 1]))
    squares = sum(_square(a) * _square(delta) for a, delta in zip(inputs, deltas, strict=True))
    squares = squares if gain is None else squares + _square(gain)
    return Surprise(tuple(inputs), tuple(deltas), gain), squares


def _square(x: Tensor) -> Tensor:
    return torch.sum(x * x, dim=-1)


def learn(
    anchor: Weights, weights: Weights, momentum: Weights, tokens: Tokens, rule: Rule, parts: Coefficients | None = None
) -> tuple[Float[Tensor, "E T H"], Weights, Weights]:
    """Let memories take in a chunk's tokens; return their answers, the weights and the momentum behind it.

    Gradients are taken at `anchor`, the weights where the chunk began; `weights` and `momentum` are those before the
    first of these tokens, which may lie inside the chunk. `parts` are the tokens' coefficients; None = computed here.
    """
    found, squares = surprise(anchor, tokens.key, tokens.value, rule)
    parts = coefficients(tokens, read=rule.read) if parts is None else parts
    theta = _silenced(tokens).theta
    if rule.max_update_norm is not None:
        # A token's gradient longer than the limit is shortened to it: clipping before the sum keeps reads causal.
        limit = rule.max_update_norm
        theta = theta * limit * torch.rsqrt(squares.clamp(min=limit * limit))
    if rule.read == "chunk":
        answer = recall(anchor, tokens.query, rule)
    else:
        own = _one_back(parts) if rule.read == "before" else parts
        answer = _recall_each(weights, momentum, tokens.query, found, own, theta, rule)
    last = Coefficients(*(None if x is None else x[:, -1] for x in parts[:-1]), parts.e)
    shares = (last.c * theta, last.e * theta)
    moved = [_moved(*each, shares, last) for each in zip(weights.kernels, momentum.kernels, found.inputs, found.deltas)]
    gain = (None, None)
    if found.gain is not None:
        ones = theta.new_ones((*theta.shape, 1))
        gain = _moved(weights.gain[:, None, :], momentum.gain[:, None, :], ones, found.gain, shares, last)
        gain = tuple(x[:, 0] for x in gain)
    kernels, momenta = zip(*moved, strict=True)
    return answer, Weights(kernels, gain[0]), Weights(momenta, gain[1])


def _one_back(parts: Coefficients) -> Coefficients:
    """Return the coefficients of the weights W_(t-1) that each token finds: those of the token before it."""

    def moved(x: Tensor | None, first: float) -> Tensor | None:
        return None if x is None else torch.cat([torch.full_like(x[:, :1], first), x[:, :-1]], dim=1)

    return Coefficients(moved(parts.beta, 1.0), moved(parts.f, 0.0), moved(parts.p, 1.0), moved(parts.c, 0.0), parts.e)


def _moved(
    kernel: Tensor, momentum: Tensor, inputs: Tensor, deltas: Tensor, shares: tuple[Tensor, Tensor], last: Coefficients
) -> tuple[Tensor, Tensor]:
    """Return a kernel and its momentum behind the last token."""
    step, pushed = (torch.einsum("ETI,ETO->EIO", inputs * share[:, :, None], deltas) for share in shares)
    kept = kernel if last.beta is None else last.beta[:, None, None] * kernel
    if last.f is None:
        return kept - step, -pushed
    return kept + last.f[:, None, None] * momentum - step, last.p[:, None, None] * momentum - pushed


def _recall_each(
    weights: Weights,
    momentum: Weights,
    query: Tensor,
    found: Surprise,
    parts: Coefficients,
    theta: Tensor,
    rule: Rule,
) -> Tensor:
    """Return each token's answer at its own weights W_t, without forming them."""
    shares = parts.c * theta[:, None, :]

    def mixed(kept: Tensor, carried: Tensor, learned: Tensor) -> Tensor:
        kept = kept if parts.beta is None else parts.beta[:, :, None] * kept
        return (kept if parts.f is None else kept + parts.f[:, :, None] * carried) - learned

    hidden = query
    for i, (kernel, inertia) in enumerate(zip(weights.kernels, momentum.kernels, strict=True)):
        hidden = activate(rule.activation, hidden) if i else hidden
        scores = shares * torch.einsum("ETI,ESI->ETS", hidden, found.inputs[i])
        learned = torch.matmul(scores, found.deltas[i])
        hidden = mixed(torch.matmul(hidden, kernel), torch.matmul(hidden, inertia), learned)
    if weights.gain is None:
        return hidden
    gain = mixed(weights.gain[:, None, :], momentum.gain[:, None, :], torch.matmul(shares, found.gain))
    return _normalise(hidden, rule.norm_eps)[0] * (1.0 + gain) + query
