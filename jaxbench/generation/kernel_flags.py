"""Flags of the commands that decode: which kernels, in which number types (S file)."""

from __future__ import annotations

from absl import flags

from jaxbench.generation import decoder

VALUES = flags.FLAGS


def define() -> None:
    """Define --kernels, --weights, --cache, --activations and --threads."""
    flags.DEFINE_enum("kernels", "auto", list(decoder.KERNELS), "what decodes: auto takes native kernels on a CPU")
    about = "number type of the weights (unset: the file's own; with xla the configuration's dtype, or float32)"
    flags.DEFINE_enum("weights", None, list(decoder.WEIGHTS), about)
    flags.DEFINE_enum("cache", None, list(decoder.CACHES), "of keys and values; native kernels only")
    flags.DEFINE_enum("activations", None, list(decoder.ACTIVATIONS), "of the products; native kernels only")
    flags.DEFINE_integer("threads", None, "at most, 0 = all; native kernels only", lower_bound=0)


def options() -> decoder.Options:
    """What the flags ask for."""
    return decoder.Options(**{name: VALUES[name].value for name in decoder.Options._fields})


def check_idle(why: str) -> None:
    """Check that none of the flags was given to a command that does not decode this time.

    Raises:
      ValueError: one was.
    """
    for name in decoder.Options._fields:
        if VALUES[name].present:
            raise ValueError(f"--{name}={VALUES[name].value} does nothing: {why}; leave it out")
