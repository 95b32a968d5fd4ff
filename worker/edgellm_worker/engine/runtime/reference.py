"""The reference engine: the speculative loop over numpy."""

from __future__ import annotations

import logging
from typing import Final

from edgellm_worker.engine.api import Engine, EngineLimits, EngineTraits
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.demands import KvCacheDtype, TreeSizes, WeightForm
from edgellm_worker.engine.errors import DemandError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.grammar import GrammarCompiler
from edgellm_worker.engine.runtime.numpy_executor import NumpyExecutor
from edgellm_worker.engine.runtime.numpy_state import StateShape
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine, SpeculativeOptions
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)

NAME: Final = "reference"
DEFAULT_DRAFTS: Final = 3

_KV_DTYPES: Final = {KvScheme.UNQUANTIZED: KvDtype.FLOAT32, KvScheme.FP8: KvDtype.FP8}
_WANTED_KV: Final = {KvCacheDtype.FLOAT16: KvDtype.FLOAT16, KvCacheDtype.FP8: KvDtype.FP8}


def open_engine(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Raises `CheckpointError`, `DemandError`, `CapacityError`. The draft's cache is kept in the base's type."""
    forms = sorted(options.quantization - {WeightForm.FLOAT16})
    if forms:
        raise DemandError(
            f"quantization {', '.join(forms)}: the reference engine decodes all weights; the tensorrt engine runs them"
            " as they are stored where GPU and library can"
        )
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    grammars = GrammarCompiler(checkpoint.path / "tokenizer.json", model.config.vocab_size)
    kv_dtype = _WANTED_KV.get(options.kv_cache_dtype, _KV_DTYPES[checkpoint.base.kv.scheme])
    return reference_engine(model, options, kv_dtype, grammars)


def reference_engine(
    model: Model,
    options: EngineOptions,
    kv_dtype: KvDtype = KvDtype.FLOAT32,
    grammars: GrammarCompiler | None = None,
) -> SpeculativeEngine:
    """A capacity beyond the model's positions is narrowed to them; a model without MTP is not drafted."""
    capacity = min(options.max_kv_cache_capacity, model.config.max_positions)
    if capacity < options.max_kv_cache_capacity:
        log.warning("max_kv_cache_capacity narrowed from %d to the model's %d", options.max_kv_cache_capacity, capacity)
    drafting = options.speculative or SpeculativeConfig(DEFAULT_DRAFTS)
    if model.mtp is None:
        drafting = SpeculativeConfig(0)
    num_drafts = drafting.num_speculative_tokens
    trees = TreeSizes(1, 0)
    if model.mtp is not None:
        trees = TreeSizes.of(num_drafts, options.max_verify_tree_size, options.max_draft_tree_size)
    limits = EngineLimits(
        max_batch_size=options.max_batch_size,
        max_input_len=min(options.max_input_len, capacity - num_drafts),
        max_kv_cache_capacity=capacity,
        max_verify_tree_size=trees.max_verify_tree_size,
        max_draft_tree_size=trees.max_draft_tree_size,
        num_speculative_tokens=num_drafts,
        vocab_size=model.config.vocab_size,
    )
    traits = EngineTraits(
        name=NAME,
        in_flight=True,
        seeded=True,
        drafts_when_sampled=num_drafts > 0,
        speculative_method=_method(model, num_drafts),
    )
    executor = NumpyExecutor(model, StateShape(options.max_batch_size, capacity, trees.max_verify_tree_size, kv_dtype))
    return SpeculativeEngine(
        executor, SpeculativeOptions(limits, traits, drafting.draft_length(), options.prefill_chunk_tokens, grammars)
    )


def _method(model: Model, num_drafts: int) -> str:
    if model.mtp is None:
        return f"off: {model.no_mtp_reason}"
    return "mtp" if num_drafts else "off: num_speculative_tokens is 0"
