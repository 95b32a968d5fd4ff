"""The noise is pinned: its bits, its range, and that it is noise."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from edgellm_worker.engine.runtime.noise import (
    MAX_GUMBEL,
    MIN_GUMBEL,
    gumbel,
    hash_tokens,
    lucky_tokens,
    noise_key,
    position_keys,
    seed_key,
    uniforms,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "noise_v1.json"
VECTORS = json.loads(GOLDEN.read_text())["vectors"]


def keys(seed: int, position: int) -> np.ndarray:
    return np.array([noise_key(seed, position)], np.uint64)


def test_hash_and_uniform_equal_the_golden_vectors_bit_for_bit() -> None:
    assert len(VECTORS) == 120
    for v in VECTORS:
        x = hash_tokens(keys(v["seed"], v["position"]), np.array([v["token"]]))
        assert f"{int(x[0]):016x}" == v["x"]
        assert float(uniforms(x)[0]).hex() == v["u"]


def test_gumbel_equals_the_golden_vectors_to_the_last_places() -> None:
    for v in VECTORS:
        g = gumbel(keys(v["seed"], v["position"]), np.array([v["token"]]))[0]
        assert g == pytest.approx(v["gumbel"], rel=1e-13, abs=1e-15)


def test_many_positions_at_once_equal_one_by_one() -> None:
    ids = np.arange(50).reshape(5, 10)
    together = gumbel(np.array([[noise_key(9, t)] for t in range(5)], np.uint64), ids)
    for t in range(5):
        assert np.array_equal(together[t], gumbel(keys(9, t), ids[t]))


def test_keys_of_many_positions_equal_those_of_each() -> None:
    seeds, positions = [0, 7, (1 << 64) - 1], [[0, 1, 2], [5, 6, 7], [1 << 40, 3, 4]]
    found = position_keys(np.array([[seed_key(seed)] for seed in seeds], np.uint64), np.array(positions))
    assert found.tolist() == [[noise_key(seed, t) for t in row] for seed, row in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("least", [-1.0, 0.0, 0.3, 0.999, 1.0 - 1e-9, 1.0])
def test_lucky_tokens_are_all_whose_u_is_large_enough(least: float) -> None:
    u = uniforms(hash_tokens(keys(4, 9), np.arange(40_000)))
    found = lucky_tokens(keys(4, 9), 40_000, least)
    assert np.array_equal(found, np.unique(found))
    assert set(np.flatnonzero(u >= least)) <= set(found.tolist())
    assert found.size <= np.count_nonzero(u >= least - 1e-12)


@pytest.mark.parametrize("x", [0, 1, (1 << 64) - 1, ((1 << 53) - 2) << 11, 1 << 63])
def test_extreme_hashes_stay_finite_and_inside_the_stated_bounds(x: int) -> None:
    u = uniforms(np.array([x], np.uint64))
    assert 0 < u[0] < 1
    g = -math.log(-math.log(u[0]))
    assert MIN_GUMBEL < g < MAX_GUMBEL


def test_uniforms_of_tokens_and_of_positions_and_of_seeds_are_uniform() -> None:
    """Chi-square over 64 bins of 64 000 numbers; 120 is above the 0.99999 quantile of 63 degrees of freedom."""
    by_token = uniforms(hash_tokens(keys(3, 5), np.arange(64_000)))
    by_position = np.concatenate([uniforms(hash_tokens(keys(3, t), np.array([7]))) for t in range(16_000)])
    by_seed = np.concatenate([uniforms(hash_tokens(keys(s, 5), np.array([7]))) for s in range(16_000)])
    for u in (by_token, by_position, by_seed):
        counts = np.histogram(u, bins=64, range=(0, 1))[0]
        expected = u.size / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120


def test_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    ids = np.arange(20_000)
    base = gumbel(keys(11, 100), ids)
    for seed, position in ((11, 101), (12, 100), (100, 11)):
        assert abs(np.corrcoef(base, gumbel(keys(seed, position), ids))[0, 1]) < 5 / math.sqrt(ids.size)
