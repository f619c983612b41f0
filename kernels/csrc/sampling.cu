// Draws one token for each row of logits, one thread block per row. kernels/contract.py specifies
// every operation at SAMPLING, to the bit, and kernels/cpu/sampling.py computes the same.  All sums
// are of integers, so threads may add in any order.  Each pass reads the row again, from the L2
// cache.
//
// Passes of `draw`: the largest key; for top_k and for top_p a radix select (`threshold`) of four
// passes, one for each digit of a key, the most significant first; the sum of the weights that
// pass; the token.
#include "prims.cuh"

// A row of SAMPLING.
struct Setting {
  double temperature;
  long long top_k;
  double top_p, min_p, uniform;
};

struct Draw {
  const void* logits;    // [R, V] float32
  const void* settings;  // [R] Setting; null: temperature 0 in every row
  const void* allowed;   // [R, words], a bit for each token; null: all are allowed
  void* drawn;           // [R] int64
  int size, stride, num_words;  // V; from row to row, in logits; words
};

const int DIGIT = 8, RADIX = 1 << DIGIT;  // bits of a digit of the order, and its values

// ln(2)^k / k!, as kernels/cpu/intrinsics.py has it.
__constant__ double POWER_SERIES[13] = {
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.5252733804059841e-05,
    1.321548679014431e-06,
    1.01780860092397e-07,
    7.054911620801123e-09,
    4.4455382718708116e-10,
    2.5678435993488206e-11,
};

// Shared memory.  A histogram has a 64-bit sum for each digit, in two halves, in a column for each
// lane of a warp.  A column is one bank, so lanes with equal digits, which most have, do not wait
// for each other.
struct Shared {
  u32 low[RADIX][32], high[RADIX][32];
  u64 sums[32];  // one of each warp
  u64 rest;      // the result of `find`
  int thread;
};

// The result of `find`.
struct Found {
  int thread;  // -1: none
  u64 rest;    // the wanted sum less the values of the threads before this one
};

// One row of logits, as its thread block processes it.
struct Row {
  Shared& shared;
  const u32* logits;  // their bits
  const u32* allowed;
  int size, num_words, run;  // each warp has a run of `run` tokens, a multiple of 32
  double largest, factor;    // see `weight`

  // The key of a logit with these bits: unsigned, and ordered as logits are.  No logit has the key
  // 0, which stands for a token that is not allowed.
  PRIM static u32 order(u32 bits) {
    const u32 magnitude = bits & 0x7fffffff;
    const u32 ordered = bits == magnitude ? bits | 0x80000000 : ~bits;
    return magnitude > 0x7f800000 ? 0xffffffff : magnitude ? ordered : 0x80000000;
  }
  PRIM bool is_allowed(int token) const {
    return !allowed || (token / 32 < num_words && allowed[token / 32] >> token % 32 & 1);
  }
  PRIM u32 key(int token) const {
    return token < size && is_allowed(token) ? order(logits[token]) : 0;
  }

  // The logit of a key.
  PRIM static double logit(u32 key) {
    return widen_exactly(key & 0x80000000 ? key & 0x7fffffff : ~key);
  }
  // The weight of a key, 2^x in units of 2^-42, x = (logit - largest) * factor: the same operations
  // as `weight_of` in kernels/cpu/intrinsics.py, one by one.
  PRIM u64 weight(u32 key) const {
    const double rounding = 6755399441055744.0, base = 1024.0;  // 1.5 * 2^52; 2^(52 - 42)
    double x = multiply_rounded(logit(key) - largest, factor);
    x = x > -64.0 ? x : -64.0;
    const double rounded = x + rounding, part = x - (rounded - rounding);
    double power = POWER_SERIES[12];
#pragma unroll
    for (int k = 11; k >= 0; k--) power = fma(power, part, POWER_SERIES[k]);
    power = double_of(bits_of(power) + (bits_of(rounded) << 52));
    return bits_of(power + base) - bits_of(base);
  }

  // Call use(token, key) for each allowed token of the row; threads divide the tokens.
  template <typename Use>
  PRIM void each(Use use) const {
    const int first = threadIdx.x / 32 * run, last = min(first + run, size);
    for (int token = first + threadIdx.x % 32; token < last; token += 4 * 32) {
      u32 bits[4];
      bool is_one[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {  // four loads are under way before the first is used
        const int here = min(token + 32 * k, last - 1);
        bits[k] = logits[here];
        is_one[k] = token + 32 * k < last && is_allowed(here);
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (is_one[k]) use(token + 32 * k, order(bits[k]));
    }
  }

  // Return the largest x of the thread block's threads.
  PRIM u64 largest_of(u64 x) const {
    for (int mask = 16; mask; mask /= 2) x = max(x, from_lane_xor(x, mask));
    __syncthreads();  // all threads have read the sums of the last call
    if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) x = max(x, shared.sums[warp]);
    return x;
  }

  // Find the first thread such that the values up to its own sum to wanted(sum of all).
  template <typename Wanted>
  PRIM Found find(u64 value, Wanted wanted) const {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32;
    u64 before = 0, sum = value, total = 0;
    for (int mask = 1; mask < 32; mask *= 2) {
      const u64 other = from_lane_xor(sum, mask);
      if (lane & mask) before += other;
      sum += other;
    }
    __syncthreads();  // all threads have read the sums and the result of the last call
    if (lane == 0) shared.sums[own] = sum;
    if (threadIdx.x == 0) shared.thread = -1;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) {
      if (warp < own) before += shared.sums[warp];
      total += shared.sums[warp];
    }
    const u64 rest = wanted(total) - before;
    if (wanted(total) > before && rest <= value) {
      shared.thread = threadIdx.x;
      shared.rest = rest;
    }
    __syncthreads();
    return {shared.thread, shared.rest};
  }

  // Radix select: return the largest key such that the amounts of the keys from it on sum to
  // wanted(sum of all), or `least` if there is none.  Keys under `least` do not count.  `prefix`
  // has the digits found so far; a pass sums amounts by the next digit of the keys that begin with
  // them.
  template <typename Amount, typename Wanted>
  PRIM u32 threshold(u32 least, Amount amount, Wanted wanted) const {
    u32 prefix = 0;
    u64 rest = 0;
    for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
      for (int i = threadIdx.x; i < RADIX * 32; i += blockDim.x)
        shared.low[0][i] = shared.high[0][i] = 0;
      __syncthreads();
      each([&](int, u32 key) {
        if (key < least || (u64)key >> (shift + DIGIT) != prefix) return;
        const int digit = key >> shift & (RADIX - 1), lane = threadIdx.x % 32;
        const u64 more = amount(key);
        const u32 low = (u32)more, before = atomicAdd(&shared.low[digit][lane], low);
        const u32 high = (u32)(more >> 32) + (before + low < before);
        if (high) atomicAdd(&shared.high[digit][lane], high);
      });
      __syncthreads();
      const int digit = RADIX - 1 - (int)threadIdx.x;
      u64 sum = 0;
      for (int i = 0; i < 32 && digit >= 0; i++) {
        const int column = (threadIdx.x + i) % 32;
        sum += shared.low[digit][column] + ((u64)shared.high[digit][column] << 32);
      }
      const bool is_first = shift == 32 - DIGIT;
      const Found found = find(sum, [&](u64 all) { return is_first ? wanted(all) : rest; });
      if (found.thread < 0) return least;
      prefix = prefix << DIGIT | (RADIX - 1 - found.thread);
      rest = found.rest;
    }
    return prefix;
  }

  // A share of a sum of weights.
  PRIM static u64 share_of(double share, u64 sum) {
    return (u64)(long long)(share * (double)(long long)sum);
  }

  // Filter by top_k, top_p and min_p, draw with `uniform`, and write the token.
  PRIM void draw(const Setting& of, long long* drawn) const {
    u32 least = 1;
    auto weighed = [&](u32 key) { return weight(key); };
    if (0 < of.top_k && of.top_k < size)
      least = threshold(least, [](u32) { return (u64)1; }, [&](u64) { return (u64)of.top_k; });
    if (of.top_p < 1.0)
      least = threshold(least, weighed, [&](u64 all) { return max(share_of(of.top_p, all), (u64)1); });
    const u64 lightest = share_of(of.min_p, (u64)1 << 42);
    auto passing = [&](u32 key) {
      const u64 found = key < least ? 0 : weight(key);
      return found < lightest ? 0 : found;
    };
    u64 sum = 0;
    each([&](int, u32 key) { sum += passing(key); });
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    // Find the warp whose run has the token, divide that run among all threads, find the thread.
    const Found warp = find(threadIdx.x % 32 ? 0 : sum,
                            [&](u64 all) { return share_of(of.uniform, all) + 1; });
    if (warp.thread < 0) {  // there is no weight
      u64 last = 0;
      each([&](int token, u32) { last = token; });
      last = largest_of(last);
      if (threadIdx.x == 0) *drawn = last;
      return;
    }
    const int first = warp.thread / 32 * run, part = (run + blockDim.x - 1) / blockDim.x;
    int token = first + threadIdx.x * part;
    const int end = min(token + part, first + run);
    sum = 0;
    for (int i = token; i < end; i++) sum += passing(key(i));
    const Found found = find(sum, [&](u64) { return warp.rest; });
    if (threadIdx.x != found.thread) return;
    for (sum = passing(key(token)); sum < found.rest; sum += passing(key(token))) token++;
    *drawn = token;
  }
};

// Write the first of the largest logits at temperature 0 or without settings; draw otherwise.
__global__ void __launch_bounds__(1024, 1) draw(const Draw a) {
  SHARED_BYTES(shared);
  const long long number = blockIdx.x;
  Row row = {*(Shared*)shared, (const u32*)a.logits + number * a.stride, 0, a.size, a.num_words};
  if (a.allowed) row.allowed = (const u32*)a.allowed + number * a.num_words;
  row.run = (a.size + blockDim.x - 1) / blockDim.x * 32;
  long long* const drawn = (long long*)a.drawn + number;
  u64 best = 0;  // key, and below it the token inverted: the first of equal keys is the largest
  row.each([&](int token, u32 key) { best = max(best, (u64)key << 32 | ~(u32)token); });
  best = row.largest_of(best);
  const Setting* const settings = (const Setting*)a.settings + number;
  if (!best || !a.settings || settings->temperature == 0) {
    if (threadIdx.x == 0) *drawn = best ? (long long)~(u32)best : -1;
    return;
  }
  row.largest = Row::logit(best >> 32);
  row.factor = min(1.4426950408889634 / settings->temperature, 1.7976931348623157e308);
  row.draw(*settings, drawn);
}
