"""Equal paths, numbers as numbers and stacks of layers decide a matching; what nothing decides is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxbench
from jaxbench.pair.first_use import first_uses
from jaxbench.pair.matching import match
from jaxbench.pair.naming import Leaf, equal_paths, natural
from jaxbench.pair.rules import to_torch

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 4, 6))


def leaves(*names, shape=(6, 6), **fields):
    return [Leaf(name, shape, i, **fields) for i, name in enumerate(names)]


def sources(arrays, tensors):
    return {guess.name: guess.rule.sources[0] for guess in match(arrays, tensors).guesses}


def params_of(module):
    """A converted state_dict: nested dictionaries with PyTorch's names."""
    tree = {}
    for name, x in module.state_dict().items():
        *path, last = name.split(".")
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = x.numpy().copy()
    return tree


class Swiglu(torch.nn.Module):
    """Gated layer, which defines what it uses second first."""

    def __init__(self):
        super().__init__()
        self.up_proj, self.gate_proj = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.down_proj = torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


def swiglu(params, x, *, gate="gate_proj", up="up_proj"):
    linear = lambda name, x: x @ params[name]["weight"].T + params[name]["bias"][None, None]
    return linear("down_proj", jax.nn.sigmoid(linear(gate, x)) * linear(up, x))


class LlamaFeedForward(torch.nn.Module):
    """The same layer with the names of Llama's own code, defined in an order of its own."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        return self.w2(torch.sigmoid(self.w1(x)) * self.w3(x))


def test_w1_w2_and_w3_are_gate_down_and_up_so_that_a_swap_is_caught():
    twin, ours = LlamaFeedForward(), params_of(Swiglu())
    right = jaxbench.compare((swiglu, ours), twin, X, dtypes=())
    assert right.passed and "assumed" not in str(right)
    swapped = lambda params, x: swiglu(params, x, gate="up_proj", up="gate_proj")
    assert not jaxbench.compare((swapped, ours), twin, X, dtypes=()).passed


def test_w1_and_w2_alone_say_nothing_of_gates():
    pairs = equal_paths(
        leaves("mlp.up.kernel", "mlp.down.kernel", "mlp.gate.kernel"), leaves("mlp.w1.weight", "mlp.w2.weight")
    )
    assert pairs == set()
    pairs = equal_paths(leaves("mlp.first.kernel"), leaves("mlp.w1.weight", "mlp.w2.weight", "mlp.w3.weight"))
    assert pairs == set()


@pytest.mark.parametrize("weights", ["torch", "own"])
def test_equal_names_are_equal_weights_and_a_swap_of_two_is_caught(weights):
    twin = Swiglu()
    right = jaxbench.compare((swiglu, params_of(twin)), twin, X, weights=weights, dtypes=())
    assert right.passed and "assumed" not in str(right)
    assert {guess.rule.sources[0] for guess in right.weights.guesses if guess.name == guess.rule.sources[0]} == {
        name for name, _ in twin.named_parameters()
    }
    swapped = lambda params, x: swiglu(params, x, gate="up_proj", up="gate_proj")
    assert not jaxbench.compare((swapped, params_of(twin)), twin, X, weights=weights, quick=True).passed


def test_names_of_a_gated_layer_tell_more_than_order_does():
    path = "model.layers.{}.mlp.{}"
    arrays = [path.format(i, f"{word}.kernel") for i in range(2) for word in ("up", "gate")]  # used in another order
    tensors = [path.format(i, f"{word}_proj.weight") for i in range(2) for word in ("gate", "up")]
    found = match(leaves(*arrays, "head.kernel"), leaves(*tensors, "lm_head.weight"))
    wanted = {name: name.replace(".kernel", "_proj.weight") for name in arrays} | {"head.kernel": "lm_head.weight"}
    assert {guess.name: guess.rule.sources[0] for guess in found.guesses} == wanted and found.assumed == ()


def test_two_biases_of_a_cell_keep_their_names():
    names = ("rnn.bias_hh", "rnn.bias_ih")
    tensors = leaves(*names[::-1], shape=(18,))
    assert sources(leaves(*names, shape=(18,)), tensors) == {name: name for name in names}


def test_order_of_use_does_not_overrule_an_equal_name():
    arrays, tensors = leaves("a.kernel", "b.kernel"), leaves("b.weight", "a.weight")
    assert sources(arrays, tensors) == {"a.kernel": "a.weight", "b.kernel": "b.weight"}


def test_numbers_are_compared_as_numbers_and_by_rank():
    names = [f"layers_{i}.kernel" for i in range(12)]
    assert sorted(sorted(names), key=natural) == names
    found = sources(leaves(*sorted(names)), leaves(*(f"layers.{i}.weight" for i in range(12))))
    assert found == {name: name.replace("_", ".").replace("kernel", "weight") for name in names}
    pairs = equal_paths(leaves("conv_0.kernel", "conv_1.kernel"), leaves("conv1.weight", "conv2.weight"))
    assert pairs == {("conv_0.kernel", "conv1.weight"), ("conv_1.kernel", "conv2.weight")}
    assert not equal_paths(leaves("conv_1.kernel", "x"), leaves("conv1.weight", "conv2.weight", "y"))


def test_numbers_that_a_framework_gives_say_nothing():
    made = leaves("linear_1.w", "linear.w", is_counted=True)
    assert equal_paths(made, leaves("linear1.weight", "linear2.weight")) == set()


def test_a_kernel_of_another_layout_is_not_taken_for_its_name():
    arrays = [Leaf("first.kernel", (4, 6), 0, True), Leaf("second.kernel", (6, 4), 1, True)]
    tensors = [Leaf("second.weight", (6, 4), 0), Leaf("first.weight", (4, 6), 1)]
    assert sources(arrays, tensors) == {"first.kernel": "second.weight", "second.kernel": "first.weight"}


class Twelve(torch.nn.Module):
    """Equal layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("name", ["layers", "tower"])
def test_twelve_layers_of_a_dictionary_are_in_the_order_in_which_they_are_used(name):
    params = {f"{name}_{i}": {"kernel": np.ones((6, 6)), "bias": np.ones(6)} for i in range(12)}

    def forward(params, x):
        params = jax.tree.map(lambda p: p.astype(x.dtype), params)  # touches all of them in the dictionary's order
        for i in range(12):
            x = x + jnp.tanh(x @ params[f"{name}_{i}"]["kernel"] + params[f"{name}_{i}"]["bias"][None, None])
        return x

    result = jaxbench.compare((forward, params), Twelve(), X, quick=True)
    assert result.passed, str(result)


def test_uses_are_found_inside_compiled_functions_and_loops():
    inner = jax.jit(lambda a, x: jnp.sin(x) * a)

    def forward(arrays, x):
        a, b, c, d = arrays
        x = inner(d, x.T)
        x = jax.lax.scan(lambda x, _: (x * b, None), x, None, length=2)[0]
        return x + a.T.astype(x.dtype)

    ones = [np.ones((3, 3))] * 4
    assert first_uses(forward, ones, np.ones((3, 3))) == [3, 1, 0, 2]
    assert first_uses(lambda arrays, x: x if arrays[0].sum() > 1 else -x, ones, 1.0) is None


def test_what_only_order_decides_is_said_in_the_verdict():
    params = {word: {"kernel": np.ones((6, 6))} for word in ("alpha", "omega")}
    forward = lambda p, x: jnp.tanh(x @ p["omega"]["kernel"]) @ p["alpha"]["kernel"]
    twin = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Tanh(), torch.nn.Linear(6, 6, bias=False))
    result = jaxbench.compare((forward, params), twin, X, quick=True)
    assert result.passed and "assumed" in str(result)
    assert "omega.kernel = 0.weight, axes (1, 0) (by order of use)" in str(result)
    branching = lambda p, x: forward(p, x) if np.all(p["alpha"]["kernel"] == p["alpha"]["kernel"]) else x
    result = jaxbench.compare((branching, params), twin, X, quick=True)
    assert "(by order of names)" in str(result)  # the function cannot be traced
    named = jaxbench.compare((forward, params), twin, X, {"omega.kernel": "0.weight"}, quick=True)
    assert named.passed and "assumed" not in str(named)


def test_two_raw_parameters_of_one_module_are_no_certainty_for_each_other():
    arrays, tensors = leaves("mlp.one", "mlp.two", "mlp.out"), leaves("mlp.x", "mlp.y", "mlp.out")
    whys = {guess.name: guess.why for guess in match(arrays, tensors).guesses}
    assert whys == {"mlp.one": "order of use", "mlp.two": "order of use", "mlp.out": "name"}


class Layer(torch.nn.Module):
    """Norm and linear layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = torch.nn.LayerNorm(6), torch.nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class Layers(torch.nn.Module):
    """Several of them."""

    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def scanned(params, x, *, reverse=False):
    """The same with the layers in one array."""

    def layer(x, p):
        p = {module: {name: y if y.ndim > 1 else y[None, None] for name, y in own.items()} for module, own in p.items()}
        centred = x - x.mean(-1, keepdims=True)
        h = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["norm"]["scale"] + p["norm"]["bias"]
        return x + jnp.tanh(h @ p["fc"]["kernel"] + p["fc"]["bias"]), None

    return jax.lax.scan(layer, x, params["layers"], reverse=reverse)[0]


@pytest.mark.parametrize("count", [2, 3, 6, 12])
@pytest.mark.parametrize("weights", ["torch", "jax"])
def test_layers_stacked_for_scan_are_joined_along_their_first_axis_in_order(count, weights):
    made = lambda *shape: RANDOM.standard_normal((count, *shape))
    layers = {"fc": {"kernel": made(6, 6), "bias": made(6)}, "norm": {"scale": made(6), "bias": made(6)}}
    result = jaxbench.compare((scanned, {"layers": layers}), Layers(count), X, weights=weights, quick=True)
    assert result.passed, str(result)
    rule = result.weights.rules["layers.fc.kernel"]
    assert rule.joined == 0 and rule.sources == tuple(f"layers.{i}.fc.weight" for i in range(count))
    wrong = lambda params, x: scanned(params, x, reverse=True)
    assert not jaxbench.compare((wrong, {"layers": layers}), Layers(count), X, quick=True).passed


def test_stacks_without_a_name_of_their_own_and_of_fused_tensors_are_found():
    tensors = [leaf for i in range(3) for leaf in leaves(f"net.{i}.weight", shape=(6, 4))]
    rule = match([Leaf("w", (3, 4, 6), 0, True)], tensors).rules["w"]
    assert rule.sources == ("net.0.weight", "net.1.weight", "net.2.weight") and rule.joined == 0
    fused = [Leaf(f"h.{i}.in_proj_weight", (18, 6), i) for i in range(2)]
    arrays = [Leaf(f"h.{name}.kernel", (2, 6, 6), i, True) for i, name in enumerate(("key", "query", "value"))]
    rules = match(arrays, fused).rules
    values = {leaf.name: RANDOM.standard_normal(leaf.shape) for leaf in fused}
    key = np.stack([values[leaf.name][6:12].T for leaf in fused])
    np.testing.assert_array_equal(rules["h.key.kernel"].apply(values), key)


def test_stacked_layers_go_back_to_their_tensors():
    tensors = leaves(*(f"layers.{i}.weight" for i in range(5)), shape=(6, 4))
    found = match([Leaf("layers.kernel", (5, 4, 6), 0, True)], tensors)
    values = {leaf.name: RANDOM.standard_normal(leaf.shape) for leaf in tensors}
    back = to_torch(found.rules, found.to_jax(values), {leaf.name: leaf.shape for leaf in tensors})
    assert all(np.array_equal(back[name], values[name]) for name in values)


def test_heads_of_one_tensor_are_no_stack_of_layers():
    tensors = [*leaves("layers.0.q.bias", "layers.1.q.bias", shape=(4,)), Leaf("out.bias", (8,), 9)]
    arrays = [*leaves("layers.0.q.bias", "layers.1.q.bias", shape=(2, 2)), Leaf("out.bias", (2, 4), 9)]
    assert sources(arrays, tensors) == {leaf.name: leaf.name for leaf in tensors}
