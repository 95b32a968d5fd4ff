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

// y = x * rsqrt(mean(x^2) + eps) * (w or 1 + w), float16. With `other`, x is first replaced by x + other (float32,
// written to `total`): the residual sum and the norm after it in one pass.
extern "C" __global__ void rms_norm(const void* __restrict__ x, const half_t* __restrict__ other,
                                    float* __restrict__ total, const float* __restrict__ weight,
                                    half_t* __restrict__ out, int width, float eps, float offset, int x_half) {
  extern __shared__ float row[];
  const size_t base = (size_t)blockIdx.x * width;
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float v = load(x, base + i, x_half);
    if (other) total[base + i] = v += h2f(other[base + i]);
    row[i] = v;
    sum += v * v;
  }
  const float scale = 1.f / sqrtf(block_sum(sum) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[base + i] = f2h(row[i] * scale * (offset + weight[i]));
}

// y = x * rsqrt(mean(x^2) + eps) * w * silu(gate), float16
extern "C" __global__ void gated_rms_norm(const float* __restrict__ x, const half_t* __restrict__ gate,
                                          const float* __restrict__ weight, half_t* __restrict__ out, int width,
                                          float eps) {
  const size_t base = (size_t)blockIdx.x * width;
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[base + i] * x[base + i];
  const float scale = 1.f / sqrtf(block_sum(sum) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float g = h2f(gate[base + i]);
    out[base + i] = f2h(x[base + i] * scale * weight[i] * (g / (1.f + __expf(-g))));
  }
}

// y = x * rsqrt(sum(x^2) + eps) * factor, float32
extern "C" __global__ void l2_norm(const float* __restrict__ x, float* __restrict__ out, int width, float eps,
                                   float factor) {
  const size_t base = (size_t)blockIdx.x * width;
  float sum = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[base + i] * x[base + i];
  const float scale = factor / sqrtf(block_sum(sum) + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[base + i] = x[base + i] * scale;
}

// silu(a) * b, or (with `reverse`) a * sigmoid(b); float16
extern "C" __global__ void gate(const half_t* __restrict__ a, const half_t* __restrict__ b, half_t* __restrict__ out,
                                int size, int reverse) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const float x = h2f(a[i]), y = h2f(b[i]);
  out[i] = f2h(reverse ? x / (1.f + __expf(-y)) : x / (1.f + __expf(-x)) * y);
}

// a + b in float32
extern "C" __global__ void add(const void* __restrict__ a, const void* __restrict__ b, float* __restrict__ out, int size,
                               int a_half, int b_half) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) out[i] = load(a, i, a_half) + load(b, i, b_half);
}

// NeoX rotary of the first 2 * half_dim of `dim`; heads of a token share its angles; float16
extern "C" __global__ void rotary(const half_t* __restrict__ x, const float* __restrict__ cosines,
                                  const float* __restrict__ sines, half_t* __restrict__ out, int dim, int half_dim,
                                  int heads) {
  const size_t base = (size_t)blockIdx.x * dim, angles = (size_t)(blockIdx.x / heads) * half_dim;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    float y = h2f(x[base + i]);
    if (i < 2 * half_dim) {
      const int j = i % half_dim;
      const float c = cosines[angles + j], s = sines[angles + j];
      const float pair = h2f(x[base + (i < half_dim ? i + half_dim : i - half_dim)]);
      y = i < half_dim ? y * c - pair * s : y * c + pair * s;
    }
    out[base + i] = f2h(y);
  }
}

// log_g = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b); float32 out
extern "C" __global__ void delta_gates(const half_t* __restrict__ a, const half_t* __restrict__ b,
                                       const float* __restrict__ a_log, const float* __restrict__ dt_bias,
                                       float* __restrict__ log_g, float* __restrict__ beta, int size, int heads) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const float z = h2f(a[i]) + dt_bias[i % heads];
  log_g[i] = -expf(a_log[i % heads]) * (fmaxf(z, 0.f) + log1pf(expf(-fabsf(z))));
  beta[i] = 1.f / (1.f + expf(-h2f(b[i])));
}

// out[r, to + i] = x[r, from + i] for i < width, in units of 2 bytes: one part of a split or a concatenation
extern "C" __global__ void copy_part(const half_t* __restrict__ x, half_t* __restrict__ out, int x_width, int out_width,
                                     int from, int to, int width) {
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[(size_t)blockIdx.x * out_width + to + i] = x[(size_t)blockIdx.x * x_width + from + i];
}
