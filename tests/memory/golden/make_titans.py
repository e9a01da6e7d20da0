"""Write titans.json, what titans-pytorch 0.5.5 itself answers in float64:

make peers
.venvs/titans/bin/python tests/memory/golden/make_titans.py

Its memory as it comes (two layers of erf GELU behind a norm, momentum and forgetting, mean loss, norms before the
projections), with what it needs to be Titans' rule: `batch_size`, so that gradients are taken at the weights where a
chunk began, and gates of single tokens, which it has with `chunk_size=1`. Its gate of a head's answer, which jaxbench
has not, is held at a half. Initial values are drawn anew, rounded, so that every part shows and the file is small.
"""

import json
from pathlib import Path

import torch
from titans_pytorch import NeuralMemory

SHAPE = {"dim": 6, "heads": 2, "dim_head": 3}
ROWS, LENGTH, BATCH_SIZE = 2, 7, 3


def build(**options) -> NeuralMemory:
    """Return a memory with random weights."""
    model = NeuralMemory(**SHAPE, **options).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "gamma" in name else 0.7
            centre = 1.0 if name in ("store_norm.weight", "retrieve_norm.weight") else 0.0
            values = centre + scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(torch.round(values, decimals=3))
        model.retrieve_norm.weight.copy_(model.store_norm.weight)  # jaxbench's layer gets one normalised stream
        model.retrieve_gate[0].weight.zero_()
    return model


def read(model: NeuralMemory, x: torch.Tensor) -> dict:
    """Return answers, the last weights, and the gradient of sum(sin(answers)) by the stream."""
    x = x.clone().requires_grad_()
    answers, state = model(x)
    answers.sin().sum().backward()
    weights = {name: value.tolist() for name, value in state.states[0].items()}
    return {"answers": answers.tolist(), "weights": weights, "gradient": x.grad.tolist()}


def read_before_write(model: NeuralMemory, x: torch.Tensor) -> list:
    """Return answers of each token to the weights before it, through the peer's own calls, a token at a time."""
    answers, state, weights = [], None, model.init_weights(len(x))
    for token in x.split(1, dim=1):
        answers.append(model.retrieve_memories(token, {name: value[:, None] for name, value in weights.items()}))
        _, state = model(token, state=state)
        weights = state.states[0]
    return torch.cat(answers, dim=1).tolist()


def main() -> None:
    """Write the file."""
    generator = torch.Generator().manual_seed(1)
    x = torch.round(torch.randn(ROWS, LENGTH, SHAPE["dim"], generator=generator, dtype=torch.float64), decimals=3)
    model = build(chunk_size=1, batch_size=BATCH_SIZE)
    parameters = {name: value.tolist() for name, value in model.named_parameters()}
    found = {"x": x.tolist(), "parameters": parameters, "batch_size": BATCH_SIZE, "token": read(model, x)}
    with torch.no_grad():
        found["before"] = read_before_write(model, x)
        # With chunks of several tokens it shares momentum and forgetting over a chunk; without both it is jaxbench's.
        chunked = build(chunk_size=BATCH_SIZE, batch_size=BATCH_SIZE, momentum=False)
        own = dict(model.named_parameters())
        for name, parameter in chunked.named_parameters():
            parameter.copy_(own[name])
        chunked.to_decay_factor[0].weight.zero_()
        chunked.to_decay_factor[0].bias.fill_(-1000.0)
        found["chunk"] = chunked(x)[0].tolist()
    Path(__file__).with_name("titans.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
