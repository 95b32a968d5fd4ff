// Causal grouped-query attention over a cache, with the cache write in the same launch (flash decoding).
//
// q [B, N, HQ, D], new k, v [B, N, HKV, D] float16; cache k, v [slots, HKV, L, D] float16 or FP8 (e4m3, scaled).
// Query n of row b sits at position start[b] + n and sees positions 0 .. start[b] + n. Positions from start[b] on are
// taken from the new k, v (rounded as stored), everything before from the cache, so no block waits for another's write;
// the last query block, which sees every new position, writes them.
//
// The N * G queries of one kv head (G = HQ / HKV) are one matrix: a block takes QROWS of them and SPAN cache positions,
// four warps on tensor cores (m16n8k16, float32 accumulation). Rows whose context needs several spans leave partial
// results; the last block to arrive merges them. How far each row reaches is read on the device, so one captured graph
// serves every context length up to L.
//
// Compile-time: HQ, HKV, D (a multiple of 32), L, KV_FP8 (0 or 1), QROWS (16 or 32), SPAN (a multiple of 64).
#define G (HQ / HKV)
#define TILE 64
#define PAD 8
#define MT (QROWS / 16)
#define SPLITS ((L + SPAN - 1) / SPAN)
#define DN (D / 32)  // n-tiles of 8 output columns per warp
// One 8-element piece of a cache tile: from the new tokens or from the cache, as float16 in units of the scale.
__device__ __forceinline__ uint4 piece(const kv_t* cache_row, const half_t* fresh_row, bool is_new, kv_t* store,
                                       float inverse) {
#if KV_FP8
  uint2 raw;
  if (is_new) {
    raw = narrow(*(const uint4*)fresh_row, inverse);
    if (store) *(uint2*)store = raw;
  } else {
    raw = *(const uint2*)cache_row;
  }
  return widen(raw);
#else
  uint4 raw;
  if (is_new) {
    raw = *(const uint4*)fresh_row;
    if (store) *(uint4*)store = raw;
  } else {
    raw = *(const uint4*)cache_row;
  }
  return raw;
#endif
}

struct Tiles {
  half_t q[QROWS][D + PAD];
  half_t kv[TILE][D + PAD];
  float s[QROWS][TILE + 4];
  half_t p[QROWS][TILE + PAD];
  float m[QROWS], l[QROWS], alpha[QROWS];
  int is_last;
};

__device__ void load_tile(Tiles& sh, const kv_t* cache, const half_t* fresh, kv_t* store, int from, int end, int start,
                          int pitch, float inverse) {
  for (int i = threadIdx.x; i < TILE * (D / 8); i += 128) {
    const int r = i / (D / 8), c = (i % (D / 8)) * 8, at = from + r;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (at < end) {
      const bool is_new = at >= start;
      value = piece(cache + (size_t)at * D + c, fresh + (size_t)(at - start) * pitch + c, is_new,
                    store ? store + (size_t)at * D + c : store, inverse);
    }
    *(uint4*)&sh.kv[r][c] = value;
  }
}

extern "C" __global__ void __launch_bounds__(128)
    attend(const half_t* q, const half_t* k, const half_t* v, kv_t* cache_k, kv_t* cache_v, const int* starts,
           const int* slots, half_t* out, float* partial, int* arrived, int num_tokens, int k_pitch, int v_pitch,
           int v_step, float scale, float k_scale, float v_scale) {
  take_turn();
  extern __shared__ char raw_shared[];
  Tiles& sh = *(Tiles*)raw_shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const int num_q_blocks = (num_tokens * G + QROWS - 1) / QROWS;
  const int q_block = blockIdx.x % num_q_blocks, split = blockIdx.x / num_q_blocks, head = blockIdx.y, b = blockIdx.z;
  const int start = starts[b], slot = slots[b];
  const int first_row = q_block * QROWS, num_rows = min(QROWS, num_tokens * G - first_row);
  const int last_token = (first_row + num_rows - 1) / G;
  const int end = min(start + last_token + 1, L);  // positions this query block sees
  const int begin = split * SPAN;
  const bool writes = q_block == num_q_blocks - 1;  // the block that sees every new position
  if (begin >= end) return;
  const int stop = min(begin + SPAN, end), num_splits = (end + SPAN - 1) / SPAN;

  const size_t cache_at = (size_t)(slot * HKV + head) * L * D;
  const half_t* k_new = k + (size_t)b * num_tokens * k_pitch + head * D;
  const half_t* v_new = v + (size_t)b * num_tokens * v_pitch + head * v_step;
  for (int i = threadIdx.x; i < QROWS * (D / 8); i += 128) {
    const int r = i / (D / 8), c = (i % (D / 8)) * 8, row = first_row + r;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (r < num_rows)
      value = *(const uint4*)(q + (((size_t)b * num_tokens + row / G) * HQ + head * G + row % G) * D + c);
    *(uint4*)&sh.q[r][c] = value;
  }
  for (int r = threadIdx.x; r < QROWS; r += 128) sh.m[r] = -1e30f, sh.l[r] = 0.f;

  float o[MT][DN][4];
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < DN; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][j][e] = 0.f;

  const float to_log2 = scale * k_scale * 1.44269504f;
  for (int from = begin; from < stop; from += TILE) {
    __syncthreads();
    load_tile(sh, cache_k + cache_at, k_new, writes ? cache_k + cache_at : (kv_t*)0, from, stop, start, k_pitch,
              1.f / k_scale);
    __syncthreads();
    // scores: warp w takes cache positions 16w .. 16w+15 of the tile
    float s[MT][2][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      u32 bf[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const half_t* row = &sh.kv[warp * 16 + j * 8 + quad][d + pair * 2];
        bf[j][0] = *(const u32*)row;
        bf[j][1] = *(const u32*)(row + 8);
      }
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const half_t* row = &sh.q[i * 16 + quad][d + pair * 2];
        const half_t* below = &sh.q[i * 16 + quad + 8][d + pair * 2];
        const u32 af[4] = {*(const u32*)row, *(const u32*)below, *(const u32*)(row + 8), *(const u32*)(below + 8)};
#pragma unroll
        for (int j = 0; j < 2; ++j) mma(s[i][j], af, bf[j][0], bf[j][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          sh.s[i * 16 + quad + (e / 2) * 8][warp * 16 + j * 8 + pair * 2 + e % 2] = s[i][j][e];
    __syncthreads();
    // V over K while the softmax runs: nothing reads the K tile any more
    load_tile(sh, cache_v + cache_at, v_new, writes ? cache_v + cache_at : (kv_t*)0, from, stop, start, v_pitch,
              1.f / v_scale);
    // softmax: 4 lanes per row, 16 positions each
    for (int r = threadIdx.x / 4; r < QROWS; r += 32) {
      const int limit = min(start + (first_row + r) / G + 1, stop) - from;  // visible positions of this tile
      float x[16], top = sh.m[r];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int c = pair + i * 4;
        x[i] = c < limit ? sh.s[r][c] * to_log2 : -1e30f;
        top = fmaxf(top, x[i]);
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int c = pair + i * 4;
        const float e = c < limit ? exp2f(x[i] - top) : 0.f;
        sum += e;
        sh.p[r][c] = f2h(e);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (pair == 0) {
        const float alpha = exp2f(sh.m[r] - top);
        sh.alpha[r] = alpha;
        sh.l[r] = sh.l[r] * alpha + sum;
        sh.m[r] = top;
      }
    }
    __syncthreads();
    // o = alpha o + P V: warp w takes output columns D/4 * w ..
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const float a0 = sh.alpha[i * 16 + quad], a1 = sh.alpha[i * 16 + quad + 8];
#pragma unroll
      for (int j = 0; j < DN; ++j) o[i][j][0] *= a0, o[i][j][1] *= a0, o[i][j][2] *= a1, o[i][j][3] *= a1;
    }
#pragma unroll
    for (int t = 0; t < TILE; t += 16) {
      u32 af[MT][4];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const half_t* row = &sh.p[i * 16 + quad][t + pair * 2];
        const half_t* below = &sh.p[i * 16 + quad + 8][t + pair * 2];
        af[i][0] = *(const u32*)row, af[i][1] = *(const u32*)below;
        af[i][2] = *(const u32*)(row + 8), af[i][3] = *(const u32*)(below + 8);
      }
#pragma unroll
      for (int j = 0; j < DN; ++j) {
        u32 b0, b1;
        const u32 address = (u32)__cvta_generic_to_shared(&sh.kv[t + lane % 16][warp * (D / 4) + j * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(address));
#pragma unroll
        for (int i = 0; i < MT; ++i) mma(o[i][j], af[i], b0, b1);
      }
    }
  }

  // one span: the result; several: partial (o unnormalised, m, l) per row, merged by the last block
  const size_t cell = ((size_t)(b * HKV + head) * num_q_blocks + q_block);
  float* mine = partial + (cell * SPLITS + split) * QROWS * (D + 2);
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < DN; ++j)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int r = i * 16 + quad + (e / 2) * 8, c = warp * (D / 4) + j * 8 + pair * 2;
        if (r >= num_rows) continue;
        const int row = first_row + r;
        if (num_splits == 1) {
          const float norm = v_scale / sh.l[r];
          *(u32*)(out + (((size_t)b * num_tokens + row / G) * HQ + head * G + row % G) * D + c) =
              pack_half2(o[i][j][e] * norm, o[i][j][e + 1] * norm);
        } else {
          mine[r * (D + 2) + c] = o[i][j][e];
          mine[r * (D + 2) + c + 1] = o[i][j][e + 1];
        }
      }
  if (num_splits == 1) return;
  for (int r = threadIdx.x; r < num_rows; r += 128) mine[r * (D + 2) + D] = sh.m[r], mine[r * (D + 2) + D + 1] = sh.l[r];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int before = atomicAdd(&arrived[cell], 1);
    sh.is_last = before == num_splits - 1;
    if (sh.is_last) arrived[cell] = 0;  // ready for the next launch
  }
  __syncthreads();
  if (!sh.is_last) return;
  __threadfence();
  const float* all = partial + cell * SPLITS * QROWS * (D + 2);
  // weights of the spans once per row (in the score tile, which is free now), then columns with loads in flight
  float* weights = &sh.s[0][0];
  constexpr int MOST = TILE + 4;  // spans whose weights fit beside each other
  for (int r = threadIdx.x; r < num_rows; r += 128) {
    float top = -1e30f, sum = 0.f;
    for (int j = 0; j < num_splits; ++j) top = fmaxf(top, all[(size_t)(j * QROWS + r) * (D + 2) + D]);
    for (int j = 0; j < num_splits; ++j) {
      const float* part = all + (size_t)(j * QROWS + r) * (D + 2) + D;
      const float w = exp2f(part[0] - top);
      sum += w * part[1];
      if (j < MOST) weights[r * MOST + j] = w;
    }
    sh.m[r] = top;
    sh.l[r] = v_scale / sum;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < D; c += 128) {
#pragma unroll 4
    for (int r = 0; r < num_rows; ++r) {
      const float* part = all + (size_t)r * (D + 2);
      float value = 0.f;
#pragma unroll 4
      for (int j = 0; j < num_splits; ++j) {
        const float* span = part + (size_t)j * QROWS * (D + 2);
        value += (j < MOST ? weights[r * MOST + j] : exp2f(span[D] - sh.m[r])) * span[c];
      }
      const int row = first_row + r;
      out[(((size_t)b * num_tokens + row / G) * HQ + head * G + row % G) * D + c] = f2h(value * sh.l[r]);
    }
  }
}
