// A block of CUDA threads on one CPU thread: each is a fiber that runs until it meets a barrier. Blocks run one after
// another. Copies to shared memory arrive when they are waited for, not before; shared memory begins as rubbish.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__

struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Index {
  unsigned x, y;
};
static Index threadIdx, blockIdx, gridDim;
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 256
#endif
constexpr int STACK = 1 << 16, SHARED = 100 << 10;
alignas(128) static unsigned char shared_memory[SHARED];

struct Copy {
  unsigned to;
  const void* from;  // null: zeros
};
struct Fiber {
  ucontext_t context;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  bool has_ended;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;

static void yield() { swapcontext(&fibers[current].context, &scheduler); }

struct Barrier {
  int arrived = 0, generation = 0;
  void wait(int count) {
    const int mine = generation;
    if (++arrived == count) {
      arrived = 0, ++generation;
      return;
    }
    while (generation == mine) yield();
  }
};
static Barrier of_block, of_warp[BLOCK_THREADS / 32];

inline void __syncthreads() { of_block.wait(BLOCK_THREADS); }
inline void __threadfence() {}
inline void start_next() {}
inline void await_previous() {}
inline int atomicAdd(int* p, int value) { return (*p += value) - value; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float2 __ldcg(const float2* p) { return *p; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float4 __ldcg(const float4* p) { return *p; }
float __shfl_xor_sync(unsigned, float, int);
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)(bytes >> ((selector >> 4 * i & 7) * 8) & 255) << 8 * i;
  return r;
}

inline float h2f(unsigned short h) {
  _Float16 f;
  memcpy(&f, &h, 2);
  return (float)f;
}
inline unsigned short f2h(float f) {
  const _Float16 r = (_Float16)f;
  unsigned short h;
  memcpy(&h, &r, 2);
  return h;
}
inline float half_of(unsigned pair, int which) { return h2f((unsigned short)(pair >> 16 * which)); }
inline unsigned pack_half2(float low, float high) { return f2h(low) | (unsigned)f2h(high) << 16; }
inline unsigned multiply2(unsigned a, unsigned b) {
  return f2h(half_of(a, 0) * half_of(b, 0)) | (unsigned)f2h(half_of(a, 1) * half_of(b, 1)) << 16;
}

inline unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - shared_memory); }
inline void fetch(unsigned to, const void* from, bool wanted) { fibers[current].open.push_back({to, wanted ? from : 0}); }
inline void commit_fetches() {
  fibers[current].groups.push_back(fibers[current].open);
  fibers[current].open.clear();
}
template <int LATER>
inline void await_fetches() {
  auto& groups = fibers[current].groups;
  for (; groups.size() > LATER; groups.pop_front())
    for (const Copy& copy : groups.front()) {
      if (copy.from) memcpy(shared_memory + copy.to, copy.from, 16);
      else memset(shared_memory + copy.to, 0, 16);
    }
}
template <class T>
inline T read(unsigned address) {
  T v;
  memcpy(&v, shared_memory + address, sizeof v);
  return v;
}
inline uint4 read16(unsigned address) { return read<uint4>(address); }
inline unsigned read4(unsigned address) { return read<unsigned>(address); }

// 8 x 8 matrices of float16: lane l gives the address of row l % 8 of matrix l / 8, and gets two neighbours of row l / 4.
template <int COUNT>
inline void load_matrices(unsigned (&r)[4], unsigned address) {
  static unsigned addresses[BLOCK_THREADS / 32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  addresses[warp][lane] = address;
  of_warp[warp].wait(32);
  for (int i = 0; i < COUNT; ++i) r[i] = read4(addresses[warp][i * 8 + lane / 4] + lane % 4 * 4);
  of_warp[warp].wait(32);
}
inline void load4(unsigned (&r)[4], unsigned address) { load_matrices<4>(r, address); }
inline void load2(unsigned& r0, unsigned& r1, unsigned address) {
  unsigned r[4];
  load_matrices<2>(r, address);
  r0 = r[0], r1 = r[1];
}

// m16n8k16: lane 4 g + t holds of a rows g and g + 8, of b column g, and k 2t, 2t + 1, 2t + 8, 2t + 9 of both.
struct Operands {
  unsigned a[32][4], b[32][2];
};
static Operands given[BLOCK_THREADS / 32];

inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Operands& all = given[warp];
  memcpy(all.a[lane], a, sizeof a);
  all.b[lane][0] = b0, all.b[lane][1] = b1;
  of_warp[warp].wait(32);
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2;
      d[e] += half_of(all.a[row % 8 * 4 + from][row / 8 + k / 8 * 2], k % 2) *
              half_of(all.b[column * 4 + from][k / 8], k % 2);
    }
  }
  of_warp[warp].wait(32);
}

static void (*body)();
static void start() {
  body();
  fibers[current].has_ended = true;
  yield();
}

// Runs `run` once for each thread of each block.
static void launch(int blocks, void (*run)(), int blocks_y = 1) {
  static std::unique_ptr<unsigned char[]> stacks(new unsigned char[(size_t)BLOCK_THREADS * STACK]);
  body = run;
  gridDim.x = blocks, gridDim.y = blocks_y;
  for (int block = 0; block < blocks * blocks_y; ++block) {
    blockIdx.x = block % blocks, blockIdx.y = block / blocks;
    memset(shared_memory, 0x7e, SHARED);
    fibers = std::vector<Fiber>(BLOCK_THREADS);
    for (int i = 0; i < BLOCK_THREADS; ++i) {
      getcontext(&fibers[i].context);
      fibers[i].context.uc_stack.ss_sp = stacks.get() + (size_t)i * STACK;
      fibers[i].context.uc_stack.ss_size = STACK;
      fibers[i].context.uc_link = nullptr;
      makecontext(&fibers[i].context, start, 0);
    }
    for (bool is_running = true; is_running;) {
      is_running = false;
      for (current = 0; current < BLOCK_THREADS; ++current) {
        if (fibers[current].has_ended) continue;
        threadIdx.x = current;
        swapcontext(&scheduler, &fibers[current].context);
        is_running = true;
      }
    }
  }
}
