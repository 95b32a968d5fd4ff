"""The multi-token-prediction head: one attention layer that guesses the token after next.

    entry i = (h_i, token_{i+1}), at position i in the rotary and in the layer's own KV cache
    x = fc(concat[ norm_e(embed(token_{i+1})), norm_h(h_i) ])        h_i: the base's hidden state *after* its final norm
    y = norm(layer(x));  logits for token i+2 = head(y)              head and embeddings are the base's

A chain of drafts feeds y, *after* the norm, back as the next h. Entries made of such guesses are provisional: after
verification the entries of accepted positions are made again from the base's own hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from edgellm_worker.engine.checkpoint.weights import Weight
from edgellm_worker.engine.models.config import ModelConfig
from edgellm_worker.engine.models.decoder import AttentionLayer, positions, read_attention_layer
from edgellm_worker.engine.models.layers import Norm, Projection, read_norm, read_projection
from edgellm_worker.engine.models.source import WeightSource
from edgellm_worker.engine.ops.api import KvCache, Ops

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mtp:
    config: ModelConfig
    embedding: Weight
    embedding_norm: Norm
    hidden_norm: Norm
    fc: Projection
    layer: AttentionLayer
    norm: Norm

    def run(self, ops: Ops[T], ids: T, hidden: T, cache: KvCache[T], start: T) -> tuple[T, KvCache[T]]:
        """N entries per row: ids int32 [B, N] (token_{i+1}), hidden [B, N, D] (h_i), start int32 [B] (i of the first).

        -> (y [B, N, D] after the norm, the cache with these entries in it).
        """
        at = positions(ops, self.config, ids, start, commit=start)  # attention commits by overwriting: unused
        embedded = self.embedding_norm.run(ops, ops.embed(self.embedding, ids))
        x = self.fc.run(ops, ops.concat((embedded, self.hidden_norm.run(ops, hidden))))
        y, cache = self.layer.run(ops, x, cache, at)
        return self.norm.run(ops, y), cache


def read_mtp(source: WeightSource, config: ModelConfig, embedding: Weight) -> Mtp:
    return Mtp(
        config=config,
        embedding=embedding,
        embedding_norm=read_norm(source, "pre_fc_norm_embedding", config),
        hidden_norm=read_norm(source, "pre_fc_norm_hidden", config),
        fc=read_projection(source, "fc"),
        layer=read_attention_layer(source, "layers.0", config),
        norm=read_norm(source, "norm", config),
    )
