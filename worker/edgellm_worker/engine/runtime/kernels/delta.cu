// Gated delta rule with the fold of the last pass, in one trip of the state through the chip.
//
//   S' = G_n S + sum_{i<n} exp(c_n - c_i) k_i u_i^T             fold n = commit[b] pending tokens
//   u_t = beta_t (v_t - exp(c_t) (k_t S') - sum_{i<t} exp(c_t - c_i) (k_t.k_i) u_i)
//   o_t = exp(c_t) (q_t S') + sum_{i<=t} exp(c_t - c_i) (q_t.k_i) u_i
//
// in blocks of at most BLOCK tokens; between blocks S' moves on in registers, and what is stored is S' before the first
// block. Columns of S never mix, so a thread block owns 32 of them: lane = column, warp w owns rows w*ROWS.. of d_k.
// One pass therefore reads and writes S once, and all products with S share those reads.
//
// Compile-time: HK, HV key and value heads; DK, DV head sizes (multiples of 8 and 32).
// Tokens of v lie v_pitch apart; the rest is dense. Pending k and log g are kept twice, selected by parity[slot]: every block of a key head reads the old ones while one
// of them writes the new. u is private to its columns and is replaced in place.
#define WARPS 8
#define ROWS (DK / WARPS)
#define BLOCK 8
#define TILES (DV / 32)

struct Shared {
  float k[BLOCK][DK];
  float q[BLOCK][DK];
  float part[WARPS][2 * BLOCK][32];
  float sums[2 * BLOCK][32];
  float kk[BLOCK][BLOCK];
  float qk[BLOCK][BLOCK];
  float u[BLOCK][32];
  float c[BLOCK];
  float beta[BLOCK];
};

// The sum of x over lanes 0 .. lane, of a block's tokens: their log decays are read at once, not one after the other.
__device__ float running_sum(float x, int lane) {
#pragma unroll
  for (int d = 1; d < BLOCK; d <<= 1) {
    const float before = __shfl_up_sync(0xffffffffu, x, d);
    if (lane >= d) x += before;
  }
  return x;
}

// S <- exp(total) S + sum_i weight_i k_i u_i^T over tokens [0, n), read from memory. Exponents are sums of log g <= 0.
__device__ void fold(float (&s)[ROWS], Shared& sh, const float* k, const float* u, const float* log_g, int n, int warp,
                     int lane) {
  float after = 0.f;  // log of the decay from the current group's end to token n-1
  for (int end = n; end > 0; end -= BLOCK) {
    const int begin = end > BLOCK ? end - BLOCK : 0, m = end - begin;
    __syncthreads();
    for (int i = threadIdx.x; i < m * DK; i += WARPS * 32)
      sh.k[i / DK][i % DK] = k[(size_t)(begin + i / DK) * HK * DK + i % DK];
    for (int i = warp; i < m; i += WARPS) sh.u[i][lane] = u[(size_t)(begin + i) * HV * DV + lane];
    if (warp == 0) {  // lane l has the l-th token from the end
      const float c = after + running_sum(lane < m ? log_g[(size_t)(end - 1 - lane) * HV] : 0.f, lane);
      const float later = __shfl_up_sync(0xffffffffu, c, 1);
      if (lane < m) sh.c[m - 1 - lane] = __expf(lane ? later : after);
      if (lane == m - 1) sh.beta[0] = c;
    }
    __syncthreads();
    after = sh.beta[0];
    // Later groups first: the state's own decay is applied once, after the last group.
    for (int i = 0; i < m; ++i) {
      const float w = sh.c[i] * sh.u[i][lane];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) s[r] += w * sh.k[i][warp * ROWS + r];
    }
  }
}

// The state's own decay exp(sum of log g over [0, n)) must precede the additions: computed first, by whole warps.
__device__ float total_log(const float* log_g, int n, int lane) {
  float c = 0.f;
  for (int i = lane; i < n; i += 32) c += log_g[(size_t)i * HV];
  return warp_sum(c);
}

extern "C" __global__ void __launch_bounds__(256)
    gated_delta_rule(const float* q, const float* k, const float* v, const float* log_g, const float* beta,
                     float* state, float* pending_k, float* pending_u, float* pending_log_g, const int* commit,
                     const int* slots, const int* parity, float* out, float* u_out, int num_tokens, int pending_rows,
                     int keep_pending, int v_pitch) {
  take_turn();
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x, hv = blockIdx.y, b = blockIdx.z;
  const int hk = hv / (HV / HK), slot = slots[b], n = commit[b];
  const int column = tile * 32 + lane;

  float s[ROWS];
  float* cell = state + ((size_t)(slot * HV + hv) * DK + warp * ROWS) * DV + column;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) s[r] = cell[(size_t)r * DV];

  const size_t half_in = (size_t)(slot * 2 + parity[slot]) * pending_rows;
  const size_t half_out = (size_t)(slot * 2 + (parity[slot] ^ 1)) * pending_rows;
  float* u_pending = pending_u + (size_t)slot * pending_rows * HV * DV + hv * DV + tile * 32;
  if (n > 0) {
    const float* g_in = pending_log_g + half_in * HV + hv;
    const float decay = __expf(total_log(g_in, n, lane));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) s[r] *= decay;
    fold(s, sh, pending_k + half_in * HK * DK + hk * DK, u_pending, g_in, n, warp, lane);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) cell[(size_t)r * DV] = s[r];
  }

  for (int t0 = 0; t0 < num_tokens; t0 += BLOCK) {
    const int m = min(BLOCK, num_tokens - t0);
    const size_t row = (size_t)b * num_tokens + t0;
    float own_v[BLOCK];  // asked for long before it is needed
    if (warp == 0) {
      const float* v_row = v + row * v_pitch + hv * DV + column;
#pragma unroll
      for (int t = 0; t < BLOCK; ++t) own_v[t] = t < m ? v_row[(size_t)t * v_pitch] : 0.f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < m * DK; i += 256) {
      const size_t at = (row + i / DK) * HK * DK + hk * DK + i % DK;
      sh.k[i / DK][i % DK] = k[at];
      sh.q[i / DK][i % DK] = q[at];
    }
    if (threadIdx.x < m) sh.beta[threadIdx.x] = beta[(row + threadIdx.x) * HV + hv];
    if (warp == 1) {
      const float c = running_sum(lane < m ? log_g[(row + lane) * HV + hv] : 0.f, lane);
      if (lane < m) sh.c[lane] = c;
    }
    __syncthreads();
    // k_t.k_i and q_t.k_i, decayed; masked by never being read where i > t
    for (int pair = warp; pair < m * m; pair += WARPS) {
      const int t = pair / m, i = pair % m;
      if (i > t) continue;
      float kk = 0.f, qk = 0.f;
      for (int d = lane; d < DK; d += 32) {
        kk += sh.k[t][d] * sh.k[i][d];
        qk += sh.q[t][d] * sh.k[i][d];
      }
      kk = warp_sum(kk);
      qk = warp_sum(qk);
      if (lane == 0) {
        const float ratio = __expf(sh.c[t] - sh.c[i]);
        sh.kk[t][i] = kk * ratio;
        sh.qk[t][i] = qk * ratio;
      }
    }
    for (int t = 0; t < m; ++t) {
      float ks = 0.f, qs = 0.f;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        ks += sh.k[t][warp * ROWS + r] * s[r];
        qs += sh.q[t][warp * ROWS + r] * s[r];
      }
      sh.part[warp][2 * t][lane] = ks;
      sh.part[warp][2 * t + 1][lane] = qs;
    }
    __syncthreads();
    for (int i = warp; i < 2 * m; i += WARPS) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sh.part[w][i][lane];
      sh.sums[i][lane] = sum;
    }
    __syncthreads();
    if (warp == 0) {
      float u[BLOCK];
      float* o_row = out + row * HV * DV + hv * DV + column;
#pragma unroll
      for (int t = 0; t < BLOCK; ++t) {
        if (t < m) {
          const float decay = __expf(sh.c[t]);
          float x = own_v[t] - decay * sh.sums[2 * t][lane];
#pragma unroll
          for (int i = 0; i < BLOCK; ++i)
            if (i < t) x -= sh.kk[t][i] * u[i];
          u[t] = sh.beta[t] * x;
          float o = decay * sh.sums[2 * t + 1][lane];
#pragma unroll
          for (int i = 0; i < BLOCK; ++i)
            if (i <= t) o += sh.qk[t][i] * u[i];
          o_row[(size_t)t * HV * DV] = o;
          sh.u[t][lane] = u[t];
          if (keep_pending)
            u_pending[(size_t)(t0 + t) * HV * DV + lane] = u[t];
          else
            u_out[(row + t) * HV * DV + hv * DV + column] = u[t];
        }
      }
    }
    if (keep_pending) {
      if (tile == 0 && hv % (HV / HK) == 0)
        for (int i = threadIdx.x; i < m * DK; i += 256)
          pending_k[(half_out + t0 + i / DK) * HK * DK + hk * DK + i % DK] = sh.k[i / DK][i % DK];
      if (tile == 0 && threadIdx.x < m)
        pending_log_g[(half_out + t0 + threadIdx.x) * HV + hv] = log_g[(row + threadIdx.x) * HV + hv];
    }
    if (t0 + BLOCK < num_tokens) {  // move on: S <- exp(c_m) S + sum exp(c_m - c_i) k_i u_i^T
      __syncthreads();
      const float decay = __expf(sh.c[m - 1]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) s[r] *= decay;
      for (int i = 0; i < m; ++i) {
        const float w = __expf(sh.c[m - 1] - sh.c[i]) * sh.u[i][lane];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) s[r] += w * sh.k[i][warp * ROWS + r];
      }
    }
  }
}

// The fold alone, at the end of a prefill chunk: k, u, log_g are this chunk's [B, N, ...].
extern "C" __global__ void __launch_bounds__(256)
    delta_fold(float* state, const float* k, const float* u, const float* log_g, const int* commit, const int* slots,
               int num_tokens) {
  take_turn();
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x, hv = blockIdx.y, b = blockIdx.z;
  const int hk = hv / (HV / HK), slot = slots[b], n = commit[b];
  if (n == 0) return;
  float s[ROWS];
  float* cell = state + ((size_t)(slot * HV + hv) * DK + warp * ROWS) * DV + tile * 32 + lane;
  const float* g = log_g + (size_t)b * num_tokens * HV + hv;
  const float decay = __expf(total_log(g, n, lane));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) s[r] = decay * cell[(size_t)r * DV];
  fold(s, sh, k + (size_t)b * num_tokens * HK * DK + hk * DK, u + (size_t)b * num_tokens * HV * DV + hv * DV + tile * 32,
       g, n, warp, lane);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) cell[(size_t)r * DV] = s[r];
}
