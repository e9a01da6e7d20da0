"""Decoders with memory behind the engine: each request's memory lies in its slot, beside keys and values (S file)."""

from __future__ import annotations

from typing import Any

from jaxbench.config import TransformerConfig
from jaxbench.memory import folder
from jaxbench.serve.settings import EngineConfig, ServerConfig


class MemoryEngineConfig(EngineConfig):
    """A model and its engine; the model may be a decoder with memory, as a training run exports it."""

    def read_config(self, path: str | None) -> TransformerConfig:
        """As EngineConfig's, also of a decoder with memory."""
        return self.checked(folder.read_config(path)) if folder.is_memory(path) else super().read_config(path)

    def build(self) -> Any:
        """As EngineConfig's, also of a decoder with memory."""
        if not folder.is_memory(self.model):
            return super().build()
        return self.built(folder.load(self.model), "memory.decoder")


class MemoryServerConfig(ServerConfig):
    """What a server lets in, of a model that may have memory."""

    engine: MemoryEngineConfig = MemoryEngineConfig()
