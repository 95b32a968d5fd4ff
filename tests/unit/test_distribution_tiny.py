"""Sampled text of the tiny checkpoint, drafted by its own head, follows the model's distribution.

CI size: 4 prompts x 60 seeds. Full size (`make soak`): 4 prompts x 1000 seeds for every setting and draft length, and the
four wrong acceptances. Every test is at a false-alarm rate of 1e-4; the recorded log is bench/results/distribution.txt.
"""

import pytest

from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.runtime.sampling import RowSampler
from tests.support.distribution import MUTANTS, SETTINGS, filtered
from tests.support.tiny_distribution import next_logits, prompt_ids, rank_tests, texts, use_rule
from tests.support.tiny_engine import short_prompts, tiny_engine

CI_SEEDS = range(60)
FULL_SEEDS = range(1_000_000, 1_001_000)


def test_the_prompts_first_tokens_are_uncertain() -> None:
    import numpy as np

    for ids in prompt_ids():
        for params in SETTINGS.values():
            p = filtered(next_logits(ids, len(ids))[0], params)
            assert -(p[p > 0] * np.log(p[p > 0])).sum() > 1.0


def test_sampled_text_follows_the_distribution() -> None:
    params = SETTINGS["T0.7 top_p0.8 top_k20"]
    assert all(test.passes for test in rank_tests(params, texts(params, 3, CI_SEEDS)))


def test_a_wrong_acceptance_in_the_loop_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SETTINGS["T0.7 top_p0.8 top_k20"]
    use_rule(monkeypatch, MUTANTS["argmax emitted on rejection"])
    assert not all(test.passes for test in rank_tests(params, texts(params, 3, CI_SEEDS)))


def accepted_share(num_drafts: int, num_tokens: int) -> float:
    """Of all drafts verified at temperature 1 over the recorded prompts."""
    engine, drafted, accepted = tiny_engine(8, num_drafts), 0, 0
    for i, prompt in enumerate(short_prompts()[:8]):
        engine.add(i, GenerationRequest(prompt.prompt_ids, num_tokens, SamplingParams(temperature=1.0, seed=i)))
    while engine.num_rows:
        for update in engine.step().updates:
            drafted += update.num_drafted
            accepted += update.num_accepted
    return accepted / drafted


def test_sampled_rows_accept_more_drafts_with_shared_noise_than_argmax_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario: acceptance 0 at temperature > 0 -> stays well above 0; and drafting sampled rows is worth it."""
    shared = accepted_share(3, 32)
    monkeypatch.setattr(RowSampler, "draft", lambda _, scores, position: int(scores.logits.argmax()))
    argmax = accepted_share(3, 32)
    print(f"share of drafts accepted at temperature 1: shared noise {shared:.3f}, argmax {argmax:.3f}")
    assert shared > argmax + 0.03
    assert argmax > 0.2


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_full_size(setting: str) -> None:
    """Text differs between draft lengths only by near ties; each difference is counted and told."""
    params = SETTINGS[setting]
    plain = None
    for num_drafts in (0, 1, 3, 5):
        found = texts(params, num_drafts, FULL_SEEDS)
        tests = rank_tests(params, found)
        plain = plain or found
        differing = sum(a != b for x, y in zip(plain, found, strict=True) for a, b in zip(x, y, strict=True))
        figures = ", ".join(f"{test.statistic:.1f} (limit {test.critical:.1f})" for test in tests)
        print(
            f"{setting} | {num_drafts} drafts | seeds {FULL_SEEDS[0]}..{FULL_SEEDS[-1]} | {figures} | {differing} differ"
        )
        assert all(test.passes for test in tests)
        assert differing <= 4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_full_size_catches_every_wrong_acceptance(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rule(monkeypatch, MUTANTS[mutant])
    params = SETTINGS["T0.7 top_p0.8 top_k20"]
    for num_drafts in (1, 3):
        tests = rank_tests(params, texts(params, num_drafts, FULL_SEEDS[:250]))
        figures = ", ".join(f"{test.statistic:.1f} (limit {test.critical:.1f})" for test in tests)
        print(f"{mutant} | T0.7 top_p0.8 top_k20 | {num_drafts} drafts | 4 x 250 texts | {figures} | caught")
        assert not all(test.passes for test in tests)
