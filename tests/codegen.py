"""Plain code generation, for files that judge what is computed, not its speed or memory: a third of the compile time.

XLA's passes over the program are the same, and so are nearly all fusions. What is left out is how loops become machine
code: the fusion emitters, which go through MLIR, and LLVM's optimisations. A tiny case's gradient takes 4.5 s of CPU
time to compile with both, 0.8 with neither, and 2.7 without LLVM's alone; a training step 3.4, 1.0 and 1.7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Compile every program of the block that way. JAX has no setting for it: options belong to a single program."""
    import jax
    from jax._src import compiler

    from jaxbench.parity import meshes

    original = compiler.get_compile_options

    def with_options(*given: Any, env_options_overrides: dict[str, Any] | None = None, **how: Any) -> Any:
        wanted = meshes.FAST_COMPILE | (env_options_overrides or {})
        return original(*given, env_options_overrides=wanted, **how)

    compiler.get_compile_options = with_options
    try:
        yield
    finally:
        compiler.get_compile_options = original
        jax.clear_caches()  # nothing that was compiled here is met by other tests
