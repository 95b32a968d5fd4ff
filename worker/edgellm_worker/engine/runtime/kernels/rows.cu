// Row operations, one launch each: what stands between matrix products when a network holds products alone.
// A "row" here is one vector of `width` elements: a token, or one head of a token. x_half says float16 or float32 input.

__device__ __forceinline__ float load(const void* x, size_t i, int is_half) {
  return is_half ? h2f(((const half_t*)x)[i]) : ((const float*)x)[i];
}

__device__ __forceinline__ float block_sum(float v) {
  __shared__ float parts[32];
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < (int)blockDim.x / 32; ++i) sum += parts[i];
  return sum;
}

// Where vector `index` of a strided input begins: `heads` vectors a token, `step` apart, tokens `pitch` apart.
__device__ __forceinline__ size_t vector_at(int index, int heads, int pitch, int step) {
  return (size_t)(index / heads) * pitch + (size_t)(index % heads) * step;
}

__device__ __forceinline__ float4 load4(const void* x, size_t i, int is_half) {
  if (!is_half) return *(const float4*)((const float*)x + i);
  const uint2 raw = *(const uint2*)((const half_t*)x + i);
  return make_float4(h2f(raw.x & 0xffff), h2f(raw.x >> 16), h2f(raw.y & 0xffff), h2f(raw.y >> 16));
}

// y = x * rsqrt(mean(x^2) + eps) * (w or 1 + w), float16. With `other`, x is first replaced by x + other (float32,
// written to `total`): the residual sum and the norm after it in one pass. Four elements a thread at a time.
extern "C" __global__ void rms_norm(const void* x, const half_t* other, float* total, const float* __restrict__ weight,
                                    half_t* out, int width, float eps, float offset, int x_half, int heads, int pitch,
                                    int step) {
  take_turn();
  extern __shared__ __align__(16) float row[];
  const size_t base = (size_t)blockIdx.x * width, from = vector_at(blockIdx.x, heads, pitch, step);
  const bool by_four = width % 4 == 0 && pitch % 4 == 0 && step % 4 == 0 && from % 4 == 0 && (size_t)x % 16 == 0;
  float sum = 0.f;
  if (by_four) {
    for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
      float4 v = load4(x, from + i, x_half);
      if (other) {
        const float4 more = load4(other, base + i, 1);
        v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
        *(float4*)(total + base + i) = v;
      }
      *(float4*)(row + i) = v;
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      float v = load(x, from + i, x_half);
      if (other) total[base + i] = v += h2f(other[base + i]);
      row[i] = v;
      sum += v * v;
    }
  }
  const float scale = 1.f / sqrtf(block_sum(sum) / width + eps);
  if (by_four) {  // a thread reads back what it wrote itself
    for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
      const float4 v = *(const float4*)(row + i), w = *(const float4*)(weight + i);
      const uint2 packed = {pack_half2(v.x * scale * (offset + w.x), v.y * scale * (offset + w.y)),
                            pack_half2(v.z * scale * (offset + w.z), v.w * scale * (offset + w.w))};
      *(uint2*)(out + base + i) = packed;
    }
  } else {
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[base + i] = f2h(row[i] * scale * (offset + weight[i]));
  }
}

// y = x * rsqrt(mean(x^2) + eps) * w * silu(gate), float16
extern "C" __global__ void gated_rms_norm(const float* x, const half_t* gate, const float* __restrict__ weight,
                                          half_t* out, int width, float eps, int heads, int pitch, int step) {
  take_turn();
  const size_t base = (size_t)blockIdx.x * width, gate_at = vector_at(blockIdx.x, heads, pitch, step);
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[base + i] * x[base + i];
  const float scale = 1.f / sqrtf(block_sum(sum) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float g = h2f(gate[gate_at + i]);
    out[base + i] = f2h(x[base + i] * scale * weight[i] * (g / (1.f + __expf(-g))));
  }
}

// y = x * rsqrt(sum(x^2) + eps) * factor, float32
extern "C" __global__ void l2_norm(const float* x, float* out, int width, float eps, float factor, int heads, int pitch,
                                   int step) {
  take_turn();
  const size_t base = (size_t)blockIdx.x * width, from = vector_at(blockIdx.x, heads, pitch, step);
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[from + i] * x[from + i];
  const float scale = factor / sqrtf(block_sum(sum) + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[base + i] = x[from + i] * scale;
}

// silu(a) * b, float16; rows of a and b lie apart by their pitches. Four elements a thread where `by_four`.
extern "C" __global__ void swiglu(const half_t* a, const half_t* b, half_t* out, int width, int a_pitch, int b_pitch,
                                  int by_four) {
  take_turn();
  const size_t row = blockIdx.y;
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * (by_four ? 4 : 1);
  if (i >= width) return;
  const auto silu = [](u32 h) { const float x = h2f(h & 0xffff); return __fdividef(x, 1.f + __expf(-x)); };
  if (by_four) {
    const uint2 x = *(const uint2*)(a + row * a_pitch + i), y = *(const uint2*)(b + row * b_pitch + i);
    const uint2 made = {pack_half2(silu(x.x) * h2f(y.x & 0xffff), silu(x.x >> 16) * h2f(y.x >> 16)),
                        pack_half2(silu(x.y) * h2f(y.y & 0xffff), silu(x.y >> 16) * h2f(y.y >> 16))};
    *(uint2*)(out + row * width + i) = made;
  } else {
    out[row * width + i] = f2h(silu(a[row * a_pitch + i]) * h2f(b[row * b_pitch + i]));
  }
}

// x * sigmoid(gate), float16; the gate's heads of `dim` lie `step` apart
extern "C" __global__ void sigmoid_gate(const half_t* x, const half_t* gate, half_t* out, int width, int pitch,
                                        int step, int dim) {
  take_turn();
  const size_t row = blockIdx.y;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const float g = h2f(gate[row * pitch + (size_t)(i / dim) * step + i % dim]);
  out[row * width + i] = f2h(__fdividef(h2f(x[row * width + i]), 1.f + __expf(-g)));
}

// a + b in float32
extern "C" __global__ void add(const void* a, const void* b, float* out, int size, int a_half, int b_half) {
  take_turn();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) out[i] = load(a, i, a_half) + load(b, i, b_half);
}

// NeoX rotary of the first 2 * half_dim of `dim`; heads of a token share its angles; float16
extern "C" __global__ void rotary(const half_t* x, const float* cosines, const float* sines, half_t* out, int dim,
                                  int half_dim, int heads, int pitch, int step) {
  take_turn();
  const size_t base = (size_t)blockIdx.x * dim, angles = (size_t)(blockIdx.x / heads) * half_dim;
  const size_t from = vector_at(blockIdx.x, heads, pitch, step);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    float y = h2f(x[from + i]);
    if (i < 2 * half_dim) {
      const int j = i % half_dim;
      const float c = cosines[angles + j], s = sines[angles + j];
      const float pair = h2f(x[from + (i < half_dim ? i + half_dim : i - half_dim)]);
      y = i < half_dim ? y * c - pair * s : y * c + pair * s;
    }
    out[base + i] = f2h(y);
  }
}

// log_g = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b); float32 out
extern "C" __global__ void delta_gates(const half_t* a, const half_t* b, const float* __restrict__ a_log,
                                       const float* __restrict__ dt_bias, float* log_g, float* beta, int size,
                                       int heads, int a_pitch, int b_pitch) {
  take_turn();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const size_t row = i / heads, head = i % heads;
  const float z = h2f(a[row * a_pitch + head]) + dt_bias[head];
  log_g[i] = -expf(a_log[head]) * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z))));
  beta[i] = 1.f / (1.f + expf(-h2f(b[row * b_pitch + head])));
}

// out[r, to + i] = x[r, from + i] for i < width, in units of 2 bytes: one part of a split or a concatenation
extern "C" __global__ void copy_part(const half_t* x, half_t* out, int x_width, int out_width, int from, int to,
                                     int width) {
  take_turn();
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[(size_t)blockIdx.x * out_width + to + i] = x[(size_t)blockIdx.x * x_width + from + i];
}
