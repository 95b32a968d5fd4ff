"""The reference engine against transformers' recorded greedy output, and the draft head against recorded chains.

All 24 prompts, token for token. A difference is allowed at a recorded logit gap under 1e-3, and printed. What runs
here covers every (batch, drafts) pair with three to nine of the shorter prompts, in turn, and all 24 at batch 4 with 3
drafts; the full grid, 24 prompts at every pair, is a soak test.
"""

import itertools

import pytest

from tests.support.tiny_engine import (
    Recorded,
    draft_chain,
    generate,
    greedy,
    recorded,
    script_drafts,
    short_prompts,
    tiny_engine,
    watch,
)

BATCHES = (1, 2, 3, 4, 8)
DRAFTS = (0, 1, 3, 5)
GRID = tuple(itertools.product(BATCHES, DRAFTS))
NUM_QUICK = 3
WHOLE = ((4, 3),)
CAPACITY = 2048


def check(prompts: tuple[Recorded, ...], batch: int, drafts: int) -> None:
    texts = generate(tiny_engine(batch, drafts, capacity=CAPACITY), [greedy(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        difference = prompt.difference(text)
        if difference is not None:
            print(difference)
        assert difference is None or prompt.is_near_tie(text), difference


def test_the_recording_is_whole():
    assert len(recorded()) == 24
    assert max(len(prompt.prompt_ids) for prompt in recorded()) > 1000


@pytest.mark.parametrize(("batch", "drafts"), GRID)
def test_greedy_text_is_transformers_text(batch: int, drafts: int):
    """Mixed lengths; rows join as others leave."""
    prompts = short_prompts()
    first = GRID.index((batch, drafts)) * NUM_QUICK
    chosen = tuple(prompts[(first + i) % len(prompts)] for i in range(max(NUM_QUICK, batch + 1)))
    check(chosen, batch, drafts)


@pytest.mark.parametrize(("batch", "drafts"), WHOLE)
def test_greedy_text_of_every_prompt_is_transformers_text(batch: int, drafts: int):
    check(recorded(), batch, drafts)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("batch", "drafts"), GRID)
def test_greedy_text_of_every_prompt_at_every_batch_and_draft_length(batch: int, drafts: int):
    check(recorded(), batch, drafts)


def first_drafts(prompts: tuple[Recorded, ...]) -> dict[str, tuple[int, ...]]:
    """What the running engine drafts in each row's first round, four rows at a time."""
    engine = tiny_engine(4, 4, capacity=CAPACITY)
    watched, found = watch(engine), {}
    for group in (prompts[i : i + 4] for i in range(0, len(prompts), 4)):
        for row_id, prompt in enumerate(group):
            engine.add(row_id, greedy(prompt, 2))
        while engine.num_rows:
            running = [row.row_id for row in engine._rows.running]
            for update in engine.step().updates:
                if update.is_verify:
                    found[group[update.row_id].name] = tuple(
                        watched.rounds[-1][1].drafts[running.index(update.row_id)].tolist()
                    )
    return found


def test_recorded_draft_chains_are_reproduced():
    found = first_drafts(tuple(prompt for prompt in recorded() if len(prompt.generated_ids) > 1))
    assert len(found) >= 20
    for prompt in recorded():
        if prompt.name in found:
            assert found[prompt.name] == prompt.mtp_draft_ids, prompt.name


def test_drafts_of_every_round_are_those_of_a_computation_from_scratch():
    """The head's cache holds true entries after acceptance, rejection and changes of the draft length."""
    prompt = short_prompts()[1]
    engine = tiny_engine(2, 5, capacity=256)
    watched = watch(engine)
    script_drafts(engine, (3, 5, 0, 0, 2, 1, 5))
    engine.add(0, greedy(prompt, 40))
    tokens, lengths = list(prompt.prompt_ids), set()
    while engine.num_rows:
        num_before = len(watched.rounds)
        for update in engine.step().updates:
            if len(watched.rounds) > num_before:
                drafts = tuple(watched.rounds[-1][1].drafts[0].tolist())
                assert drafts == draft_chain(tokens, len(drafts))
                lengths.add((len(drafts), update.num_accepted))
            tokens += update.token_ids
    assert {length for length, _ in lengths} == {0, 1, 2, 3, 5}
    assert any(accepted == length > 0 for length, accepted in lengths)
    assert any(0 < accepted < length for length, accepted in lengths)


def test_feeding_the_head_its_output_before_the_norm_is_caught():
    """Acceptance barely falls with this fault; the recorded draft ids show it."""
    wrong = [
        prompt.name
        for prompt in short_prompts()
        if draft_chain((*prompt.prompt_ids, prompt.generated_ids[0]), 4, feeds_back_before_norm=True)
        != prompt.mtp_draft_ids
    ]
    right = [
        prompt.name
        for prompt in short_prompts()
        if draft_chain((*prompt.prompt_ids, prompt.generated_ids[0]), 4) == prompt.mtp_draft_ids
    ]
    assert len(right) == len(short_prompts())
    assert wrong
