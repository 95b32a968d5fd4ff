// y = x W^T for few rows: x [rows, depth], W [width, depth], y [rows, width], float16, summed in float32.
//
// At a handful of rows a product takes as long as reading W takes, so everything here serves to keep loads of W in
// flight. A block takes 64 columns of y (rows of W) and a share of the depth, in chunks of 64, STAGES of them in shared
// memory at once. Four warps fetch W and multiply, 32 columns and half of a chunk's depth each; a fifth fetches x. What a
// thread has fetched it can only await in order, so x has a warp of its own: W, which no kernel writes, is asked for
// before the kernels before this one have finished, and x when they have.
//
// Where there are few columns the depth is shared by up to eight blocks. They are a cluster (since SM90) and add up each
// other's shared memory, a part of the tile each; on older GPUs the last one to arrive adds what the others left. Both
// add in the order of the depth, and how it is shared does not depend on the rows: a row's bits are the same in any batch.
//
// Tensor cores (m16n8k16) take W as their first operand, 16 columns of y, and x as their second, 8 rows. A row of a chunk
// is 128 bytes, eight pieces of 16, and piece p of row r lies at p ^ (r % 8): no two of the rows that a warp reads at
// once meet in a bank.
//
// SWIGLU: W is the gate's rows and, behind them, as many of the up projection; y [rows, width / 2] is silu(gate) * up.
// The block's first 32 columns are the gate's, the others the same columns of up; both are rounded to float16 first. The
// depth is not shared.
//
// Compile-time: TILES, eights of rows; STAGES, at least 3; CLUSTER (1: blocks that share a depth are a cluster); SWIGLU.
// depth is a multiple of 8, width is even.
#define WARPS 4
#define THREADS ((WARPS + 1) * 32)
#define COLUMNS 64
#define ROWS (TILES * 8)
#define CHUNK 64
#define W_BYTES (COLUMNS * CHUNK * 2)
#define STAGE_BYTES (W_BYTES + ROWS * CHUNK * 2)
#define PITCH (COLUMNS + 8)  // of the sums, in floats

__device__ __forceinline__ u32 place(int row, int piece) { return row * (CHUNK * 2) + (piece ^ (row % 8)) * 16; }

// Four 8 x 8 matrices of float16, or two: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load2(u32& r0, u32& r1, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address));
}

// What a thread fetches of each chunk: the same piece of COUNT rows of a tile, STRIDE apart. The tile's halves lie `gap`
// elements apart in the operand; of their rows the first `valid` and `more_valid` are there, the others are zeros.
template <int STRIDE, int COUNT>
struct Feed {
  const half_t* from;
  size_t step, gap;
  int first, piece, valid, more_valid, left;  // of the depth

  __device__ __forceinline__ Feed(const half_t* tile, int thread, int depth, int chunk, size_t gap, int valid,
                                  int more_valid)
      : step((size_t)STRIDE * depth), gap(gap), first(thread / 8), piece(thread % 8), valid(valid), more_valid(more_valid) {
    const int k = chunk * CHUNK + piece * 8;
    from = tile + (size_t)(first < valid ? first : 0) * depth + k;
    left = depth - k;
  }

  __device__ __forceinline__ void next(u32 to) {
    constexpr int HALF = COUNT / 2;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool is_there = first + i % HALF * STRIDE < (i < HALF ? valid : more_valid) && left > 0;
      fetch(to + place(first + i * STRIDE, piece), is_there ? from + i % HALF * step + (i < HALF ? 0 : gap) : from,
            is_there);
    }
    from += CHUNK, left -= CHUNK;
  }
};

// A warp's 32 columns, two tiles of 16, over its half of a chunk's depth.
__device__ __forceinline__ void multiply(u32 stage, float (&sums)[2][TILES][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp % 2 * 32, part = warp / 2;
  const u32 w = stage, x = stage + W_BYTES;
#pragma unroll
  for (int k = 0; k < CHUNK / 32; ++k) {
    const int at = (part * (CHUNK / 32) + k) * 2;  // in pieces
    u32 a[2][4];
    load4(a[0], w + place(column + lane % 16, at + lane / 16));
    load4(a[1], w + place(column + 16 + lane % 16, at + lane / 16));
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
      u32 b[4];
      if (j + 1 < TILES)
        load4(b, x + place((j + lane / 16) * 8 + lane % 8, at + lane / 8 % 2));
      else
        load2(b[0], b[1], x + place(j * 8 + lane % 8, at + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma(sums[i][j], a[i], b[0], b[1]);
        if (j + 1 < TILES) mma(sums[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Sums of 16 columns through shared memory, between warps: a slot for each.
struct Slots {
  float4 values[WARPS][TILES][32];

  __device__ __forceinline__ void put(int slot, const float (&sums)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      values[slot][j][threadIdx.x % 32] = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
  }
  __device__ __forceinline__ void get(int slot, float (&sums)[TILES][4]) const {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const float4 v = values[slot][j][threadIdx.x % 32];
      sums[j][0] = v.x, sums[j][1] = v.y, sums[j][2] = v.z, sums[j][3] = v.w;
    }
  }
};

// sums [16 columns] of this warp: column 32 half + 16 part + .., halves of the depth added up. All threads take part.
__device__ __forceinline__ void add_halves(const float (&halves)[2][TILES][4], float (&sums)[TILES][4], Slots& slots) {
  const int warp = threadIdx.x / 32, part = warp / 2;
  if (warp < WARPS) {
    float other[TILES][4];
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[j][e] = part ? halves[1][j][e] : halves[0][j][e];
        other[j][e] = part ? halves[0][j][e] : halves[1][j][e];
      }
    slots.put(warp ^ 2, other);
  }
  __syncthreads();
  if (warp < WARPS) {
    float more[TILES][4];
    slots.get(warp, more);
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] += more[j][e];
  }
}

__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ float2 read_of(u32 address, int block) {  // two floats of a block of the cluster
  float2 v;
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.f32 {%0,%1}, [there];}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(address), "r"(block));
  return v;
}

// y of this warp's 16 columns from `column` on.
__device__ __forceinline__ void store(const float (&sums)[TILES][4], half_t* y, int column, int rows, int width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = j * 8 + lane % 4 * 2 + e % 2, at = column + lane / 4 + e / 2 * 8;
      if (row < rows && at < width) y[(size_t)row * width + at] = f2h(sums[j][e]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    linear(const half_t* x, const half_t* __restrict__ w, half_t* y, float* partial, int* arrived, int rows, int width,
           int depth) {
  extern __shared__ __align__(128) u8 stages[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blockIdx.y, splits = gridDim.y;
  const int chunks = (depth + CHUNK - 1) / CHUNK;
  const int begin = chunks * split / splits, end = chunks * (split + 1) / splits;
  const u32 base = shared_address(stages);
  start_next();

#if SWIGLU
  const int column = blockIdx.x * 32, out_width = width / 2;
  const size_t gap = (size_t)out_width * depth;
  const int valid = out_width - column, more_valid = valid;
#else
  const int column = blockIdx.x * COLUMNS;
  const size_t gap = (size_t)32 * depth;
  const int valid = width - column, more_valid = valid - 32;
#endif
  Feed<16, 4> feed_w(w + (size_t)column * depth, threadIdx.x % (WARPS * 32), depth, begin, gap, valid, more_valid);
  Feed<4, ROWS / 4> feed_x(x, lane, depth, begin, (size_t)(ROWS / 2) * depth, rows, rows - ROWS / 2);
  auto fetch_next = [&](u32 stage, bool wanted) {
    if (wanted) {
      if (warp < WARPS)
        feed_w.next(stage);
      else
        feed_x.next(stage + W_BYTES);
    }
    commit_fetches();
  };
  if (warp == WARPS) await_previous();
#pragma unroll 1  // short code: a launch of a small product takes about as long as fetching its instructions
  for (int s = 0; s < STAGES - 1; ++s) fetch_next(base + s * STAGE_BYTES, begin + s < end);

  float halves[2][TILES][4], sums[TILES][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) halves[i][j][e] = 0.f;
  u32 used = 0, filled = (STAGES - 1) * STAGE_BYTES;  // offsets
  for (int chunk = begin; chunk < end; ++chunk) {
    await_fetches<STAGES - 2>();
    __syncthreads();  // this chunk is there for all, and nobody reads the one before any more
    fetch_next(base + filled, chunk + STAGES - 1 < end);
    if (warp < WARPS) multiply(base + used, halves);
    filled = used;
    used = used == (STAGES - 1) * STAGE_BYTES ? 0 : used + STAGE_BYTES;
  }
  // The stage after the last one used is free, and so is the one behind it. The first is wanted below.
  Slots& slots = *(Slots*)(stages + (used ? used : STAGE_BYTES));
  add_halves(halves, sums, slots);
  await_previous();

#if SWIGLU
  if (warp < WARPS && warp % 2) slots.put(warp, sums);
  __syncthreads();
  if (warp >= WARPS || warp % 2) return;
  float up[TILES][4];
  slots.get(warp + 1, up);
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float gate = h2f(f2h(sums[j][e]));
      sums[j][e] = __fdividef(gate, 1.f + __expf(-gate)) * h2f(f2h(up[j][e]));
    }
  store(sums, y, column + warp / 2 * 16, rows, out_width);
#else
  const int own = warp % 2 * 32 + warp / 2 * 16;
  if (splits == 1) {
    if (warp < WARPS) store(sums, y, column + own, rows, width);
    return;
  }
  float* tile = (float*)stages;  // [ROWS][PITCH]
  if (warp < WARPS) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        tile[(j * 8 + lane % 4 * 2 + e % 2) * PITCH + own + lane / 4 + e / 2 * 8] = sums[j][e];
  }
  auto write = [&](int i, const float2 (&part)[8]) {  // the sum of the i-th pair of columns, row by row
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int p = 0; p < 8; ++p)
      if (p < splits) sum.x += part[p].x, sum.y += part[p].y;
    const int at = column + i % (COLUMNS / 2) * 2;
    if (at < width) *(u32*)(y + (size_t)(i / (COLUMNS / 2)) * width + at) = pack_half2(sum.x, sum.y);
  };
  auto pair_of = [&](int i) { return i / (COLUMNS / 2) * PITCH + i % (COLUMNS / 2) * 2; };
  const int pairs = rows * (COLUMNS / 2);
#if CLUSTER
  arrive_at_cluster(), await_cluster();
  for (int i = split * THREADS + threadIdx.x; i < pairs; i += splits * THREADS) {
    float2 part[8];
#pragma unroll
    for (int p = 0; p < 8; ++p)
      if (p < splits) part[p] = read_of(base + pair_of(i) * 4, p);
    write(i, part);
  }
  arrive_at_cluster(), await_cluster();  // the others may still read this block's sums
#else
  __shared__ int is_last;
  __syncthreads();
  float2* all = (float2*)partial + (size_t)blockIdx.x * splits * (ROWS * COLUMNS / 2);
  for (int i = threadIdx.x; i < pairs; i += THREADS)
    all[split * (ROWS * COLUMNS / 2) + i] = *(const float2*)(tile + pair_of(i));
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&arrived[blockIdx.x], 1) == splits - 1;
    if (is_last) arrived[blockIdx.x] = 0;  // ready for the next launch
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    float2 part[8];
#pragma unroll
    for (int p = 0; p < 8; ++p)
      if (p < splits) part[p] = __ldcg(all + p * (ROWS * COLUMNS / 2) + i);
    write(i, part);
  }
#endif
#endif
}
