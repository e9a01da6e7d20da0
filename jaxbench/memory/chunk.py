"""One chunk of Titans' neural memory in closed form: pure functions of arrays. Twin: torch_ref/memory/chunk.py.

A memory is a network M_W: one matrix, or layers with an activation between them. Each token updates the weights by
the gradient of the associative loss ||M_W(k) - v||^2, taken at the weights A at the chunk's start (Titans, eq. 16):

    u_t = grad loss(A; k_t, v_t)      S_t = eta_t S_(t-1) - theta_t u_t      W_t = (1 - alpha_t) W_(t-1) + S_t

and token t reads y_t = M_(W_t)(q_t). Unrolled, with beta_t = prod (1 - alpha), P_t = prod eta, and

    E[t, i] = eta_(i+1) ... eta_t    R[t, j] = beta_t / beta_j (j <= t)    C = R E    f = R P

    W_t = beta_t W_0 + f_t S_0 - sum_i C[t, i] theta_i u_i          S_t = P_t S_0 - sum_i E[t, i] theta_i u_i

A token's gradient with respect to a kernel is a_i delta_i^T (the layer's input, and the gradient at its output). So the
sums at the chunk's end are two weighted products of the same a and delta, and a read at W_t is attention over the
chunk's tokens in every layer: no W_t is formed. docs/memory.md derives this. Axis letters: E memories, rows and heads
merged (B * N); T tokens of the chunk; I and O a kernel's inputs and outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxbench.memory.products import multiply, multiply_transposed, outer

GELU = (math.sqrt(2.0 / math.pi), 0.044715)  # of the tanh approximation (Hendrycks and Gimpel 2016)
ROOT_HALF, ROOT_TAU = math.sqrt(0.5), math.sqrt(2.0 * math.pi)


class Weights(NamedTuple):
    """A memory network's weights, or anything of their shape such as momentum."""

    kernels: tuple[Float[Array, "E I O"], ...]
    gain: Float[Array, "E H"] | None  # of the residual norm


class Tokens(NamedTuple):
    """Queries, keys, values and gates of a chunk's tokens."""

    query: Float[Array, "E T H"]
    key: Float[Array, "E T H"]
    value: Float[Array, "E T H"]
    theta: Float[Array, "E T"]  # inner learning rate, > 0
    log_eta: Float[Array, "E T"] | None  # log of the decay of momentum, <= 0; None = no momentum
    log_keep: Float[Array, "E T"] | None  # log(1 - alpha), alpha = share forgotten; None = no forgetting
    is_token: Bool[Array, "E T"] | None  # False = padding, which writes nothing; None = no padding


class Rule(NamedTuple):
    """Static settings of the inner optimisation and of the read-out."""

    activation: str  # "gelu", "gelu_erf" or "silu"
    loss_scale: float  # of the squared error: 1 = sum over the head's width, 1 / H = mean
    read: str  # weights that token t is read out at: "token" W_t, "before" W_(t-1), "chunk" A
    max_update_norm: float | None  # a token's gradient is clipped to this 2-norm; None = no clipping
    norm_eps: float


class Surprise(NamedTuple):
    """Gradients of each token's associative loss, as factors: for kernel l, inputs[l]^T deltas[l]."""

    inputs: tuple[Float[Array, "E T I"], ...]  # of each layer
    deltas: tuple[Float[Array, "E T O"], ...]  # gradients at each layer's output
    gain: Float[Array, "E T H"] | None  # gradient with respect to the residual norm's gain


class Coefficients(NamedTuple):
    """Coefficients of W_t and S_t in the closed form; the names are those of the module's formulas."""

    beta: Float[Array, "E T"] | None  # decay of W_0; None = no forgetting, all 1
    f: Float[Array, "E T"] | None  # weight of S_0 in W_t; None = no momentum
    p: Float[Array, "E T"] | None  # decay of S_0; None = no momentum
    c: Float[Array, "E T T"]  # weight of token i's step in W_t
    e: Float[Array, "E T"]  # weight of token i's step in S_T of the last token


def coefficients(tokens: Tokens, *, read: str = "token") -> Coefficients:
    """Compute coefficients beta, f, P, C and E of a chunk's tokens from their decay gates.

    They cover every token, or with read = "chunk" only the last one, [E 1 ...] each. Ratios are exponentials of
    differences of cumulative sums of logarithms, so they never over- or underflow.
    """
    tokens = _without_padding(tokens)
    length, dtype = tokens.theta.shape[1], tokens.theta.dtype
    first = length - 1 if read == "chunk" else 0
    beta, retained = _cumulative_products(tokens.log_keep, first, length, dtype)
    retained = jnp.broadcast_to(retained, (len(tokens.theta), *retained.shape[1:]))
    if tokens.is_token is not None:
        # W_t adds S_t at tokens, never at padding.
        retained = jnp.where(tokens.is_token[:, None, :], retained, jnp.zeros((), dtype))
    if tokens.log_eta is None:
        last = (jnp.arange(length) == length - 1).astype(dtype)
        return Coefficients(beta, None, None, retained, jnp.broadcast_to(last[None], tokens.theta.shape))
    p, e = _cumulative_products(tokens.log_eta, 0, length, dtype)
    f = jnp.sum(retained * p[:, None, :], axis=-1)
    return Coefficients(beta, f, p[:, first:], jnp.matmul(retained, e), e[:, -1])


def _cumulative_products(
    log: Float[Array, "E T"] | None, first: int, length: int, dtype: jnp.dtype
) -> tuple[Float[Array, "E S"] | None, Float[Array, "_ S T"]]:
    """Products of decays x from their logarithms: prod_(l <= t) x_l, and prod_(i < l <= t) x_l, 0 where i > t.

    The S = T - first rows are those of t = first and later; log = None stands for x = 1 in every memory, [1 S T].
    """
    is_past = jnp.tril(jnp.ones((1, length, length), bool))[:, first:]
    if log is None:
        return None, is_past.astype(dtype)
    total = jnp.matmul(log, jnp.triu(jnp.ones((length, length), dtype)), precision="highest")
    ratio = jnp.where(is_past, total[:, first:, None] - total[:, None, :], jnp.asarray(-jnp.inf, dtype))
    return jnp.exp(total)[:, first:] if first else jnp.exp(total), jnp.exp(ratio)


def _without_padding(tokens: Tokens) -> Tokens:
    """Set the gates of padding to theta = 0, eta = 1 and alpha = 0, which change neither weights nor momentum."""
    if tokens.is_token is None:
        return tokens
    zero = jnp.zeros((), tokens.theta.dtype)
    gates = {name: getattr(tokens, name) for name in ("theta", "log_eta", "log_keep")}
    gates = {name: None if x is None else jnp.where(tokens.is_token, x, zero) for name, x in gates.items()}
    return tokens._replace(**gates)


def activate(kind: str, z: Float[Array, "E T I"]) -> Float[Array, "E T I"]:
    """Activation by name: gelu (tanh approximation), gelu_erf (exact) or silu."""
    if kind == "silu":
        return z * jax.nn.sigmoid(z)
    if kind == "gelu_erf":
        return z * _normal_cdf(z)
    return 0.5 * z * (1.0 + jnp.tanh(GELU[0] * (z + GELU[1] * z * z * z)))


def activation_derivative(kind: str, z: Float[Array, "E T I"]) -> Float[Array, "E T I"]:
    """Derivative of `activate` with respect to its input."""
    if kind == "silu":
        gate = jax.nn.sigmoid(z)
        return gate * (1.0 + z * (1.0 - gate))
    if kind == "gelu_erf":
        return _normal_cdf(z) + z * jnp.exp(-0.5 * z * z) / ROOT_TAU
    tanh = jnp.tanh(GELU[0] * (z + GELU[1] * z * z * z))
    return 0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * GELU[0] * (1.0 + 3.0 * GELU[1] * z * z)


def _normal_cdf(z: Float[Array, "E T I"]) -> Float[Array, "E T I"]:
    """Cumulative distribution function of the standard normal distribution."""
    return 0.5 + 0.5 * lax.erf(ROOT_HALF * z)


def _layer_norm(x: Float[Array, "E T H"], eps: float) -> tuple[Float[Array, "E T H"], Float[Array, "E T 1"]]:
    """LayerNorm over the last axis without scale or bias, and 1 / its standard deviation."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred * inverse, inverse


def recall(weights: Weights, query: Float[Array, "E T H"], rule: Rule) -> Float[Array, "E T H"]:
    """Read-out of memories with fixed weights, M_W(q) of each query (Titans, eq. 15); nothing is written."""
    hidden = query
    for i, kernel in enumerate(weights.kernels):
        hidden = multiply(activate(rule.activation, hidden) if i else hidden, kernel)
    if weights.gain is None:
        return hidden
    return _layer_norm(hidden, rule.norm_eps)[0] * (1.0 + weights.gain[:, None, :]) + query


def surprise(
    weights: Weights, key: Float[Array, "E T H"], value: Float[Array, "E T H"], rule: Rule
) -> tuple[Surprise, Float[Array, "E T"]]:
    """Gradient in W of each token's associative loss ||M_W(k) - v||^2 (Titans, eq. 12 and 16), and its squared norm."""
    inputs, hidden = [key], []
    for i, kernel in enumerate(weights.kernels):
        if i:
            inputs.append(activate(rule.activation, hidden[-1]))
        hidden.append(multiply(inputs[-1], kernel))
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
        projected = jnp.mean(scaled, axis=-1, keepdims=True) + normal * jnp.mean(
            scaled * normal, axis=-1, keepdims=True
        )
        delta = inverse * (scaled - projected)
    # Backpropagation through the layers.
    deltas = [delta]
    for i in reversed(range(1, len(weights.kernels))):
        back = multiply_transposed(deltas[0], weights.kernels[i])
        deltas.insert(0, back * activation_derivative(rule.activation, hidden[i - 1]))
    # An outer product's squared 2-norm is the product of its factors' squared 2-norms.
    squared_norm = sum(_squared_norm(a) * _squared_norm(delta) for a, delta in zip(inputs, deltas, strict=True))
    squared_norm = squared_norm if gain is None else squared_norm + _squared_norm(gain)
    return Surprise(tuple(inputs), tuple(deltas), gain), squared_norm


def _squared_norm(x: Float[Array, "E T H"]) -> Float[Array, "E T"]:
    return jnp.sum(x * x, axis=-1)


def learn(
    anchor: Weights,
    weights: Weights,
    momentum: Weights,
    tokens: Tokens,
    rule: Rule,
    coeffs: Coefficients | None = None,
) -> tuple[Float[Array, "E T H"], Weights, Weights]:
    """Write a chunk's tokens into their memories (Titans, eq. 13, 14 and 16) and read each token out (eq. 15).

    Args:
      anchor: weights A at the start of the chunk, where all gradients are taken.
      weights: W_0, before the first of these tokens, which may lie inside the chunk.
      momentum: S_0, likewise.
      coeffs: the tokens' coefficients; None = computed here.

    Returns:
      Each token's read-out, and the weights and the momentum after the last token.
    """
    gradients, squared_norm = surprise(anchor, tokens.key, tokens.value, rule)
    coeffs = coefficients(tokens, read=rule.read) if coeffs is None else coeffs
    theta = _without_padding(tokens).theta
    if rule.max_update_norm is not None:
        # Each token's gradient is clipped before the sum over tokens, which keeps read-outs causal.
        limit = rule.max_update_norm
        theta = theta * limit * lax.rsqrt(jnp.maximum(squared_norm, limit * limit))
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
        ones = jnp.ones((*theta.shape, 1), theta.dtype)
        gain = _write(weights.gain[:, None, :], momentum.gain[:, None, :], ones, gradients.gain, shares, last)
        gain = tuple(x[:, 0] for x in gain)
    return output, Weights(kernels, gain[0]), Weights(momenta, gain[1])


def _of_previous_token(coeffs: Coefficients) -> Coefficients:
    """Shift coefficients by one token: those of W_(t-1), the weights before token t is written."""

    def shifted(x: Float[Array, "E T ..."] | None, first: float) -> Float[Array, "E T ..."] | None:
        if x is None:
            return None
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)), constant_values=first)

    beta, f, p, c, e = coeffs
    return Coefficients(shifted(beta, 1.0), shifted(f, 0.0), shifted(p, 1.0), shifted(c, 0.0), e)


def _write(
    kernel: Float[Array, "E I O"],
    momentum: Float[Array, "E I O"],
    inputs: Float[Array, "E T I"],
    deltas: Float[Array, "E T O"],
    shares: tuple[Float[Array, "E T"], Float[Array, "E T"]],
    last: Coefficients,
) -> tuple[Float[Array, "E I O"], Float[Array, "E I O"]]:
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
    inputs: Float[Array, "E T I"],
    deltas: Float[Array, "E T O"],
    shares: tuple[Float[Array, "E T"], Float[Array, "E T"]],
) -> tuple[Float[Array, "E I O"], Float[Array, "E I O"]]:
    """Sums over tokens of the gradients inputs_i^T deltas_i under two weightings.

    Both sums are one product, whose narrower operand is the concatenation of its two weighted copies.
    """
    if inputs.shape[2] <= deltas.shape[2]:
        weighted = jnp.concatenate([inputs * share[:, :, None] for share in shares], axis=2)
        first, second = jnp.split(outer(weighted, deltas), 2, axis=1)
    else:
        weighted = jnp.concatenate([deltas * share[:, :, None] for share in shares], axis=2)
        first, second = jnp.split(outer(inputs, weighted), 2, axis=2)
    return first, second


def _read_out(
    weights: Weights,
    momentum: Weights,
    query: Float[Array, "E T H"],
    gradients: Surprise,
    coeffs: Coefficients,
    theta: Float[Array, "E T"],
    rule: Rule,
) -> Float[Array, "E T H"]:
    """Read-out M_(W_t)(q_t) of each token at its own weights, without forming them.

    In every layer, with h its input at q_t,

        h W_t = beta_t h W_0 + f_t h S_0 - sum_i C[t, i] theta_i (h . a_i) delta_i

    whose sum is a causal attention over the chunk's tokens with keys a_i and values delta_i.
    """
    shares = coeffs.c * theta[:, None, :]  # C[t, i] theta_i

    def combined(
        decayed: Float[Array, "E _ O"], carried: Float[Array, "E _ O"], written: Float[Array, "E T O"]
    ) -> Float[Array, "E T O"]:
        decayed = decayed if coeffs.beta is None else coeffs.beta[:, :, None] * decayed
        return (decayed if coeffs.f is None else decayed + coeffs.f[:, :, None] * carried) - written

    hidden = query
    for i, (kernel, kernel_momentum) in enumerate(zip(weights.kernels, momentum.kernels, strict=True)):
        hidden = activate(rule.activation, hidden) if i else hidden
        scores = shares * multiply_transposed(hidden, gradients.inputs[i])
        written = multiply(scores, gradients.deltas[i])
        hidden = combined(multiply(hidden, kernel), multiply(hidden, kernel_momentum), written)
    if weights.gain is None:
        return hidden
    gain = combined(weights.gain[:, None, :], momentum.gain[:, None, :], jnp.matmul(shares, gradients.gain))
    return _layer_norm(hidden, rule.norm_eps)[0] * (1.0 + gain) + query
