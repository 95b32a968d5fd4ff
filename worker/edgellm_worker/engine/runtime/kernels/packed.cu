// Products with quantized weights that stay quantized in memory: y[M, N] = x[M, K] W[N, K]^T + bias, x and y float16,
// float32 accumulation. At a few rows such a product takes as long as reading W does, so W is read once, in its own bytes.
//
// Numbers. An e2m1 or e4m3 code becomes a float16 by moving its bits to the right place under a smaller exponent bias:
// e2m1 then reads as value * 2^-14, e4m3 as value * 2^-8, subnormals included. NVFP4's block scale is multiplied in as
// scale * 2^6: what remains, value * scale * 2^-8, has at most six significant bits and lies between 2^-18 and 10.5, so
// float16 holds it exactly. The products are therefore those of the checkpoint's own values; the sum is rounded, in
// float32; and `factor` (2^8 and the tensor's scale) is applied once, at the end, in float32.
//
// Layout (engine/runtime/packed_weights.py packs it): one kibibyte is 16 rows by 64 bytes, 32 lanes by 16 bytes of rows
// 0 to 7 and then of rows 8 to 15, as the tensor core's A operand wants them (m16n8k16: lane = 4 * row + quarter). Which
// k a lane holds is free as long as both operands agree: it owns consecutive ones, and x is laid out in shared memory to
// match. Within a word the bits lie so that two neighbours in k come out as two float16 after few operations.
//
// Work. A tile is ROWS weight rows by 8 NT rows of x; a unit is a tile's STEP of 128 k. All units, tile after tile, are
// dealt to the blocks in equal runs, so that every block streams the same number of bytes whatever the shape, and its
// loads run ahead across the ends of tiles. A tile that is cut between blocks leaves partial sums; the last block to
// arrive adds them in the order of the blocks: the same bits on every run.
//
// Compile-time: FP4 (1: NVFP4, 0: e4m3), NT (tiles of 8 rows of x), STAGES (units in shared memory at once, at least 2).
#define WARPS 8
#define RT 2  // tiles of 16 weight rows a warp
#define BLOCKS (NT == 1 ? 3 : 2)  // that should fit into a multiprocessor
#define ROWS (WARPS * RT * 16)
#define STEP 128
#define TILE_BYTES (FP4 ? 1024 : 2048)
#define X_PITCH (STEP * 2 + 64)  // quarter-warps read two rows of x at once: they must not meet in a bank
#define SCALE_BYTES (FP4 ? 128 : 0)
#define STAGE_BYTES (WARPS * RT * (TILE_BYTES + SCALE_BYTES) + NT * 8 * X_PITCH)

__device__ __forceinline__ uint4 read16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 read4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Two e4m3 in bytes 1 and 3 -> two float16, value * 2^-8.
__device__ __forceinline__ u32 widen8(u32 v) { return (v & 0x80008000u) | ((v >> 1) & 0x3f803f80u); }

// A word of four e4m3: k 0 and 1 in bytes 1 and 3, k 2 and 3 in bytes 0 and 2.
__device__ __forceinline__ void widen(u32 v, u32& first, u32& second) { first = widen8(v), second = widen8(v << 8); }

// A word of eight e2m1 -> k 0 and 1, 2 and 3, ... as two float16 each, value * 2^-14. Sign and three bits of k 0 lie in
// bits 15, 11 to 9; of k 2 in 7, 3 to 1; of k 4 in 8, 14 to 12; of k 6 in 0, 6 to 4; odd k sixteen bits higher.
__device__ __forceinline__ void widen(u32 v, u32 (&r)[4]) {
  r[0] = v & 0x8e008e00u;
  r[1] = (v << 8) & 0x8e008e00u;
  r[2] = ((v << 7) & 0x80008000u) | ((v >> 3) & 0x0e000e00u);
  r[3] = ((v << 15) & 0x80008000u) | ((v << 5) & 0x0e000e00u);
}

// Byte INDEX of `scales`, an e4m3, as two equal float16: value * 2^6.
template <int INDEX>
__device__ __forceinline__ u32 block_scale(u32 scales) {
  return multiply2(widen8(__byte_perm(scales, 0, INDEX << 12 | INDEX << 4 | 0x0404)), 0x74007400u);
}

struct Shape {
  const half_t* x;
  const u8* weight;  // [row tiles, k steps, TILE_BYTES]
  const u8* scales;  // [row tiles, k steps, 128], NVFP4 only
  int m, n, k, num_steps, num_chunks;
};

// What a thread fetches next. Addresses advance by a step; only a new tile makes them anew.
struct Feed {
  const u8* weight;
  const u8* scales;
  const u8* x;
  int tile, step, row_tiles_left, rows_left, k_left;

  __device__ __forceinline__ void enter(const Shape& s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = tile / s.num_chunks * (WARPS * RT) + warp * RT, row = tile % s.num_chunks * (NT * 8);
    const size_t place = (size_t)row_tile * s.num_steps + step;
    row_tiles_left = (s.n + 15) / 16 - row_tile;
    weight = s.weight + place * TILE_BYTES + lane * 16;
    scales = s.scales + (place + (size_t)(lane / 8) * s.num_steps) * 128 + lane % 8 * 16;
    rows_left = s.m - row - (int)threadIdx.x / 16;
    const int k = step * STEP + threadIdx.x % 16 * 8;
    k_left = s.k - k;
    x = (const u8*)(s.x + (size_t)(row + threadIdx.x / 16) * s.k + k);
  }

  // One unit's weights (each lane what it will read itself) and scales, zeros where there is none.
  __device__ __forceinline__ void fetch_weights(const Shape& s, u32 stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 to = stage + warp * RT * TILE_BYTES + lane * 16;
    const u8* from = weight;
#pragma unroll
    for (int r = 0; r < RT; ++r, from += (size_t)s.num_steps * TILE_BYTES, to += TILE_BYTES)
#pragma unroll
      for (int i = 0; i < TILE_BYTES; i += 512) fetch(to + i, from + i, r < row_tiles_left);
    to = stage + WARPS * RT * TILE_BYTES + warp * RT * 128 + lane * 16;
    if (FP4 && lane < RT * 8) fetch(to, scales, lane / 8 < row_tiles_left);
  }

  __device__ __forceinline__ void fetch_x(const Shape& s, u32 stage) const {
    // piece 4 t + c of NVFP4, 8 h + 2 t + c of e4m3: lane quarter t, its c-th read, half h of the step
    const int piece = threadIdx.x % 16;
    const int place = FP4 ? piece % 4 * 4 + piece / 4 : (piece & 8) + piece % 2 * 4 + piece % 8 / 2;
    const u32 to = stage + WARPS * RT * (TILE_BYTES + SCALE_BYTES) + threadIdx.x / 16 * X_PITCH + place * 16;
    const u8* from = x;
    constexpr int AT_ONCE = WARPS * 2;  // rows
#pragma unroll
    for (int row = 0; row < NT * 8; row += AT_ONCE, from += (size_t)s.k * 2 * AT_ONCE)
      if (row + AT_ONCE <= NT * 8 || threadIdx.x < (NT * 8 - row) * 16)
        fetch(to + row * X_PITCH, from, row < rows_left && k_left > 0);
  }

  __device__ __forceinline__ void advance(const Shape& s) {
    if (++step == s.num_steps) {
      step = 0, ++tile;
      enter(s);
    } else {
      weight += TILE_BYTES, scales += 128, x += STEP * 2, k_left -= STEP;
    }
  }
};

__device__ __forceinline__ void clear(float (&acc)[RT][NT][4]) {
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[r][j][e] = 0.f;
}

// acc += this unit. acc[r][j]: weight rows of the warp's r-th row tile, rows of x of the j-th tile.
__device__ __forceinline__ void multiply_unit(u32 stage, float (&acc)[RT][NT][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 weight = stage + warp * RT * TILE_BYTES + lane * 16;
  const u32 x = stage + WARPS * RT * (TILE_BYTES + SCALE_BYTES) + lane / 4 * X_PITCH + lane % 4 * 16;
#if FP4
  const u32 scales = stage + WARPS * RT * TILE_BYTES + warp * RT * 128 + lane * 4;
  uint4 packed[RT][2];
  u32 packed_scales[RT];
#pragma unroll
  for (int r = 0; r < RT; ++r) {
    packed[r][0] = read16(weight + r * TILE_BYTES);
    packed[r][1] = read16(weight + r * TILE_BYTES + 512);
    packed_scales[r] = read4(scales + r * 128);
  }
  u32 scale[RT][2];
#pragma unroll
  for (int c = 0; c < 4; ++c) {  // eight k a lane and row: two products of 16 k
    u32 a[RT][2][4];
#pragma unroll
    for (int r = 0; r < RT; ++r) {
      if (c == 0) scale[r][0] = block_scale<0>(packed_scales[r]), scale[r][1] = block_scale<2>(packed_scales[r]);
      if (c == 2) scale[r][0] = block_scale<1>(packed_scales[r]), scale[r][1] = block_scale<3>(packed_scales[r]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = packed[r][half];
        u32 wide[4];
        widen(c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w, wide);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[r][i / 2][i % 2 * 2 + half] = multiply2(wide[i], scale[r][half]);
      }
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const uint4 b = read16(x + j * 8 * X_PITCH + c * 64);
#pragma unroll
      for (int r = 0; r < RT; ++r) mma(acc[r][j], a[r][0], b.x, b.y);
#pragma unroll
      for (int r = 0; r < RT; ++r) mma(acc[r][j], a[r][1], b.z, b.w);
    }
  }
#else
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint4 packed[RT][2];
#pragma unroll
    for (int r = 0; r < RT; ++r)
      packed[r][0] = read16(weight + r * TILE_BYTES + h * 1024),
      packed[r][1] = read16(weight + r * TILE_BYTES + h * 1024 + 512);
#pragma unroll
    for (int c = 0; c < 2; ++c) {  // eight k a lane and row
      u32 a[RT][2][4];
#pragma unroll
      for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 v = packed[r][half];
          widen(c == 0 ? v.x : v.z, a[r][0][half], a[r][0][2 + half]);
          widen(c == 0 ? v.y : v.w, a[r][1][half], a[r][1][2 + half]);
        }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint4 b = read16(x + j * 8 * X_PITCH + h * 128 + c * 64);
#pragma unroll
        for (int r = 0; r < RT; ++r) mma(acc[r][j], a[r][0], b.x, b.y);
#pragma unroll
        for (int r = 0; r < RT; ++r) mma(acc[r][j], a[r][1], b.z, b.w);
      }
    }
  }
#endif
}

// Blocks before `longer` take units + 1 units in a row, the others `units`.
struct Deal {
  int units, longer;
  __device__ __forceinline__ int begin(int block) const { return block * units + min(block, longer); }
  __device__ __forceinline__ int block_of(int unit) const {
    const int edge = longer * (units + 1);
    return unit < edge ? unit / (units + 1) : longer + (unit - edge) / units;
  }
};

// Where a block leaves its part of a tile: a block cuts at most two tiles, the one it continues and the one it leaves.
__device__ __forceinline__ float4* partial_place(float4* partial, int block, int tile_begin, Deal deal) {
  const int which = deal.begin(block) > tile_begin ? 0 : 1;
  return partial + ((size_t)block * 2 + which) * (RT * NT * WARPS * 32) + threadIdx.x;
}

// acc becomes the whole tile's sum. False where another block will finish it.
__device__ __forceinline__ bool gather(float (&acc)[RT][NT][4], float4* partial, int* arrived, int tile, int num_steps,
                                       Deal deal) {
  __shared__ int is_last;
  constexpr int PITCH = WARPS * 32, IN_FLIGHT = NT == 1 ? 4 : NT <= 3 ? 2 : 1;  // blocks' parts loaded at once
  const int begin = tile * num_steps, first = deal.block_of(begin), last = deal.block_of(begin + num_steps - 1);
  if (first == last) return true;
  float4* mine = partial_place(partial, blockIdx.x, begin, deal);
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int j = 0; j < NT; ++j)
      mine[(r * NT + j) * PITCH] = make_float4(acc[r][j][0], acc[r][j][1], acc[r][j][2], acc[r][j][3]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&arrived[tile], 1) == last - first;
    if (is_last) arrived[tile] = 0;  // ready for the next launch
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  clear(acc);
  for (int block = first; block <= last; block += IN_FLIGHT) {
    float4 part[IN_FLIGHT][RT * NT];
#pragma unroll
    for (int b = 0; b < IN_FLIGHT; ++b) {
      const float4* from = partial_place(partial, min(block + b, last), begin, deal);
#pragma unroll
      for (int i = 0; i < RT * NT; ++i) part[b][i] = __ldcg(from + i * PITCH);
    }
#pragma unroll
    for (int b = 0; b < IN_FLIGHT; ++b)
#pragma unroll
      for (int i = 0; i < RT * NT; ++i) {
        if (block + b > last) continue;
        float(&sum)[4] = acc[i / NT][i % NT];
        sum[0] += part[b][i].x, sum[1] += part[b][i].y, sum[2] += part[b][i].z, sum[3] += part[b][i].w;
      }
  }
  return true;
}

__device__ __forceinline__ void write_tile(const Shape& s, int tile, const float (&acc)[RT][NT][4], float factor,
                                           const float* bias, half_t* y) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = (tile / s.num_chunks * (WARPS * RT) + warp * RT) * 16 + lane / 4;
  const int first_row = tile % s.num_chunks * (NT * 8) + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int column = first + r * 16 + e * 4;
      if (column >= s.n) continue;
      const float offset = bias ? bias[column] : 0.f;
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = first_row + j * 8 + i;
          if (row < s.m) y[(size_t)row * s.n + column] = f2h(acc[r][j][e + i] * factor + offset);
        }
    }
}

// partial: two places for each block of RT * NT * WARPS * 32 float4; arrived: one zero for each tile.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    packed_linear(const half_t* x, const u8* __restrict__ weight, const u8* __restrict__ scales,
                  const float* __restrict__ bias, half_t* y, float4* partial, int* arrived, int m, int n, int k,
                  int units, int longer, float factor) {
  extern __shared__ __align__(128) u8 stages[];
  const Shape s = {x, weight, scales, m, n, k, (k + STEP - 1) / STEP, (m + NT * 8 - 1) / (NT * 8)};
  const Deal deal = {units, longer};
  const int begin = deal.begin(blockIdx.x), end = deal.begin(blockIdx.x + 1);
  const u32 base = shared_address(stages);
  int tile = begin / s.num_steps, step = begin % s.num_steps;
  Feed feed;
  feed.tile = tile, feed.step = step;
  feed.enter(s);
  int unit = begin;
  u32 filled = 0, used = 0;  // offsets of the stage to fill and to use next
  start_next();
  Feed early = feed;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i)
    if (begin + i < end) early.fetch_weights(s, base + i * STAGE_BYTES), early.advance(s);
  await_previous();
  auto fetch_next = [&](bool wanted, bool has_weights) {
    if (wanted) {
      if (!has_weights) feed.fetch_weights(s, base + filled);
      feed.fetch_x(s, base + filled), feed.advance(s);
    }
    commit_fetches();
    filled = filled == (STAGES - 1) * STAGE_BYTES ? 0 : filled + STAGE_BYTES;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_next(begin + i < end, true);
  float acc[RT][NT][4];
  clear(acc);
  while (true) {
    await_fetches<STAGES - 2>();
    __syncthreads();  // x of this unit is there for all; the stage of the unit before is free
    fetch_next(unit + STAGES - 1 < end, false);
    multiply_unit(base + used, acc);
    used = used == (STAGES - 1) * STAGE_BYTES ? 0 : used + STAGE_BYTES;
    const bool is_done = ++unit == end;
    if (++step < s.num_steps && !is_done) continue;
    if (gather(acc, partial, arrived, tile, s.num_steps, deal)) write_tile(s, tile, acc, factor, bias, y);
    if (is_done) return;
    clear(acc);
    step = 0, ++tile;
  }
}
