// Attention of a step: at most 16 new tokens per row, over a cache, in one launch with what stands before it.
//
// q [B, N, HQ, D], new k, v [B, N, HKV, D] float16, tokens and heads strided (they may lie in one joint product); cache
// k, v [slots, HKV, L, D] float16 or FP8 (e4m3, scaled). Query n of row b sits at position start[b] + n and sees
// positions 0 .. start[b] + n. Queries and keys are normed (NORM) and rotated (ROT) as they are loaded; the new keys and
// values are written to the cache by one block and taken from shared memory by all, so no block waits for another.
//
// The N * G queries of one kv head (G = HQ / HKV) are one matrix, 16 rows a block. Cache positions go in tiles of 16, a
// tile to a warp: warps share nothing until they merge at the end, so the loop has no barriers and its loads, 16 bytes
// each, are all in flight. Tensor cores (m16n8k16) read fragments straight from those loads: a product may sum over d in
// any order if both sides use it, and may give its columns in any order if they are written back so.
//
//     scores   lane (quad, pair) holds k[quad][32 c + 8 pair ..+8]: two k-steps of 16, of which it has d = 4h .. 4h+3
//     values   it holds v[2 pair, +1, +8, +9][64 c + 8 quad ..+8]; column n of product e is d = 64 c + 8 n + e
//
// Contexts over SPLIT_AT are shared by several blocks, and the last one to arrive merges. How many is read on the device,
// so one captured graph serves every context length up to L.
//
// Compile-time: HQ, HKV, D (a multiple of 64), L, KV_FP8, NORM (0 or 1), ROT (half of the rotated dims, 0: none), SPLITS,
// WARPS (8, or 4 where what 8 leave to be merged exceeds a block's shared memory).
#define G (HQ / HKV)
#define ROWS 16
#define SPLIT_AT 512
#define PAD 8
#define WIDE (D + 4)
#define PER_LANE (D / 32)

struct Step {
  half_t q[ROWS][D + PAD], k[ROWS][D + PAD], v[ROWS][D + PAD];
  float m[WARPS][ROWS], l[WARPS][ROWS];
  float o[WARPS][ROWS][WIDE];
  int is_last;
};

struct Norm {
  float eps, offset;
};

// One head vector held by a warp, PER_LANE elements a lane, with what norm and rotation multiply it by. `load` only
// loads, so that several are under way at once; `finish` rounds to float16 after each step, as the separate kernels do.
struct Head {
  float x[PER_LANE], weight[PER_LANE], c[PER_LANE], s[PER_LANE];

  __device__ __forceinline__ void load(const half_t* from, const float* weights, const float* cosines,
                                       const float* sines) {
    const int at = threadIdx.x % 32 * PER_LANE;
    u32 raw[PER_LANE / 2];
    if (PER_LANE == 2) raw[0] = *(const u32*)(from + at);
    if (PER_LANE == 4) *(uint2*)raw = *(const uint2*)(from + at);
    if (PER_LANE == 8) *(uint4*)raw = *(const uint4*)(from + at);
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
      x[e] = h2f(e % 2 ? raw[e / 2] >> 16 : raw[e / 2] & 0xffff);
#if NORM
      weight[e] = weights[at + e];
#endif
#if ROT
      if (at + e < 2 * ROT) c[e] = cosines[(at + e) % ROT], s[e] = sines[(at + e) % ROT];
#endif
    }
  }

  __device__ __forceinline__ void finish(half_t* to, Norm norm) {
    const int at = threadIdx.x % 32 * PER_LANE;
#if NORM
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) sum += x[e] * x[e];
    const float scale = 1.f / sqrtf(warp_sum(sum) / D + norm.eps);
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) x[e] *= scale * (norm.offset + weight[e]);
#endif
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) to[at + e] = f2h(x[e]);
    __syncwarp();
#if ROT
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e) {
      const int i = at + e;
      if (i < 2 * ROT) {
        const float own = h2f(to[i]), pair = h2f(to[i < ROT ? i + ROT : i - ROT]);
        x[e] = i < ROT ? own * c[e] - pair * s[e] : own * c[e] + pair * s[e];
      }
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < PER_LANE; ++e)
      if (at + e < 2 * ROT) to[at + e] = f2h(x[e]);
    __syncwarp();
#endif
  }
};

// 8 elements of a cache row, as float16 in units of the scale.
__device__ __forceinline__ uint4 cached(const kv_t* row) {
#if KV_FP8
  return widen(*(const uint2*)row);
#else
  return *(const uint4*)row;
#endif
}

// What a new row is in the cache: `row` is replaced by its rounded form, in units of the scale.
__device__ __forceinline__ void store_row(half_t* row, kv_t* cache_row, float inverse) {
  for (int c = (threadIdx.x % 32) * 8; c < D; c += 256) {
    uint4 value = *(uint4*)&row[c];
#if KV_FP8
    const uint2 raw = narrow(value, inverse);
    *(uint4*)&row[c] = widen(raw);
    if (cache_row) *(uint2*)(cache_row + c) = raw;
#else
    if (cache_row) *(uint4*)(cache_row + c) = value;
#endif
  }
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ u32 halves(u32 a, u32 b, int high) {
  return high ? __byte_perm(a, b, 0x7632) : __byte_perm(a, b, 0x5410);
}

// What fits the registers: up to 128 columns, values are loaded with their keys, and the next tile's while this one is
// worked on; above that a tile's values come chunk by chunk.
#define EARLY (D <= 128)
#define CHUNKS 2

// Positions past the last cached one are read from it; they are masked later.
__device__ __forceinline__ void load_keys(uint4 (&kf)[2][D / 32], const kv_t* keys, int at, int start) {
  const int quad = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
      kf[j][c] = cached(keys + (size_t)min(at + j * 8 + quad, start - 1) * D + c * 32 + pair * 8);
}

// A lane's values of one tile, 64 columns a chunk.
struct Values {
  uint4 parts[CHUNKS][4];

  __device__ __forceinline__ void load(const Step& sh, const kv_t* cache, bool is_new, int at, int start) {
#pragma unroll
    for (int c = 0; c < D / 64; ++c) load_chunk(sh, cache, is_new, at, start, c, c % CHUNKS);
  }

  __device__ __forceinline__ void load_chunk(const Step& sh, const kv_t* cache, bool is_new, int at, int start, int c,
                                             int to) {
    const int quad = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    if (is_new) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[to][i] = *(const uint4*)&sh.v[pair * 2 + i % 2 + i / 2 * 8][c * 64 + quad * 8];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = min(at + pair * 2 + i % 2 + i / 2 * 8, start - 1);
        parts[to][i] = cached(cache + (size_t)row * D + c * 64 + quad * 8);
      }
    }
  }
};

// The tiles of one of the blocks that share a context of `start` cached positions.
struct Span {
  int num_splits, first_tile, end_tile;

  __device__ __forceinline__ Span(int start, int split) {
    num_splits = min(max((start + SPLIT_AT - 1) / SPLIT_AT, 1), SPLITS);
    const int num_tiles = (start + 15) / 16, share = (num_tiles + num_splits - 1) / num_splits;
    first_tile = split * share, end_tile = min(first_tile + share, num_tiles);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    attend_step(const half_t* q, const half_t* k, const half_t* v, kv_t* cache_k, kv_t* cache_v, const int* starts,
                const int* slots, half_t* out, float* partial, int* arrived, const float* cosines, const float* sines,
                const float* q_weight, const float* k_weight, int num_tokens, int q_pitch, int q_step, int k_pitch,
                int k_step, int v_pitch, int v_step, float scale, float k_scale, float v_scale, float eps,
                float offset) {
  start_next();
  extern __shared__ __align__(16) char raw_shared[];
  Step& sh = *(Step*)raw_shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const int num_q_blocks = (num_tokens * G + ROWS - 1) / ROWS;
  const int q_block = blockIdx.x % num_q_blocks, split = blockIdx.x / num_q_blocks, head = blockIdx.y, b = blockIdx.z;
  if (threadIdx.x == 0 && q_block == 0) {  // what a row's start may have been a kernel ago is near enough for a prefetch
    const int start = min(max(__ldcg(starts + b), 0), L);
    const Span span(start, split);
    const size_t from = ((size_t)(__ldcg(slots + b) * HKV + head) * L + span.first_tile * 16) * D;
    const int most = 65536 / (D * (int)sizeof(kv_t));  // more would be gone again before it is read
    const int count = min(min(span.end_tile * 16, start) - span.first_tile * 16, most);
    if (count > 0) {
      prefetch(cache_k + from, count * D * sizeof(kv_t));
      prefetch(cache_v + from, count * D * sizeof(kv_t));
    }
  }
  await_previous();
  const int start = starts[b], slot = slots[b];
  const Span span(start, split);
  const int num_splits = span.num_splits, end_tile = span.end_tile;
  if (split >= num_splits) return;
  const int first_row = q_block * ROWS, num_rows = min(ROWS, num_tokens * G - first_row);
  const Norm norm = {eps, offset};

  const size_t cache_at = (size_t)(slot * HKV + head) * L * D;
  const size_t token = (size_t)b * num_tokens;
  // a warp's first tile is on its way while queries and new keys are made ready
  const kv_t* const keys = cache_k + cache_at;
  const kv_t* const values = cache_v + cache_at;
  int tile = span.first_tile + warp;
  uint4 kf[2][D / 32];
  Values early;
  if (tile < end_tile) load_keys(kf, keys, tile * 16, start);
  if (tile < end_tile && EARLY) early.load(sh, values, false, tile * 16, start);

  Head heads[3];  // two query rows at a time, and the new key of token warp; tokens from WARPS on come after
  const half_t* const new_k = k + token * k_pitch + head * k_step;
  const half_t* const new_v = v + token * v_pitch + head * v_step;
  const bool has_key = split == 0 && warp < num_tokens;
#pragma unroll
  for (int first = 0; first < ROWS; first += 2 * WARPS) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + min(first + warp + i * WARPS, num_rows - 1), n = row / G, h = head * G + row % G;
      heads[i].load(q + (token + n) * q_pitch + h * q_step, q_weight, cosines + (token + n) * ROT,
                    sines + (token + n) * ROT);
    }
    if (first == 0 && has_key)
      heads[2].load(new_k + (size_t)warp * k_pitch, k_weight, cosines + (token + warp) * ROT,
                    sines + (token + warp) * ROT);
#pragma unroll
    for (int i = 0; i < 2; ++i) heads[i].finish(sh.q[first + warp + i * WARPS], norm);
  }
  if (split == 0) {
    const bool writes = q_block == 0;
    for (int n = warp; n < ROWS; n += WARPS) {
      if (n >= num_tokens) {
        for (int c = lane; c < D; c += 32) sh.k[n][c] = 0, sh.v[n][c] = 0;
        continue;
      }
      if (n > warp)
        heads[2].load(new_k + (size_t)n * k_pitch, k_weight, cosines + (token + n) * ROT, sines + (token + n) * ROT);
      for (int c = lane * 8; c < D; c += 256) *(uint4*)&sh.v[n][c] = *(const uint4*)(new_v + (size_t)n * v_pitch + c);
      heads[2].finish(sh.k[n], norm);
      __syncwarp();
      const bool kept = writes && start + n < L;
      const size_t at = cache_at + (size_t)(start + n) * D;
      store_row(sh.k[n], kept ? cache_k + at : (kv_t*)0, 1.f / k_scale);
      store_row(sh.v[n], kept ? cache_v + at : (kv_t*)0, 1.f / v_scale);
    }
  }
  __syncthreads();

  float o[D / 8][4];
#pragma unroll
  for (int t = 0; t < D / 8; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[t][e] = 0.f;
  float top[2] = {-1e30f, -1e30f}, sum[2] = {0.f, 0.f};
  const float to_log2 = scale * k_scale * 1.44269504f;
  // after the cached tiles split 0 has that of the new tokens, at index end_tile
  for (; tile < end_tile + (split == 0); tile += WARPS) {
    const bool is_new = tile == end_tile;
    if (is_new) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < D / 32; ++c) kf[j][c] = *(const uint4*)&sh.k[j * 8 + quad][c * 32 + pair * 8];
      if (EARLY) early.load(sh, values, true, 0, start);
    }
    float s[2][4] = {};
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const uint4 above = *(const uint4*)&sh.q[quad][c * 32 + pair * 8];
      const uint4 below = *(const uint4*)&sh.q[quad + 8][c * 32 + pair * 8];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 a[4] = {word(above, 2 * h), word(below, 2 * h), word(above, 2 * h + 1), word(below, 2 * h + 1)};
#pragma unroll
        for (int j = 0; j < 2; ++j) mma(s[j], a, word(kf[j][c], 2 * h), word(kf[j][c], 2 * h + 1));
      }
    }
    const int next = tile + WARPS;
    if (EARLY && next < end_tile) load_keys(kf, keys, next * 16, start);
    u32 p[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows quad and quad + 8
      const int last = is_new ? (first_row + quad + i * 8) / G : start - 1 - tile * 16;  // last visible column
      float x[4], best = top[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = e / 2 * 8 + pair * 2 + e % 2;
        x[e] = column <= last ? s[e / 2][i * 2 + e % 2] * to_log2 : -1e30f;
        best = fmaxf(best, x[e]);
      }
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
      const float alpha = exp2f(top[i] - best);
      top[i] = best;
      sum[i] *= alpha;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = x[e] > -1e29f ? exp2f(x[e] - best) : 0.f;
        sum[i] += x[e];
      }
      p[i] = pack_half2(x[0], x[1]);
      p[i + 2] = pack_half2(x[2], x[3]);
#pragma unroll
      for (int t = 0; t < D / 8; ++t) o[t][i * 2] *= alpha, o[t][i * 2 + 1] *= alpha;
    }
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      if (!EARLY) early.load_chunk(sh, values, is_new, tile * 16, start, c, c % CHUNKS);
      const uint4(&vf)[4] = early.parts[c % CHUNKS];
#pragma unroll
      for (int e = 0; e < 8; ++e)
        mma(o[c * 8 + e], p, halves(word(vf[0], e / 2), word(vf[1], e / 2), e % 2),
            halves(word(vf[2], e / 2), word(vf[3], e / 2), e % 2));
    }
    if (next < end_tile) {
      if (EARLY) early.load(sh, values, false, next * 16, start);
      else load_keys(kf, keys, next * 16, start);
    }
  }

  // the warps' parts side by side
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    if (pair == 0) sh.m[warp][quad + i * 8] = top[i], sh.l[warp][quad + i * 8] = sum[i];
#pragma unroll
    for (int c = 0; c < D / 64; ++c)
#pragma unroll
      for (int e = 0; e < 16; e += 4) {
        float4 four = {o[c * 8 + e % 8][i * 2 + e / 8], o[c * 8 + e % 8 + 1][i * 2 + e / 8],
                       o[c * 8 + e % 8 + 2][i * 2 + e / 8], o[c * 8 + e % 8 + 3][i * 2 + e / 8]};
        *(float4*)&sh.o[warp][quad + i * 8][c * 64 + pair * 16 + e] = four;
      }
  }
  __syncthreads();
  constexpr int THREADS = WARPS * 32 / ROWS, OWN = D / THREADS;  // threads of a row, columns of a thread
  const int r = threadIdx.x / THREADS, from = threadIdx.x % THREADS * OWN;
  float best = -1e30f, total = 0.f, y[OWN] = {};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) best = fmaxf(best, sh.m[w][r]);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float factor = exp2f(sh.m[w][r] - best);
    total += factor * sh.l[w][r];
#pragma unroll
    for (int c = 0; c < OWN; ++c) y[c] += factor * sh.o[w][r][from + c];
  }
  const size_t cell = ((size_t)(b * HKV + head) * num_q_blocks + q_block);
  if (num_splits > 1) {
    float* mine = partial + ((cell * SPLITS + split) * ROWS + r) * WIDE;
#pragma unroll
    for (int c = 0; c < OWN; ++c) mine[from + c] = y[c];
    if (from == 0) mine[D] = best, mine[D + 1] = total;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      sh.is_last = atomicAdd(&arrived[cell], 1) == num_splits - 1;
      if (sh.is_last) arrived[cell] = 0;  // ready for the next launch
    }
    __syncthreads();
    if (!sh.is_last) return;
    __threadfence();
    const float* parts = partial + (cell * SPLITS * ROWS + r) * WIDE;
    best = -1e30f, total = 0.f;
    for (int j = 0; j < num_splits; ++j) best = fmaxf(best, parts[(size_t)j * ROWS * WIDE + D]);
#pragma unroll
    for (int c = 0; c < OWN; ++c) y[c] = 0.f;
#pragma unroll 4
    for (int j = 0; j < num_splits; ++j) {
      const float* part = parts + (size_t)j * ROWS * WIDE;
      const float factor = exp2f(part[D] - best);
      total += factor * part[D + 1];
#pragma unroll
      for (int c = 0; c < OWN; ++c) y[c] += factor * part[from + c];
    }
  }
  if (r >= num_rows) return;
  const int row = first_row + r;
  half_t* to = out + ((token + row / G) * HQ + head * G + row % G) * D + from;
  const float factor = v_scale / total;
#pragma unroll
  for (int c = 0; c < OWN; c += 2) *(u32*)(to + c) = pack_half2(y[c] * factor, y[c + 1] * factor);
}
