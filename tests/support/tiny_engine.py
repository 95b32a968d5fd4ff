"""The tiny checkpoint on the reference engine, its recorded transformers output, and ways to drive and watch it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import edgellm_worker
from edgellm_worker.engine.api import Engine, GenerationRequest, RowUpdate, SamplingParams
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.decoder import AttentionLayer
from edgellm_worker.engine.models.layers import DeltaNetState
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import DeltaPending, KvCache, KvDtype
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.runtime.draft_length import FixedDraftLength, StepObservation
from edgellm_worker.engine.runtime.executor import (
    Executor,
    PrefillChunk,
    RoundInput,
    RoundOutput,
    StartedPrefill,
    StartedRound,
)
from edgellm_worker.engine.runtime.reference import reference_engine
from edgellm_worker.engine.runtime.scores import (
    NUM_CANDIDATES,
    Candidates,
    DenseScores,
    RoundScores,
    Scores,
    log_sum_exp,
    top_indices,
)
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

CHECKPOINT = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_qwen3_5_mtp.json"
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Recorded:
    """One prompt and what transformers made of it, greedily."""

    name: str
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    logit_gaps: tuple[float, ...]
    mtp_draft_ids: tuple[int, ...]

    def difference(self, token_ids: Sequence[int], length: int) -> str | None:
        """Where at most `length` tokens first differ, and the recorded gap there; None when they do not."""
        for i, (got, wanted) in enumerate(zip(token_ids, self.generated_ids, strict=False)):
            if got != wanted:
                return f"{self.name}: token {i} is {got}, recorded {wanted} at a logit gap of {self.logit_gaps[i]}"
        if len(token_ids) != min(length, len(self.generated_ids)):
            return f"{self.name}: {len(token_ids)} tokens, recorded {len(self.generated_ids)}"
        return None

    def is_near_tie(self, token_ids: Sequence[int]) -> bool:
        differing = [
            gap
            for got, wanted, gap in zip(token_ids, self.generated_ids, self.logit_gaps, strict=False)
            if got != wanted
        ]
        return bool(differing) and differing[0] < NEAR_TIE


@cache
def golden() -> Mapping[str, Any]:
    return json.loads(GOLDEN.read_text())


@cache
def recorded() -> tuple[Recorded, ...]:
    return tuple(
        Recorded(
            p["name"],
            tuple(p["prompt_ids"]),
            tuple(p["generated_ids"]),
            tuple(p["logit_gaps"]),
            tuple(p["mtp_draft_ids"]),
        )
        for p in golden()["prompts"]
    )


def short_prompts(limit: int = 120) -> tuple[Recorded, ...]:
    return tuple(r for r in recorded() if len(r.prompt_ids) <= limit)


@cache
def tiny_model() -> Model:
    checkpoint = open_checkpoint(CHECKPOINT)
    return read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)


def tiny_engine(
    max_batch_size: int = 4,
    num_drafts: int = 3,
    *,
    capacity: int = 1024,
    chunk: int = 128,
    kv_dtype: KvDtype = KvDtype.FLOAT32,
) -> SpeculativeEngine:
    options = EngineOptions(
        max_batch_size, capacity, capacity, SpeculativeConfig(num_drafts), prefill_chunk_tokens=chunk
    )
    return reference_engine(tiny_model(), options, kv_dtype)


def greedy(prompt: Recorded, max_new_tokens: int = 64) -> GenerationRequest:
    return GenerationRequest(prompt.prompt_ids, max_new_tokens, eos_token_ids=frozenset(golden()["eos_token_ids"]))


def sampled(prompt: Recorded, seed: int, max_new_tokens: int = 24) -> GenerationRequest:
    params = SamplingParams(temperature=0.8, top_k=20, seed=seed)
    return GenerationRequest(prompt.prompt_ids, max_new_tokens, params, frozenset(golden()["eos_token_ids"]))


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """All requests, as many at once as there are slots, each joining as soon as another leaves."""
    tokens: dict[int, list[int]] = {}
    waiting = list(enumerate(requests))
    while waiting or engine.num_rows:
        while waiting and engine.num_rows < engine.limits.max_batch_size:
            row_id, request = waiting.pop(0)
            engine.add(row_id, request)
            tokens[row_id] = []
        for update in engine.step().updates:
            assert update.error is None, update
            tokens[update.row_id] += update.token_ids
    return [tuple(tokens[i]) for i in range(len(requests))]


def updates_of(engine: Engine, request: GenerationRequest) -> list[RowUpdate]:
    """One row's updates, alone."""
    engine.add(0, request)
    updates: list[RowUpdate] = []
    while engine.num_rows:
        updates += engine.step().updates
    return updates


class WatchedExecutor:
    """Any executor, with every round kept; `change` may alter what a round gave."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.rounds: list[tuple[RoundInput, RoundOutput]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def change(self, output: RoundOutput) -> RoundOutput:
        return output

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Any) -> StartedRound:
        wait = self._inner.start_round(batch, num_drafts, choosers)

        def watched() -> RoundOutput:
            output = self.change(wait())
            self.rounds.append((batch, output))
            return output

        return watched


class EagerExecutor(WatchedExecutor):
    """Runs a round as it is started, as a device does, so that the loop runs ahead of what it reports."""

    runs_ahead = True

    def start_prefill(self, slot: int, chunk: PrefillChunk) -> StartedPrefill:
        """And is not over when it is first asked."""
        output = self._inner.start_prefill(slot, chunk).wait()
        answers = iter((False,))
        return StartedPrefill(lambda: next(answers, True), lambda: output)

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Any) -> StartedRound:
        output = super().start_round(batch, num_drafts, choosers)()
        return lambda: output


def advanced(batch: RoundInput, drafts: np.ndarray, best: np.ndarray) -> RoundInput:
    """What a round of rows that take the best score leaves for the next: drafts [B, K], best ids [B, K + 1]."""
    pairs = np.zeros_like(best)
    commit = np.zeros_like(batch.commit)
    for row, (proposed, own) in enumerate(zip(drafts.tolist(), best.tolist(), strict=True)):
        differing = [i for i, draft in enumerate(proposed) if draft != own[i]]
        commit[row] = min(differing, default=len(proposed)) + 1
        pairs[row, : commit[row]] = own[: commit[row]]
    return RoundInput(pairs, commit, batch.position + commit, commit)


def regrouped(batch: RoundInput, places: Sequence[int | None], joining: RoundInput | None) -> RoundInput:
    """Rows of a batch by their places in it, the others one after another from `joining`."""
    width = max(part.pairs.shape[1] for part in (batch, joining) if part is not None)
    parts = [part for part in (batch, joining) if part is not None]
    pairs = np.concatenate([np.pad(part.pairs, ((0, 0), (0, width - part.pairs.shape[1]))) for part in parts])
    steering = [np.concatenate([getattr(part, name) for part in parts]) for name in ("num_pairs", "position", "commit")]
    new = iter(range(len(batch.position), len(pairs)))
    rows = [next(new) if place is None else place for place in places]
    return RoundInput(pairs[rows], *(array[rows] for array in steering))


def best_draft(scores: Scores, _position: int) -> int:
    assert isinstance(scores, DenseScores)
    return int(scores.logits.argmax())


def listed(scores: RoundScores, num_rows: int, read_logits: Callable[[int, int], np.ndarray]) -> RoundScores:
    """The same with candidates, as a device lists them; all logits are `read_logits`' to give."""
    dense = np.array([[scores.read_logits(row, i) for i in range(scores.num_positions)] for row in range(num_rows)])
    flat = dense.reshape(-1, dense.shape[-1])
    ids = np.array([top_indices(logits, NUM_CANDIDATES) for logits in flat]).reshape(*dense.shape[:2], -1)
    sums = np.array([log_sum_exp(logits) for logits in flat]).reshape(dense.shape[:2])
    return RoundScores(
        scores.num_positions, Candidates(np.take_along_axis(dense, ids, axis=-1), ids, sums), read_logits
    )


class FollowingExecutor(EagerExecutor):
    """And goes on by itself, before what it gave was read: logits are gone then, candidates are not."""

    follows = True
    num_followed = 0
    num_regrouped = 0  # of these, where rows left or joined
    _newest: RoundScores | None = None

    def change(self, output: RoundOutput) -> RoundOutput:
        given = self._newest = output.scores

        def read_logits(row: int, position: int) -> np.ndarray:
            if given is not self._newest:
                raise EngineError("the next round has overwritten the logits")
            return given.read_logits(row, position)

        return replace(output, scores=listed(given, len(output.drafts), read_logits))

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Any) -> StartedRound:
        wait = super().start_round(batch, num_drafts, choosers)
        self._last = (batch, wait(), choosers)
        return wait

    def follow_round(
        self, num_drafts: int, places: Sequence[int | None], joining: RoundInput | None = None
    ) -> StartedRound:
        before, output, choosers = self._last
        rows, width = output.drafts.shape
        scores = [[output.scores.read_logits(row, i).argmax() for i in range(width + 1)] for row in range(rows)]
        batch = regrouped(self.advanced(before, output.drafts, np.array(scores, np.int32)), places, joining)
        self.num_followed += 1
        self.num_regrouped += list(places) != list(range(rows))
        wait = self.start_round(batch, num_drafts, [best_draft if p is None else choosers[p] for p in places])
        return lambda: replace(wait(), followed=batch)

    def advanced(self, batch: RoundInput, drafts: np.ndarray, best: np.ndarray) -> RoundInput:
        return advanced(batch, drafts, best)


def watch(engine: SpeculativeEngine, kind: type[WatchedExecutor] = WatchedExecutor) -> WatchedExecutor:
    """Put a watcher between the engine and its executor."""
    watched = kind(engine._executor)
    engine._executor = watched
    return watched


class ScriptedDraftLength(FixedDraftLength):
    """Whatever is next in the script, over and over."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(0)
        self._lengths = lengths
        self.observations: list[StepObservation] = []

    def choose(self, num_rows: int) -> int:
        return self._lengths[len(self.observations) % len(self._lengths)]

    def observe(self, observation: StepObservation) -> None:
        self.observations.append(observation)


def script_drafts(engine: SpeculativeEngine, lengths: Sequence[int]) -> ScriptedDraftLength:
    script = ScriptedDraftLength(lengths)
    engine._options = replace(engine._options, draft_length=script)
    return script


# --- from scratch: no executor, no loop, no state kept between calls ---


def _blank_memory(model: Model, length: int) -> list[Any]:
    attention, delta = model.config.attention, model.config.delta_net

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros((1, *shape), np.float32)

    def cache(layer: AttentionLayer) -> KvCache[np.ndarray]:
        size = (attention.num_kv_heads, length, attention.head_dim)
        return KvCache(zeros(*size), zeros(*size), KvDtype.FLOAT32, layer.kv_scales)

    memory: list[Any] = []
    for layer in (*model.base.layers, *([model.mtp.layer] if model.mtp else [])):
        if isinstance(layer, AttentionLayer):
            memory.append(cache(layer))
            continue
        heads, dims = delta.num_value_heads, (delta.key_dim, delta.value_dim)
        pending = DeltaPending(zeros(1, delta.num_key_heads, dims[0]), zeros(1, heads, dims[1]), zeros(1, heads))
        tail = zeros(delta.conv_kernel - 1, delta.num_channels)
        memory.append(DeltaNetState(zeros(heads, *dims), tail, zeros(1, delta.num_channels), pending))
    return memory


def hidden_states(model: Model, ops: NumpyOps, token_ids: Sequence[int]) -> np.ndarray:
    """The base over a whole sequence in one pass -> [N, D]."""
    memory = _blank_memory(model, len(token_ids))[: len(model.base.layers)]
    zero = np.zeros(1, np.int32)
    hidden, _ = model.base.run(ops, np.array([token_ids], np.int32), memory, zero, zero)
    return hidden[0]


def logits_of(model: Model, ops: NumpyOps, token_ids: Sequence[int]) -> np.ndarray:
    """[N, V]."""
    return model.base.logits(ops, hidden_states(model, ops, token_ids))


def draft_chain(token_ids: Sequence[int], num_drafts: int, *, feeds_back_before_norm: bool = False) -> tuple[int, ...]:
    """The head's greedy drafts after `token_ids`, everything computed anew. The flag is the published mistake."""
    from edgellm_worker.engine.models.layers import Norm

    model, ops = tiny_model(), NumpyOps()
    mtp = model.mtp
    assert mtp is not None

    class NoNorm(Norm):
        def run(self, ops, x):
            return x

    bare = replace(mtp, norm=NoNorm(mtp.norm.weight, mtp.norm.eps, mtp.norm.is_zero_centred))
    cache = _blank_memory(model, len(token_ids) + num_drafts)[-1]
    ids = np.array([token_ids[1:]], np.int32)
    fed = hidden_states(model, ops, token_ids[:-1])[None]
    start, drafts = 0, []
    for _ in range(num_drafts):
        raw, cache = bare.run(ops, ids, fed, cache, np.array([start], np.int32))
        normed = mtp.norm.run(ops, raw[:, -1:])
        drafts.append(int(model.base.logits(ops, normed)[0, 0].argmax()))
        start += ids.shape[1]
        ids, fed = np.array([drafts[-1:]], np.int32), raw[:, -1:] if feeds_back_before_norm else normed
    return tuple(drafts)
