"""A JAX model of any kind as one pure function of named arrays: Flax NNX and Linen, Equinox, Haiku, plain functions.

Calls of its modules can be routed through a handler, handler(name, call, args, kwargs), without changing the model.
Functions without modules mark places with `tap`.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbench.pair.first_use import first_uses
from jaxbench.pair.pair_file import first_line
from jaxbench.parity.capture import ROOT

Handler = Callable[[str, Callable[..., Any], tuple, dict], Any]
Arrays = dict[str, Any]

_handler: contextvars.ContextVar[Handler | None] = contextvars.ContextVar("jaxbench_tap", default=None)


def tap(name: str, x: Any) -> Any:
    """Mark a value inside a function without modules, on either side, for `jaxbench.compare`, and return it unchanged.

    The same name on both sides, or the name of a PyTorch module, states that both compute the same value there.
    """
    handler = _handler.get()
    return x if handler is None else handler(name, lambda value: value, (x,), {})


@contextlib.contextmanager
def tapped(handler: Handler | None) -> Iterator[None]:
    """Route every tap through a handler inside the context."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


class UnknownModel(TypeError):
    """The object given as the JAX side is not a model of a known kind."""


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Re-raise an exception of the caller's model as a ValueError whose one line says what failed."""
    try:
        yield
    except UnknownModel:
        raise
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {first_line(error)}") from error


class JaxModel(NamedTuple):
    """A JAX model split into named arrays and a pure function of them."""

    framework: str
    params: Arrays  # floating arrays by dotted name
    state: Arrays  # batch statistics and the like
    # (params, state, inputs, is_training, handler or None) -> (outputs, state after the call)
    apply: Callable[[Arrays, Arrays, tuple, bool, Handler | None], tuple[Any, Arrays]]
    # For a function: parameter names by first use, empty where unknown; None = other models, whose params are in order
    order: tuple[str, ...] | None = None


class Options(NamedTuple):
    """How to call a JAX model; the defaults call it as model(*inputs)."""

    call: Callable[..., Any] | None = None  # (model, *inputs) -> outputs, for modules not called as model(*inputs)
    by_mode: Mapping[str, Mapping[str, Any]] = {}  # keyword arguments in "eval" and "train"
    key: int = 0  # seed of the random key for initialisers and dropout


def open_model(side: Any, inputs: tuple, options: Options) -> JaxModel:
    """Split a JAX model of any kind into named arrays and a pure function.

    Args:
      side: a Flax NNX or Equinox module, or Equinox's (module, state); a Linen module, or (module, variables); a
        Haiku transformed function, or (transformed, params) or (transformed, params, state); (function, params); or
        a function alone.
      inputs: arguments of one call, for models whose parameters are not initialised yet.
      options: how to call it.

    Raises:
      UnknownModel: side is none of these.
    """
    model, *rest = side if isinstance(side, tuple) and not hasattr(side, "_fields") else (side,)
    for framework, base, take in (
        ("flax.nnx", "Module", _nnx),
        ("flax.linen", "Module", _linen),
        ("equinox", "Module", _equinox),
    ):
        if framework in sys.modules and isinstance(model, getattr(sys.modules[framework], base)):
            return take(model, *rest, inputs=inputs, options=options)
    if type(model).__name__ in ("Transformed", "TransformedWithState"):
        return _haiku(model, *rest, inputs=inputs, options=options)
    if callable(model):
        return _function(model, *rest, inputs=inputs, options=options)
    raise UnknownModel(f"jax_side={type(model).__name__}: not a Flax, Equinox or Haiku model, nor (function, params)")


def _nnx(model: Any, *, inputs: tuple, options: Options) -> JaxModel:
    from flax import nnx

    from jaxbench.training.intercept import intercepted, nnx_modules

    graph, params, random, state = nnx.split(model, nnx.Param, nnx.RngState, ...)

    def named(tree: Any) -> Arrays:
        return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(tree)}

    def filled(tree: Any, arrays: Arrays) -> Any:
        pairs = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(tree)]
        return nnx.from_flat_state(pairs)

    def drawn(variable: Any) -> Any:
        """Return a random stream's variable for this call; options.key, unless 0, is folded into its key."""
        value = variable.get_value()
        is_key = isinstance(variable, nnx.RngKey) and options.key
        return variable.replace(jax.random.fold_in(value, options.key) if is_key else jnp.asarray(value))

    def apply(params_: Arrays, state_: Arrays, inputs: tuple, is_training: bool, handler: Handler | None) -> Any:
        streams = nnx.from_flat_state([(path, drawn(leaf)) for path, leaf in nnx.to_flat_state(random)])
        module = nnx.merge(graph, filled(params, params_), streams, filled(state, state_))
        module.train() if is_training else module.eval()
        watched = intercepted(nnx_modules(module, root=ROOT), handler) if handler else contextlib.nullcontext()
        with watched, tapped(handler):
            result = (options.call or _call)(module, *inputs, **_keywords(options, is_training))
        return result, named(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))

    return JaxModel("flax.nnx", named(params), named(state), apply)


def _linen(model: Any, variables: Any = None, *, inputs: tuple, options: Options) -> JaxModel:
    from flax import linen

    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(options.key)), strict=True))
    if variables is None:
        variables = model.init(keys, *inputs, **_keywords(options, is_training=False))
    collections = {name: dict(_leaves(tree)) for name, tree in variables.items()}
    trees = {name: jax.tree.structure(tree) for name, tree in variables.items()}
    state = {f"{kind}:{name}": x for kind, each in collections.items() if kind != "params" for name, x in each.items()}

    def apply(params: Arrays, state_: Arrays, inputs: tuple, is_training: bool, handler: Handler | None) -> Any:
        filled = {"params": jax.tree.unflatten(trees["params"], [params[name] for name in collections["params"]])}
        for kind in collections.keys() - {"params"}:
            values = [state_[f"{kind}:{name}"] for name in collections[kind]]
            filled[kind] = jax.tree.unflatten(trees[kind], values)

        def interceptor(next_call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return next_call(*args, **kwargs)
            return handler(".".join(context.module.path) or ROOT, next_call, args, kwargs)

        mutable = [kind for kind in collections if kind != "params"] or False
        watched = linen.intercept_methods(interceptor) if handler else contextlib.nullcontext()
        with watched, tapped(handler):
            method = options.call and {"method": options.call}
            result = model.apply(
                filled, *inputs, rngs=keys, mutable=mutable, **(method or {}), **_keywords(options, is_training)
            )
        result, moved = result if mutable else (result, {})
        after = {f"{kind}:{name}": x for kind, tree in moved.items() for name, x in _leaves(tree)}
        return result, state_ | after

    return JaxModel("flax.linen", collections.get("params", {}), state, apply)


def _equinox(model: Any, state: Any = None, *, inputs: tuple, options: Options) -> JaxModel:
    import equinox as eqx

    from jaxbench.training.intercept import equinox_modules, intercepted

    if state is not None and not isinstance(state, eqx.nn.State):
        wanted = "an Equinox model, or (model, state) of eqx.nn.make_with_state"
        raise UnknownModel(f"jax_side=({type(model).__name__}, {type(state).__name__}): wanted {wanted}")
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    tree, names = jax.tree.structure(arrays), [name for name, _ in _leaves(arrays)]
    held, state_tree = jax.tree.flatten(state)
    places = _equinox_state(model, jax.tree.unflatten(state_tree, range(len(held))), held) if held else {}
    named = lambda values: {name: values[i] for name, i in places.items()}

    def apply(params: Arrays, state_: Arrays, inputs: tuple, is_training: bool, handler: Handler | None) -> Any:
        module = eqx.combine(jax.tree.unflatten(tree, [params[name] for name in names]), rest)
        module = eqx.nn.inference_mode(module, value=not is_training)
        # A weakly typed count comes from a Python number: give it the default integer type where the call runs.
        values = [jnp.asarray(x.item()) if x.weak_type and not x.shape else x for x in held]
        for name, i in places.items():
            values[i] = state_[name]
        given = inputs if state is None else (*inputs, jax.tree.unflatten(state_tree, values))
        watched = intercepted(equinox_modules(module, root=ROOT), handler) if handler else contextlib.nullcontext()
        with watched, tapped(handler):
            result = (options.call or _call)(module, *given, **_keywords(options, is_training))
        if state is None:
            return result, state_
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], eqx.nn.State)):
            raise UnknownModel(
                f"jax_side=(model, state): the call returns a {type(result).__name__}, wanted (outputs, state); give "
                "the model alone where it has no state"
            )
        return result[0], named(jax.tree.leaves(result[1]))

    return JaxModel("equinox", dict(_leaves(arrays)), named(held), apply)


def _equinox_state(model: Any, places: Any, values: list[Any]) -> dict[str, int]:
    """Return indices of an Equinox state's floating arrays, named by module; two of one index are mean and var."""
    import equinox as eqx

    is_index = lambda x: isinstance(x, eqx.nn.StateIndex)
    found: dict[str, int] = {}
    for path, index in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_index)[0]:
        if is_index(index):
            module = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
            own = [i for i in jax.tree.leaves(places.get(index)) if is_floating(values[i])]
            last = ("mean", "var") if len(own) == 2 else [f"{path[-1].name}_{i}" for i in range(len(own))]
            found |= {f"{module}.{name}" if module else name: i for name, i in zip(last, own, strict=True)}
    return found


def _haiku(model: Any, params: Any = None, state: Any = None, *, inputs: tuple, options: Options) -> JaxModel:
    import haiku as hk

    key = jax.random.key(options.key)
    keys = (key,) if "rng" in inspect.signature(model.apply).parameters else ()  # not after hk.without_apply_rng
    has_state = type(model).__name__ == "TransformedWithState"
    if params is None:
        made = model.init(key, *inputs, **_keywords(options, is_training=True))
        params, state = made if has_state else (made, {})
    flat, flat_state = (
        {_haiku_name(f"{m}/{n}"): (m, n) for m, n, _ in _haiku_leaves(t)} for t in (params, state or {})
    )

    def nested(names: Mapping[str, tuple[str, str]], arrays: Arrays) -> dict:
        tree: dict[str, dict] = {}
        for name, (module, leaf) in names.items():
            tree.setdefault(module, {})[leaf] = arrays[name]
        return tree

    def named(names: Mapping[str, tuple[str, str]], tree: Any) -> Arrays:
        return {name: tree[module][leaf] for name, (module, leaf) in names.items()}

    def apply(params_: Arrays, state_: Arrays, inputs: tuple, is_training: bool, handler: Handler | None) -> Any:
        def interceptor(next_call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return next_call(*args, **kwargs)
            return handler(_haiku_name(context.module.module_name), next_call, args, kwargs)

        given = (nested(flat, params_), *((nested(flat_state, state_),) if has_state else ()))
        watched = hk.intercept_methods(interceptor) if handler else contextlib.nullcontext()
        with watched, tapped(handler):
            result = model.apply(*given, *keys, *inputs, **_keywords(options, is_training))
        return (result[0], named(flat_state, result[1])) if has_state else (result, state_)

    return JaxModel("haiku", named(flat, params), named(flat_state, state), apply)


def _haiku_leaves(tree: Any) -> Iterator[tuple[str, str, Any]]:
    for module, leaves in tree.items():
        for name, value in leaves.items():
            yield module, name, value


def _haiku_name(name: str) -> str:
    """Return a dotted name; state in a norm's submodules, norm/~/mean_ema/average, becomes the norm's: norm.mean."""
    name = name.replace("/~/", ".").replace("/", ".")
    return name.replace("_ema.average", "").replace("_ema.", "_")


def _function(function: Callable[..., Any], params: Any = None, *, inputs: tuple, options: Options) -> JaxModel:
    leaves, tree = jax.tree.flatten(params)
    names = [name for name, _ in _leaves(params)]
    arrays = {name: x for name, x in zip(names, leaves, strict=True) if is_floating(x)}

    def called(arrays_: Arrays, inputs: tuple, is_training: bool) -> Any:
        filled = [arrays_.get(name, x) for name, x in zip(names, leaves, strict=True)]  # others stay unchanged
        given = () if params is None else (jax.tree.unflatten(tree, filled),)
        return function(*given, *inputs, **_keywords(options, is_training))

    def apply(params_: Arrays, state: Arrays, inputs: tuple, is_training: bool, handler: Handler | None) -> Any:
        with tapped(handler):
            return called(params_, inputs, is_training), state

    by_place = lambda values: called(dict(zip(arrays, values, strict=True)), inputs, False)
    uses = first_uses(by_place, list(arrays.values()))
    order = () if uses is None else tuple(list(arrays)[i] for i in uses)
    return JaxModel("function", arrays, {}, apply, order)


def _leaves(tree: Any) -> Sequence[tuple[str, Any]]:
    """Return (dotted name, leaf) of every leaf of a tree."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]


def _call(model: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    return model(*inputs, **keywords)


def _keywords(options: Options, is_training: bool) -> dict[str, Any]:
    return dict(options.by_mode.get("train" if is_training else "eval", {}))


def is_floating(x: Any) -> bool:
    """True for a floating or complex array, JAX or numpy."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def as_type(x: Any, dtype: Any) -> jax.Array:
    """Cast a floating array to a type; of a complex one the parts, but to float32 at least."""
    dtype = jnp.dtype(dtype)
    return jnp.asarray(x, jnp.promote_types(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype)
