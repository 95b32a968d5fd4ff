"""What users of such systems report about generation, each as a test on the tiny checkpoint.

Others of the same list stand where their subject is: stop strings in tests/unit/test_stops.py, split characters in
test_tokenizer.py, defaults in test_sampling_defaults.py, acceptance and distribution in test_distribution_tiny.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import DEFAULT_MAX_TOKENS, Job
from edgellm_worker.engine.api import FinishReason, GenerationRequest, RowUpdate, SamplingParams
from edgellm_worker.jobs import max_new_tokens
from edgellm_worker.sampling_defaults import SamplingDefaults, resolve_sampling
from edgellm_worker.tokenizer import Tokenizer
from tests.support.tiny_engine import (
    CHECKPOINT,
    Recorded,
    generate,
    golden,
    greedy,
    recorded,
    script_drafts,
    short_prompts,
    tiny_engine,
    updates_of,
)

tokenizer = Tokenizer(CHECKPOINT)
EOS = frozenset(golden()["eos_token_ids"])
NAMES = ("get_name", "set_value", "parse_line", "read_file", "is_empty", "count_words", "make_table", "find_path")


def sampled(prompt: Recorded, seed: int, temperature: float = 1.0, num_tokens: int = 16) -> GenerationRequest:
    return GenerationRequest(prompt.prompt_ids, num_tokens, SamplingParams(temperature, top_k=40, seed=seed), EOS)


def alone(requests: Sequence[GenerationRequest], num_drafts: int = 0) -> list[tuple[int, ...]]:
    return [generate(tiny_engine(1, num_drafts), [request])[0] for request in requests]


def tokens_of(updates: Sequence[RowUpdate]) -> list[int]:
    return [token_id for update in updates for token_id in update.token_ids]


def ended(limit: int = 64) -> Recorded:
    """A recorded text that ends with an EOS by itself."""
    return next(r for r in recorded() if r.generated_ids[-1] in EOS and len(r.generated_ids) < limit)


def test_temperature_0_with_drafting_differs_from_without() -> None:
    requests = [greedy(prompt, 24) for prompt in short_prompts()[:4]]
    plain = alone(requests)
    for num_drafts in (1, 3, 5):
        assert generate(tiny_engine(4, num_drafts), requests) == plain


def test_sampled_request_silently_decoded_greedily_or_drafting_silently_off_for_sampled_rows() -> None:
    prompt = short_prompts()[0]
    engine = tiny_engine(1, 3)
    updates = updates_of(engine, sampled(prompt, 3, temperature=1.5, num_tokens=32))
    assert tokens_of(updates) != list(prompt.generated_ids[:32])
    assert engine.traits.drafts_when_sampled
    assert all(update.num_drafted == 3 for update in updates if update.is_verify)
    assert sum(update.num_accepted for update in updates) > 0


def test_unset_0_and_1_temperatures_mixed_in_one_batch() -> None:
    prompt = short_prompts()[1]
    defaults = SamplingDefaults.read({"do_sample": True, "temperature": 0.6, "top_k": 40})
    params = [
        resolve_sampling(Job(id="j", prompt="x", seed=7, **given), defaults)
        for given in ({}, {"temperature": 0.0}, {"temperature": 1.0})
    ]
    requests = [GenerationRequest(prompt.prompt_ids, 30, p) for p in params]
    together = generate(tiny_engine(3, 3), requests)
    assert len(set(together)) == 3
    assert together == alone(requests)
    assert together[1] == prompt.generated_ids[:30]  # argmax whatever the neighbours do


def test_mixed_seeded_and_unseeded_rows() -> None:
    prompts = short_prompts()
    seeded = sampled(prompts[2], 11)
    expected = alone([seeded])[0]
    for batch_size in (2, 3, 4):
        others = [sampled(prompts[i], 1000 + batch_size * 10 + i) for i in range(batch_size - 1)]
        for place in range(batch_size):
            requests = [*others[:place], seeded, *others[place:]]
            assert generate(tiny_engine(batch_size, 3), requests)[place] == expected


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 8])
def test_batch_of_3_or_more_corrupts_rows_or_answers_another_rows_question(batch_size: int) -> None:
    """Every prompt holds a name of its own, which the answer repeats in its first line."""
    names = NAMES[:batch_size]
    text = "<|im_start|>user\nWrite a Python function `{}(x)`. Return x.<|im_end|>\n<|im_start|>assistant\n"
    requests = [GenerationRequest(tokenizer.encode(text.format(name)), 20, eos_token_ids=EOS) for name in names]
    together = generate(tiny_engine(batch_size, 3), requests)
    assert together == alone(requests)
    for name, ids in zip(names, together, strict=True):
        answer = tokenizer.decode(ids)
        assert f"def {name}(" in answer
        assert not any(other in answer for other in names if other != name)


def test_draft_length_drops_to_0_after_two_or_more_were_accepted() -> None:
    prompt = short_prompts()[0]
    engine = tiny_engine(1, 3)
    script_drafts(engine, [3, 0])
    updates = updates_of(engine, greedy(prompt, 40))
    assert any(u.num_accepted >= 2 and v.num_drafted == 0 for u, v in pairwise(updates))
    assert tuple(tokens_of(updates)) == prompt.generated_ids[:40]


@pytest.mark.parametrize("num_drafts", [0, 3, 5])
def test_max_tokens_is_reached_in_the_same_step_in_which_an_eos_came_earlier(num_drafts: int) -> None:
    prompt = ended()
    length = len(prompt.generated_ids)
    for extra in (0, 1):
        updates = updates_of(tiny_engine(1, num_drafts), greedy(prompt, length + extra))
        assert updates[-1].finish_reason is FinishReason.STOP
        assert tuple(tokens_of(updates)) == prompt.generated_ids
    updates = updates_of(tiny_engine(1, num_drafts), greedy(prompt, length - 1))
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert tuple(tokens_of(updates)) == prompt.generated_ids[:-1]


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_stop_string_inside_a_multi_token_accept_and_nothing_past_it(num_drafts: int) -> None:
    """Text, token ids and log-probabilities end at the same token, the same one with and without drafts."""
    prompt = short_prompts()[0]
    whole = tokenizer.decode(prompt.generated_ids)
    stop = whole[20:27]
    request = replace(greedy(prompt, 64), sampling=SamplingParams(top_logprobs=1))
    output, ids, logprobs, texts, num_tokens = tokenizer.output_text([stop], EOS), [], [], [], 0
    for update in updates_of(tiny_engine(1, num_drafts), request):
        ids += update.token_ids
        logprobs += update.logprobs
        delta = output.push(update.token_ids)
        texts.append(delta.text)
        num_tokens += delta.num_tokens
        if delta.stopped:
            break
    assert delta.stopped
    assert "".join(texts) == whole[: whole.index(stop)]
    assert len(logprobs) == len(ids) >= num_tokens
    assert tokenizer.decode(ids[:num_tokens]).startswith("".join(texts))
    assert len(tokenizer.decode(ids[: num_tokens - 1])) < len("".join(texts))


def test_several_eos_ids_and_rows_of_one_batch_that_end_at_different_steps() -> None:
    prompts = short_prompts()[:3]
    ends = [prompt.generated_ids[at] for prompt, at in zip(prompts, (3, 9, 14), strict=True)]
    requests = [
        replace(greedy(prompt, 30), eos_token_ids=EOS | {end}) for prompt, end in zip(prompts, ends, strict=True)
    ]
    texts = generate(tiny_engine(3, 3), requests)
    for prompt, end, text in zip(prompts, ends, texts, strict=True):
        first = prompt.generated_ids.index(end)
        assert text == prompt.generated_ids[: first + 1]
    assert len({len(text) for text in texts}) > 1


def test_missing_max_tokens_and_a_huge_explicit_one() -> None:
    limits = tiny_engine(1, 3, capacity=512).limits
    assert max_new_tokens(Job(id="a", prompt="x"), 10, limits) == DEFAULT_MAX_TOKENS
    assert max_new_tokens(Job(id="a", prompt="x"), 400, limits) == 512 - 400 + 1 - 3
    with pytest.raises(JobRejected) as caught:
        max_new_tokens(Job(id="a", prompt="x", max_tokens=100_000), 10, limits)
    assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "max_tokens")


def test_a_short_prompt_beside_a_long_one() -> None:
    """Same text as alone, and it keeps stepping while the long one is read."""
    longest = max(recorded(), key=lambda r: len(r.prompt_ids))
    short, long = greedy(short_prompts()[0], 40), greedy(longest, 8)
    engine = tiny_engine(2, 3, capacity=2048, chunk=64)
    engine.add(0, short)
    engine.step()
    engine.add(1, long)
    tokens: dict[int, list[int]] = {0: list(alone([short])[0][:1]), 1: []}
    between = 0
    while engine.num_rows:
        report = engine.step()
        for update in report.updates:
            tokens[update.row_id] += update.token_ids
            between += update.row_id == 0 and not tokens[1]
    assert tuple(tokens[0]) == alone([short])[0]
    assert tuple(tokens[1]) == longest.generated_ids[:8]
    assert between > 5
