// CUDA kernels on a CPU, for tests: one fiber for each CUDA thread, one thread block at a time.
//
// What it is hard on: thread blocks, warps and lanes run in any order (ORDER), asynchronous copies
// happen as late as a wait allows (LATE), what is published without a fence appears when the kernel
// has ended, shared memory is NaN at first, addresses of shared memory are checked, warp operations
// need the whole warp, a barrier needs every thread that has not returned.  What is of Hopper
// alone: hopper_cpu.h.
#pragma once
#define SHIM 1
#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#ifndef __global__
#define __global__
#define __device__
#define __forceinline__ inline
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)
#define SHARED_BYTES(name) unsigned char* name = shim::shared
#define MINUS_INFINITY (-HUGE_VALF)

namespace shim {
enum State { READY, PAUSED, AT_BARRIER, IN_WARP, IN_PHASE, RETURNED };
enum Operation { EXCHANGE, MATRICES, TRANSPOSED, MULTIPLY_BF16, MULTIPLY_FP16, PRODUCTS };
struct Index { unsigned x, y, z; };
struct Copy { void* to; const void* from; size_t size; bool valid; int group; };
using Stores = std::vector<std::function<void()>>;
// In shared memory; `last` are copies whose end arrives at it, if they are late.
struct Barrier { unsigned count, pending, phase; std::vector<Copy> last; unsigned num_last; };
// A product of a warpgroup, as one thread asked for it; a descriptor or registers are its `a`.
struct Product {
  float* c;
  const unsigned* a;
  unsigned long long a_at, b_at;
  int eights;
  bool is_bf16, add;
  int group;
};

constexpr size_t STACK = 64 << 10;
struct Thread {
  jmp_buf place;  // where it left; a ucontext would cost two system calls each time
  std::unique_ptr<char[]> stack;  // null: it has not begun
  Index index;
  State state;
  Operation operation;
  std::vector<Copy> copies;
  Stores stores;  // published, and not fenced yet
  int group;
  unsigned long long value;  // EXCHANGE
  int source;
  const void* row;   // MATRICES
  unsigned result[4];
  float* sums;       // MULTIPLY
  unsigned a[4], b[2];
  std::vector<Product> products;
  int product_group;
  bool may_multiply;
  int pending;       // PRODUCTS
  Barrier* barrier;  // IN_PHASE
  unsigned parity;
};

inline Thread* current;
inline Index block, block_size, grid;
inline unsigned char* shared;
inline size_t shared_bytes;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline bool late;
inline int votes, voted;  // __syncthreads_or
inline std::map<const void*, Barrier> barriers;
inline std::vector<unsigned char> shown;                       // shared memory as products see it
inline std::vector<std::pair<unsigned char*, size_t>> hidden;  // what they do not see yet

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "shim: %s (block %u,%u thread %u)\n", what, block.x, block.y,
          current ? current->index.x : 0);
  abort();
}
inline void leave(State state) {
  current->state = state;
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
inline void live() {  // through one thread block after the other
  for (;;) {
    body();
    leave(RETURNED);
  }
}
inline void resume(Thread& thread) {
  current = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.stack) _longjmp(thread.place, 1);
  thread.stack.reset(new char[STACK]);
  static ucontext_t beginning;
  getcontext(&beginning);
  beginning.uc_stack.ss_sp = thread.stack.get();
  beginning.uc_stack.ss_size = STACK;
  makecontext(&beginning, live, 0);
  setcontext(&beginning);
}
inline void make(Stores& stores) {
  for (auto& store : stores) store();
  stores.clear();
}
inline void in_warp(Operation operation) {
  current->operation = operation;
  leave(IN_WARP);
}
inline void check_shared(const void* p, size_t size) {
  auto at = (const unsigned char*)p;
  if (at < shared || at + size > shared + shared_bytes) fail("outside shared memory");
  if ((at - shared) % size) fail("misaligned in shared memory");
}
inline float widen16(unsigned bits, bool is_bf16) {
  unsigned short half = (unsigned short)bits;
  if (is_bf16) {
    __nv_bfloat16 x;
    memcpy(&x, &half, 2);
    return __bfloat162float(x);
  }
  __half x;
  memcpy(&x, &half, 2);
  return __half2float(x);
}

inline void copy(const Copy& it) {
  it.valid ? memcpy(it.to, it.from, it.size) : memset(it.to, 0, it.size);
  hidden.push_back({(unsigned char*)it.to, it.size});
}
inline void arrive(Barrier& it) {
  if (!--it.pending) it.pending = it.count, it.phase ^= 1;
}
// Whether that phase is over; copies happen when they are all that it waits for.
inline bool is_over(Barrier& it, unsigned parity) {
  if (it.phase == parity && it.num_last && it.num_last == it.pending) {
    for (auto& last : it.last) copy(last);
    it.last.clear();
    for (; it.num_last; it.num_last--) arrive(it);
  }
  return it.phase != parity;
}

// PTX ISA: fragments of ldmatrix and of mma.m16n8k16.
inline void matrices(Thread* warp, bool transposed) {
  for (int m = 0; m < 4; m++)
    for (int l = 0; l < 32; l++) {
      unsigned short e[2];
      for (int k = 0; k < 2; k++) {
        int row = l / 4, column = 2 * (l % 4) + k;
        if (transposed) std::swap(row, column);
        check_shared(warp[8 * m + row].row, 16);
        e[k] = ((const unsigned short*)warp[8 * m + row].row)[column];
      }
      warp[l].result[m] = e[0] | (unsigned)e[1] << 16;
    }
}
inline void multiply_warp(Thread* warp, bool is_bf16) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; l++)
    for (int k = 0; k < 2; k++) {
      for (int r = 0; r < 4; r++)
        a[l / 4 + 8 * (r % 2)][2 * (l % 4) + k + 8 * (r / 2)] =
            widen16(warp[l].a[r] >> (16 * k), is_bf16);
      for (int r = 0; r < 2; r++)
        b[2 * (l % 4) + k + 8 * r][l / 4] = widen16(warp[l].b[r] >> (16 * k), is_bf16);
    }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 16; k++)
        warp[l].sums[i] += a[l / 4 + 8 * (i / 2)][k] * b[k][2 * (l % 4) + i % 2];
}
inline void run_products(Thread* warp);
inline void run_warp(Thread* warp) {
  for (int l = 1; l < 32; l++)
    if (warp[l].operation != warp[0].operation) fail("a warp diverged");
  switch (warp[0].operation) {
    case EXCHANGE:
      for (int l = 0; l < 32; l++) memcpy(warp[l].result, &warp[warp[l].source].value, 8);
      break;
    case MATRICES: matrices(warp, false); break;
    case TRANSPOSED: matrices(warp, true); break;
    case MULTIPLY_BF16: multiply_warp(warp, true); break;
    case MULTIPLY_FP16: multiply_warp(warp, false); break;
    case PRODUCTS: run_products(warp); break;
  }
  for (int l = 0; l < 32; l++) warp[l].state = READY;
}

// Run one warp as far as it gets; true if it moved at all.
inline bool run_until_blocked(Thread* warp, const std::vector<int>& lanes) {
  for (int l : lanes)
    if (warp[l].state == PAUSED) warp[l].state = READY;
  for (bool moved = false;; moved = true) {
    bool ran = false;
    for (int l : lanes)
      if (warp[l].state == IN_PHASE && is_over(*warp[l].barrier, warp[l].parity))
        warp[l].state = READY;
    for (int l : lanes)
      if (warp[l].state == READY) {
        resume(warp[l]);
        ran = true;
      }
    bool together = std::all_of(warp, warp + 32, [](Thread& t) { return t.state == IN_WARP; });
    if (together) run_warp(warp);
    if (!ran && !together) return moved;
  }
}

inline void run_block(std::vector<Thread>& threads, int order, std::mt19937& random) {
  int num_warps = (int)threads.size() / 32;
  std::vector<int> warps(num_warps), lanes(32);
  for (int i = 0; i < num_warps; i++) warps[i] = i;
  for (int i = 0; i < 32; i++) lanes[i] = i;
  auto count = [&](State s) {
    return std::count_if(threads.begin(), threads.end(), [&](Thread& t) { return t.state == s; });
  };
  while (count(RETURNED) < (long)threads.size()) {
    if (order == 1) std::reverse(warps.begin(), warps.end()), std::reverse(lanes.begin(), lanes.end());
    if (order == 2) std::shuffle(warps.begin(), warps.end(), random), std::shuffle(lanes.begin(), lanes.end(), random);
    bool moved = false;
    for (int w : warps) moved |= run_until_blocked(&threads[w * 32], lanes);
    long waiting = count(AT_BARRIER);
    if (waiting && waiting + count(RETURNED) == (long)threads.size()) {
      voted = votes, votes = 0;
      for (auto& t : threads)
        if (t.state == AT_BARRIER) t.state = READY;
    } else if (!moved) {
      fail("threads wait at a barrier or in a warp for others that do not come");
    }
  }
}

template <typename Kernel>
void launch(Kernel kernel, unsigned grid_x, unsigned grid_y, int num_threads, size_t bytes,
            int order, int seed, int late_copies) {
  // They live on: what makes them, and the pages of their stacks, take longer than a kernel.
  static std::map<int, std::vector<Thread>> lives;
  auto& mine = lives[num_threads];
  mine.resize(num_threads);
  std::vector<unsigned char> memory(bytes + 128);
  shared = (unsigned char*)(((size_t)memory.data() + 127) & ~(size_t)127);
  shared_bytes = bytes;
  grid = {grid_x, grid_y, 1};
  block_size = {(unsigned)num_threads, 1, 1};
  late = late_copies;
  body = kernel;
  std::mt19937 random(seed);
  std::vector<unsigned> blocks(grid_x * grid_y);
  for (unsigned i = 0; i < blocks.size(); i++) blocks[i] = i;
  if (order == 1) std::reverse(blocks.begin(), blocks.end());
  if (order == 2) std::shuffle(blocks.begin(), blocks.end(), random);
  Stores unfenced;
  for (unsigned number : blocks) {
    block = {number % grid_x, number / grid_x, 0};
    memset(shared, 0xFF, bytes);  // NaN in every float format
    shown.assign(shared, shared + bytes);
    hidden.clear();
    barriers.clear();
    for (int i = 0; i < num_threads; i++) {
      auto& t = mine[i];
      t.index = {(unsigned)i, 0, 0};
      t.state = READY;
      t.copies.clear();
      t.products.clear();
      t.group = t.product_group = 0;
      t.may_multiply = false;
    }
    run_block(mine, order, random);
    for (auto& t : mine) {
      if (!t.copies.empty()) fail("copies that nobody has waited for fall into later results");
      unfenced.insert(unfenced.end(), t.stores.begin(), t.stores.end());
      t.stores.clear();
    }
  }
  make(unfenced);
}
}  // namespace shim

#define threadIdx (shim::current->index)
#define blockIdx (shim::block)
#define blockDim (shim::block_size)
#define gridDim (shim::grid)
inline void __syncthreads() { shim::leave(shim::AT_BARRIER); }
inline int __syncthreads_or(int vote) {
  shim::votes |= vote != 0;
  __syncthreads();
  return shim::voted;
}
inline void __threadfence() { shim::make(shim::current->stores); }
inline unsigned atomicInc(unsigned* at, unsigned last) {
  unsigned before = *at;
  *at = before >= last ? 0 : before + 1;
  return before;
}
template <typename T>
void publish(T* to, T value) {
  shim::current->stores.push_back([=] { *to = value; });
}

static inline void copy_later(void* to, const void* from, size_t size, bool valid) {
  shim::check_shared(to, size);
  shim::Copy it = {to, from, size, valid, shim::current->group};
  shim::late ? shim::current->copies.push_back(it) : shim::copy(it);
}
static inline void copy_async(void* to, const void* from, bool valid) {
  copy_later(to, from, 16, valid);
}
static inline void copy_number_async(void* to, const int* from, bool valid) {
  copy_later(to, from, 4, valid);
}
static inline void copies_commit() { shim::current->group++; }
template <int PENDING>
static inline void copies_wait() {
  auto& copies = shim::current->copies;
  auto done = [](shim::Copy& c) { return c.group < shim::current->group - PENDING; };
  for (auto& c : copies)
    if (done(c)) shim::copy(c);
  copies.erase(std::remove_if(copies.begin(), copies.end(), done), copies.end());
}
static inline void load_matrices(unsigned* r, const void* row) {
  shim::current->row = row;
  shim::in_warp(shim::MATRICES);
  memcpy(r, shim::current->result, 16);
}
static inline void load_transposed(unsigned* r, const void* row) {
  shim::current->row = row;
  shim::in_warp(shim::TRANSPOSED);
  memcpy(r, shim::current->result, 16);
}
static inline void multiply_any(shim::Operation operation, float* c, const unsigned* a, unsigned b0,
                                unsigned b1) {
  auto t = shim::current;
  t->sums = c;
  memcpy(t->a, a, 16);
  t->b[0] = b0, t->b[1] = b1;
  shim::in_warp(operation);
}
static inline void multiply(__nv_bfloat16, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  multiply_any(shim::MULTIPLY_BF16, c, a, b0, b1);
}
static inline void multiply(__half, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  multiply_any(shim::MULTIPLY_FP16, c, a, b0, b1);
}
static inline float __fdividef(float x, float y) { return x / y; }
static inline float power_of_two(float x) { return exp2f(x); }
template <typename T>
static inline T from_lane(T x, int lane) {
  memcpy(&shim::current->value, &x, sizeof x);
  shim::current->source = lane;
  shim::in_warp(shim::EXCHANGE);
  memcpy(&x, shim::current->result, sizeof x);
  return x;
}
template <typename T>
static inline T from_lane_xor(T x, int mask) {
  return from_lane(x, threadIdx.x % 32 ^ mask);
}
template <typename To, typename From>
static inline To with_bits(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "of one size");
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline unsigned bits_of(float x) { return with_bits<unsigned>(x); }
static inline unsigned long long bits_of(double x) { return with_bits<unsigned long long>(x); }
static inline double double_of(unsigned long long bits) { return with_bits<double>(bits); }
static inline double multiply_rounded(double x, double y) { return x * y; }
static inline double widen_exactly(unsigned bits) { return with_bits<float>(bits); }
static inline unsigned atomicAdd(unsigned* sum, unsigned more) {
  shim::check_shared(sum, sizeof *sum);
  unsigned before = *sum;
  *sum += more;
  return before;
}
using std::max;
using std::min;
#include "hopper_cpu.h"
