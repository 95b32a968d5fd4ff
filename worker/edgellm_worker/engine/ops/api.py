"""The operations that every model of this product is written in.

A model is plain Python over `Ops[T]`. `NumpyOps` runs it eagerly (T = numpy array); `TensorRtOps` adds layers to a
network under construction (T = a symbolic tensor). One definition, two ways to run it, one parity case per op.

Shapes. B rows of the batch, N new tokens per row, D hidden size, H heads, d head size, C channels, V vocabulary.
Every tensor but the caches is float32 in the reference; a backend may hold activations in another floating type, never
the ones said here to be float32. Integer tensors are int32. Nothing may depend on tensor *values* in Python: what
differs per row (start position, committed count) is a tensor [B]. Shapes may: N is known when the model runs.

State. Ops are functional: state goes in, new state comes out. An eager backend may write into the cache or state that
it was given, so the caller keeps only the returned one.

State without snapshots. A recurrent state cannot be rewound, and one copy per verify position is not affordable. So
S stays the state *before* the last verify pass, and the pass leaves its per-token results behind as "pending":

    S' = G_n S + sum_{i<=n} (G_n / G_i) k_i u_i^T        G_t = g_1 ... g_t, n = commit[b] tokens kept of the last pass

k_i, u_i and g_i depend on earlier tokens alone, so whatever was rejected after row n does not matter. Every pass folds
first, hence the draft length may change at any step; n = 0 returns S bit for bit. Ratios are formed as
exp(c_n - c_i) with c = cumsum(log g), and masked by setting the *exponent* to -inf: dividing G's, or masking after
exp, gives NaN where a real gate closes (log g near -50 per token).

Block form of N new tokens from S, row vectors q_t, k_t, v_t, Gamma_ti = exp(c_t - c_i) for i <= t:

    A = strict_lower(beta_t Gamma_ti k_t.k_i)        U = (I + A)^-1 (beta (V - G K S))
    O = G (Q S) + lower(Gamma Q K^T) U

(I + A)^-1 is taken on diagonal blocks of at most 8 and by substitution between them: the product form
(I-A)(I+A^2)(I+A^4)... over longer blocks explodes when keys repeat. All of it in float32, c in float64 or per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from edgellm_worker.engine.checkpoint.weights import Array, KvScales, Weight

T = TypeVar("T")


class KvDtype(StrEnum):
    """How keys and values are stored. FP8 is e4m3fn with the layer's `KvScales`: stored = e4m3(value / scale)."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class KvCache(Generic[T]):
    """One attention layer's cache, or the prefix of it that is attended: k, v [B, H_kv, L, d] in `dtype`."""

    k: T
    v: T
    dtype: KvDtype
    scales: KvScales


@dataclass(frozen=True, slots=True)
class DeltaInputs(Generic[T]):
    """What one Gated DeltaNet layer feeds to the delta rule for N tokens; all float32.

    q, k   [B, N, H_k, d_k], L2-normalised; q already multiplied by d_k^-0.5
    v      [B, N, H_v, d_v]
    log_g  [B, N, H_v] <= 0
    beta   [B, N, H_v] in (0, 1)

    Value head h uses key head h // (H_v / H_k).
    """

    q: T
    k: T
    v: T
    log_g: T
    beta: T


@dataclass(frozen=True, slots=True)
class DeltaPending(Generic[T]):
    """What a pass leaves to fold, all finite float32: k [B, N, H_k, d_k], u [B, N, H_v, d_v], log_g [B, N, H_v]."""

    k: T
    u: T
    log_g: T


class Ops(Protocol[T]):
    """The op vocabulary. Weights come as the checkpoint holds them; the ops decode them (or emit dequantize layers)."""

    # --- tokens, projections, pointwise ---

    def embed(self, table: Weight, ids: T) -> T:
        """`table` [V, D], ids int32 [B, N] -> [B, N, D]: rows of the table."""

    def linear(self, x: T, weight: Weight, bias: Weight | None = None) -> T:
        """`x` [..., in], weight [out, in], bias [out] -> x W^T + b [..., out]."""

    def fused_linear(self, x: T, weights: Sequence[Weight], biases: Sequence[Weight | None]) -> tuple[T, ...]:
        """Several `linear` of one x (q|k|v, gate|up): a backend may run them as one product. One result per weight."""

    def rms_norm(self, x: T, weight: Weight, eps: float, *, zero_centred: bool) -> T:
        """`x` [..., D], weight [D] -> x * rsqrt(mean(x^2, last) + eps) * w, with (1 + w) for w if `zero_centred`."""

    def gated_rms_norm(self, x: T, gate: T, weight: Weight, eps: float) -> T:
        """x, gate [..., d], weight [d] -> (x * rsqrt(mean(x^2, last) + eps) * w) * silu(gate), in float32."""

    def l2_norm(self, x: T, eps: float, scale: float) -> T:
        """`x` [..., d] -> x * rsqrt(sum(x^2, last) + eps) * scale, in float32."""

    def swiglu(self, gate: T, up: T) -> T:
        """Both [..., D] -> silu(gate) * up, silu(z) = z / (1 + exp(-z))."""

    def sigmoid_gate(self, x: T, gate: T) -> T:
        """Both [..., D] -> x * sigmoid(gate)."""

    def add(self, a: T, b: T) -> T:
        """Same shape -> a + b."""

    # --- shape ---

    def concat(self, xs: Sequence[T]) -> T:
        """[..., D_i] -> [..., sum D_i]."""

    def split(self, x: T, sizes: Sequence[int]) -> tuple[T, ...]:
        """[..., sum(sizes)] -> one [..., size] each, in order."""

    def split_heads(self, x: T, num_heads: int) -> T:
        """[B, N, H * d] -> [B, N, H, d]."""

    def merge_heads(self, x: T) -> T:
        """[B, N, H, d] -> [B, N, H * d]."""

    def gather_rows(self, x: T, index: T) -> T:
        """`x` [B, N, D], index int32 [B, M] in [0, N) -> [B, M, D]: x[b, index[b, m]]."""

    # --- attention ---

    def token_positions(self, start: T, ids: T) -> T:
        """`start` int32 [B], ids [B, N] (its shape alone) -> int32 [B, N]: start[b] + n."""

    def rope_angles(self, positions: T, inv_freq: Array, magnitude: float) -> tuple[T, T]:
        """`positions` [B, N], inv_freq float32 [R/2] -> (cos, sin) float32 [B, N, R/2] of position * inv_freq, both
        multiplied by `magnitude` (1.0 but for scaled variants).
        """

    def rotary(self, x: T, cos: T, sin: T) -> T:
        """NeoX rotary on the first R of d dims of x [B, N, H, d]; cos, sin [B, N, R/2].

        With x1 = x[..., :R/2], x2 = x[..., R/2:R]: (x1 cos - x2 sin, x2 cos + x1 sin, x[..., R:]).
        """

    def attend(self, qkv: tuple[T, T, T], cache: KvCache[T], start: T, scale: float) -> tuple[T, KvCache[T]]:
        """Write N tokens per row into the cache, then causal grouped-query attention over it.

        q [B, N, H_q, d]; k, v [B, N, H_kv, d]; start int32 [B] = the position of each row's first new token;
        start[b] + N <= L. k and v of token n are stored at position start[b] + n. Query n of row b sees the cache
        positions 0 .. start[b] + n (its own as stored, so after rounding to the cache's dtype):
        softmax(scale * q k^T) v in float32, query head h with kv head h // (H_q / H_kv) -> [B, N, H_q, d].
        Entries past a row's committed tokens are rubbish (rejected drafts, padding), overwritten before they are seen.
        """

    # --- Gated DeltaNet ---

    def conv_commit(self, tail: T, pending: T, commit: T) -> T:
        """`tail` [B, K-1, C], pending [B, N, C], commit int32 [B] in [0, N] -> rows commit .. commit+K-2 of
        [tail; pending], [B, K-1, C]: the last K-1 inputs of committed tokens (zeros before a row's first token).
        """

    def causal_conv(self, x: T, tail: T, weight: Weight) -> T:
        """Depthwise causal convolution, then SiLU. x [B, N, C], tail [B, K-1, C], weight [C, 1, K] ->
        y[b, n, c] = silu(sum_j w[c, 0, j] * [tail; x][b, n + j, c]), [B, N, C]. x is the pass's pending conv input.
        """

    def delta_gates(self, a: T, b: T, a_log: Weight, dt_bias: Weight) -> tuple[T, T]:
        """a, b [B, N, H]; a_log, dt_bias [H] -> (log_g, beta) float32 [B, N, H]:
        log_g = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b).
        """

    def gated_delta_rule(
        self, inputs: DeltaInputs[T], state: T, pending: DeltaPending[T], commit: T
    ) -> tuple[T, T, DeltaPending[T]]:
        """Fold commit[b] tokens of `pending` into state float32 [B, H_v, d_k, d_v], then run the N new tokens from it
        (the recurrence S <- g S; u = beta (v - k^T S); S <- S + k u^T; o = q^T S, in block form, see above).

        -> (o float32 [B, N, H_v, d_v], folded state *before* the new tokens, pending of the new tokens).
        commit int32 [B] in [0, N_pending].
        """

    def delta_fold(self, state: T, pending: DeltaPending[T], commit: T) -> T:
        """The fold alone (the end of a prefill chunk) -> state [B, H_v, d_k, d_v]."""

    # --- scores ---

    def arg_max(self, x: T) -> T:
        """[..., V] -> int32 [...], ties by lowest id."""

    def top_k(self, x: T, k: int) -> tuple[T, T]:
        """[..., V] -> (values [..., k] descending, ids int32 [..., k]); equal values by lowest id."""

    def log_sum_exp(self, x: T) -> T:
        """[..., V] -> float32 [...]: log(sum(exp(x))), by the maximum."""
