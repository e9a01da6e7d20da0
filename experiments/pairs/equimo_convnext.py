"""ConvNeXt of equimo (Equinox) and of timm, each with its own defaults.

Command: python -m jaxbench pair experiments/pairs/equimo_convnext.py     (needs equimo, timm and torchvision)
Expected: 60 seconds, exit code 1: the outputs differ by 6e-8. equimo computes its inner norms in float32, and has the
tanh form of GELU where timm has the erf form, which a layer scale of 1e-6 hides from the outputs; both are named. Given
by hand: that equimo takes one image. All 65 arrays are matched, under other names.
"""

import jax
import numpy as np
from equimo.models.convnext import ConvNeXt
from timm.models import convnext

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both networks of five blocks, on two images of 64 x 64."""
    sizes = {"num_classes": 10, "depths": [1, 1, 2, 1], "dims": [16, 32, 48, 64]}
    network = ConvNeXt(in_channels=3, key=jax.random.key(0), **sizes)
    image = np.random.default_rng(0).standard_normal((2, 3, 64, 64))
    return jaxbench.Pair(network, convnext.ConvNeXt(in_chans=3, **sizes), image, per_example=True)
