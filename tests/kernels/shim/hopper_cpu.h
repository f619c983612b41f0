// Products of a warpgroup and barriers in shared memory, for cuda_cpu.h.
//
// Products see no copies but those from before a `show_copies`.  If copies are late, products happen at
// once, which is before what was not waited for; else they happen as late as a wait allows, with
// what is then in registers and memory.
#pragma once

namespace shim {
// PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout": the 16-bit value of a matrix
// with a swizzle of 128 bytes.  `row` is of what the products keep (M or N), `k` of what they sum.
constexpr unsigned SHARED_BEGIN = 0x480;  // no multiple of what the swizzle repeats after
inline unsigned value_at(unsigned long long descriptor, int row, int k, bool is_k_major) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) fail("not a swizzle of 128 bytes");
  const unsigned begin = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
                 stride = (descriptor >> 32 & 0x3FFF) << 4;
  // Eight lines of 128 bytes are an atom; these follow each other after `stride`, and where a line
  // is of one k, the next 64 rows after `leading`.
  const unsigned line = is_k_major ? row : k, column = is_k_major ? k : row;
  unsigned at = begin + line / 8 * stride + line % 8 * 128 + column / 64 * leading + column % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  if (at < SHARED_BEGIN || at + 2 > SHARED_BEGIN + shown.size())
    fail("a matrix outside shared memory");
  unsigned short bits;
  memcpy(&bits, &shown[at - SHARED_BEGIN], 2);
  // What is being replaced may be either.
  return memcmp(&bits, shared + (at - SHARED_BEGIN), 2) ? 0x7FFF : bits;  // NaN
}
// 16 rows of a product, those of one warp, which has a quarter of the 64.
inline void multiply_rows(Thread* warp, const Product* of[32]) {
  const Product& it = *of[0];
  static float a[16][16], b[16][128];
  const int first_row = (int)(warp->index.x / 32 % 4) * 16;
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < it.eights * 8; n++)
      b[k][n] = widen16(value_at(it.b_at, n, k, !it.a), it.is_bf16);
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 4; r++)
      for (int k = 0; k < 2; k++) {
        const int row = l / 4 + 8 * (r % 2), column = 2 * (l % 4) + k + 8 * (r / 2);
        const unsigned bits = it.a ? of[l]->a[r] >> (16 * k)
                                   : value_at(it.a_at, first_row + row, column, true);
        a[row][column] = widen16(bits, it.is_bf16);
      }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4 * it.eights; i++) {
      const int row = l / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + 2 * (l % 4) + i % 2;
      float sum = it.add ? of[l]->c[i] : 0;
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
      of[l]->c[i] = sum;
    }
}
// Those products of a warp that a wait is for.
inline void run_products(Thread* warp) {
  auto due = [](Thread& thread) {
    return std::count_if(thread.products.begin(), thread.products.end(), [&](Product& it) {
      return it.group < thread.product_group - thread.pending;
    });
  };
  const long count = due(warp[0]);
  for (int l = 1; l < 32; l++)
    if (due(warp[l]) != count) fail("the lanes of a warp wait for different products");
  for (long i = 0; i < count; i++) {
    const Product* of[32];
    for (int l = 0; l < 32; l++) of[l] = &warp[l].products[i];
    multiply_rows(warp, of);
  }
  for (int l = 0; l < 32; l++)
    warp[l].products.erase(warp[l].products.begin(), warp[l].products.begin() + count);
}
}  // namespace shim

static inline unsigned shared_address(const void* p) {
  return shim::SHARED_BEGIN + ((const unsigned char*)p - shim::shared);
}
static inline shim::Barrier& barrier_at(unsigned long long* at) {
  shim::check_shared(at, sizeof *at);
  if (!shim::barriers.count(at)) shim::fail("nobody has made this barrier");
  return shim::barriers[at];
}
static inline void barrier_make(unsigned long long* at, unsigned count) {
  shim::check_shared(at, sizeof *at);
  shim::barriers[at] = {count, count};
}
static inline void barrier_arrive(unsigned long long* at) {
  shim::arrive(barrier_at(at));
  shim::leave(shim::PAUSED);  // whoever waits may go on before this thread does
}
static inline void copies_arrive(unsigned long long* at) {
  auto &it = barrier_at(at);
  auto& copies = shim::current->copies;
  if (!shim::late) return shim::arrive(it);
  it.last.insert(it.last.end(), copies.begin(), copies.end());
  copies.clear();
  it.num_last++;
}
static inline bool barrier_wait(unsigned long long* at, unsigned parity) {
  shim::current->barrier = &barrier_at(at);
  shim::current->parity = parity;
  shim::leave(shim::IN_PHASE);
  return true;
}
static inline void show_copies() {
  for (auto& [at, size] : shim::hidden) memcpy(&shim::shown[at - shim::shared], at, size);
  shim::hidden.clear();
}
template <int COUNT>
static inline void fewer_registers() {}
template <int COUNT>
static inline void more_registers() {}
static inline void products_begin() { shim::current->may_multiply = true; }
static inline void products_commit() { shim::current->product_group++; }
template <int PENDING>
static inline void products_wait() {
  shim::current->pending = PENDING;
  shim::current->may_multiply = false;  // what is written from here on needs a fence
  shim::in_warp(shim::PRODUCTS);
}
template <int EIGHTS>
static inline void products_done(float (*)[4]) {}
static inline void ask(shim::Product it) {
  auto& mine = *shim::current;
  if (!mine.may_multiply) shim::fail("products without `products_begin`");
  it.group = mine.product_group;
  mine.products.push_back(it);
  if (!shim::late) return;
  mine.pending = -1;  // not even for this one's group
  shim::in_warp(shim::PRODUCTS);
}
template <typename T>
static inline void multiply_shared(T, float (*c)[4], unsigned long long a, unsigned long long b,
                                   bool add) {
  ask({c[0], nullptr, a, b, 16, std::is_same_v<T, __nv_bfloat16>, add});
}
template <typename T, int EIGHTS>
static inline void multiply_values(T, float (&c)[EIGHTS][4], const unsigned* a,
                                   unsigned long long b) {
  ask({c[0], a, 0, b, EIGHTS, std::is_same_v<T, __nv_bfloat16>, true});
}
