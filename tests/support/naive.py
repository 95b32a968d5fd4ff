"""The ops' mathematics by plain loops in float64: nothing shared with any implementation."""

from __future__ import annotations

import numpy as np


def silu(x):
    return x * sigmoid(x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def rms_norm(x, gain, eps):
    y = np.empty_like(x)
    for i in np.ndindex(x.shape[:-1]):
        y[i] = x[i] / np.sqrt(np.mean(x[i] ** 2) + eps) * gain
    return y


def l2_norm(x, eps, scale):
    y = np.empty_like(x)
    for i in np.ndindex(x.shape[:-1]):
        y[i] = x[i] / np.sqrt(np.sum(x[i] ** 2) + eps) * scale
    return y


def rotary(x, cos, sin):
    y, half = x.copy(), cos.shape[-1]
    for b, n, h in np.ndindex(x.shape[:3]):
        for i in range(half):
            c, s, low, high = cos[b, n, i], sin[b, n, i], x[b, n, h, i], x[b, n, h, half + i]
            y[b, n, h, i], y[b, n, h, half + i] = low * c - high * s, high * c + low * s
    return y


def attend(q, k, v, k_cache, v_cache, start, scale, stored=lambda x: x):
    """The caches are given as values; `stored` is the rounding that storing does."""
    num_rows, num_tokens, num_heads, _ = q.shape
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    group = num_heads // k.shape[2]
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(num_rows):
        for n in range(num_tokens):
            k_cache[b, :, start[b] + n], v_cache[b, :, start[b] + n] = stored(k[b, n]), stored(v[b, n])
        for n, h in np.ndindex(num_tokens, num_heads):
            seen = start[b] + n + 1
            scores = np.array([scale * q[b, n, h] @ k_cache[b, h // group, i] for i in range(seen)])
            weights = np.exp(scores - scores.max())
            out[b, n, h] = weights / weights.sum() @ v_cache[b, h // group, :seen]
    return out, k_cache, v_cache


def causal_conv(x, tail, weight):
    y = np.zeros_like(x)
    for b in range(len(x)):
        inputs = np.concatenate((tail[b], x[b]))
        for n, j in np.ndindex(x.shape[1], weight.shape[2]):
            y[b, n] += weight[:, 0, j] * inputs[n + j]
    return silu(y)


def conv_commit(tail, pending, commit):
    return np.stack([np.concatenate((t, p))[n : n + len(t)] for t, p, n in zip(tail, pending, commit, strict=True)])


def delta_fold(state, k, u, log_g, commit):
    """Token by token: S <- g S + k u^T."""
    state = state.copy()
    repeat = state.shape[1] // k.shape[2]
    for b, h in np.ndindex(state.shape[:2]):
        for i in range(commit[b]):
            state[b, h] = np.exp(log_g[b, i, h]) * state[b, h] + np.outer(k[b, i, h // repeat], u[b, i, h])
    return state


def delta_rule(state, q, k, v, log_g, beta):
    """Token by token from the folded state -> (o, u)."""
    out, u = np.zeros_like(v), np.zeros_like(v)
    repeat = state.shape[1] // k.shape[2]
    for b, h in np.ndindex(state.shape[:2]):
        s = state[b, h].copy()
        for t in range(v.shape[1]):
            key = k[b, t, h // repeat]
            s *= np.exp(log_g[b, t, h])
            u[b, t, h] = beta[b, t, h] * (v[b, t, h] - key @ s)
            s += np.outer(key, u[b, t, h])
            out[b, t, h] = q[b, t, h // repeat] @ s
    return out, u
