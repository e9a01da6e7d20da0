"""Watermarks in other decoding loops: transformers' generate, and equal logits from both twins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxbench.watermark import config, host_loop, logits_processor, reference
from jaxbench.watermark.keys import Key
from torch_ref.watermark import host_loop as torch_host_loop
from torch_ref.watermark import logits_processor as torch_logits_processor

VOCAB = 120
KEYS = [Key(1), None, Key(3)]
SIDES = {
    "flax": (host_loop, logits_processor, jnp.asarray),
    "torch": (torch_host_loop, torch_logits_processor, torch.asarray),
}


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, **shape)).eval()


@pytest.mark.parametrize(
    "scheme",
    [
        {"scheme": "kgw", "delta": 8.0},
        {"scheme": "gumbel", "context": {"width": 2}},
        {"scheme": "gumbel", "prf": "vllm"},
        {"scheme": "dip", "alpha": 0.5},
    ],
)
def test_transformers_generate_marks_each_row_under_its_key(llama, scheme):
    from transformers import LogitsProcessorList

    scheme = config.parse_scheme(scheme)
    watermark = torch_logits_processor.Watermark(scheme, vocab_size=VOCAB)
    processor = torch_host_loop.HostLoop(watermark, KEYS, temperature=0.9)
    prompt = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 40, "pad_token_id": 0}
    made = llama.generate(
        prompt, attention_mask=torch.ones_like(prompt), logits_processor=LogitsProcessorList([processor]), **settings
    ).numpy()
    keys = [key or Key(1) for key in KEYS]
    found = reference.evidence(
        scheme, keys, made, np.full(3, made.shape[1]), vocab_size=VOCAB, prompt_lengths=prompt.shape[1]
    )
    for row, key in enumerate(KEYS):
        words = found.words[row][found.scored[row]]
        marked = words > 0.8 * 2**32 if scheme.scheme == "gumbel" else scheme.is_green(words)
        assert (marked.mean() > 0.75) == (key is not None)


@pytest.mark.parametrize("name", ["kgw", "synthid", "dip", "gumbel"])
def test_both_twins_change_the_logits_alike(name):
    random = np.random.default_rng(0)
    loops = [
        host_loop.HostLoop(logits_processor.Watermark(name, vocab_size=VOCAB), KEYS, temperature=0.7),
        torch_host_loop.HostLoop(torch_logits_processor.Watermark(name, vocab_size=VOCAB), KEYS, temperature=0.7),
    ]
    tokens = random.integers(0, VOCAB, (3, 12))
    for length in (2, 6, 12):
        logits = random.standard_normal((3, VOCAB)).astype(np.float32)
        one = np.asarray(loops[0](jnp.asarray(tokens[:, :length]), jnp.asarray(logits)))
        other = loops[1](torch.tensor(tokens[:, :length]), torch.tensor(logits)).numpy()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(one[1], logits[1])
        np.testing.assert_array_equal(other[1], logits[1])


def test_a_loop_compiles_once_and_not_for_each_of_its_tokens():
    watermark, compiled, random = logits_processor.Watermark("kgw", vocab_size=VOCAB), [], np.random.default_rng(0)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        counts = []
        for _ in range(2):
            loop = host_loop.HostLoop(watermark, KEYS)
            for _ in range(4):
                logits = jnp.asarray(random.standard_normal((3, VOCAB)), jnp.float32)
                loop(jnp.zeros((3, 12), jnp.int32), logits)
                counts.append(len(compiled))
    finally:
        jax.monitoring.clear_event_listeners()
    assert 0 < counts[0] and counts[-1] == counts[0], counts


def test_several_sequences_of_one_prompt_are_marked_under_its_key(llama):
    from transformers import LogitsProcessorList

    scheme = config.parse_scheme({"scheme": "kgw", "delta": 8.0})
    processor = torch_host_loop.HostLoop(torch_logits_processor.Watermark(scheme, vocab_size=VOCAB), KEYS)
    prompt = torch.tensor([[1, 2, 3, 4, 5]] * 3)
    made = llama.generate(
        prompt, attention_mask=torch.ones_like(prompt), logits_processor=LogitsProcessorList([processor]),
        num_return_sequences=2, do_sample=True, top_k=0, max_new_tokens=40, pad_token_id=0,
    ).numpy()  # fmt: skip
    assert made.shape == (6, 45) and (made[0] != made[1]).any()
    keys = [key or Key(1) for key in KEYS for _ in range(2)]
    found = reference.evidence(scheme, keys, made, np.full(6, 45), vocab_size=VOCAB, prompt_lengths=5)
    green = [scheme.is_green(found.words[row][found.scored[row]]).mean() > 0.75 for row in range(6)]
    assert green == [True, True, False, False, True, True]


@pytest.mark.parametrize("side", SIDES)
def test_rows_share_keys_evenly_or_not_at_all(side):
    library, marks, array = SIDES[side]
    watermark = marks.Watermark({"scheme": "kgw", "payload_bits": 2}, vocab_size=VOCAB)
    logits, tokens = np.zeros((4, VOCAB), np.float32), np.array([[1, 2]] * 4)
    shared = library.HostLoop(watermark, KEYS[:2], payloads=[3, 0])(array(tokens), array(logits))
    keys = [KEYS[0], KEYS[0], KEYS[1], KEYS[1]]
    spelled = library.HostLoop(watermark, keys, payloads=[3, 3, 0, 0])(array(tokens), array(logits))
    np.testing.assert_array_equal(np.asarray(shared), np.asarray(spelled))
    assert np.asarray(shared)[0].any() and not np.asarray(shared)[2].any()
    with pytest.raises(ValueError, match="4 rows for 3 keys, wanted as many, or a multiple"):
        library.HostLoop(watermark, KEYS)(array(tokens), array(logits))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["gumbel", {"scheme": "gumbel", "prf": "vllm"}, "synthid", "dip", "kgw"])
def test_logits_of_16_bits_are_marked_as_their_values_in_float32_are(scheme, dtype, side):
    library, marks, array = SIDES[side]
    keys = [Key(i) for i in range(64)]
    watermark = marks.Watermark(scheme, vocab_size=VOCAB)
    values = torch.tensor(np.random.default_rng(0).standard_normal((64, VOCAB)), dtype=getattr(torch, dtype))
    tokens, found = np.tile(np.arange(5), (64, 1)), []
    for narrow in (True, False):
        logits = values if narrow else values.float()
        if side == "flax":
            logits = jnp.asarray(values.float().numpy(), dtype if narrow else "float32")
        marked = library.HostLoop(watermark, keys, temperature=0.7)(array(tokens), logits)
        assert marked.dtype == logits.dtype
        found.append(torch.tensor(np.asarray(marked, np.float32)) if side == "flax" else marked.float())
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)
    assert len(set(found[0].argmax(dim=1).tolist())) > 10  # the draws of many keys


@pytest.mark.parametrize("side", SIDES)
def test_a_loop_refuses_another_batch_than_its_first(side):
    library, marks, array = SIDES[side]
    loop = library.HostLoop(marks.Watermark({"scheme": "gumbel", "prf": "vllm"}, vocab_size=VOCAB), [Key(1)])
    loop(array(np.ones((1, 9), np.int64)), array(np.zeros((1, VOCAB), np.float32)))
    for rows, length in ((1, 4), (2, 10)):
        with pytest.raises(ValueError, match=f"{rows} rows of {length} tokens after 1 prompts of 9; a HostLoop serves"):
            loop(array(np.ones((rows, length), np.int64)), array(np.zeros((rows, VOCAB), np.float32)))


def test_a_temperature_of_zero_is_refused_for_schemes_that_draw():
    watermark = torch_logits_processor.Watermark("gumbel", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="gumbel: temperature=0.0 leaves nothing to draw"):
        torch_host_loop.HostLoop(watermark, [Key(1)], temperature=0.0)
