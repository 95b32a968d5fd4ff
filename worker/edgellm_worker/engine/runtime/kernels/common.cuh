// Shared by all kernels: 16-bit floats without headers, so that NVRTC needs no include path.
typedef unsigned short half_t;
typedef unsigned int u32;
typedef unsigned char u8;

__device__ __forceinline__ float h2f(half_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ half_t f2h(float f) {
  half_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
__device__ __forceinline__ u32 pack_half2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
  return v;
}

// d += a b, a [16, 16], b [16, 8], by a warp
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Launches overlap (programmatic dependent launch, since SM90): a kernel lets the next one begin as soon as all its own
// blocks have, and that one may read what no kernel writes, the weights, before it waits for all kernels before it.
// What kernels write must not be __restrict__ const: it changes while a later kernel has begun.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Into the L2 cache, from where whoever needs it reads what is current: it may be asked for before the wait.
__device__ __forceinline__ void prefetch(const void* from, u32 bytes) {  // multiples of 16
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void take_turn() { start_next(), await_previous(); }

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes to shared memory, asynchronously; zeros instead where `wanted` is false (`from` must be readable all the same).
__device__ __forceinline__ void fetch(u32 to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void await_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

#ifdef KV_FP8  // what both attention kernels need
#if KV_FP8
typedef u8 kv_t;
#else
typedef half_t kv_t;
#endif

#if KV_FP8
__device__ __forceinline__ uint4 widen(uint2 packed) {  // 8 e4m3 -> 8 float16
  uint4 r;
  asm("{.reg .b16 a,b,c,d; mov.b32 {a,b}, %4; mov.b32 {c,d}, %5;"
      "cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; cvt.rn.f16x2.e4m3x2 %2, c; cvt.rn.f16x2.e4m3x2 %3, d;}"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "r"(packed.x), "r"(packed.y));
  return r;
}
__device__ __forceinline__ u32 narrow2(u32 halves, float inverse) {  // 2 float16 / scale -> 2 e4m3 in the low 16 bits
  u32 r;
  const float low = h2f(halves & 0xffff) * inverse, high = h2f(halves >> 16) * inverse;
  asm("{.reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, %1, %2; cvt.u32.u16 %0, a;}" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint2 narrow(uint4 v, float inverse) {
  return make_uint2(narrow2(v.x, inverse) | narrow2(v.y, inverse) << 16,
                    narrow2(v.z, inverse) | narrow2(v.w, inverse) << 16);
}
#endif
#endif
