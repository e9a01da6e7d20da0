"""A small decoder with distinct random weights, and its generator on each of the three backends."""

from jaxbench import initial, sample, transformer
from jaxbench.config import TransformerConfig
from jaxbench.eqx import transformer as eqx_transformer
from torch_ref import sample as torch_sample
from torch_ref import transformer as torch_transformer

VOCAB, NEW = 601, 24  # more than NUM_CANDIDATES, so that top-p's fallback can run
CONFIG = TransformerConfig(
    vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_seq_len=64
)
PARAMS = initial.initial_params(CONFIG, 0, distinct=True)
BACKENDS = {
    "flax": (transformer, sample),
    "equinox": (eqx_transformer, sample),
    "torch": (torch_transformer, torch_sample),
}
PROMPTS = [[1, 2, 3, 4, 5], [7] * 16, [9, 10]]


def make(backend: str, *, eos_id=None, processors=(), **settings):
    build, sampling = BACKENDS[backend]
    model = build.build(CONFIG, PARAMS)
    return sampling.Generator(model, eos_id=eos_id, sampling=sampling.SamplingParams(**settings), processors=processors)
