"""Measure how much TPU memory a reader takes, by compiling its programs for a chip that is not attached.

    python -m jaxbench.hallucination.study.reader_memory --prompt_slots=2048
    python -m jaxbench.hallucination.study.reader_memory --reader=llama2_7b --offload_layers=32

Weights are shapes without values. Prints a line of JSON per program, in bytes of one chip: its arguments there and in
host memory, its outputs, and its temporary memory. Programs: `read_prompt`, `scores` of the responses after it, and
`surprise`, only their loss and entropy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from absl import flags

from jaxbench import cli
from jaxbench.config import Compute, TransformerConfig
from jaxbench.measure import chips, tpu_compile

READERS = {  # config.json of HuggingFaceTB/SmolLM2-135M-Instruct and of meta-llama/Llama-2-7b-chat-hf
    "smollm2_135m": TransformerConfig(
        vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        max_seq_len=8192, rope_theta=100000.0,
    ),
    "llama2_7b": TransformerConfig(
        vocab_size=32000, d_model=4096, d_ff=11008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128,
        max_seq_len=4096, tie_embeddings=False,
    ),
}  # fmt: skip


def compile_programs(
    model: TransformerConfig, topology: chips.Topology, *, dtype: str, prompt_slots: int, row_slots: int,
    offload_layers: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield what the compiler reports of each program, in bytes of one chip.

    Args:
      prompt_slots: of the prompt. row_slots: of the responses; parametric scores of all of them may be asked for.
      offload_layers: last blocks whose weights are in host memory.

    Raises:
      ValueError: libtpu is not installed, or the model has fewer blocks.
    """
    (chip, *_) = tpu_compile.devices(topology)
    import jax
    from flax import nnx
    from jax.sharding import SingleDeviceSharding

    from jaxbench.hallucination import layout, placement
    from jaxbench.hallucination.features import FeatureReader
    from jaxbench.native import library
    from jaxbench.parameters import dotted
    from jaxbench.sharding import PINNED_HOST
    from jaxbench.transformer import Transformer

    near = SingleDeviceSharding(chip)
    far = near.with_memory_kind(PINNED_HOST)

    def abstract(array: Any, where: Any = near) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    plain = nnx.eval_shape(lambda: Transformer(model, Compute(dtype=dtype)))
    arranged = placement.arranged(plain, offload_layers=offload_layers)
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: abstract(leaf, far if placement.is_on_host(dotted(path)) else near),
        nnx.split(arranged)[1],
    )
    text = layout.Text(range(3), range(1, 2))
    prompts = jax.tree.map(abstract, layout.prompt_arrays([text], share=0.1, size=prompt_slots))
    prompt = (prompts.tokens, prompts.positions, prompts.is_context)
    rows = jax.tree.map(abstract, layout.response_arrays([text], [[[0]]], size=row_slots))
    slots, count = (jax.ShapeDtypeStruct(shape, "int32", sharding=near) for shape in ((row_slots,), ()))
    made = FeatureReader(arranged, state_layer=0)
    programs = {"read_prompt": made._read, "scores": made._with, "surprise": made._without}
    with library.switched_off():
        read = jax.tree.map(abstract, jax.eval_shape(programs["read_prompt"], state, *prompt))
        given = {
            "read_prompt": prompt,
            "scores": (read, prompts.num_attended, rows, slots, count),
            "surprise": (read, rows),
        }
        for name, arguments in given.items():
            lowered = programs[name].lower
            found = tpu_compile.compile_program(lambda: lowered(state, *arguments), topology)  # noqa: B023
            yield {"program": name, "compile_s": round(found.compile_s, 1), **found.memory}


def define() -> None:
    """Define the flags."""
    flags.DEFINE_enum("reader", "smollm2_135m", list(READERS), "whose shape is compiled")
    flags.DEFINE_string("topology", "v5e:2x2", "slice, of which one chip reads")
    flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "of weights and products")
    flags.DEFINE_integer("prompt_slots", 2048, "of the prompt", lower_bound=1)
    flags.DEFINE_integer("row_slots", 512, "of the responses", lower_bound=1)
    flags.DEFINE_integer("offload_layers", 0, "last blocks whose weights lie in the host's memory", lower_bound=0)


def main() -> int:
    """Compile the programs, and print what the compiler reports; return the exit code."""
    values = flags.FLAGS
    names = ("dtype", "prompt_slots", "row_slots", "offload_layers")
    topology = chips.parse_topology(values.topology)
    try:
        for found in compile_programs(READERS[values.reader], topology, **{name: values[name].value for name in names}):
            print(json.dumps(found), flush=True)
    except tpu_compile.DoesNotFitError as error:
        print(error)
        return cli.EXIT_GATE
    return cli.EXIT_OK


if __name__ == "__main__":
    tpu_compile.start_anew()
    define()
    cli.run(main, about=__doc__)
