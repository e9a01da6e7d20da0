"""ResNet-18 of dm-haiku and of torchvision: a port that differs from its first convolution on (flax issue 2993).

Command: jaxbench pair experiments/pairs/haiku_resnet18.py     (needs dm-haiku and torchvision)
Expected: 30 seconds, exit code 1; none of 122 arrays is named by hand; blames the convolutions of stride 2, whose
padding is (2, 3) in JAX ("SAME") and (3, 3) in PyTorch.
"""

import haiku as hk
import numpy as np
import torch
import torchvision

import jaxbench


def pair() -> jaxbench.Pair:
    """Pair both networks on two images of 64 x 64; the norms' statistics are random, so that they matter."""
    network = hk.transform_with_state(
        lambda x, is_training: hk.nets.ResNet18(10, resnet_v2=False)(x, is_training, test_local_stats=False)
    )
    twin = torchvision.models.resnet18(num_classes=10)
    for module in twin.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return jaxbench.Pair(
        network, twin, np.random.default_rng(0).standard_normal((2, 3, 64, 64)), modes=("eval",),
        jax_inputs=lambda x: (x.transpose(0, 2, 3, 1),),
        jax_modes={"eval": {"is_training": False}, "train": {"is_training": True}},
    )  # fmt: skip
