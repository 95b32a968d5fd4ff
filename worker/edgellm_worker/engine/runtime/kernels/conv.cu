// Depthwise causal convolution of width 4 with SiLU, fused with the commit of the last pass.
//
// tail [slots, 3, C] holds the last three inputs of committed tokens, pending [slots, P, C] the last pass's inputs.
// With n = commit[b]: new tail = rows n..n+2 of [tail; pending]. A channel is private to its thread, so both are replaced
// in place: new tail, then this pass's inputs as the new pending.
// x's rows lie `pitch` apart. Compile-time: C channels.
#define AHEAD 8

extern "C" __global__ void causal_conv(const half_t* x, half_t* tail, half_t* pending, const float* __restrict__ weight,
                                       const int* commit, const int* slots, float* out, int num_tokens,
                                       int pending_rows, int keep_pending, int pitch) {
  take_turn();
  const int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
  if (c >= C) return;
  const int slot = slots[b];
  half_t* tail_row = tail + (size_t)slot * 3 * C + c;
  half_t* pending_row = pending + (size_t)slot * pending_rows * C + c;
  half_t h[3];
  const int n = keep_pending ? commit[b] : 0;
#pragma unroll
  for (int j = 0; j < 3; ++j)
    h[j] = n + j < 3 ? tail_row[(size_t)(n + j) * C] : pending_row[(size_t)(n + j - 3) * C];
  if (n > 0)
#pragma unroll
    for (int j = 0; j < 3; ++j) tail_row[(size_t)j * C] = h[j];
  const float w0 = weight[c * 4], w1 = weight[c * 4 + 1], w2 = weight[c * 4 + 2], w3 = weight[c * 4 + 3];
  float a0 = h2f(h[0]), a1 = h2f(h[1]), a2 = h2f(h[2]);
  for (int t0 = 0; t0 < num_tokens; t0 += AHEAD) {
    half_t raw[AHEAD];  // all asked for before the first is needed: what is written in between may be x, for all it knows
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      raw[i] = t0 + i < num_tokens ? x[((size_t)b * num_tokens + t0 + i) * pitch + c] : (half_t)0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (t0 + i < num_tokens) {
        const float now = h2f(raw[i]);
        const float y = w0 * a0 + w1 * a1 + w2 * a2 + w3 * now;
        out[((size_t)b * num_tokens + t0 + i) * C + c] = y / (1.f + __expf(-y));
        if (keep_pending) pending_row[(size_t)(t0 + i) * C] = raw[i];
        a0 = a1, a1 = a2, a2 = now;
      }
  }
}

// The commit alone, at the end of a prefill chunk: pending is the chunk's own input [B, N, C].
extern "C" __global__ void conv_commit(const half_t* x, half_t* tail, const int* commit, const int* slots,
                                       int num_tokens, int pitch) {
  take_turn();
  const int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
  if (c >= C) return;
  half_t* tail_row = tail + (size_t)slots[b] * 3 * C + c;
  const int n = commit[b];
  half_t h[3];
#pragma unroll
  for (int j = 0; j < 3; ++j)
    h[j] = n + j < 3 ? tail_row[(size_t)(n + j) * C] : x[((size_t)b * num_tokens + n + j - 3) * pitch + c];
#pragma unroll
  for (int j = 0; j < 3; ++j) tail_row[(size_t)j * C] = h[j];
}
