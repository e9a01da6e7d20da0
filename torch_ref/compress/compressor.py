"""A context compressor in PyTorch: encoder, connector, local head, and the decoder that reads its vectors.

Twin: jaxbench/compress/compressor.py.
Data flow: tokens of a chunk -> encoder layers, in which each token attends to the whole chunk; the last one averages
queries and residual stream over groups -> connector, added to the mean embedding of a group's tokens, scaled and
re-centred -> vectors, which precede the decoder's other inputs. The local head predicts a vector's own tokens from that
vector alone; without it, training stays where the decoder ignores vectors. Axis letters: config.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jaxbench import rotary
from jaxbench.compress.config import TAGS, CompressorConfig
from jaxbench.config import Compute
from torch_ref import functional, nn, train, transformer
from torch_ref.attention import Context, Spans, attention
from torch_ref.lora import layers

LOCAL_WEIGHT = 1.0  # of the local head's cross-entropy relative to the decoder's, up to LOCAL_RATIO tokens per vector
LOCAL_RATIO = 8  # above it, proportionally less: no vector can encode 32 tokens, and the rest is noise
TEACHER_WEIGHT = 1.0  # of the cross-entropy to the teacher's probabilities


class Batch(NamedTuple):
    """Rows of compressed text and the decoder's targets after it; config.Arrays describes the fields."""

    context: Int[Tensor, "B C T"]
    groups: Int[Tensor, "B C M"]
    inputs: Int[Tensor, "B S"]
    positions: Int[Tensor, "B S"]
    places: Int[Tensor, "B U"]
    targets: Int[Tensor, "B U"]
    mask: Bool[Tensor, "B U"]
    sampled: Int[Tensor, "B C P"]
    teacher_tokens: Int[Tensor, "B U K"] | None = None
    teacher_probs: Float[Tensor, "B U K"] | None = None


class Output(NamedTuple):
    """Logits from which a batch's loss is computed."""

    logits: Float[Tensor, "B U V"]  # of the decoder
    local: Float[Tensor, "B P V"]  # of the local head, all chunks' tokens in order


class PooledBlock(transformer.Block):
    """An encoder's last block: queries and residual stream averaged over groups, keys and values of every token."""

    def pooled(
        self, x: Float[Tensor, "B T D"], context: Context, groups: Int[Tensor, "B M"], frequencies: tuple[float, ...]
    ) -> Float[Tensor, "B M D"]:
        """Residual stream of the groups after the block; groups: the position of each, -1 = no token."""
        positions, size = context.spans.key_positions, x.shape[1] // groups.shape[1]
        normed, inner = self.attention_norm(x), self.attention
        key, value = inner.keys_values(normed, context)
        angles = functional.rotary_angles(groups, frequencies, dtype=str(x.dtype).removeprefix("torch."))
        query = inner.queries(group_means(normed, positions >= 0, size), context._replace(angles=angles))
        mixed = attention(
            query, key, value, Spans(groups, positions), is_causal=False, implementation=inner.implementation,
            block_size=inner.block_size, softcap=inner.softcap,
        )  # fmt: skip
        mixed = inner.o_proj(mixed.reshape(*groups.shape, -1))
        mixed = mixed if self.attention_post_norm is None else self.attention_post_norm(mixed)
        return self.feed(group_means(x, positions >= 0, size) + mixed, context, 0)


def group_means(x: Float[Tensor, "B T D"], is_token: Bool[Tensor, "B T"], size: int) -> Float[Tensor, "B M D"]:
    """Mean of the tokens among each `size` neighbours; 0 where there are none."""
    batch, length, width = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    grouped = torch.where(is_token[:, :, None], wide, 0.0).reshape(batch, length // size, size, width)
    count = is_token.reshape(batch, -1, size).sum(dim=2)[:, :, None]
    return (grouped.sum(dim=2) / count.clamp(min=1).to(wide.dtype)).to(x.dtype)


class Encoder(torch.nn.Module):
    """The decoder's first layers, in which each token attends to its whole chunk."""

    def __init__(self, config: CompressorConfig, compute: Compute):
        super().__init__()
        shape = config.encoder
        *inner, last = range(shape.num_layers)
        self.layers = torch.nn.ModuleList([transformer.Block(shape.at_layer(i), compute) for i in inner])
        self.layers.append(PooledBlock(shape.at_layer(last), compute))
        self.final_norm = nn.norm(shape.norm, shape.d_model, eps=shape.norm_eps, dtype=compute.dtype)
        self.slots = nn.Embed(sum(config.ratios), shape.d_model, dtype=compute.dtype)
        self.frequencies = rotary.frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        self.first_slot = {ratio: sum(each for each in config.ratios if each < ratio) for ratio in config.ratios}
        self.dtype = str(compute.dtype)

    def forward(
        self, x: Float[Tensor, "B T D"], is_token: Bool[Tensor, "B T"], groups: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M D"]:
        """States of a chunk's groups, from its tokens' embeddings."""
        ratio = x.shape[1] // groups.shape[1]
        x = x + self.slots(self.first_slot[ratio] + torch.arange(x.shape[1], device=x.device)[None] % ratio)
        positions = torch.where(is_token, torch.arange(x.shape[1], dtype=torch.int32, device=x.device)[None], -1)
        angles = functional.rotary_angles(positions, self.frequencies, dtype=self.dtype)
        context = Context(Spans(positions, positions), angles, None, None)
        *inner, last = self.layers
        for layer in inner:
            x, _ = layer(x, context, (0, 0))  # dropout sites, unused: there is no dropout
        return self.final_norm(last.pooled(x, context, groups, self.frequencies))


class Gain(torch.nn.Module):
    """A factor for each channel."""

    def __init__(self, features: int, *, dtype: str):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(features, dtype=getattr(torch, dtype)))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Multiply each channel by its factor."""
        return x * self.scale


class Connector(torch.nn.Module):
    """Map encoder states and the mean embeddings of their tokens to vectors in the decoder's embedding space."""

    def __init__(self, config: CompressorConfig, compute: Compute):
        super().__init__()
        shape = config.encoder.model_copy(update={"d_ff": config.d_connector})
        self.norm = nn.norm(shape.norm, shape.d_model, eps=shape.norm_eps, dtype=compute.dtype)
        self.mlp = transformer.MLP(shape, compute)
        self.gain = Gain(shape.d_model, dtype=compute.dtype)
        self.centers = nn.Embed(len(config.ratios), shape.d_model, dtype=compute.dtype)
        self.known_ratios = config.ratios

    def forward(
        self, states: Float[Tensor, "B M D"], means: Float[Tensor, "B M D"], ratio: int
    ) -> Float[Tensor, "B M D"]:
        """Vectors of groups; a mean of `ratio` rows is multiplied by sqrt(ratio), so that it is as long as one row."""
        center = self.centers(torch.full((1, 1), self.known_ratios.index(ratio), device=means.device))
        return means * math.sqrt(ratio) + center + self.gain(self.mlp(self.norm(states)))


class LocalHead(torch.nn.Module):
    """Predict a vector's own tokens from it alone, as decoder hidden states before the vocabulary projection."""

    def __init__(self, config: CompressorConfig, compute: Compute):
        super().__init__()
        shape, dtype = config.encoder, compute.dtype
        self.up_proj = nn.Linear(shape.d_model, config.d_local, use_bias=False, dtype=dtype)
        self.down_proj = nn.Linear(config.d_local, max(config.ratios) * shape.d_model, use_bias=False, dtype=dtype)

    def forward(
        self, vectors: Float[Tensor, "B M D"], sampled: Int[Tensor, "B P"], size: int
    ) -> Float[Tensor, "B P D"]:
        """Hidden state of each sampled token of chunks whose vectors stand for `size` tokens each."""
        hidden = F.silu(self.up_proj(vectors))
        kernel = self.down_proj.kernel[:, : size * vectors.shape[2]]
        tokens = functional.linear(hidden, kernel, None).reshape(vectors.shape[0], -1, vectors.shape[2])
        return torch.take_along_dim(tokens, sampled.clamp(min=0).long()[:, :, None], dim=1)


class TextEncoder(torch.nn.Module):
    """The modules that make vectors, without the decoder that reads them: embeddings, encoder and connector."""

    def __init__(self, config: CompressorConfig, compute: Compute):
        super().__init__()
        shape = config.decoder
        self.embed = nn.Embed(shape.vocab_size, shape.d_model, dtype=compute.dtype, scale=shape.embedding_scale)
        self.encoder, self.connector = Encoder(config, compute), Connector(config, compute)

    def forward(self, tokens: Int[Tensor, "B T"], groups: Int[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Vectors of chunks of tokens (-1 = padding)."""
        return _encode(self.embed, self.encoder, self.connector, tokens, groups)


def _encode(
    embed: nn.Embed, encoder: Encoder, connector: Connector, tokens: Int[Tensor, "B T"], groups: Int[Tensor, "B M"]
) -> Float[Tensor, "B M D"]:
    is_token = tokens >= 0
    # `embed` is not called here: tools that watch modules should see one call of it, on the decoder's inputs
    x = functional.take_rows(embed.embedding, tokens.clamp(min=0)) * embed.scale
    ratio = x.shape[1] // groups.shape[1]
    return connector(encoder(x, is_token, groups), group_means(x, is_token, ratio), ratio)


class Compressor(torch.nn.Module):
    """Encoder, connector, tags, local head, and the decoder."""

    def __init__(self, config: CompressorConfig, compute: Compute):
        super().__init__()
        self.encoder, self.connector = Encoder(config, compute), Connector(config, compute)
        self.local = LocalHead(config, compute)
        self.tags = nn.Embed(len(TAGS) * config.prefix, config.decoder.d_model, dtype=compute.dtype)
        make_layer = None if config.lora is None else layers.make_layer
        self.decoder = transformer.Transformer(config.adapted, compute, make_layer)

    def encode(self, tokens: Int[Tensor, "B T"], groups: Int[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """Vectors of chunks of tokens (-1 = padding)."""
        return _encode(self.decoder.embed, self.encoder, self.connector, tokens, groups)

    def forward(self, batch: Batch, *, dropout: Any = None) -> Output:
        """Logits at the targets of the decoder and of the local head; dropout is (Philox key, step)."""
        rows, count, length = batch.context.shape
        groups = batch.groups.reshape(rows * count, -1)
        vectors = self.encode(batch.context.reshape(rows * count, length), groups)
        sampled = batch.sampled.reshape(rows * count, -1)
        local = self.local(vectors, sampled, length // groups.shape[1])
        table = torch.cat([vectors.reshape(-1, vectors.shape[2]), self.tags.embedding])
        hidden, _ = self.decoder.features(self._of_table(batch), batch.positions, dropout=dropout, vectors=table)
        hidden = torch.take_along_dim(hidden, batch.places.long()[:, :, None], dim=1)
        local = local.reshape(rows, -1, local.shape[2])
        return Output(self.decoder.logits(hidden), self.decoder.logits(local))

    def _of_table(self, batch: Batch) -> Int[Tensor, "B S"]:
        """Renumber vectors and tags in the decoder's inputs for one table: the vectors of all rows, then the tags."""
        rows, count, each = batch.groups.shape
        size, own = self.decoder.vocab_size, count * each
        number = batch.inputs - size
        row = torch.arange(rows, dtype=batch.inputs.dtype, device=number.device)[:, None]
        of_table = torch.where(number < own, row * own + number, (rows - 1) * own + number)
        return torch.where(number < 0, batch.inputs, size + of_table)


def predict(model: Compressor, batch: Batch, *, dropout: Any = None) -> Output:
    """Logits of a batch."""
    return model(batch, dropout=dropout)


def loss_of(output: Output, batch: Batch) -> Float[Tensor, ""]:
    """Weighted cross-entropies of the decoder, of the local head and, if any, to the teacher, in nats per token."""
    loss = train.cross_entropy(output.logits, batch.targets, batch.mask)
    sampled = batch.sampled.reshape(*batch.context.shape[:2], -1)
    tokens = torch.take_along_dim(batch.context, sampled.clamp(min=0).long(), dim=2)
    own, is_asked = (each.reshape(len(each), -1) for each in (tokens, sampled >= 0))
    # Divided by the decoder's targets, by which micro-batches weight their losses; a mean where all rows are full.
    count, size = batch.mask.sum().clamp(min=1), batch.mask.shape[1] / is_asked.shape[1]
    weight = LOCAL_WEIGHT * min(1.0, LOCAL_RATIO * batch.groups.shape[2] / batch.context.shape[2])
    loss = loss + weight * (is_asked.sum().to(loss.dtype) / count * size) * train.cross_entropy(
        output.local, own, is_asked
    )
    if batch.teacher_tokens is None:
        return loss
    wide = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
    log_probs = torch.take_along_dim(wide, batch.teacher_tokens.long(), dim=2)
    log_probs = log_probs - torch.logsumexp(wide, dim=2, keepdim=True)
    losses = -(batch.teacher_probs.to(wide.dtype) * log_probs).sum(dim=2)
    count = batch.mask.sum().clamp(min=1).to(wide.dtype)
    return loss + TEACHER_WEIGHT * losses.masked_fill(~batch.mask, 0.0).sum() / count


def loss_fn(model: Compressor, batch: Batch, *, dropout: Any = None) -> Float[Tensor, ""]:
    """The model's loss on a batch, nats per token."""
    return loss_of(predict(model, batch, dropout=dropout), batch)


def build(
    config: CompressorConfig, params: Mapping[str, np.ndarray], *, device: str = "cpu", **compute: Any
) -> Compressor:
    """Build the compressor of a configuration with `params` on a device, as jaxbench.compress.compressor.build does."""
    with torch.device("meta"):
        model = Compressor(config, Compute(**compute))
    return nn.load_params(model, params, device=device)


def chunk_encoder(
    config: CompressorConfig, params: Mapping[str, np.ndarray], *, device: str = "cpu", **compute: Any
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function from chunks' tokens [B T] and groups [B M] to float32 vectors [B M D]."""
    with torch.device("meta"):
        model = TextEncoder(config, Compute(**compute))
    model = nn.load_params(model, params, device=device)

    def encode(tokens: np.ndarray, groups: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            on_device = (torch.from_numpy(each).to(device) for each in (tokens, groups))
            return model(*on_device).float().cpu().numpy()

    return encode
