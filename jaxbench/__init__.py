"""jaxbench: LLM research systems in JAX/Flax, proven equal to a PyTorch reference and compared with it.

For any pair of models: `compare`, `assert_same_function`, `speed`, `Pair`, `Rule`, `tap` and `widened`, see
docs/your_own_pair.md.
"""

_PAIR = {
    "compare": "compare",
    "assert_same_function": "compare",
    "Pair": "public_types",
    "Rule": "rules",
    "speed": "speed",
    "tap": "jax_model",
    "widened": "widening",
}


def __getattr__(name: str) -> object:
    """Import a public name of jaxbench.pair on first use, so that command lines start without loading it."""
    import importlib

    if name not in _PAIR:
        raise AttributeError(f"module 'jaxbench' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxbench.pair.{_PAIR[name]}"), name)
