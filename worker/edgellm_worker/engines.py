"""From settings to a running engine, in a child process or in a thread.

A child is the default: an engine that hangs, leaks or crashes costs its rows an attempt and nothing else. A thread
starts sooner and is what the demo uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from edgellm_worker.config import EngineHome, Settings
from edgellm_worker.engine.api import Engine, EngineHandle, EngineLimits
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.child.handle import ChildEngineHandle, ChildOptions, RequestRules
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.watchdog import WatchdogLimits
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.edgellm.rules import EdgeLlmRules
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.runtime.handle import ThreadEngineHandle
from edgellm_worker.engine.runtime.rules import SpeculativeRules

ASSUMED_DRAFTS: Final = 3
"""What is shown of the draft length until the checkpoint has said it."""


def engine_options(settings: Settings) -> EngineOptions:
    return EngineOptions(
        max_batch_size=settings.max_batch_size,
        max_input_len=settings.max_input_len,
        max_kv_cache_capacity=settings.max_kv_cache_capacity,
        speculative=settings.speculative_config,
        max_verify_tree_size=settings.max_verify_tree_size,
        max_draft_tree_size=settings.max_draft_tree_size,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        cache_dir=settings.bundles_dir,
        rewrites_mtp=settings.rewrite_mtp is not None,
        corrects_draft_feedback=settings.correct_draft_feedback,
        accepts_fp16_kv=settings.accept_fp16_kv,
    )


def requested_limits(settings: Settings) -> EngineLimits:
    """What the settings ask for, before an engine has said what it can do."""
    drafting = settings.speculative_config
    num_drafts = ASSUMED_DRAFTS if drafting is None else drafting.num_speculative_tokens
    draft_size = num_drafts if settings.max_draft_tree_size is None else settings.max_draft_tree_size
    return EngineLimits(
        max_batch_size=settings.max_batch_size,
        max_input_len=settings.max_input_len,
        max_kv_cache_capacity=settings.max_kv_cache_capacity,
        max_verify_tree_size=settings.max_verify_tree_size or draft_size + 1,
        max_draft_tree_size=draft_size,
        num_speculative_tokens=num_drafts,
        vocab_size=0,
    )


async def open_engine(settings: Settings) -> EngineHandle:
    """Health and signals are answered meanwhile. Raises what `load_engine` raises, here or in the child."""
    if settings.engine_home is EngineHome.THREAD:
        return ThreadEngineHandle(await asyncio.to_thread(_load, settings))
    limit = settings.engine_rss_limit_gib
    return await ChildEngineHandle.start(
        ChildOptions(
            load=Load(settings.engine, str(settings.model_dir), engine_options(settings)),
            rules=_rules(settings),
            watchdog=WatchdogLimits(load_s=settings.load_timeout_s, progress_s=settings.watchdog_s),
            soft_rss_bytes=None if limit is None else round(limit * (1 << 30)),
        )
    )


def _rules(settings: Settings) -> Callable[[EngineLimits], RequestRules]:
    """What the child would say of a request, for the parent to say before it is sent over."""
    if settings.engine == "edgellm":
        return partial(EdgeLlmRules, prompts=PromptText(settings.model_dir))
    return SpeculativeRules


def _load(settings: Settings) -> Engine:
    return load_engine(settings.engine, open_checkpoint(settings.model_dir), engine_options(settings))
