"""Where a model's weights come from: one namespace of a checkpoint, by the names transformers gives its modules.

The base's names are those below `model.` (`embed_tokens`, `layers.3.mlp.up_proj`, `norm`) and `lm_head`; the draft's
are those below `mtp.` (`fc`, `layers.0.self_attn.q_proj`). Prefixes, fused tensors and sidecars are the checkpoint's.
"""

from __future__ import annotations

from typing import Protocol

from edgellm_worker.engine.checkpoint.weights import DenseWeight, KvScales, Weight


class WeightSource(Protocol):
    def weight(self, name: str) -> Weight:
        """The `.weight` of module `name`, as stored. Raises `CheckpointError` when there is none."""

    def array(self, name: str) -> DenseWeight:
        """A tensor by its full name there: `layers.0.linear_attn.A_log`, `layers.0.self_attn.q_proj.bias`."""

    def has(self, name: str) -> bool:
        """Whether that tensor (full name, `.weight` included) exists."""

    def kv_scales(self, layer: int) -> KvScales:
        """The FP8 cache scales of an attention layer; 1.0 where there are none."""
