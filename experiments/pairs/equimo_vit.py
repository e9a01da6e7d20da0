"""The Vision Transformer of equimo (Equinox) and of timm, each with what it is called by default.

Command: python -m jaxbench pair experiments/pairs/equimo_vit.py     (needs equimo, timm and torchvision)
Expected: 40 seconds, exit code 1: equimo's presets have the tanh form of GELU and eps 1e-5 where timm has the erf form
and 1e-6; both are named. With act_layer="exactgelu" and eps=1e-6 a difference of 2e-8 remains: its attention computes
the softmax in float32. Given by hand: that equimo takes one image. All 32 arrays are matched.
"""

import jax
import numpy as np
from equimo.models.vit import VisionTransformer
from timm.models import vision_transformer

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both networks of two blocks, on two images of 32 x 32."""
    sizes = {"img_size": 32, "patch_size": 8, "num_heads": 3, "num_classes": 10}
    network = VisionTransformer(
        in_channels=3, dim=48, depths=[2], reg_tokens=0, global_pool="token", key=jax.random.key(0), **sizes
    )
    twin = vision_transformer.VisionTransformer(embed_dim=48, depth=2, **sizes)
    image = np.random.default_rng(0).standard_normal((2, 3, 32, 32))
    return jaxbench.Pair(network, twin, image, per_example=True)
