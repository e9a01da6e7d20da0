"""Serve decoders with memory: a request's memory is in its cache slot, with its keys and values (S file)."""

from __future__ import annotations

from typing import Any

from jaxbench.config import TransformerConfig
from jaxbench.memory import folder
from jaxbench.serve.settings import EngineConfig, ServerConfig


class MemoryEngineConfig(EngineConfig):
    """A model and its engine; the model may be a decoder with memory, as a training run exports it."""

    def read_config(self, path: str | None) -> TransformerConfig:
        """As in EngineConfig, also for a decoder with memory."""
        return self.checked(folder.read_config(path)) if folder.is_memory(path) else super().read_config(path)

    def build(self) -> Any:
        """As in EngineConfig, also for a decoder with memory."""
        if not folder.is_memory(self.model):
            return super().build()
        return self.built(folder.load(self.model), "memory.decoder")


class MemoryServerConfig(ServerConfig):
    """Settings of a server whose model may have memory."""

    engine: MemoryEngineConfig = MemoryEngineConfig()
