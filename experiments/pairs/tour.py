# %% [markdown]
# A port of an encoder block with one planted bug: compare, see what is to blame, fix it, prove it, time it.
#
# Run it as a whole, `python experiments/pairs/tour.py` (a minute; `--fast` limits the timing to two short launches), or
# cell by cell in an editor that knows `# %%`. With `pair()` below, it is also a file for `python -m jaxbench pair`.
"""A tour of jaxbench.compare and jaxbench.speed on one small block, in cells.

Command: python experiments/pairs/tour.py
Expected: one minute; first "NOT the same function", the MLP blamed and its GELU named, then "the same function" and the
speed of both sides.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "experiments/pairs/tour.py")).resolve().parents[2]))

import jax
import numpy as np
import optax
import torch
from flax import nnx

import jaxbench

# %% The PyTorch module that was ported


class TorchBlock(torch.nn.Module):
    """Norm and MLP with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.act, self.down = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)

    def forward(self, x):
        """Hidden states [B T D]."""
        return x + self.down(self.act(self.up(self.norm(x))))


# %% The port. Flax's gelu is the tanh form by default, PyTorch's the erf form: an error that no shape reveals


class Mlp(nnx.Module):
    """Two layers with a GELU between."""

    def __init__(self, rngs: nnx.Rngs, *, is_mended: bool):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
        self.is_mended = is_mended

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x), approximate=not self.is_mended))


class Block(nnx.Module):
    """The port; eps is given, because Flax's default differs."""

    def __init__(self, rngs: nnx.Rngs, *, is_mended: bool = True):
        self.norm, self.mlp = nnx.LayerNorm(64, epsilon=1e-5, rngs=rngs), Mlp(rngs, is_mended=is_mended)

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


FILE = globals().get("__file__", "experiments/pairs/tour.py")  # a notebook has no __file__
X = np.random.default_rng(0).standard_normal((8, 32, 64))


def pair() -> jaxbench.Pair:
    """Pair the fixed port and its original, with an optimiser for each."""
    optimizers = (optax.adamw(1e-3, weight_decay=1e-2), lambda params: torch.optim.AdamW(params, 1e-3))
    return jaxbench.Pair(Block(nnx.Rngs(0)), TorchBlock(), X, optimizers=optimizers)


# %% Compare. Weights are matched automatically; if the functions differ, the module to blame and why are named

if __name__ == "__main__":
    result = jaxbench.compare(Block(nnx.Rngs(0), is_mended=False), TorchBlock(), X, quick=True)
    print(result)

# %% What was blamed, as data; which weights were matched with which

if __name__ == "__main__":
    print({entry.module: f"{entry.error:.0e}" for entry in result.blamed}, result.causes)
    for guess in result.weights.guesses:
        print(f"{guess.name:18} {guess.rule.text():28} because: {guess.why}")

# %% Fix it, and prove it: outputs, every module, gradients, five AdamW steps in float64, then the narrower types

if __name__ == "__main__":
    print(jaxbench.compare(*pair()[:3], optimizers=pair().optimizers))

# %% How fast is each side? Fresh processes load this file, so the measurement takes a file and not a model

if __name__ == "__main__":
    size = {"launches": 2, "seconds": 0.05} if "--fast" in sys.argv else {"launches": 3, "seconds": 0.2}
    print(jaxbench.speed(FILE, arms=("jax_compiled", "torch_eager"), **size))
