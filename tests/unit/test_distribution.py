"""Drafted and verified text is drawn from the model's own distribution, and wrong acceptances are caught.

A Markov chain of 10 tokens stands for the model, so that the exact probability of every text is known; its first token has
0.9 to 2.1 nats of entropy. Three chi-squares per case (first token, first two, first three), each at a false-alarm rate of
1e-4. Seeds are fixed, so the outcome is too; the power of the CI size against each mutant is in docs/generation.md.
"""

import numpy as np
import pytest

from edgellm_worker.engine.api import SamplingParams
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import DenseScores
from tests.support.distribution import MUTANTS, SETTINGS, MarkovModel, chi_square, filtered, markov_tests, markov_texts

CI_SEEDS = 800
FULL_SEEDS = 4000
WRONG = [  # at temperature 1, ignoring the temperature is no fault
    (mutant, setting)
    for mutant in MUTANTS
    for setting, params in SETTINGS.items()
    if not (mutant.startswith("temperature") and params.temperature == 1.0)
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_text_follows_the_distribution_with_any_number_of_drafts(setting: str) -> None:
    params = SETTINGS[setting]
    plain = markov_texts(params, 0, CI_SEEDS)
    assert all(test.passes for test in markov_tests(params, plain))
    for num_drafts in (1, 3, 5):
        for shared in (True, False):
            assert np.array_equal(
                markov_texts(params, num_drafts, CI_SEEDS // 4, shared=shared), plain[: CI_SEEDS // 4]
            )


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize(("mutant", "setting"), WRONG)
def test_a_wrong_acceptance_is_caught(mutant: str, setting: str, num_drafts: int) -> None:
    params = SETTINGS[setting]
    texts = markov_texts(params, num_drafts, CI_SEEDS, rule=MUTANTS[mutant], shared=False)
    assert not all(test.passes for test in markov_tests(params, texts))


@pytest.mark.soak
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("setting", SETTINGS)
def test_full_size(setting: str, num_drafts: int, shared: bool) -> None:
    params = SETTINGS[setting]
    texts = markov_texts(params, num_drafts, FULL_SEEDS, first_seed=1_000_000, shared=shared)
    tests = markov_tests(params, texts)
    for name, test in zip(("first", "two", "three"), tests, strict=True):
        print(
            f"{setting}, {num_drafts} drafts, shared {shared}, {name}: {test.statistic:.1f} (limit {test.critical:.1f})"
        )
    assert all(test.passes for test in tests)


def test_the_first_token_is_uncertain_enough_to_tell() -> None:
    for params in SETTINGS.values():
        p = filtered(MarkovModel().base[0], params)
        assert -(p[p > 0] * np.log(p[p > 0])).sum() > 0.8


def test_drafts_with_the_rows_noise_agree_more_often_than_argmax_drafts() -> None:
    """Temperature 1, one draft: argmax drafts are accepted with p(argmax) = 0.3; shared noise does far better here."""
    model, agreed = MarkovModel(), {True: 0, False: 0}
    for seed in range(2000):
        sampler = RowSampler(SamplingParams(temperature=1.0, seed=seed), ())
        own = sampler.draw(DenseScores(model.base[0]), 1).token_id
        agreed[True] += sampler.draft(DenseScores(model.head[0]), 1) == own
        agreed[False] += int(model.head[0].argmax()) == own
    assert agreed[True] > 1.5 * agreed[False] > 0


def test_the_statistic_itself_tells_a_fair_die_from_a_loaded_one() -> None:
    rng = np.random.default_rng(3)
    expected = np.full(6, 200.0)
    fair = np.bincount(rng.integers(0, 6, 1200), minlength=6).astype(np.float64)
    loaded = np.bincount(rng.choice(6, 1200, p=[0.25, *[0.15] * 5]), minlength=6).astype(np.float64)
    assert chi_square(fair, expected).passes
    assert not chi_square(loaded, expected).passes
    assert not chi_square(np.array([10.0, 1.0]), np.array([11.0, 0.0])).passes
