"""The speculative loop: joins, leaves, draft lengths, prefill between rounds, rows that fail alone, exact ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from edgellm_worker.engine.api import FinishReason, GenerationRequest, Phase, SamplingParams
from edgellm_worker.engine.errors import CapacityError, EngineError, RequestError
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.runtime.executor import RoundOutput, attended_length
from tests.support.tiny_engine import (
    WatchedExecutor,
    generate,
    greedy,
    hidden_states,
    recorded,
    sampled,
    script_drafts,
    short_prompts,
    tiny_engine,
    tiny_model,
    updates_of,
    watch,
)

PROMPTS = short_prompts()


def test_a_draft_length_that_changes_at_every_step_leaves_greedy_text_alone():
    """To 0 and back among them, right after several drafts were accepted."""
    rng = np.random.default_rng(7)
    engine = tiny_engine(3, 5)
    script = script_drafts(engine, [*rng.integers(0, 6, 41).tolist(), 5, 0, 0, 5, 3, 0, 1])
    texts = generate(engine, [greedy(prompt, 40) for prompt in PROMPTS[:6]])
    assert texts == [prompt.generated_ids[:40] for prompt in PROMPTS[:6]]
    after_many = {
        later.num_speculative_tokens
        for earlier, later in pairwise(script.observations)
        if max(earlier.num_accepted) >= 2
    }
    assert 0 in after_many
    assert len(after_many) >= 3


def test_greedy_and_sampled_rows_share_a_batch_and_each_equals_its_solo_run():
    requests = [
        greedy(PROMPTS[0], 24),
        sampled(PROMPTS[1], 5),
        sampled(PROMPTS[1], 6),
        greedy(PROMPTS[2], 24),
        sampled(PROMPTS[3], 5),
    ]
    together = generate(tiny_engine(4, 3), requests)
    alone = [generate(tiny_engine(1, drafts), [request])[0] for drafts, request in enumerate(requests)]
    assert together == alone
    assert len(set(together)) == len(together)


def test_a_sampled_row_is_drafted_and_drafts_are_accepted():
    updates = updates_of(tiny_engine(1, 3), sampled(PROMPTS[0], 3, 48))
    verified = [update for update in updates if update.is_verify]
    assert all(update.num_drafted == 3 for update in verified)
    assert sum(update.num_accepted for update in verified) > len(verified) / 4


def test_a_long_prompt_is_read_between_the_rounds_of_a_running_row():
    long_prompt = max(recorded(), key=lambda prompt: len(prompt.prompt_ids))
    engine = tiny_engine(2, 3, capacity=2048, chunk=64)
    engine.add(0, greedy(PROMPTS[0], 60))
    engine.step()
    engine.add(1, greedy(long_prompt, 8))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    kinds = []
    while engine.num_rows:
        report = engine.step()
        kinds.append(Phase.PREFILL in report.phase_s)
        assert report.num_prefill_tokens <= 64
        for update in report.updates:
            tokens[update.row_id] += update.token_ids
    both = kinds[: 2 * sum(kinds)]
    assert not any(one and other for one, other in pairwise(both[:16]))
    assert tuple(tokens[1]) == long_prompt.generated_ids[:8]
    assert tuple(tokens[0]) == PROMPTS[0].generated_ids[1:60]


@pytest.mark.parametrize("chunk", [1, 7, 64, 2000])
def test_the_chunks_of_a_prompt_do_not_change_the_text(chunk: int):
    prompt = PROMPTS[4]
    assert generate(tiny_engine(1, 2, chunk=chunk), [greedy(prompt, 16)]) == [prompt.generated_ids[:16]]


def test_500_equal_tokens_prefill_alike_in_chunks_of_any_size():
    """Equal keys make the delta rule's matrix nearly singular: long product forms explode here."""
    ids = [77] * 500
    model, ops = tiny_model(), NumpyOps()
    whole = hidden_states(model, ops, ids)
    assert np.isfinite(whole).all()
    request = GenerationRequest((77,) * 500, 12)
    texts = {generate(tiny_engine(1, 3, chunk=chunk), [request])[0] for chunk in (8, 500)}
    assert len(texts) == 1


def test_max_new_tokens_cuts_inside_an_accepted_run():
    prompt = PROMPTS[0]
    for length in range(1, 9):
        updates = updates_of(tiny_engine(1, 5), greedy(prompt, length))
        tokens = [token for update in updates for token in update.token_ids]
        assert tuple(tokens) == prompt.generated_ids[:length]
        assert [update.finish_reason for update in updates if update.finish_reason] == [FinishReason.LENGTH]


def test_an_eos_among_accepted_drafts_ends_the_row_there_and_wins_over_the_length():
    prompt = PROMPTS[0]
    end = 5
    eos = prompt.generated_ids[end]
    first = prompt.generated_ids.index(eos)
    request = replace(greedy(prompt, first + 1), eos_token_ids=frozenset({eos}))
    updates = updates_of(tiny_engine(1, 5), request)
    tokens = [token for update in updates for token in update.token_ids]
    assert tuple(tokens) == prompt.generated_ids[: first + 1]
    assert updates[-1].finish_reason is FinishReason.STOP


def test_a_first_token_that_ends_the_row_is_reported_by_the_prefill_step():
    prompt = PROMPTS[0]
    request = replace(greedy(prompt), eos_token_ids=frozenset({prompt.generated_ids[0]}))
    (update,) = updates_of(tiny_engine(1, 3), request)
    assert (update.token_ids, update.finish_reason, update.is_verify) == (
        prompt.generated_ids[:1],
        FinishReason.STOP,
        False,
    )


def test_a_row_without_eos_ids_runs_past_them():
    ended = next(p for p in PROMPTS if len(p.generated_ids) < 64)
    request = replace(greedy(ended, len(ended.generated_ids) + 4), eos_token_ids=frozenset())
    (text,) = generate(tiny_engine(1, 3), [request])
    assert len(text) == len(ended.generated_ids) + 4
    assert text[: len(ended.generated_ids)] == ended.generated_ids


class _PoisonedRow(WatchedExecutor):
    """The second row's scores of the third round are not numbers."""

    def change(self, output: RoundOutput) -> RoundOutput:
        if len(self.rounds) != 2:
            return output
        scores = output.scores

        def read(row: int, position: int) -> np.ndarray:
            logits = scores.read_logits(row, position)
            return np.full_like(logits, np.nan) if row == 1 else logits

        return replace(output, scores=replace(scores, read_logits=read))


def test_a_row_whose_scores_are_not_numbers_fails_alone():
    engine = tiny_engine(3, 3)
    watch(engine, _PoisonedRow)
    for row_id in range(3):
        engine.add(row_id, greedy(PROMPTS[row_id], 30))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    failed = {}
    while engine.num_rows:
        for update in engine.step().updates:
            tokens[update.row_id] += update.token_ids
            if update.finish_reason is FinishReason.ERROR:
                failed[update.row_id] = update.error
    assert list(failed) == [1]
    assert "not numbers" in failed[1]
    assert tuple(tokens[0]) == PROMPTS[0].generated_ids[:30]
    assert tuple(tokens[2]) == PROMPTS[2].generated_ids[:30]


def test_a_slot_is_clean_after_a_row_that_filled_it_with_nan():
    engine = tiny_engine(1, 3)
    engine.add(0, greedy(PROMPTS[0], 30))
    engine.step()
    engine.step()
    for array, _ in engine._executor._state._arrays():
        array[...] = np.nan
    engine._executor._state._num_written[0] = 1024
    engine.remove(0)
    assert generate(engine, [greedy(PROMPTS[1], 20)]) == [PROMPTS[1].generated_ids[:20]]


def test_rows_removed_from_outside_free_their_slots_and_leave_the_others_alone():
    engine = tiny_engine(3, 3)
    for row_id in range(3):
        engine.add(row_id, greedy(PROMPTS[row_id], 30))
    with pytest.raises(CapacityError):
        engine.add(3, greedy(PROMPTS[3]))
    engine.step()
    engine.step()
    engine.remove(0)
    engine.remove(0)
    engine.remove(99)
    assert engine.num_rows == 2
    engine.add(3, greedy(PROMPTS[3], 30))
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    while engine.num_rows:
        for update in engine.step().updates:
            tokens[update.row_id] += update.token_ids
    assert tuple(tokens[3]) == PROMPTS[3].generated_ids[:30]
    assert tuple(tokens[2]) == PROMPTS[2].generated_ids[30 - len(tokens[2]) : 30]


def test_a_row_id_in_use_is_refused():
    engine = tiny_engine(2, 0)
    engine.add(7, greedy(PROMPTS[0]))
    with pytest.raises(RequestError, match="row_id"):
        engine.add(7, greedy(PROMPTS[1]))
    assert engine.num_rows == 1


def test_a_step_without_rows_reports_nothing():
    report = tiny_engine(2, 3).step()
    assert (report.updates, report.num_rows, report.kv_tokens_used) == ((), 0, 0)


def test_a_report_says_what_the_step_did():
    engine = tiny_engine(2, 3)
    engine.add(0, greedy(PROMPTS[0], 30))
    prefill, verify = engine.step(), engine.step()
    num_prompt = len(PROMPTS[0].prompt_ids)
    assert (prefill.num_prefill_tokens, prefill.num_rows, prefill.kv_tokens_used) == (num_prompt, 1, num_prompt + 1)
    assert set(prefill.phase_s) == {Phase.PREFILL, Phase.SAMPLE}
    assert set(verify.phase_s) == {Phase.DRAFT, Phase.VERIFY, Phase.SAMPLE}
    assert (verify.num_speculative_tokens, verify.num_rows) == (3, 1)
    (update,) = verify.updates
    assert len(update.token_ids) == update.num_accepted + 1
    assert verify.kv_tokens_used == num_prompt + 1 + len(update.token_ids)
    assert {"weights", "kv_cache", "recurrent_state", "pending"} == set(verify.memory_bytes)


def test_recurrent_state_memory_does_not_grow_with_the_draft_length():
    none, many = (tiny_engine(4, drafts)._executor.memory_bytes for drafts in (1, 15))
    assert none["recurrent_state"] == many["recurrent_state"]
    per_token = (many["pending"] - none["pending"]) / 14
    assert per_token < none["recurrent_state"] / 8


def test_a_draft_length_beyond_what_was_reserved_is_the_engines_fault():
    engine = tiny_engine(1, 2)
    script_drafts(engine, (3,))
    engine.add(0, greedy(PROMPTS[0]))
    engine.step()
    with pytest.raises(EngineError, match="3 was chosen"):
        engine.step()


def test_an_fp8_cache_holds_base_and_draft_in_a_quarter_of_the_memory_and_drafts_well():
    wide, narrow = tiny_engine(1, 3), tiny_engine(1, 3, kv_dtype=KvDtype.FP8)
    assert narrow._executor.memory_bytes["kv_cache"] * 4 == wide._executor.memory_bytes["kv_cache"]
    caches = [narrow._executor._state.draft(slice(0, 1), 64), narrow._executor._state._base[3]]
    assert {cache.dtype for cache in caches} == {KvDtype.FP8}
    updates = [update for prompt in PROMPTS[:3] for update in updates_of(narrow, greedy(prompt, 40))]
    drafted, accepted = (sum(getattr(u, name) for u in updates) for name in ("num_drafted", "num_accepted"))
    assert accepted / drafted > 0.4


def test_logprobs_come_with_every_token_that_asked_for_them():
    request = replace(greedy(PROMPTS[0], 12), sampling=SamplingParams(top_logprobs=2))
    updates = updates_of(tiny_engine(1, 3), request)
    for update in updates:
        assert len(update.logprobs) == len(update.token_ids)
        for token_id, logprobs in zip(update.token_ids, update.logprobs, strict=True):
            assert logprobs.top[0] == (token_id, logprobs.logprob)
            assert len(logprobs.top) == 2


@pytest.mark.parametrize(("needed", "length"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1025, 1500), (1500, 1500)])
def test_attention_covers_the_doubling_bucket_up_to_the_capacity(needed: int, length: int):
    assert attended_length(needed, 1500) == length
