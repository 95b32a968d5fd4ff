"""A decoder-only model: embeddings, layers, final norm, head.

    x = embed(ids)
    each layer: x += mixer(norm(x)); x += mlp(norm(x))
    hidden = final_norm(x); logits = head(hidden)

A layer's mixer is attention (its memory: a KV cache) or Gated DeltaNet (its memory: a recurrent state). The families
differ in how they are read from a checkpoint, not in how they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgellm_worker.engine.checkpoint.weights import KvScales, Weight
from edgellm_worker.engine.models.config import LayerKind, ModelConfig
from edgellm_worker.engine.models.layers import (
    Attention,
    DeltaNet,
    DeltaNetState,
    Mlp,
    Norm,
    Pass,
    read_attention,
    read_delta_net,
    read_mlp,
    read_norm,
)
from edgellm_worker.engine.models.source import WeightSource
from edgellm_worker.engine.ops.api import KvCache, Ops

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """`kv_scales` are what its FP8 cache is to be made with."""

    input_norm: Norm
    mixer: Attention
    mlp_norm: Norm
    mlp: Mlp
    kv_scales: KvScales

    def run(self, ops: Ops[T], x: T, cache: KvCache[T], at: Pass[T]) -> tuple[T, KvCache[T]]:
        mixed, cache = self.mixer.run(ops, self.input_norm.run(ops, x), cache, at)
        x = ops.add(x, mixed)
        return ops.add(x, self.mlp.run(ops, self.mlp_norm.run(ops, x))), cache


@dataclass(frozen=True, slots=True)
class DeltaNetLayer:
    input_norm: Norm
    mixer: DeltaNet
    mlp_norm: Norm
    mlp: Mlp

    def run(self, ops: Ops[T], x: T, memory: DeltaNetState[T], at: Pass[T]) -> tuple[T, DeltaNetState[T]]:
        mixed, memory = self.mixer.run(ops, self.input_norm.run(ops, x), memory, at)
        x = ops.add(x, mixed)
        return ops.add(x, self.mlp.run(ops, self.mlp_norm.run(ops, x))), memory


Layer = AttentionLayer | DeltaNetLayer


@dataclass(frozen=True, slots=True)
class Decoder:
    config: ModelConfig
    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Norm
    head: Weight

    def run(
        self,
        ops: Ops[T],
        ids: T,
        memory: Sequence[KvCache[T] | DeltaNetState[T]],
        start: T,
        commit: T,
    ) -> tuple[T, tuple[KvCache[T] | DeltaNetState[T], ...]]:
        """One pass over N tokens per row.

        ids int32 [B, N]; start int32 [B], the position of each row's first token; commit int32 [B], how many tokens
        of the pass before are kept. `memory` is one entry per layer, of the layer's kind.
        -> (hidden [B, N, D] after the final norm, the memory after this pass).
        """
        at = positions(ops, self.config, ids, start, commit)
        x = ops.embed(self.embedding, ids)
        after: list[KvCache[T] | DeltaNetState[T]] = []
        for layer, before in zip(self.layers, memory, strict=True):
            match layer, before:
                case AttentionLayer(), KvCache():
                    x, cache = layer.run(ops, x, before, at)
                    after.append(cache)
                case DeltaNetLayer(), DeltaNetState():
                    x, state = layer.run(ops, x, before, at)
                    after.append(state)
                case _:
                    raise TypeError(f"{type(layer).__name__} cannot use {type(before).__name__}")
        return self.norm.run(ops, x), tuple(after)

    def logits(self, ops: Ops[T], hidden: T) -> T:
        """`hidden` [..., D] after a final norm (the base's or the draft's) -> [..., V]."""
        return ops.linear(hidden, self.head)


def positions(ops: Ops[T], config: ModelConfig, ids: T, start: T, commit: T) -> Pass[T]:
    """What the layers of a pass share."""
    cos, sin = ops.rope_angles(ops.token_positions(start, ids), config.rope.inv_freq(), 1.0)
    return Pass(start=start, commit=commit, cos=cos, sin=sin)


def read_decoder(source: WeightSource, config: ModelConfig) -> Decoder:
    """The names below `model.` are the same in every family; which of them exist is the config's to say."""
    embedding = source.weight("embed_tokens")
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(read_layer(source, f"layers.{i}", kind, config) for i, kind in enumerate(config.layers)),
        norm=read_norm(source, "norm", config),
        head=embedding if config.has_tied_head else source.weight("lm_head"),
    )


def read_layer(source: WeightSource, prefix: str, kind: LayerKind, config: ModelConfig) -> Layer:
    if kind is LayerKind.ATTENTION or config.delta_net is None:
        return read_attention_layer(source, prefix, config)
    return DeltaNetLayer(
        input_norm=read_norm(source, f"{prefix}.input_layernorm", config),
        mixer=read_delta_net(source, f"{prefix}.linear_attn", config, config.delta_net),
        mlp_norm=read_norm(source, f"{prefix}.post_attention_layernorm", config),
        mlp=read_mlp(source, f"{prefix}.mlp"),
    )


def read_attention_layer(source: WeightSource, prefix: str, config: ModelConfig) -> AttentionLayer:
    return AttentionLayer(
        input_norm=read_norm(source, f"{prefix}.input_layernorm", config),
        mixer=read_attention(source, f"{prefix}.self_attn", config),
        mlp_norm=read_norm(source, f"{prefix}.post_attention_layernorm", config),
        mlp=read_mlp(source, f"{prefix}.mlp"),
        kv_scales=source.kv_scales(int(prefix.rpartition(".")[2])),
    )
