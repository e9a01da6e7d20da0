"""Counter-based random numbers in PyTorch: the streams of jaxbench/philox.py, bit for bit. Twin: jaxbench/prng.py.

Words are int64 tensors with values in [0, 2**32): PyTorch has no arithmetic on unsigned 32-bit integers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from jaxbench import philox


def key_from_seed(seed: int, *, device: str = "cpu") -> Int64[Tensor, "2"]:
    """Philox key of a seed: its low and high 32-bit halves.

    Raises:
      ValueError: seed is outside [0, 2**64).
    """
    return torch.tensor(philox.split_seed(seed), dtype=torch.int64, device=device)


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x without leaving signed 64 bits."""
    low, high = x * (constant & 0xFFFF), x * (constant >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & philox.MASK32


def philox4x32(counter: tuple[Tensor, ...], key: Int64[Tensor, "2"]) -> tuple[Tensor, ...]:
    """Philox 4x32-10: the four 32-bit words of each counter (four broadcastable int64 tensors)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key[0], key[1]
    for _ in range(philox.ROUNDS):
        high0, low0 = _multiply(philox.MULTIPLIERS[0], c0)
        high1, low1 = _multiply(philox.MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + philox.WEYL[0]) & philox.MASK32, (k1 + philox.WEYL[1]) & philox.MASK32
    return c0, c1, c2, c3


def words(
    key: Int64[Tensor, "2"], *, step: Tensor | int, site: int, rows: Int[Tensor, " B"], num_elements: int
) -> Int64[Tensor, "B E"]:
    """Random 32-bit words of elements 0..E-1 of each row, modulo 2**32; a block of four comes from one counter."""
    stacked = torch.stack(lanes(key, step=step, site=site, rows=rows, num_elements=num_elements), dim=-1)
    return stacked.reshape(rows.shape[0], -1)[:, :num_elements]


def lanes(
    key: Int64[Tensor, "2"], *, step: Tensor | int, site: int, rows: Int[Tensor, " B"], num_elements: int
) -> tuple[Tensor, ...]:
    """Random words (`words`) as four tensors [B ceil(E / 4)]: tensor j holds elements j, j + 4, j + 8, .."""
    blocks = torch.arange(-(-num_elements // 4), dtype=torch.int64, device=key.device)[None, :]
    blocks, rows = torch.broadcast_tensors(blocks, rows.to(torch.int64)[:, None] & philox.MASK32)
    counter = (blocks, rows, torch.zeros_like(blocks) + step, torch.full_like(blocks, site))
    return philox4x32(counter, key)


def exponential(words: Int64[Tensor, "*shape"], *, dtype: str = "float32") -> Float[Tensor, "*shape"]:
    """Exponentials -log(uniform) of random words, finite and positive for every word, as jaxbench.prng.exponential."""
    k = words >> 8
    is_low = k < 2**23
    low = (torch.where(is_low, k, 0).to(getattr(torch, dtype)) + 0.5) * 2.0**-24
    complement = (torch.where(is_low, 0, 2**24 - 1 - k).to(getattr(torch, dtype)) + 0.5) * 2.0**-24
    return torch.where(is_low, -torch.log(low), -torch.log1p(-complement))


def keep_mask(words: Int64[Tensor, "*shape"], rate: float) -> Bool[Tensor, "*shape"]:
    """Dropout mask, True where a value survives: uniform >= rate, compared as integers, so equal in every dtype."""
    return (words >> 8) >= max(0, math.ceil(rate * 2**24 - 0.5))
