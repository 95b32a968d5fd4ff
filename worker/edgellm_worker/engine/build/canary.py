"""The canary: a prompt whose greedy beginning the reference engine wrote when the bundle was built.

An engine writes it before it takes its first job. Rounding may turn the choice between two tokens that are nearly as
good, so the first other token counts as a fault only where the reference preferred its own by more than a margin.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from tokenizers import Tokenizer

from edgellm_worker.engine.api import Engine, GenerationRequest, SamplingParams
from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.weight_policy import WeightPolicy, WeightReader
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.reference import reference_engine

FILE: Final = "canary.json"
_TEXT: Final = "def add(a, b):\n"
_NUM_TOKENS: Final = 16
_ROW: Final = 0
_MOST_PARAMETERS: Final = 2_000_000_000
"""The reference holds weights in float32: 8 GB for these."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Canary:
    """`gaps[i]` is by how much `token_ids[i]` was preferred to the next best, in logits."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From `as_json`. Raises `KeyError` and `TypeError`."""
        return cls(tuple(given["prompt_ids"]), tuple(given["token_ids"]), tuple(given["gaps"]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def record(model: Model, spec: EngineSpec, model_dir: Path) -> Canary | None:
    """What the reference engine writes, or None for a model too large for it."""
    count = num_parameters(model, spec)
    if count > _MOST_PARAMETERS:
        _log.warning(
            "no canary is recorded: %.1f billion parameters are too many for the reference; an engine is held against"
            " itself when it starts",
            count / 1e9,
        )
        return None
    prompt = _prompt(model, model_dir)
    capacity = len(prompt) + _NUM_TOKENS
    kv_dtype = KvDtype.FP8 if spec.kv_dtype is KvDtype.FP8 else KvDtype.FLOAT32
    engine = reference_engine(model.without_mtp(), EngineOptions(1, len(prompt), capacity), kv_dtype)
    token_ids, gaps = _write(engine, prompt, SamplingParams(top_logprobs=2))
    engine.close()
    return Canary(prompt, tuple(token_ids), tuple(gaps))


def num_parameters(model: Model, spec: EngineSpec) -> int:
    """Of all weights that the passes read, equal ones once."""
    stored = WeightReader(WeightPolicy(runs_fp8=True, runs_fp4=True))
    graphs = Recorder(spec.drafted(model), spec.layout, stored).all(spec.prefill_chunk).values()
    sizes = {
        (weight.data.ctypes.data, weight.shape): int(np.prod(weight.shape))
        for graph in graphs
        for node in graph.nodes
        for weight in node.weights
    }
    return sum(sizes.values())


def _prompt(model: Model, model_dir: Path) -> tuple[int, ...]:
    """Without a tokenizer of the usual form, some ids: any prompt has a greedy continuation."""
    path = model_dir / "tokenizer.json"
    if path.is_file():
        return tuple(Tokenizer.from_file(str(path)).encode(_TEXT, add_special_tokens=False).ids)
    return tuple((index * 7919 + 13) % model.config.vocab_size for index in range(8))


def rounding_margin(*, is_quantized: bool) -> float:
    """In logits. Activations are quantized too where weights run as FP8 or NVFP4, which the reference does not do."""
    return 2.0 if is_quantized else 0.5


def check(engine: Engine, canary: Canary, *, is_quantized: bool) -> None:
    """Raises `EngineError` where this engine leaves the recorded text and no rounding explains it."""
    token_ids, _ = _write(engine, canary.prompt_ids, SamplingParams())
    pairs = zip(token_ids, canary.token_ids, strict=False)
    at = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if at is None:
        _log.info("canary: %d tokens as the reference engine wrote them", len(token_ids))
        return
    margin = rounding_margin(is_quantized=is_quantized)
    where = f"token {at} is {token_ids[at]}, the reference engine wrote {canary.token_ids[at]}"
    if canary.gaps[at] > margin:
        raise EngineError(
            f"canary: {where}, preferred by {canary.gaps[at]:.2f}, more than rounding explains ({margin}): this engine"
            " computes something else; no job was taken"
        )
    _log.info("canary: %s by %.4f, a near tie", where, canary.gaps[at])


def _write(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], list[float]]:
    length = min(_NUM_TOKENS, engine.limits.max_new_tokens(len(prompt)))
    engine.add(_ROW, GenerationRequest(prompt, length, params))
    token_ids: list[int] = []
    gaps: list[float] = []
    while engine.num_rows:
        for update in engine.step().updates:
            if update.error is not None:
                raise EngineError(f"canary: {update.error}")
            token_ids += update.token_ids
            gaps += [one.top[0][1] - one.top[1][1] for one in update.logprobs]
    return token_ids, gaps
