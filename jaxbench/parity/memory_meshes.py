"""Cases of the mesh proofs (meshes.py) whose decoder has memory."""

from __future__ import annotations

from jaxbench.memory import decoder
from jaxbench.memory.bank_config import BankConfig
from jaxbench.memory.config import NeuralMemoryConfig
from jaxbench.memory.decoder_config import DecoderMemory, with_memory
from jaxbench.parity import meshes
from jaxbench.parity.meshes import LLAMA, Case

ATTENTION = {"d_model": 16, "num_heads": 4, "head_dim": 4}
NEURAL = NeuralMemoryConfig(**ATTENTION, chunk_size=4)
BANK = BankConfig(**ATTENTION, block_size=2, memory_slots=2, ratio=2)
MEMORY = {  # in one layer of two; the batch's rows hold two documents
    "mac": DecoderMemory(kind="mac", layers=(1,), window=4, num_persistent=2, max_documents=2, neural=NEURAL),
    "bank": DecoderMemory(kind="bank", layers=(1,), window=4, max_documents=2, bank=BANK),
}


def _form(kind: str, **sizes: int) -> Case:
    model = with_memory(LLAMA.model_copy(update={"num_layers": 2}), MEMORY[kind])
    return meshes.form(kind, model, **sizes)._replace(extension=decoder.extension(MEMORY[kind]))


FORMS = (  # 15 to 25 CPU seconds each, most of it compiling
    _form("mac", data=2, fsdp=2, model=2),
    _form("bank", fsdp=2, sequence=2, model=2),
)
