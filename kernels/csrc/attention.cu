// Causal attention to paged KV with one kernel: prompts, chunks of prompts and decode.
//
// The G query heads of one KV head are packed: row r of a sequence is query r / G, head r % G.  A
// thread block computes one tile of rows over one range of keys, given by a work item.  Few rows
// (decode) make few tiles, so their keys are split over several blocks; each writes a partial
// result, and the last of a tile's blocks to finish combines them.
#include "attention.cuh"

// A thread block is ROWS_W x KEYS_W warps: each has 16 M rows, and KEYS_W warps divide the BN keys
// of a tile.  Tiles of K and V go through a ring of STAGES in shared memory, whose rows are one chunk
// of 16 bytes longer than D: an odd number of chunks, so that the eight rows of an ldmatrix lie in
// different banks.  A warp loads each matrix of K once for its M matrices of Q: with M = 2 the
// tensor cores should be the limit, not shared memory.
//
// 1. Copy the tile of Q, the numbers of the first blocks, and the first STAGES - 1 tiles of K and V.
// 2. For each tile of keys, while the next ones are copied: s = Q K^T; scale, cap and mask s;
//    compute weights and their sums (`weigh`); o += weights V.
// 3. Write the rows of all warps to shared memory, and combine those of KEYS_W warps.
// 4. If keys are split, publish the partial result and take a ticket; the last block combines all.
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
  const int sequence = item[0], key_begin = item[2], key_end = item[3];
  if (sequence < 0) return;
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_row = warp / KEYS_W * WM, warp_key = warp % KEYS_W * KN;
  const int table = sequence * a.num_columns, head_offset = (int)key_offset(a, 0, blockIdx.y, 0, D);
  const int v_offset = (a.num_kv_heads << a.block_bits) * D;
  const int block_size = 2 * a.num_layers * v_offset;

  // `find` copies the numbers of the blocks of a tile's keys, `load` the keys and values.  The
  // numbers are stored in the ring before K is, in the chunk that ends each row, so that no copy of
  // KV waits for the block table.
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

  const Rows it(a, item);
  for (int i = thread; i < BM * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const T* from = (const T*)a.query + it.offset(a, row < it.count ? row : 0, D) + chunk * 8;
    copy_async(q_tile + row * LD + chunk * 8, from, row < it.count);
  }
  auto position_of = [&](int row) -> int& { return *(int*)(q_tile + row * LD + D); };
  for (int row = thread; row < BM; row += THREADS)  // also in the chunk that ends a row
    position_of(row) = it.position(row);
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

  // Where this lane's rows of the matrices begin: in Q, and in a tile of K and of V.
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
    if (warp_row >= it.count) continue;  // this warp has no rows: it only copies
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

    const int first_key = key_begin + tile * BN + warp_key;
    // A range of keys that ends within a tile ends at the last row's own key, so the causal mask
    // covers the keys behind it.
    const bool is_whole = first_key + KN <= position_of(warp_row) + 1 &&
                          (a.window == 0 || first_key > position_of(warp_row + WM - 1) - a.window);
#pragma unroll
    for (int m = 0; m < M; m++) {
      float shrink[2];
      weigh<KN / 8>(a, s[m], top[m], sum[m], shrink, is_whole, first_key,
                    [&](int h) { return position_of(warp_row + m * 16 + lane / 4 + 8 * h); });
#pragma unroll
      for (int d = 0; d < D / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[m][d][i] *= shrink[i / 2];
    }

#pragma unroll
    for (int n = 0; n < KN / 16; n++) {  // Q K^T is in registers in the layout of an operand
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
  float* const rows = (float*)shared;
  copies_wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; m++)
    leave_rows<D>(rows + (warp * WM + m * 16) * (D + 4), o[m], top[m], sum[m]);
  __syncthreads();
  finish<T, D, BM, KEYS_W, WM, THREADS>(a, item, it, rows, thread);
}

// The same formula for dtypes and head sizes that have no tiles: one warp for each query and head,
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
