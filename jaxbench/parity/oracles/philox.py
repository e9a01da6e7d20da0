"""The random streams versus Random123's known answers, XLA's own Philox, and scipy's distributions."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import scipy.stats
import torch

import torch_ref.functional
from jaxbench import functional, philox, prng
from jaxbench.parity import cases, gates
from torch_ref import prng as torch_prng

ONES = 0xFFFFFFFF
# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, words.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
CRC32_CHECK = {"123456789": 0xCBF43926}  # the check value of CRC-32/ISO-HDLC in every catalogue of checksums
STEP, SITE, ROWS, COUNT = 5, "layers.3.mlp.dropout", (0, 7, 2**31 - 1), 19
SEED = (philox.site_id(SITE) << 32) | STEP  # XLA's counter ends with the key, so ours must too
MANY = 20_000
RATE, LAYERS, SHAPE = 0.1, 2, (4, 64, 32)  # of dropout: rate, layers, and axes [B T D] of what it acts on


def gates_of(case: cases.Case) -> list[gates.Gate]:
    """Gates of words, sites, uniform and normal values, and of dropout's masks."""
    known = np.array([words for _, _, words in KNOWN_ANSWERS], np.int64).T
    xla = np.stack([xla_words(SEED, row, COUNT) for row in ROWS])
    answers, streams = _answers(), _streams()
    uniforms = philox.uniform(philox.words(1, step=0, site="oracle", rows=np.zeros(1), num_elements=MANY)[0])
    normals = philox.normal(1, step=0, site="oracle", num_elements=MANY)
    ends = np.array([0, 0xFF, 0x100, ONES], np.uint32)
    reflected = {"uniform of w + uniform of not w": philox.uniform(ends) + philox.uniform(~ends)}
    drawn = philox.normal(SEED, step=STEP, site=SITE, num_elements=8)
    sites = {name: philox.site_id(name) for name in CRC32_CHECK}
    ks = "scipy.stats.kstest"
    return [
        gates.oracle("Philox 4x32-10", answers, dict.fromkeys(answers, known),
                     source="Random123 1.14, kat_vectors", tolerance=0.0),
        gates.oracle("stream of a seed, step, site and row", streams, dict.fromkeys(streams, xla),
                     source=f"XLA's RngBitGenerator, jax {jax.__version__}", tolerance=0.0),
        gates.oracle("number of a site", sites, CRC32_CHECK, source="check value of CRC-32", tolerance=0.0),
        gates.oracle("uniform values lie evenly", reflected, dict.fromkeys(reflected, np.ones(4)),
                     source="reflection of (0, 1)", tolerance=0.0),
        gates.oracle("normal values", {"site": drawn}, {"site": _box_muller(8)},
                     source="Box and Muller 1958, of XLA's words by scipy's Rayleigh quantile", tolerance=1e-12),
        gates.chance("uniform distribution", {"20,000": scipy.stats.kstest(uniforms, "uniform").pvalue}, source=ks),
        gates.chance("normal distribution", {"20,000": scipy.stats.kstest(normals, "norm").pvalue}, source=ks),
        *(gate for library in (functional, torch_ref.functional) for gate in _dropout(library)),
    ]  # fmt: skip


def _dropout(library: Any) -> list[gates.Gate]:
    """Gates of one backend's dropout: what is kept grows by 1 / (1 - rate); no two masks of a model are alike."""
    name, is_torch = library.__name__.partition(".")[0], library is torch_ref.functional
    ones = torch.ones(SHAPE, dtype=torch.float64) if is_torch else jnp.ones(SHAPE)
    key = (torch_prng if is_torch else prng).key_from_seed(SEED)
    sites = {f"layer {i} {part}": site for i, pair in enumerate(philox.dropout_sites(LAYERS))
             for part, site in zip(("attention", "mlp"), pair)}  # fmt: skip
    first = sites["layer 0 attention"]
    places = {where: (STEP, site) for where, site in sites.items()} | {"the next step": (STEP + 1, first)}
    kept = {
        where: np.asarray(library.dropout(ones, RATE, library.DropoutStream(key, step), site=site))
        for where, (step, site) in places.items()
    }
    values = {where: x[x != 0.0] for where, x in kept.items()}
    wanted = {where: np.full(len(x), 1.0 / (1.0 - RATE)) for where, x in values.items()}
    shares = {where: scipy.stats.binomtest(len(x), ones.shape.numel() if is_torch else ones.size, 1.0 - RATE).pvalue
              for where, x in values.items()}  # fmt: skip
    rows = {f"{where}, row {row}": x[row].ravel() for where, x in kept.items() for row in range(2)}
    alike = {
        f"{a} and {b}": float(scipy.stats.pearsonr(rows[a], rows[b]).pvalue) for a, b in itertools.combinations(rows, 2)
    }
    return [
        gates.oracle(f"{name}: what dropout keeps", values, wanted, source="Srivastava et al. 2014, inverted"),
        gates.chance(f"{name}: shares that dropout keeps", shares, source="scipy.stats.binomtest"),
        gates.chance(f"{name}: dropout's masks are independent", alike, source="scipy.stats.pearsonr"),
    ]


def _answers() -> dict[str, np.ndarray]:
    """Words for the known answers' counters and keys by each of the three implementations, [words answers]."""
    counters, keys = (np.array(part, np.uint32).T for part in list(zip(*KNOWN_ANSWERS, strict=True))[:2])
    in_numpy = philox.philox4x32(tuple(counters), tuple(keys))
    in_jax = jax.jit(lambda counter, key: prng.philox4x32(counter, key))(
        tuple(map(jnp.array, counters)), jnp.array(keys)
    )
    in_torch = torch_prng.philox4x32(*(torch.from_numpy(part.astype(np.int64)) for part in (counters, keys)))
    return {"numpy": np.stack(in_numpy), "jax": np.stack(in_jax), "torch": torch.stack(in_torch).numpy()}


def _streams() -> dict[str, np.ndarray]:
    """Words of a seed, step, site and rows by each of the three implementations, [rows COUNT]."""
    how, site = {"step": STEP, "num_elements": COUNT}, philox.site_id(SITE)
    in_numpy = philox.words(SEED, site=SITE, rows=np.array(ROWS), **how)
    in_jax = jax.jit(lambda key, rows: prng.words(key, site=site, rows=rows, **how))(
        prng.key_from_seed(SEED), jnp.array(ROWS)
    )
    in_torch = torch_prng.words(torch_prng.key_from_seed(SEED), site=site, rows=torch.tensor(ROWS), **how)
    return {"numpy": in_numpy, "jax": np.asarray(in_jax), "torch": in_torch.numpy()}


def xla_words(seed: int, row: int, count: int) -> np.ndarray:
    """Words from XLA, whose counter is (block, row, the key's two halves)."""
    with jax.enable_x64(True):
        state = jnp.array([seed, row << 32], jnp.uint64)
        blocks = -(-count // 4) * 4
        philox_kind = jax.lax.RandomAlgorithm.RNG_PHILOX
        return np.asarray(jax.lax.rng_bit_generator(state, (blocks,), jnp.uint32, algorithm=philox_kind)[1])[:count]


def _box_muller(count: int) -> np.ndarray:
    pairs = philox.uniform(xla_words(SEED, 0, 2 * count)).reshape(count, 2)
    return scipy.stats.rayleigh.isf(pairs[:, 0]) * scipy.special.cosdg(360.0 * pairs[:, 1])
