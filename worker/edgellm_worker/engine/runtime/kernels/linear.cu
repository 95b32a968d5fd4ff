// y = x W^T for few rows: x [rows, depth], W [width, depth], y [rows, width], float16, summed in float32.
//
// At a handful of rows a product takes as long as reading W takes, so everything here serves to keep loads of W in
// flight. A block takes 32 columns of y (rows of W) and a share of the depth; its eight warps take turns at chunks of 32
// along it, each lane with STAGES chunks of 16-byte loads under way, and add their sums up at the end. Where there are
// few columns the depth is shared by several blocks as well, and the last one to arrive adds their parts.
//
// Tensor cores (m16n8k16) take W as their first operand, 16 columns of y, and x as their second, 8 rows. Both are read
// straight from memory: a product may sum over the depth in any order if both sides use it, so lane (quad, pair) loads
// elements 8 pair .. +8 of a chunk and has in them what it needs for two k-steps. x is small and stays in the L1 cache;
// W passes it by.
//
// Compile-time: TILES, eights of rows. depth is a multiple of 32.
#define WARPS 8
#define COLUMNS 32
#define STAGES 4
#define ROWS (TILES * 8)
#define PITCH (COLUMNS + 1)

__device__ __forceinline__ uint4 stream(const half_t* from) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from));
  return v;
}

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

extern "C" __global__ void __launch_bounds__(WARPS * 32, TILES <= 3 ? 2 : 1)
    linear(const half_t* __restrict__ x, const half_t* __restrict__ w, half_t* __restrict__ y, float* partial,
           int* arrived, int rows, int width, int depth) {
  extern __shared__ __align__(16) float sums[];  // [WARPS][ROWS][PITCH]
  __shared__ int is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4;
  const int column = blockIdx.x * COLUMNS, split = blockIdx.y, splits = gridDim.y;
  const int share = (depth / 32 + splits - 1) / splits;
  const int first = split * share + warp, end = min((split + 1) * share, depth / 32);

  const half_t* columns[4];  // columns past the last are read from it and not written
#pragma unroll
  for (int i = 0; i < 4; ++i) columns[i] = w + (size_t)min(column + i * 8 + quad, width - 1) * depth + pair * 8;
  const half_t* own[TILES];
#pragma unroll
  for (int j = 0; j < TILES; ++j) own[j] = x + (size_t)min(j * 8 + quad, rows - 1) * depth + pair * 8;

  uint4 a[STAGES][4];
#pragma unroll
  for (int s = 0; s < STAGES; ++s)
    if (first + s * WARPS < end) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = stream(columns[i] + (first + s * WARPS) * 32);
    }
  float c[2][TILES][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][j][e] = 0.f;
  for (int chunk = first; chunk < end; chunk += STAGES * WARPS) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      const int at = chunk + s * WARPS;
      if (at < end) {
        uint4 b[TILES];
#pragma unroll
        for (int j = 0; j < TILES; ++j) b[j] = *(const uint4*)(own[j] + at * 32);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 &above = a[s][2 * i], &below = a[s][2 * i + 1];
            const u32 part[4] = {word(above, 2 * h), word(below, 2 * h), word(above, 2 * h + 1), word(below, 2 * h + 1)};
#pragma unroll
            for (int j = 0; j < TILES; ++j) mma(c[i][j], part, word(b[j], 2 * h), word(b[j], 2 * h + 1));
          }
        const int next = at + STAGES * WARPS;
        if (next < end) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[s][i] = stream(columns[i] + next * 32);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[(warp * ROWS + j * 8 + pair * 2 + e % 2) * PITCH + i * 16 + quad + e / 2 * 8] = c[i][j][e];
  __syncthreads();
  float total[TILES];  // rows warp + 8 j of column lane
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    total[j] = 0.f;
#pragma unroll
    for (int v = 0; v < WARPS; ++v) total[j] += sums[(v * ROWS + j * 8 + warp) * PITCH + lane];
  }
  if (splits > 1) {
    float* mine = partial + ((size_t)blockIdx.x * splits + split) * ROWS * COLUMNS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < TILES; ++j) mine[j * 8 * COLUMNS] = total[j];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(&arrived[blockIdx.x], 1) == splits - 1;
      if (is_last) arrived[blockIdx.x] = 0;  // ready for the next launch
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const float* all = partial + (size_t)blockIdx.x * splits * ROWS * COLUMNS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < TILES; ++j) total[j] = 0.f;
#pragma unroll 4
    for (int p = 0; p < splits; ++p)
#pragma unroll
      for (int j = 0; j < TILES; ++j) total[j] += all[(size_t)p * ROWS * COLUMNS + j * 8 * COLUMNS];
  }
  if (column + lane >= width) return;
#pragma unroll
  for (int j = 0; j < TILES; ++j)
    if (j * 8 + warp < rows) y[(size_t)(j * 8 + warp) * width + column + lane] = f2h(total[j]);
}
