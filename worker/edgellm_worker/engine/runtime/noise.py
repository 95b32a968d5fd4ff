"""Counter-based Gumbel noise: a number for every (seed, position, token), the same on every machine and in any order.

A row's token at absolute position t (its index in prompt + output) is `argmax_v(log p_t(v) + G(seed, t, v))`: an exact
draw from p_t (the Gumbel-max rule). Because G is a hash and not a stream of random numbers, the draw depends on the
seed, the position and the row's own distribution only: not on the batch, the slot, the drafts, or how many candidates
were looked at, in which order.

The hash is pinned (tests/golden/noise_v1.json holds vectors; texts of seeded jobs change if it changes). All arithmetic
is on unsigned 64-bit integers, modulo 2^64:

    mix(z):  z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key    = mix(mix(seed + C) + (position + 1) * C)             C = 0x9E3779B97F4A7C15
    x      = mix(key + (token + 1) * C)
    u      = min(((x >> 11) + 0.5) * 2^-53, 1 - 2^-53)           float64, 0 < u < 1
    G      = -log(-log(u))                                       float64, -3.6 < G < 36.8

`mix` and C are those of SplitMix64 (Steele, Lea, Flood 2014), so a position's noise is the output of that generator
started at `key`. The minimum matters for one value of x in 2^53: there the sum rounds to 2^53, u would be 1 and G
infinite. The bits of x and u are pinned; the two logarithms may differ in the last place between maths libraries.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MUL_1: Final = 0xBF58476D1CE4E5B9
_MUL_2: Final = 0x94D049BB133111EB

_GOLDEN_U64: Final = np.uint64(_GOLDEN)
_MUL_1_U64: Final = np.uint64(_MUL_1)
_MUL_2_U64: Final = np.uint64(_MUL_2)
_S11, _S27, _S30, _S31 = (np.uint64(n) for n in (11, 27, 30, 31))
_LARGEST_U: Final = 1.0 - 2.0**-53

MAX_GUMBEL: Final = 36.8
MIN_GUMBEL: Final = -3.7
"""Bounds of the noise: a token whose log-probability is more than their difference below the best cannot be drawn."""


_BLOCK: Final = 1 << 14


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def seed_key(seed: int) -> int:
    """The inner half of a row's key: the same at every position."""
    return _mix((seed + _GOLDEN) & _MASK)


def position_key(seeded: int, position: int) -> int:
    """The 64-bit key of one position of the row whose `seed_key` is given."""
    return _mix((seeded + (position + 1) * _GOLDEN) & _MASK)


def position_keys(seeded: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.uint64]:
    """`position_key` of arrays that broadcast: a key's step over positions is that of a position's over tokens."""
    return hash_tokens(seeded, positions)


def noise_key(seed: int, position: int) -> int:
    return position_key(seed_key(seed), position)


def hash_tokens(keys: NDArray[np.uint64], token_ids: NDArray[np.integer]) -> NDArray[np.uint64]:
    """The x of every token. `keys` broadcasts against `token_ids`: [1] with [V], or [N, 1] with [N, K]."""
    z = token_ids.astype(np.uint64)
    z *= _GOLDEN_U64
    z = z + (keys + _GOLDEN_U64)
    z ^= z >> _S30
    z *= _MUL_1_U64
    z ^= z >> _S27
    z *= _MUL_2_U64
    z ^= z >> _S31
    return z


def uniforms(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The u of every hash, strictly between 0 and 1."""
    u = (hashes >> _S11).astype(np.float64)
    u += 0.5
    u *= 2.0**-53
    return np.minimum(u, _LARGEST_U, out=u)


def lucky_tokens(keys: NDArray[np.uint64], num_tokens: int, least: float) -> NDArray[np.int64]:
    """The ids below `num_tokens` whose u is at least `least`, and perhaps a few just below; rising. `keys` is [1].

    In blocks that stay in the cache, and without the logarithms that a whole vocabulary of noise would cost.
    """
    bound = np.uint64(min(max(0, int(least * 2.0**53) - 1) << 11, _MASK))
    found = []
    for start in range(0, num_tokens, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, num_tokens))
        found.append(ids[hash_tokens(keys, ids) >= bound])
    return np.concatenate(found)


def gumbel(keys: NDArray[np.uint64], token_ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """G for every token, shaped as `keys` and `token_ids` broadcast."""
    g = uniforms(hash_tokens(keys, token_ids))
    np.log(g, out=g)
    np.negative(g, out=g)
    np.log(g, out=g)
    return np.negative(g, out=g)
