// Causal attention to paged KV: prompts, chunks of prompts and generation, with one kernel.
//
// The G query heads of one KV head are packed: row r of a sequence is query r / G, head r % G.  A
// thread block attends with one tile of rows to one range of keys, given by a work item.  Few rows
// (generation) leave few tiles, so their keys are split over several thread blocks; each writes a
// partial result, and the last of a tile's blocks to finish combines them.
//
// For a row of Q, with keys K and values V of the positions it may see (online softmax):
//   score = q k * scale, capped if there is a cap, times log2(e)
//   top = max(score), weight = 2^(score - top), sum = sum(weight), out = sum(weight * v) / sum
// `top`, `sum` and the output so far are kept in registers, and shrink when `top` grows.
#include "prims.cuh"

struct Attention {
  const void* query;  // [T, Hq, D]
  const void* pool;   // [N, L, 2, Hkv, B, D]
  void* out;          // [T, Hq, D]
  float* parts;       // [slots, Hkv, tile rows, D + 4]: partial results, see `Partial`
  u32* tickets;       // [slots, Hkv]: parts of a tile that are written, at its first slot
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
  return a.cap - __fdividef(2 * a.cap, 1 + power_of_two(2 * LOG2_E / a.cap * score));
}

PRIM float sink_of(const Attention& a, int head) {
  return a.sinks ? a.sinks[head] * LOG2_E : MINUS_INFINITY;
}

// The result of a row for some of its keys: the values times their weights, not yet divided by the
// sum of the weights.  A weight is 2^(score - top).  In memory: D values, `top`, `sum`, padding to
// D + 4.  A thread has four of the values.
struct alignas(16) Four { float at[4]; };
struct Partial {
  Four value;
  float top, sum;
};

// Combine the four values from `d` on of `count` results that lie `stride` floats apart.  `sink` is
// one more score, without a value; minus infinity for none.
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

// A thread block is ROWS_W x KEYS_W warps: each has 16 M rows, and KEYS_W warps divide the BN keys
// of a tile.  Tiles of K and V go through a ring of STAGES in shared memory, whose rows are one chunk
// of 16 bytes longer than D: an odd number of chunks, so that the eight rows of an ldmatrix lie in
// different banks.  A warp loads each matrix of K once for its M matrices of Q: with M = 2 the
// tensor cores should be the limit, not shared memory.
//
// 1. Copy the tile of Q, the numbers of the first blocks, and the first STAGES - 1 tiles of K and V.
// 2. For each tile of keys, while the next ones are copied: s = Q K^T; scale, cap and mask s;
//    weights and sums (above); o += weights V.
// 3. Put the rows of all warps into shared memory, and combine those of KEYS_W warps.
// 4. Of split keys: publish the partial result, take a ticket; the last block combines all parts.
template <typename T, int D, int ROWS_W, int M, int KEYS_W, int BN, int STAGES>
__global__ void __launch_bounds__(ROWS_W* KEYS_W * 32) attend(const Attention a) {
  constexpr int WM = 16 * M, BM = WM * ROWS_W, THREADS = ROWS_W * KEYS_W * 32;
  constexpr int CHUNKS = D / 8, LD = D + 8, EACH = (BN * CHUNKS - 1) / THREADS + 1;
  constexpr int KN = BN / KEYS_W;  // keys of one warp
  static_assert(D % 16 == 0 && KN % 16 == 0 && STAGES >= 2, "tiles are whole matrices");
  SHARED_BYTES(shared);
  T* const q_tile = (T*)shared;
  T* const ring = q_tile + BM * LD;  // [STAGES][K, V][BN][LD]

  const int* item = a.work + 7 * blockIdx.x;
  const int sequence = item[0], first_row = item[1], key_begin = item[2], key_end = item[3];
  if (sequence < 0) return;
  const int kv_head = blockIdx.y, group = a.num_heads / a.num_kv_heads;
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_row = warp / KEYS_W * WM, warp_key = warp % KEYS_W * KN;
  const int table = sequence * a.num_columns, head_offset = (int)key_offset(a, 0, kv_head, 0, D);
  const int v_offset = (a.num_kv_heads << a.block_bits) * D;
  const int block_size = 2 * a.num_layers * v_offset;

  // `find` copies the numbers of the blocks that a tile's keys are in, `load` the keys and values.
  // The numbers are in the ring ahead of K, in the chunk that ends a row, so that no copy of KV
  // waits for the block table.
  auto slot_of = [&](int tile) { return ring + tile % STAGES * 2 * BN * LD; };
  auto find = [&](int tile) {
    for (int row = thread; row < BN; row += THREADS) {
      const int key = key_begin + tile * BN + row, column = (key < key_end ? key : 0) >> a.block_bits;
      copy_number_async(slot_of(tile) + row * LD + D, a.tables + table + column, key < key_end);
    }
  };
  auto load = [&](int tile) {
    T* const keys = slot_of(tile);
    int block[EACH];
#pragma unroll
    for (int n = 0; n < EACH; n++)
      block[n] = *(const int*)(keys + (thread + n * THREADS) / CHUNKS * LD + D);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      if (EACH * THREADS > BN * CHUNKS && thread + n * THREADS >= BN * CHUNKS) break;
      const u32 row = (thread + n * THREADS) / CHUNKS, chunk = (thread + n * THREADS) % CHUNKS;
      const int key = key_begin + tile * BN + row, offset = key & ((1 << a.block_bits) - 1);
      const T* from = (const T*)a.pool + (long long)block[n] * block_size +
                      (head_offset + offset * D + chunk * 8);
      copy_async(keys + row * LD + chunk * 8, from, key < key_end);
      copy_async(keys + (BN + row) * LD + chunk * 8, from + v_offset, key < key_end);
    }
  };
  for (int tile = 0; tile < STAGES; tile++) find(tile);

  const int first_token = a.starts[sequence];
  const int num_queries = a.starts[sequence + 1] - first_token;
  const int num_rows = num_queries * group - first_row;  // from this tile's first row on
  const int first_position = a.contexts[sequence] - num_queries;
  auto row_offset = [&](int row) {  // of packed row `row` in query and out
    int head = kv_head * group + row % group;
    return ((long long)(first_token + row / group) * a.num_heads + head) * D;
  };
  for (int i = thread; i < BM * CHUNKS; i += THREADS) {
    int row = i / CHUNKS, chunk = i % CHUNKS;
    bool valid = row < num_rows;
    const T* from = (const T*)a.query + row_offset(valid ? first_row + row : 0) + chunk * 8;
    copy_async(q_tile + row * LD + chunk * 8, from, valid);
  }
  auto position_of = [&](int row) -> int& { return *(int*)(q_tile + row * LD + D); };
  for (int row = thread; row < BM; row += THREADS)  // in the chunk that ends a row of Q
    position_of(row) = first_position + (first_row + row) / group;
  copies_commit();
  copies_wait<0>();
  __syncthreads();  // the block numbers and positions of all threads are visible
  const int num_keys = key_end - key_begin;
  for (int tile = 0; tile < STAGES - 1; tile++) {
    if (tile > 0) {
      __syncthreads();  // every thread has read the numbers that `find` replaces
      find(tile + STAGES - 1);
    }
    if (tile * BN < num_keys) load(tile);
    copies_commit();  // also when empty: the waits below count groups
  }

  // Where this lane's rows of the matrices begin, of Q, and in a tile of K and of V.
  const T* const q_row = q_tile + (warp_row + lane % 16) * LD + lane / 16 * 8;
  const int k_row = (warp_key + lane % 8 + lane / 16 * 8) * LD + lane / 8 % 2 * 8;
  const int v_row = (BN + warp_key + lane % 16) * LD + lane / 16 * 8;

  float o[M][D / 8][4], top[M][2], sum[M][2];
#pragma unroll
  for (int m = 0; m < M; m++) {
    top[m][0] = top[m][1] = MINUS_INFINITY, sum[m][0] = sum[m][1] = 0;
#pragma unroll
    for (int d = 0; d < D / 8; d++) o[m][d][0] = o[m][d][1] = o[m][d][2] = o[m][d][3] = 0;
  }

  for (int tile = 0; tile * BN < num_keys; tile++) {
    copies_wait<STAGES - 2>();
    __syncthreads();  // all copies of this tile are visible, and the tile before it has been read
    if ((tile + STAGES - 1) * BN < num_keys) {
      load(tile + STAGES - 1);
      find(tile + 2 * (STAGES - 1));
    }
    copies_commit();
    if (warp_row >= num_rows) continue;  // this warp has no rows: it only copies
    const T *const keys = slot_of(tile) + k_row, *const values = slot_of(tile) + v_row;

    float s[M][KN / 8][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < KN / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
      u32 q[M][4], k[4];
#pragma unroll
      for (int m = 0; m < M; m++) load_matrices(q[m], q_row + m * 16 * LD + d * 16);
#pragma unroll
      for (int n = 0; n < KN / 16; n++) {
        load_matrices(k, keys + n * 16 * LD + d * 16);
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply(T(), s[m][2 * n], q[m], k[0], k[1]);
          multiply(T(), s[m][2 * n + 1], q[m], k[2], k[3]);
        }
      }
    }

    float scale = a.scale;  // what is left to multiply scores by
    if (a.cap != 0) {
#pragma unroll
      for (int i = 0; i < M * KN / 2; i++) (&s[0][0][0])[i] = capped(a, (&s[0][0][0])[i] * scale);
      scale = 1;
    }
    const int first_key = key_begin + tile * BN + warp_key;
    // A range of keys that ends within a tile ends at the last row's own key, so the causal mask
    // covers the keys behind it.
    const bool is_whole = first_key + KN <= position_of(warp_row) + 1 &&
                          (a.window == 0 || first_key > position_of(warp_row + WM - 1) - a.window);
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {  // rows lane / 4 and lane / 4 + 8 of each 16
      const int m = i / 2, h = i % 2;
      if (!is_whole) {
        const int position = position_of(warp_row + m * 16 + lane / 4 + 8 * h);
        const int oldest = a.window > 0 ? position - a.window : -1;
#pragma unroll
        for (int n = 0; n < KN / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int key = first_key + n * 8 + lane % 4 * 2 + e;
            if (key > position || key <= oldest) s[m][n][2 * h + e] = MINUS_INFINITY;
          }
      }
      float highest = MINUS_INFINITY;
#pragma unroll
      for (int n = 0; n < KN / 8; n++)
        highest = fmaxf(highest, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      highest = fmaxf(highest, from_lane_xor(highest, 1));
      highest = fmaxf(highest, from_lane_xor(highest, 2));
      const float now = fmaxf(top[m][h], highest * scale);
      const float base = now == MINUS_INFINITY ? 0.f : now;  // no key seen yet: -inf - -inf is NaN
      const float shrink = power_of_two(top[m][h] - base);
      float added = 0;
#pragma unroll
      for (int n = 0; n < KN / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[m][n][2 * h + e];
          x = power_of_two(x * scale - base);
          added += x;
        }
      sum[m][h] = sum[m][h] * shrink + added;
      top[m][h] = now;
#pragma unroll
      for (int d = 0; d < D / 8; d++) o[m][d][2 * h] *= shrink, o[m][d][2 * h + 1] *= shrink;
    }

#pragma unroll
    for (int n = 0; n < KN / 16; n++) {  // sums of Q K^T lie in registers as an operand has to
      u32 p[M][4];
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          p[m][i] = pair<T>(s[m][2 * n + i / 2][i % 2 * 2], s[m][2 * n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int d = 0; d < D / 16; d++) {
        u32 v[4];
        load_transposed(v, values + n * 16 * LD + d * 16);
#pragma unroll
        for (int m = 0; m < M; m++) {
          multiply(T(), o[m][2 * d], p[m], v[0], v[1]);
          multiply(T(), o[m][2 * d + 1], p[m], v[2], v[3]);
        }
      }
    }
  }

  // Every warp writes its rows to shared memory, which the tiles no longer need.
  constexpr int LDO = D + 4;
  float* const rows = (float*)shared;
  copies_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * M; i++) {
    const int m = i / 2, h = i % 2;
    sum[m][h] += from_lane_xor(sum[m][h], 1);
    sum[m][h] += from_lane_xor(sum[m][h], 2);
    float* mine = rows + (warp * WM + m * 16 + lane / 4 + 8 * h) * LDO;
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      mine[d * 8 + lane % 4 * 2] = o[m][d][2 * h];
      mine[d * 8 + lane % 4 * 2 + 1] = o[m][d][2 * h + 1];
    }
    if (lane % 4 == 0) mine[D] = top[m][h], mine[D + 1] = sum[m][h];
  }
  __syncthreads();

  const int slot = item[4], first_slot = item[5], num_slots = item[6];
  auto in_slot = [&](int slot, int row) {
    return a.parts + (((long long)slot * a.num_kv_heads + kv_head) * BM + row) * LDO;
  };
  auto write = [&](int row, int d, const float* first, int count, long long stride) {
    // The sink is added here, once, and not in each part.
    const float sink = sink_of(a, kv_head * group + (first_row + row) % group);
    const Partial all = combine<D>(first, count, stride, d, sink);
    const float *value = all.value.at, share = 1 / all.sum;
    struct alignas(8) Out { u32 low, high; };
    *(Out*)((T*)a.out + row_offset(first_row + row) + d) = {
        pair<T>(value[0] * share, value[1] * share), pair<T>(value[2] * share, value[3] * share)};
  };
  const int num_fours = (num_rows < BM ? num_rows : BM) * (D / 4);
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
  __threadfence();  // other blocks see what this thread published before they see its ticket
  __syncthreads();
  u32* ticket = a.tickets + (long long)first_slot * a.num_kv_heads + kv_head;
  // The last ticket sets the count to 0 again, for the next launch.
  if (!__syncthreads_or(thread == 0 && atomicInc(ticket, num_slots - 1) == num_slots - 1)) return;
  __threadfence();
  const long long stride = in_slot(1, 0) - in_slot(0, 0);
  for (int i = thread; i < num_fours; i += THREADS) {
    const int row = i / (D / 4), d = i % (D / 4) * 4;
    write(row, d, in_slot(first_slot, row), num_slots, stride);
  }
}

// The same formula for dtypes and head sizes that have no tiles: one warp for one query and head,
// key by key, in any dtype and any D up to 256.
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
    x *= a.scale;
    if (a.cap != 0) x = capped(a, x);
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
