// The parts that the attention kernels share: arguments, rows, the softmax, writing results.
#pragma once
#include "prims.cuh"

struct Attention {
  const void* query;  // [T, Hq, D]
  const void* pool;   // [N, L, 2, Hkv, B, D]
  void* out;          // [T, Hq, D]
  float* parts;       // [slots, Hkv, tile rows, D + 4]: partial results, see `combine`
  u32* tickets;       // [slots, Hkv]: how many of a tile's blocks are done, at its first slot
  const int* starts;    // [S + 1]
  const int* contexts;  // [S]
  const int* tables;    // [S, M]
  // [items, 7]: sequence or -1, first row, first key, end of keys; slot or -1 if keys are not
  // split, the first slot and the number of slots of its tile
  const int* work;
  const float* sinks;   // [Hq] or null: scores without a value
  int num_heads, num_kv_heads, head_dim, num_layers, layer, block_bits, num_columns, window;
  float scale, cap;  // times log2(e), so that scores are exponents of 2; a cap of 0 is none
};

constexpr float LOG2_E = 1.4426950408889634f;

// cap * tanh(score / cap); no exponent overflows, because 2^x saturates at infinity and at 0.
PRIM float capped(const Attention& a, float score) {
  return a.cap - __fdividef(2 * a.cap, 1 + power_of_two(2 * LOG2_E / a.cap * score));
}

PRIM float sink_of(const Attention& a, int head) {
  return a.sinks ? a.sinks[head] * LOG2_E : MINUS_INFINITY;
}

// A row's partial result for some keys: weighted values, not yet divided by the sum of weights.
// Weights are powers of 2 of scores less the highest one.  In memory: D values, `top`, `sum`.
struct alignas(16) Four { float at[4]; };
struct Partial {
  Four value;
  float top, sum;
};

// Combine four values, from `d` on, of `count` partial results `stride` floats apart, and a sink.
template <int D>
PRIM Partial combine(const float* first, int count, long long stride, int d, float sink) {
  float top = sink;
#pragma unroll 4
  for (int i = 0; i < count; i++) top = fmaxf(top, first[i * stride + D]);
  const float base = top == MINUS_INFINITY ? 0.f : top;  // no key seen: -inf - -inf is NaN
  Partial all = {{0, 0, 0, 0}, top, power_of_two(sink - base)};
#pragma unroll 4
  for (int i = 0; i < count; i++) {
    const float* from = first + i * stride;
    const float weight = power_of_two(from[D] - base);
    const Four part = *(const Four*)(from + d);
    for (int k = 0; k < 4; k++) all.value.at[k] += weight * part.at[k];
    all.sum += weight * from[D + 1];
  }
  return all;
}

// Return the offset of K of (block, head, offset) in the pool; V is Hkv * B * D further on.
PRIM long long key_offset(const Attention& a, int block, int head, int offset, int head_dim) {
  long long row = ((long long)block * a.num_layers + a.layer) * 2 * a.num_kv_heads + head;
  return ((row << a.block_bits) + offset) * head_dim;
}

// Turn the scores of 16 rows into weights, in place.  Of row `lane / 4 + 8 * h` a lane has `s[.][2
// * h]` and the next: two keys in every eight.  `shrink` is set to the factor for older weights.
template <int EIGHTS, typename Position>
PRIM void weigh(const Attention& a, float (*s)[4], float* top, float* sum, float* shrink,
                bool is_whole, int first_key, const Position& position_of) {
  const int lane = threadIdx.x % 32;
  float scale = a.scale;  // what scores still have to be multiplied by
  if (a.cap != 0) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) s[i / 4][i % 4] = capped(a, s[i / 4][i % 4] * scale);
    scale = 1;
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!is_whole) {
      const int position = position_of(h);
      const int oldest = a.window > 0 ? position - a.window : -1;
#pragma unroll
      for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int key = first_key + n * 8 + lane % 4 * 2 + e;
          if (key > position || key <= oldest) s[n][2 * h + e] = MINUS_INFINITY;
        }
    }
    float highest = MINUS_INFINITY;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
      highest = fmaxf(highest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    highest = fmaxf(highest, from_lane_xor(highest, 1));
    highest = fmaxf(highest, from_lane_xor(highest, 2));
    const float now = fmaxf(top[h], highest * scale);
    const float base = now == MINUS_INFINITY ? 0.f : now;  // no key seen yet: -inf - -inf is NaN
    shrink[h] = power_of_two(top[h] - base);
    float added = 0;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[n][2 * h + e];
        x = power_of_two(x * scale - base);
        added += x;
      }
    sum[h] = sum[h] * shrink[h] + added;
    top[h] = now;
  }
}

// Write a lane's part of the results of 16 rows from registers to shared memory, at `rows`.
template <int D>
PRIM void leave_rows(float* rows, float (*o)[4], const float* top, float* sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += from_lane_xor(sum[h], 1);
    sum[h] += from_lane_xor(sum[h], 2);
    float* mine = rows + (lane / 4 + 8 * h) * (D + 4);
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      mine[d * 8 + lane % 4 * 2] = o[d][2 * h];
      mine[d * 8 + lane % 4 * 2 + 1] = o[d][2 * h + 1];
    }
    if (lane % 4 == 0) mine[D] = top[h], mine[D + 1] = sum[h];
  }
}

// The rows of an item: queries of a sequence, in each head that shares the KV head.
struct Rows {
  int kv_head, group, first_row, first_token, count, first_position;  // `count` from first_row on

  PRIM Rows(const Attention& a, const int* item)
      : kv_head(blockIdx.y), group(a.num_heads / a.num_kv_heads), first_row(item[1]) {
    first_token = a.starts[item[0]];
    const int num_queries = a.starts[item[0] + 1] - first_token;
    count = num_queries * group - first_row;
    first_position = a.contexts[item[0]] - num_queries;
  }
  PRIM int head(int row) const { return kv_head * group + (first_row + row) % group; }
  PRIM int position(int row) const { return first_position + (first_row + row) / group; }
  // Return the offset of a row in query and out.
  PRIM long long offset(const Attention& a, int row, int head_dim) const {
    const int token = first_token + (first_row + row) / group;
    return ((long long)token * a.num_heads + head(row)) * head_dim;
  }
};

// Write the results of BM rows, which are in shared memory.  Of each row there are KEYS_W partial
// results: those of the first WM rows, one set for each warp, then those of the next WM rows.  If
// keys are split, the thread block that is last combines the parts.
template <typename T, int D, int BM, int KEYS_W, int WM, int THREADS>
PRIM void finish(const Attention& a, const int* item, const Rows& it, const float* rows, u32 thread) {
  constexpr int LDO = D + 4;
  const int slot = item[4], first_slot = item[5], num_slots = item[6];
  auto in_slot = [&](int slot, int row) {
    return a.parts + (((long long)slot * a.num_kv_heads + it.kv_head) * BM + row) * LDO;
  };
  auto write = [&](int row, int d, const float* first, int count, long long stride) {
    // The sink is added here, once: every part of split keys would count it.
    const float sink = sink_of(a, it.head(row));
    const Partial all = combine<D>(first, count, stride, d, sink);
    const float *value = all.value.at, share = 1 / all.sum;
    struct alignas(8) Out { u32 low, high; };
    *(Out*)((T*)a.out + it.offset(a, row, D) + d) = {
        pair<T>(value[0] * share, value[1] * share), pair<T>(value[2] * share, value[3] * share)};
  };
  const int num_fours = (it.count < BM ? it.count : BM) * (D / 4);
  for (int i = thread; i < num_fours; i += THREADS) {
    const int row = i / (D / 4), d = i % (D / 4) * 4;
    const float* first = rows + (row / WM * KEYS_W * WM + row % WM) * LDO;
    if (slot < 0) {
      write(row, d, first, KEYS_W, WM * LDO);
      continue;
    }
    const Partial mine = combine<D>(first, KEYS_W, WM * LDO, d, MINUS_INFINITY);
    publish((Four*)(in_slot(slot, row) + d), mine.value);
    if (d == 0) publish((Four*)(in_slot(slot, row) + D), Four{mine.top, mine.sum});
  }
  if (slot < 0) return;
  __threadfence();  // others see what this thread published before the ticket
  __syncthreads();
  u32* ticket = a.tickets + (long long)first_slot * a.num_kv_heads + it.kv_head;
  // The last increment wraps the ticket to 0, for the next launch.
  if (!__syncthreads_or(thread == 0 && atomicInc(ticket, num_slots - 1) == num_slots - 1)) return;
  __threadfence();
  const long long stride = in_slot(1, 0) - in_slot(0, 0);
  for (int i = thread; i < num_fours; i += THREADS) {
    const int row = i / (D / 4), d = i % (D / 4) * 4;
    write(row, d, in_slot(first_slot, row), num_slots, stride);
  }
}
