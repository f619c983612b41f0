// Causal attention to paged KV: prompts, chunks of prompts and generation, with one kernel.
//
// The G query heads of one KV head are packed: row r of a sequence is query r / G, head r % G.  A
// thread block attends with one tile of rows to one range of keys, given by a work item.  Few rows
// (generation) leave few tiles, so their keys are split over several blocks; each leaves a partial
// result, and the last of a tile's blocks to arrive combines them.
#include "prims.cuh"

struct Attention {
  const void* query;  // [T, Hq, D]
  const void* pool;   // [N, L, 2, Hkv, B, D]
  void* out;          // [T, Hq, D]
  float* parts;       // [slots, Hkv, tile rows, D + 4]: partial results, see `combine`
  u32* tickets;       // [slots, Hkv]: how many blocks of a tile have left theirs, by its first slot
  const int* starts;    // [S + 1]
  const int* contexts;  // [S]
  const int* tables;    // [S, M]
  // [items, 7]: sequence or -1, first row, first key, end of keys; slot or -1, and of its tile the
  // first slot and the number of slots
  const int* work;
  const float* sinks;   // [Hq] or null: scores without a value
  int num_heads, num_kv_heads, head_dim, num_layers, layer, block_bits, num_columns, window;
  float scale, cap;  // times log2(e), so that scores are exponents of 2; a cap of 0 is none
};

constexpr float LOG2_E = 1.4426950408889634f;

// cap * tanh(score / cap), of which no exponent is too large: 2^x ends at infinity and at 0.
PRIM float capped(const Attention& a, float score) {
  if (a.cap == 0) return score;
  return a.cap * (1 - 2 / (1 + power_of_two(2 * LOG2_E * score / a.cap)));
}

PRIM float sink_of(const Attention& a, int head) {
  return a.sinks ? a.sinks[head] * LOG2_E : MINUS_INFINITY;
}

// What some keys give a row: values times their weights, not yet divided by the sum of weights.
// Weights are powers of 2 of scores less the highest one.  In memory: D values, `top`, `sum`.
struct alignas(16) Four { float at[4]; };
struct Partial {
  Four value;
  float top, sum;
};

// Combine the values from `d` on of `count` results that lie `stride` apart, and a sink's weight.
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

// Where the K of (block, head, offset) begins; V lies Hkv * B * D further.
PRIM long long key_offset(const Attention& a, int block, int head, int offset, int head_dim) {
  long long row = ((long long)block * a.num_layers + a.layer) * 2 * a.num_kv_heads + head;
  return ((row << a.block_bits) + offset) * head_dim;
}

// ROWS_W warps of 16 rows by KEYS_W warps that share the keys of a tile of BN; a ring of STAGES
// tiles of K and V.  Shared rows are one 16-byte chunk longer than D: an odd number of chunks, so
// that the eight rows of an ldmatrix lie in different banks.
template <typename T, int D, int ROWS_W, int KEYS_W, int BN, int STAGES>
__global__ void __launch_bounds__(ROWS_W* KEYS_W * 32) attend(const Attention a) {
  constexpr int BM = 16 * ROWS_W, THREADS = ROWS_W * KEYS_W * 32, CHUNKS = D / 8, LD = D + 8;
  constexpr int KN = BN / KEYS_W;  // keys of one warp
  static_assert(D % 16 == 0 && KN % 16 == 0 && STAGES >= 2, "tiles are whole matrices");
  SHARED_BYTES(shared);
  T* const q_tile = (T*)shared;
  T* const ring = q_tile + BM * LD;  // [STAGES][K, V][BN][LD]

  const int* item = a.work + 7 * blockIdx.x;
  const int sequence = item[0], first_row = item[1], key_begin = item[2], key_end = item[3];
  if (sequence < 0) return;
  const int kv_head = blockIdx.y, group = a.num_heads / a.num_kv_heads;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_row = warp / KEYS_W * 16, warp_key = warp % KEYS_W * KN;
  const int first_token = a.starts[sequence];
  const int num_queries = a.starts[sequence + 1] - first_token;
  const int num_rows = num_queries * group;
  const int first_position = a.contexts[sequence] - num_queries;
  const int* table = a.tables + (long long)sequence * a.num_columns;

  auto row_offset = [&](int row) {  // of packed row `row` in query and out
    int head = kv_head * group + row % group;
    return ((long long)(first_token + row / group) * a.num_heads + head) * D;
  };
  auto load = [&](int tile) {
    T* keys = ring + (tile % STAGES) * 2 * BN * LD;
    for (int i = thread; i < BN * CHUNKS; i += THREADS) {
      int row = i / CHUNKS, chunk = i % CHUNKS, key = key_begin + tile * BN + row;
      bool valid = key < key_end;
      int block = valid ? table[key >> a.block_bits] : 0;
      int offset = valid ? key & ((1 << a.block_bits) - 1) : 0;
      const T* from = (const T*)a.pool + key_offset(a, block, kv_head, offset, D) + chunk * 8;
      copy_async(keys + row * LD + chunk * 8, from, valid);
      from += ((long long)a.num_kv_heads << a.block_bits) * D;
      copy_async(keys + (BN + row) * LD + chunk * 8, from, valid);
    }
  };

  for (int i = thread; i < BM * CHUNKS; i += THREADS) {
    int row = i / CHUNKS, chunk = i % CHUNKS;
    bool valid = first_row + row < num_rows;
    const T* from = (const T*)a.query + row_offset(valid ? first_row + row : 0) + chunk * 8;
    copy_async(q_tile + row * LD + chunk * 8, from, valid);
  }
  const int num_tiles = (key_end - key_begin + BN - 1) / BN;
  for (int tile = 0; tile < STAGES - 1; tile++) {
    if (tile < num_tiles) load(tile);
    copies_commit();  // also when empty: the waits below count groups
  }

  float o[D / 8][4], top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0, 0};
#pragma unroll
  for (int d = 0; d < D / 8; d++) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0;

  for (int tile = 0; tile < num_tiles; tile++) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // everybody's copies of this tile are visible; nobody reads the one before
    if (tile + STAGES - 1 < num_tiles) load(tile + STAGES - 1);
    copies_commit();
    const T* keys = ring + (tile % STAGES) * 2 * BN * LD + warp_key * LD;
    const T* values = keys + BN * LD;

    float s[KN / 8][4];
#pragma unroll
    for (int n = 0; n < KN / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
      u32 q[4], k[4];
      load_matrices(q, q_tile + (warp_row + lane % 16) * LD + d * 16 + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < KN / 16; n++) {
        int key = n * 16 + lane % 8 + lane / 16 * 8;
        load_matrices(k, keys + key * LD + d * 16 + lane / 8 % 2 * 8);
        multiply(T(), s[2 * n], q, k[0], k[1]);
        multiply(T(), s[2 * n + 1], q, k[2], k[3]);
      }
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {  // rows lane / 4 and lane / 4 + 8 of the warp's 16
      int row = first_row + warp_row + lane / 4 + 8 * h;
      int position = first_position + row / group;
      int oldest = a.window > 0 ? position - a.window : -1;
      float highest = MINUS_INFINITY;
#pragma unroll
      for (int n = 0; n < KN / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int key = key_begin + tile * BN + warp_key + n * 8 + lane % 4 * 2 + e;
          bool seen = row < num_rows && key < key_end && key <= position && key > oldest;
          float& x = s[n][2 * h + e];
          x = seen ? capped(a, x * a.scale) : MINUS_INFINITY;
          highest = fmaxf(highest, x);
        }
      highest = fmaxf(highest, from_lane_xor(highest, 1));
      highest = fmaxf(highest, from_lane_xor(highest, 2));
      float now = fmaxf(top[h], highest);
      float base = now == MINUS_INFINITY ? 0.f : now;  // no key seen yet: -inf - -inf is NaN
      float shrink = power_of_two(top[h] - base), added = 0;
#pragma unroll
      for (int n = 0; n < KN / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][2 * h + e];
          x = power_of_two(x - base);
          added += x;
        }
      sum[h] = sum[h] * shrink + added;
      top[h] = now;
#pragma unroll
      for (int d = 0; d < D / 8; d++) o[d][2 * h] *= shrink, o[d][2 * h + 1] *= shrink;
    }

#pragma unroll
    for (int n = 0; n < KN / 16; n++) {  // the weights are an operand as they lie
      const float *left = s[2 * n], *right = s[2 * n + 1];
      u32 p[4] = {pair<T>(left[0], left[1]), pair<T>(left[2], left[3]),
                  pair<T>(right[0], right[1]), pair<T>(right[2], right[3])};
#pragma unroll
      for (int d = 0; d < D / 16; d++) {
        u32 v[4];
        load_transposed(v, values + (n * 16 + lane % 16) * LD + d * 16 + lane / 16 * 8);
        multiply(T(), o[2 * d], p, v[0], v[1]);
        multiply(T(), o[2 * d + 1], p, v[2], v[3]);
      }
    }
  }

  // Every warp leaves its rows in shared memory, which the tiles no longer need.
  constexpr int LDO = D + 4;
  float* const rows = (float*)shared;
  copies_wait<0>();
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += from_lane_xor(sum[h], 1);
    sum[h] += from_lane_xor(sum[h], 2);
    float* mine = rows + (warp * 16 + lane / 4 + 8 * h) * LDO;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      mine[d * 8 + lane % 4 * 2] = o[d][2 * h];
      mine[d * 8 + lane % 4 * 2 + 1] = o[d][2 * h + 1];
    }
    if (lane % 4 == 0) mine[D] = top[h], mine[D + 1] = sum[h];
  }
  __syncthreads();

  const int slot = item[4], first_slot = item[5], num_slots = item[6];
  auto in_slot = [&](int slot, int row) {
    return a.parts + (((long long)slot * a.num_kv_heads + kv_head) * BM + row) * LDO;
  };
  auto write = [&](int row, int d, const float* first, int count, long long stride) {
    // Of keys that are split, every part would count the sink: it counts here, once.
    const float sink = sink_of(a, kv_head * group + (first_row + row) % group);
    const Partial all = combine<D>(first, count, stride, d, sink);
    const float* value = all.value.at;
    struct alignas(8) Out { u32 low, high; };
    *(Out*)((T*)a.out + row_offset(first_row + row) + d) = {
        pair<T>(value[0] / all.sum, value[1] / all.sum),
        pair<T>(value[2] / all.sum, value[3] / all.sum)};
  };
  const int num_fours = (num_rows - first_row < BM ? num_rows - first_row : BM) * (D / 4);
  for (int i = thread; i < num_fours; i += THREADS) {
    const int row = i / (D / 4), d = i % (D / 4) * 4;
    const float* first = rows + (row / 16 * KEYS_W * 16 + row % 16) * LDO;
    if (slot < 0) {
      write(row, d, first, KEYS_W, 16 * LDO);
      continue;
    }
    const Partial mine = combine<D>(first, KEYS_W, 16 * LDO, d, MINUS_INFINITY);
    publish((Four*)(in_slot(slot, row) + d), mine.value);
    if (d == 0) publish((Four*)(in_slot(slot, row) + D), Four{mine.top, mine.sum});
  }
  if (slot < 0) return;
  __threadfence();  // what this thread published, others see before the ticket
  __syncthreads();
  u32* ticket = a.tickets + (long long)first_slot * a.num_kv_heads + kv_head;
  // The last one's makes it 0 again, for the next launch.
  if (!__syncthreads_or(thread == 0 && atomicInc(ticket, num_slots - 1) == num_slots - 1)) return;
  __threadfence();
  const long long stride = in_slot(1, 0) - in_slot(0, 0);
  for (int i = thread; i < num_fours; i += THREADS) {
    const int row = i / (D / 4), d = i % (D / 4) * 4;
    write(row, d, in_slot(first_slot, row), num_slots, stride);
  }
}

// One warp for one query and head, key by key: any dtype, any D up to 256; for what has no tiles.
template <typename T>
__global__ void __launch_bounds__(32) attend_plain(const Attention a) {
  const int token = blockIdx.x, head = blockIdx.y, lane = threadIdx.x;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  int sequence = 0;
  while (a.starts[sequence + 1] <= token) sequence++;
  const int position = a.contexts[sequence] - (a.starts[sequence + 1] - token);
  const long long place = ((long long)token * a.num_heads + head) * a.head_dim;
  float q[8], o[8], top = sink_of(a, head), sum = a.sinks ? 1 : 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int d = lane + 32 * i;
    q[i] = d < a.head_dim ? widen(((const T*)a.query)[place + d]) : 0;
    o[i] = 0;
  }
  int first = a.window > 0 ? position - a.window + 1 : 0;
  for (int key = first > 0 ? first : 0; key <= position; key++) {
    int block = a.tables[(long long)sequence * a.num_columns + (key >> a.block_bits)];
    int offset = key & ((1 << a.block_bits) - 1);
    const T* k = (const T*)a.pool + key_offset(a, block, kv_head, offset, a.head_dim);
    const T* v = k + ((long long)a.num_kv_heads << a.block_bits) * a.head_dim;
    float x = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane + 32 * i < a.head_dim) x += q[i] * widen(k[lane + 32 * i]);
    for (int mask = 16; mask; mask /= 2) x += from_lane_xor(x, mask);
    x = capped(a, x * a.scale);
    float now = fmaxf(top, x), shrink = power_of_two(top - now), weight = power_of_two(x - now);
    sum = sum * shrink + weight;
    top = now;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane + 32 * i < a.head_dim) o[i] = o[i] * shrink + weight * widen(v[lane + 32 * i]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (lane + 32 * i < a.head_dim) ((T*)a.out)[place + lane + 32 * i] = narrow<T>(o[i] / sum);
}
