// Token-level kernels: gather, rotary angles, arg max, candidates, carried hidden states.

// out[r, :] = table[ids[r * stride], :] as float32; an id outside the table gives zeros.
extern "C" __global__ void embed(const half_t* __restrict__ table, const int* ids, float* out, int width, int vocab,
                                 int stride) {
  take_turn();
  const int id = ids[blockIdx.x * stride];
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[(size_t)blockIdx.x * width + i] = id >= 0 && id < vocab ? h2f(table[(size_t)id * width + i]) : 0.f;
}

// out[b, m, :] = x[b, index[b, m], :], in units of 2 bytes
extern "C" __global__ void gather_rows(const half_t* x, const int* index, half_t* out, int num_in, int num_out,
                                       int width) {
  take_turn();
  const int b = blockIdx.x / num_out, from = min(max(index[blockIdx.x], 0), num_in - 1);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[(size_t)blockIdx.x * width + i] = x[((size_t)b * num_in + from) * width + i];
}

// positions[b, n] = start[b] + n
extern "C" __global__ void token_positions(const int* start, int* out, int num_tokens) {
  take_turn();
  out[blockIdx.x * num_tokens + threadIdx.x] = start[blockIdx.x] + threadIdx.x;
}

// cos, sin [rows, R/2] of position * inv_freq: the product in float32 as the reference has it, the reduction accurate
extern "C" __global__ void rope_angles(const int* positions, const float* __restrict__ inv_freq, float* cosines,
                                       float* sines, int half_dim, float magnitude) {
  take_turn();
  const int r = blockIdx.x, i = threadIdx.x;
  if (i >= half_dim) return;
  const float angle = (float)positions[r] * inv_freq[i];
  cosines[r * half_dim + i] = cosf(angle) * magnitude;
  sines[r * half_dim + i] = sinf(angle) * magnitude;
}

__device__ __forceinline__ void better(float& value, int& id, float other, int other_id) {
  if (other > value || (other == value && other_id < id)) value = other, id = other_id;
}

// ids[r * stride] = the lowest id among the largest of x[r, :]
extern "C" __global__ void __launch_bounds__(1024) arg_max(const half_t* x, int* ids, int vocab, int stride) {
  take_turn();
  __shared__ float values[32];
  __shared__ int best_ids[32];
  const half_t* row = x + (size_t)blockIdx.x * vocab;
  float value = -3.4e38f;
  int id = 0x7fffffff;
  if (vocab % 8 == 0) {
#pragma unroll 4
    for (int i = threadIdx.x * 8; i < vocab; i += 8192) {
      const uint4 packed = *(const uint4*)(row + i);
      const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        better(value, id, h2f(words[j] & 0xffff), i + 2 * j);
        better(value, id, h2f(words[j] >> 16), i + 2 * j + 1);
      }
    }
  } else {
    for (int i = threadIdx.x; i < vocab; i += 1024) better(value, id, h2f(row[i]), i);
  }
  for (int m = 16; m; m >>= 1)
    better(value, id, __shfl_xor_sync(0xffffffffu, value, m), __shfl_xor_sync(0xffffffffu, id, m));
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, best_ids[threadIdx.x / 32] = id;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = values[threadIdx.x], id = best_ids[threadIdx.x];
    for (int m = 16; m; m >>= 1)
      better(value, id, __shfl_xor_sync(0xffffffffu, value, m), __shfl_xor_sync(0xffffffffu, id, m));
    if (threadIdx.x == 0) ids[blockIdx.x * stride] = id == 0x7fffffff ? 0 : id;
  }
}

// Hidden states carried from pass to pass, in units of 2 bytes: kept [slots, P, D].
// take: out[b, i, :] = kept[slots[b], i, :];  put: kept[slots[b], i, :] = x[b, i, :] for i < N
extern "C" __global__ void take_slots(const half_t* kept, const int* slots, half_t* out, int rows, int width) {
  take_turn();
  const int b = blockIdx.x / rows, i = blockIdx.x % rows;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    out[(size_t)blockIdx.x * width + c] = kept[((size_t)slots[b] * rows + i) * width + c];
}
extern "C" __global__ void put_slots(const half_t* x, const int* slots, half_t* kept, int rows, int width,
                                     int kept_rows) {
  take_turn();
  const int b = blockIdx.x / rows, i = blockIdx.x % rows;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    kept[((size_t)slots[b] * kept_rows + i) * width + c] = x[(size_t)blockIdx.x * width + c];
}

// A slot's part of every tensor becomes zeros: (address, bytes of a slot, a multiple of 4) of each tensor in `spans`.
extern "C" __global__ void clear_slot(const unsigned long long* __restrict__ spans, int slot) {
  take_turn();
  const size_t count = spans[2 * blockIdx.y + 1] / 4;
  u32* words = (u32*)spans[2 * blockIdx.y] + slot * count;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) words[i] = 0;
}

// What a launch costs by itself (bench/gpu/profile.py).
extern "C" __global__ void nothing() { take_turn(); }
