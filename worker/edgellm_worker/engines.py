"""From settings to a running engine."""

from __future__ import annotations

import asyncio
from typing import Final

from edgellm_worker.config import Settings
from edgellm_worker.engine.api import Engine, EngineHandle, EngineLimits
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.runtime.handle import ThreadEngineHandle
from edgellm_worker.errors import ConfigError

ASSUMED_DRAFTS: Final = 3
"""What is shown of the draft length until the checkpoint has said it."""


def engine_options(settings: Settings) -> EngineOptions:
    return EngineOptions(
        max_batch_size=settings.max_batch_size,
        max_input_len=settings.max_input_len,
        max_kv_cache_capacity=settings.max_kv_cache_capacity,
        speculative=settings.speculative_config,
        cache_dir=settings.cache_dir,
        rewrites_mtp=settings.rewrite_mtp,
    )


def requested_limits(settings: Settings) -> EngineLimits:
    """What the settings ask for, before an engine has said what it can do."""
    drafting = settings.speculative_config
    num_drafts = ASSUMED_DRAFTS if drafting is None else drafting.num_speculative_tokens
    return EngineLimits(
        max_batch_size=settings.max_batch_size,
        max_input_len=settings.max_input_len,
        max_kv_cache_capacity=settings.max_kv_cache_capacity,
        max_verify_tree_size=settings.max_verify_tree_size or num_drafts + 1,
        max_draft_tree_size=settings.max_draft_tree_size or num_drafts,
        num_speculative_tokens=num_drafts,
        vocab_size=0,
    )


def _load(settings: Settings) -> Engine:
    if settings.model is None:
        raise ConfigError(["--model is required"])
    return load_engine(settings.engine, open_checkpoint(settings.model.expanduser()), engine_options(settings))


async def open_engine(settings: Settings) -> EngineHandle:
    """Load in a thread, so that health and signals are answered meanwhile. Raises what `load_engine` raises."""
    return ThreadEngineHandle(await asyncio.to_thread(_load, settings))
