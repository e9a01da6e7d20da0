"""The closed form of a chunk against Titans' recurrence written out token by token, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench.memory import chunk, layout
from jaxbench.memory.chunk import Rule, Tokens, Weights
from tests.memory.oracle import worst

pytestmark = pytest.mark.usefixtures("x64")


# The oracle: one memory, one token after the other, gradients by autodiff


def network(weights, x, rule):
    hidden = x
    for i, kernel in enumerate(weights.kernels):
        if i:
            is_tanh = rule.activation == "gelu"
            hidden = jax.nn.silu(hidden) if rule.activation == "silu" else jax.nn.gelu(hidden, approximate=is_tanh)
        hidden = hidden @ kernel
    if weights.gain is None:
        return hidden
    return jax.nn.standardize(hidden, epsilon=rule.norm_eps) * (1.0 + weights.gain) + x


def recurrence(weights, momentum, tokens, *, size, rule):
    """Read tokens [T ...] of one memory: S = eta S - theta u, W = (1 - alpha) W + S, y = M_W(q)."""

    def loss(weights, key, value):
        return rule.loss_scale * jnp.sum((network(weights, key, rule) - value) ** 2)

    def step(carry, each):
        weights, momentum, anchor = carry
        index, token = each
        anchor = jax.tree.map(lambda a, w: jnp.where(index % size == 0, w, a), anchor, weights)
        update = jax.grad(loss)(anchor, token.key, token.value)
        if rule.max_update_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(update)))
            update = jax.tree.map(lambda u: u * jnp.minimum(1.0, rule.max_update_norm / norm), update)
        eta = 0.0 if token.log_eta is None else jnp.exp(token.log_eta)
        keep = 1.0 if token.log_keep is None else jnp.exp(token.log_keep)
        momentum = jax.tree.map(lambda s, u: eta * s - token.theta * u, momentum, update)
        before, weights = weights, jax.tree.map(lambda w, s: keep * w + s, weights, momentum)
        answer = network({"token": weights, "before": before, "chunk": anchor}[rule.read], token.query, rule)
        return (weights, momentum, anchor), answer

    index = jnp.arange(tokens.key.shape[0])
    (weights, momentum, _), answers = jax.lax.scan(step, (weights, momentum, weights), (index, tokens))
    return answers, weights, momentum


@functools.partial(jax.jit, static_argnames=("size", "rule"))
def recurrences(weights, momentum, tokens, *, size, rule):
    return jax.vmap(functools.partial(recurrence, size=size, rule=rule))(weights, momentum, tokens)


def problem(length, *, widths=(5, 7, 5), gain=False, momentum=True, forgetting=True, seed=0):
    """Return weights, momentum and tokens of three memories, far from any special value."""
    random = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * random.standard_normal(shape))

    def weights(scale):
        kernels = tuple(normal(3, i, o, scale=scale * i**-0.5) for i, o in zip(widths, widths[1:]))
        return Weights(kernels, normal(3, widths[-1], scale=0.3 * scale) if gain else None)

    query, key, value = (normal(3, length, widths[0]) for _ in range(3))
    key, query = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (key, query))
    theta, eta, keep = (jnp.asarray(random.uniform(low, 0.999, (3, length))) for low in (0.0, 0.1, 0.8))
    logs = (jnp.log(eta) if momentum else None, jnp.log(keep) if forgetting else None)
    tokens = Tokens(query, key, value, 0.05 * theta, *logs, None)
    return weights(1.0), weights(0.1) if momentum else jax.tree.map(jnp.zeros_like, weights(0.1)), tokens


@functools.partial(jax.jit, static_argnames=("size", "rule"))
def by_chunks(weights, momentum, tokens, *, size, rule):
    answers, length = [], tokens.key.shape[1]
    for start in range(0, length, size):
        part = layout.tree_map(lambda x, at=slice(start, start + size): x[:, at], tokens)
        answer, weights, momentum = chunk.learn(weights, weights, momentum, part, rule)
        answers.append(answer)
    return jnp.concatenate(answers, axis=1), weights, momentum


RULE = Rule(activation="gelu", loss_scale=1.0, read="token", max_update_norm=None, norm_eps=1e-5)


CASES = [
    (1, 3, {}, {}),
    (4, 11, {"widths": (5, 5)}, {}),
    (16, 25, {"widths": (5, 7, 6, 5), "gain": True}, {"activation": "silu"}),
    (64, 100, {}, {"loss_scale": 0.2}),
    (4, 7, {"momentum": False, "forgetting": False}, {"read": "chunk"}),
    (4, 11, {"gain": True}, {"read": "before", "activation": "gelu_erf"}),
    (4, 7, {"momentum": False, "forgetting": False}, {"read": "before"}),
    (4, 7, {"widths": (5, 7, 7, 7, 5), "gain": True}, {"max_update_norm": 0.7}),
]


@pytest.mark.parametrize(("size", "length", "shape", "rule"), CASES)
def test_the_closed_chunk_equals_the_recurrence(size, length, shape, rule):
    how = {"size": size, "rule": RULE._replace(**rule)}
    given = problem(length, **shape)
    assert worst(by_chunks(*given, **how), recurrences(*given, **how)) < 1e-12


def test_the_recurrence_sees_each_of_its_rules():
    """Each rule moves the oracle's answers far beyond the tolerance, so the test above cannot pass without it."""
    given = problem(6, gain=True)
    first = recurrences(*given, size=4, rule=RULE)
    changed = [{"read": "chunk"}, {"read": "before"}, {"activation": "gelu_erf"}, {"max_update_norm": 0.1}]
    assert min(worst(recurrences(*given, size=4, rule=RULE._replace(**one)), first) for one in changed) > 1e-4
    assert worst(recurrences(*given, size=3, rule=RULE), first) > 1e-4


def test_gradients_through_the_closed_chunk_equal_those_through_the_recurrence():
    given = problem(7, gain=True)

    def loss(run, weights, momentum, tokens):
        leaves = jax.tree.leaves(run(weights, momentum, tokens, size=4, rule=RULE))
        return sum(jnp.sum(jnp.sin(x)) for x in leaves)

    found, wanted = (
        jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1, 2)))(*given) for run in (by_chunks, recurrences)
    )
    assert worst(found, wanted) < 1e-12


def test_long_chunks_neither_overflow_nor_underflow_in_float32():
    """exp(-2000) is 0 in float32: coefficients from ratios of cumulated products would be 0 / 0."""
    tokens = problem(64)[2]
    tokens = tokens._replace(log_keep=jnp.full((3, 64), -40.0), log_eta=jnp.full((3, 64), -30.0))
    tokens = jax.tree.map(lambda x: x.astype(jnp.float32), tokens)
    value, grad = jax.value_and_grad(lambda t: jnp.sum(chunk.coefficients(t).c))(tokens)
    assert float(value) == pytest.approx(3 * 64) and np.isfinite(np.asarray(grad.log_keep)).all()


def test_what_was_read_is_remembered():
    """The loss of the same tokens is lower at the second reading, and that is the inner learning's doing."""
    weights, momentum, tokens = problem(16)
    tokens = tokens._replace(log_keep=None, theta=4.0 * tokens.theta)
    _, after, _ = by_chunks(weights, momentum, tokens, size=16, rule=RULE)

    def loss(weights):
        return float(jnp.mean((chunk.recall(weights, tokens.key, RULE) - tokens.value) ** 2))

    assert loss(after) < 0.9 * loss(weights)
