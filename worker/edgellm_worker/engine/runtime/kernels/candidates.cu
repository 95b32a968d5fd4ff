// The K largest of each row of scores, and the logarithm of the sum of all exponentials: what acceptance looks at.
//
// Two launches. `parts`: a block takes PIECE scores of one row, held in registers, and leaves their K largest, their
// maximum and their sum of exponentials. `merge`: a block per row does the same with what the parts left, and sorts.
//
// Scores are compared as 16-bit keys of the same order, so the K-th largest is found exactly in 16 rounds, one per bit:
// how many keys are at least this? Equal scores go by the lowest id: candidates are kept in the order of their ids.
//
// Compile-time: K candidates (at most 256), PER scores a thread (a multiple of 8), PARTS pieces a row,
// PARTS * K <= THREADS * MERGE.
#define THREADS 256
#define WARPS (THREADS / 32)
#define PIECE (THREADS * PER)
#define MERGE ((PARTS * K + THREADS - 1) / THREADS)

struct Candidate {
  u32 key;
  int id;
};

// An order-preserving key of a float16: larger value, larger key. 0 is below every number and stands for nothing.
__device__ __forceinline__ u32 key_of(u32 h) { return h & 0x8000 ? 0xffff & ~h : h | 0x8000u; }
__device__ __forceinline__ half_t half_of(u32 key) { return (half_t)(key & 0x8000 ? key & 0x7fff : ~key); }

struct Shared {
  __align__(16) int counts[2][WARPS];
  int offsets[WARPS];
  float maxima[WARPS], sums[WARPS];
};

__device__ __forceinline__ int total_of(const int* counts) {
  int sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += counts[w];
  return sum;
}

// The place of each of this thread's keys among the block's K largest, or -1. A thread's keys follow the thread
// before's. Places: those above the K-th key first, then as many equal to it as are wanted, each in order.
template <int N>
__device__ __forceinline__ void select(const u32 (&keys)[N], int (&places)[N], Shared& sh) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 limit = 0;
#pragma unroll 1
  for (int bit = 15; bit >= 0; --bit) {
    const u32 attempt = limit | 1u << bit;
    int count = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) count += keys[i] >= attempt;
    count = __reduce_add_sync(0xffffffffu, count);
    if (lane == 0) sh.counts[bit & 1][warp] = count;
    __syncthreads();
    if (total_of(sh.counts[bit & 1]) >= K) limit = attempt;
  }
  int mine = 0;  // above the limit in the low half, equal to it in the high half
#pragma unroll
  for (int i = 0; i < N; ++i) mine += (keys[i] > limit) + ((keys[i] == limit) << 16);
  int before = mine;
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, before, m);
    if (lane >= m) before += other;
  }
  if (lane == 31) sh.offsets[warp] = before;
  before -= mine;
  __syncthreads();
  int all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) before += sh.offsets[w];
    all += sh.offsets[w];
  }
  int above = before & 0xffff, equal = (before >> 16) + (all & 0xffff);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    places[i] = keys[i] > limit ? above++ : keys[i] == limit ? equal++ : K;
    if (places[i] >= K) places[i] = -1;
  }
}

// scores [rows, vocab]; found [rows, PARTS, K]; sums [rows, PARTS, 2]: maximum, sum of exp(x - maximum)
extern "C" __global__ void __launch_bounds__(THREADS)
    parts(const half_t* scores, Candidate* found, float* sums, int vocab) {
  await_previous();  // and the next may begin when this is done: it has nothing to do before
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const half_t* row = scores + (size_t)blockIdx.y * vocab;
  const int from = blockIdx.x * PIECE + threadIdx.x * PER;
  u32 keys[PER];
  float top = -3.4e38f, sum = 0.f;
  if (from + PER <= vocab && vocab % 8 == 0) {
#pragma unroll
    for (int i = 0; i < PER; i += 8) {
      const uint4 packed = *(const uint4*)(row + from + i);
      const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[i + 2 * j] = words[j] & 0xffff, keys[i + 2 * j + 1] = words[j] >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < PER; ++i) keys[i] = from + i < vocab ? row[from + i] : 0xffff;  // not a number: key 0
  }
#pragma unroll
  for (int i = 0; i < PER; ++i)
    if (from + i < vocab) top = fmaxf(top, h2f((half_t)keys[i]));
#pragma unroll
  for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  if (lane == 0) sh.maxima[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) top = fmaxf(top, sh.maxima[w]);
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    if (from + i < vocab) sum += __expf(h2f((half_t)keys[i]) - top);
    keys[i] = key_of(keys[i]);
  }
  sum = warp_sum(sum);
  if (lane == 0) sh.sums[warp] = sum;
  int places[PER];
  select(keys, places, sh);
  const size_t part = (size_t)blockIdx.y * PARTS + blockIdx.x;
#pragma unroll
  for (int i = 0; i < PER; ++i)
    if (places[i] >= 0) found[part * K + places[i]] = {keys[i], from + i};
  if (threadIdx.x == 0) {
    sum = 0.f;
    for (int w = 0; w < WARPS; ++w) sum += sh.sums[w];
    sums[part * 2] = top, sums[part * 2 + 1] = sum;
  }
}

// -> values, ids [rows, K], falling, equal values by id; log_sum_exp [rows] unless null
extern "C" __global__ void __launch_bounds__(THREADS)
    merge(const Candidate* found, const float* sums, float* values, int* ids, float* log_sum_exp) {
  take_turn();
  __shared__ Shared sh;
  __shared__ Candidate best[K];
  const int t = threadIdx.x;
  const Candidate* mine = found + (size_t)blockIdx.x * PARTS * K;
  u32 keys[MERGE];
  int owner[MERGE], places[MERGE];
#pragma unroll
  for (int i = 0; i < MERGE; ++i) {
    const int at = t * MERGE + i;
    const Candidate one = at < PARTS * K ? mine[at] : Candidate{0, 0};
    keys[i] = one.key, owner[i] = one.id;
  }
  select(keys, places, sh);
#pragma unroll
  for (int i = 0; i < MERGE; ++i)
    if (places[i] >= 0) best[places[i]] = {keys[i], owner[i]};
  __syncthreads();
  if (t < K) {
    const Candidate own = best[t];
    int place = 0;
    for (int i = 0; i < K; ++i) place += best[i].key > own.key || (best[i].key == own.key && best[i].id < own.id);
    values[(size_t)blockIdx.x * K + place] = h2f(half_of(own.key));
    ids[(size_t)blockIdx.x * K + place] = own.id;
  }
  if (t < 32 && log_sum_exp) {
    const float* part = sums + (size_t)blockIdx.x * PARTS * 2;
    float top = -3.4e38f, sum = 0.f;
    for (int i = t; i < PARTS; i += 32) top = fmaxf(top, part[2 * i]);
#pragma unroll
    for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
    for (int i = t; i < PARTS; i += 32) sum += part[2 * i + 1] * __expf(part[2 * i] - top);
    sum = warp_sum(sum);
    if (t == 0) log_sum_exp[blockIdx.x] = top + logf(sum);
  }
}

// log_sum_exp alone, from the same parts
extern "C" __global__ void __launch_bounds__(32) merge_sums(const float* sums, float* out) {
  take_turn();
  const float* part = sums + (size_t)blockIdx.x * PARTS * 2;
  const int t = threadIdx.x;
  float top = -3.4e38f, sum = 0.f;
  for (int i = t; i < PARTS; i += 32) top = fmaxf(top, part[2 * i]);
#pragma unroll
  for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
  for (int i = t; i < PARTS; i += 32) sum += part[2 * i + 1] * __expf(part[2 * i] - top);
  sum = warp_sum(sum);
  if (t == 0) out[blockIdx.x] = top + logf(sum);
}
