"""The gated delta rule on numpy arrays: the fold and the block form whose mathematics stand in ops/api.py.

Value heads are grouped by their key head: a state [B, H_v, d_k, d_v] is seen as [B, H_k, R, d_k, d_v], R = H_v / H_k,
so that a key is used by its R value heads without being copied.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending

F32 = NDArray[np.float32]
Int = NDArray[np.int32]

BLOCK: Final = 8
"""Longest diagonal block that is inverted by the product form: safe when all keys are equal."""


def fold(state: F32, pending: DeltaPending[F32], commit: Int) -> F32:
    """S' = G_n S + sum_{i<=n} (G_n / G_i) k_i u_i^T with n = commit[b]; n = 0 gives the values of S unchanged."""
    num_rows, num_pending, num_keys = pending.k.shape[:3]
    if not commit.any():
        return state
    kept = (np.arange(num_pending) < commit[:, None])[:, :, None]
    decay = np.where(kept, pending.log_g, 0).cumsum(axis=1, dtype=np.float64)  # c_1 .. c_n, then constant
    ratio = np.exp(np.where(kept, decay[:, -1:] - decay, -np.inf).astype(np.float32))
    weighted = (pending.u * ratio[..., None]).reshape(num_rows, num_pending, num_keys, -1, pending.u.shape[-1])
    added = pending.k.transpose(0, 2, 3, 1)[:, :, None] @ weighted.transpose(0, 2, 3, 1, 4)
    folded: F32 = state * np.exp(decay[:, -1].astype(np.float32))[:, :, None, None]
    folded += added.reshape(state.shape)
    return folded


def run(inputs: DeltaInputs[F32], state: F32) -> tuple[F32, DeltaPending[F32]]:
    """The N new tokens from the folded state -> (o [B, N, H_v, d_v], their pending)."""
    num_rows, num_tokens, num_values, value_dim = inputs.v.shape
    num_keys = inputs.k.shape[2]
    grouped = (num_rows, num_keys, num_values // num_keys)
    queries_keys = np.concatenate((inputs.q, inputs.k), axis=1).transpose(0, 2, 1, 3)  # [B, H_k, 2N, d_k]
    keys = queries_keys[:, :, num_tokens:]
    from_state = queries_keys[:, :, None] @ state.reshape(*grouped, *state.shape[2:])  # [B, H_k, R, 2N, d_v]
    products = (queries_keys @ keys.transpose(0, 1, 3, 2))[:, :, None]  # [B, H_k, 1, 2N, N]

    log_g = inputs.log_g.transpose(0, 2, 1).reshape(*grouped, num_tokens)
    beta = inputs.beta.transpose(0, 2, 1).reshape(*grouped, num_tokens, 1)
    decay = log_g.cumsum(axis=-1, dtype=np.float64)
    gamma = _ratios(decay)  # [B, H_k, R, N, N]
    since_start = np.exp(decay.astype(np.float32))[..., None]

    value = inputs.v.transpose(0, 2, 1, 3).reshape(*grouped, num_tokens, value_dim)
    rhs = beta * (value - since_start * from_state[..., num_tokens:, :])
    coupling = beta * gamma * products[..., num_tokens:, :]
    u = _solve_unit_lower(coupling, rhs)
    out = since_start * from_state[..., :num_tokens, :]
    out += (gamma * products[..., :num_tokens, :]) @ u

    back = (num_rows, num_values, num_tokens, value_dim)
    pending = DeltaPending(inputs.k, u.reshape(back).transpose(0, 2, 1, 3), inputs.log_g)
    return out.reshape(back).transpose(0, 2, 1, 3), pending


def _ratios(decay: NDArray[np.float64]) -> F32:
    """exp(c_t - c_i) for i <= t, else 0: masked in the exponent. decay [..., N] -> float32 [..., N, N]."""
    num_tokens = decay.shape[-1]
    if num_tokens == 1:
        return np.ones((*decay.shape, 1), np.float32)
    exponent = (decay[..., :, None] - decay[..., None, :]).astype(np.float32)
    np.copyto(exponent, -np.inf, where=_future(num_tokens))
    ratios: F32 = np.exp(exponent, out=exponent)
    return ratios


@cache
def _future(num_tokens: int) -> NDArray[np.bool_]:
    """[N, N]: where i > t."""
    return ~np.tri(num_tokens, dtype=bool)


@cache
def _strict_lower(num_tokens: int) -> F32:
    return np.tri(num_tokens, k=-1, dtype=np.float32)


@cache
def _identity(size: int) -> F32:
    return np.eye(size, dtype=np.float32)


def _solve_unit_lower(coupling: F32, rhs: F32) -> F32:
    """(I + strict_lower(coupling))^-1 rhs; coupling [..., N, N], rhs [..., N, d]."""
    num_tokens = rhs.shape[-2]
    if num_tokens == 1:
        return rhs
    strict: F32 = coupling * _strict_lower(num_tokens)
    if num_tokens <= BLOCK:
        return _invert_block(strict) @ rhs
    solved = np.empty_like(rhs)
    for start in range(0, num_tokens, BLOCK):
        end = min(start + BLOCK, num_tokens)
        block = rhs[..., start:end, :]
        if start:
            known: F32 = strict[..., start:end, :start] @ solved[..., :start, :]
            block = block - known
        solved[..., start:end, :] = _invert_block(strict[..., start:end, start:end]) @ block
    return solved


def _invert_block(strict: F32) -> F32:
    """(I + A)^-1 = (I - A)(I + A^2)(I + A^4), exact for strictly lower A of at most eight rows."""
    size = strict.shape[-1]
    identity = _identity(size)
    inverse: F32 = identity - strict
    power, reach = strict, 2
    while reach < size:
        power = power @ power
        inverse = inverse @ (identity + power)
        reach *= 2
    return inverse
