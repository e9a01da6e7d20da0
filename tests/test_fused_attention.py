"""Splash attention's masks, its program run on the CPU, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbench import fused_attention

HEADS, WIDTH, TOKENS = 2, 8, 7


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_splash_attention_sees_what_order_and_window_allow(is_causal, window):
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(TOKENS, heads, WIDTH)).astype(np.float32) for heads in (HEADS, 1, 1))
    behind = np.arange(TOKENS)[:, None] - np.arange(TOKENS)[None, :]
    mask = (behind >= 0) if is_causal else np.ones_like(behind, bool)
    mask &= behind < (TOKENS if window is None else window)
    scores = np.where(mask, np.einsum("TNH,SH->NTS", query, key[:, 0]) / np.sqrt(WIDTH), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("NTS,SH->TNH", weights / weights.sum(-1, keepdims=True), value[:, 0])
    positions = jnp.arange(TOKENS)[None]
    arrays = query[None], key.transpose(1, 2, 0)[None], value.transpose(1, 0, 2)[None], positions, None
    how = {"sliding_window": window, "mask": None, "is_causal": is_causal, "kernel": "splash", "interpret": True}
    with jax.numpy_rank_promotion("allow"):  # the kernel's own code promotes ranks
        found = fused_attention.attention(*map(lambda x: None if x is None else jnp.asarray(x), arrays), **how)
    np.testing.assert_allclose(found[0], wanted, atol=2e-6)
