"""A dense model of 1.6 billion parameters with random weights: shapes to time, not text to read."""

from __future__ import annotations

import numpy as np

from edgellm_worker.engine.checkpoint.weights import DenseWeight, KvScales
from edgellm_worker.engine.models.config import AttentionConfig, Family, LayerKind, ModelConfig
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.models.rope import Rope


class PoolWeights:
    """Random weights as overlapping views of one pool: generated in a second, yet every one is its own device copy."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._pool = (self._rng.standard_normal(70_000_000, dtype=np.float32) * 0.02).astype(np.float16)
        self._next = 0

    def weight(self, name: str) -> DenseWeight:
        config, attention = self._config, self._config.attention
        hidden, inner, dim = config.hidden_size, config.intermediate_size, attention.head_dim
        shapes = {
            "embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden),
            "q_proj": (attention.num_heads * dim, hidden), "k_proj": (attention.num_kv_heads * dim, hidden),
            "v_proj": (attention.num_kv_heads * dim, hidden), "o_proj": (hidden, attention.num_heads * dim),
            "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
            "q_norm": (dim,), "k_norm": (dim,), "fc": (hidden, 2 * hidden),
        }  # fmt: skip
        shape = shapes.get(name.rpartition(".")[2], (hidden,))
        size = int(np.prod(shape))
        self._next = (self._next + 8192) % 1_000_000
        if len(shape) == 1:
            return DenseWeight(np.zeros(shape, np.float32))
        if size > self._pool.size - self._next:
            data = np.resize(self._pool, size).reshape(shape)
            return DenseWeight(data)
        return DenseWeight(self._pool[self._next : self._next + size].reshape(shape))

    def array(self, name: str) -> DenseWeight:
        raise KeyError(name)

    def has(self, name: str) -> bool:
        return name == "fc.weight"

    def kv_scales(self, layer: int) -> KvScales:
        del layer
        return KvScales(np.float32(1), np.float32(1))


def dense_config() -> ModelConfig:
    """24 layers of 2048 x 8192, 16 query and 4 kv heads of 128, vocabulary 65536: 1.59 billion parameters."""
    return ModelConfig(
        family=Family.QWEN3_5, hidden_size=2048, intermediate_size=8192, vocab_size=65536, max_positions=4096,
        rms_norm_eps=1e-6, has_tied_head=True, layers=(LayerKind.ATTENTION,) * 24,
        attention=AttentionConfig(16, 4, 128, is_gated=False, has_qk_norm=True), delta_net=None,
        rope=Rope(10000.0, 128, None), num_mtp_layers=1,
    )  # fmt: skip


def dense_model() -> Model:
    config = dense_config()
    weights = PoolWeights(config, 1)
    return read_model(config, weights, PoolWeights(config, 2))
