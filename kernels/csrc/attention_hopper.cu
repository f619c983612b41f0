// Causal attention with many rows on Hopper by `wgmma`, whose operands are in shared memory.
//
// Work items, rows and results are those of attention.cu.  One warpgroup copies, two multiply, 64
// rows each.  Q is loaded once; K and V go through a ring of two slots, each of which has 128 keys;
// each half of a slot (K or V) has two barriers, one for full and one for free again.  A
// multiplying warpgroup starts the products for the scores of the next tile and for the values of
// this one together, and turns the scores into weights while the values are added.
//
// A tile has the layout that `wgmma` takes with a swizzle of 128 bytes: panels of 64 of the D
// values, where a row of a panel is 128 bytes, whose eight chunks of 16 bytes are permuted by the
// row's number.  The pool's blocks are not permuted, so copies of 16 bytes (`cp.async`) write every
// chunk to its position, whatever the block size; a bulk copy would keep the order of a block's
// rows.
#include "attention.cuh"

#if defined(SHIM) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr u32 ROW = 128;  // bytes, of a panel
constexpr u32 NO_ROW = ~0u;

// Return the descriptor of the matrix at an address: groups of eight rows are adjacent, panels are
// `panel` bytes apart; PTX ISA, "matrix descriptor", defines its bits.
PRIM u64 matrix_at(u32 address, u32 panel) {
  return (u64)1 << 62 | (u64)(8 * ROW / 16) << 32 | (u64)(panel / 16) << 16 | address / 16;
}

template <typename T, int D>
__global__ void __launch_bounds__(384, 1) attend_wide(const Attention a) {
  constexpr int BM = 128, BN = 128, STAGES = 2, CHUNKS = D / 8, COPYING = 128, MULTIPLYING = 256;
  constexpr u32 PANEL = 128 * ROW, TILE = D / 64 * PANEL;
  constexpr int AT_ONCE = COPYING / CHUNKS;  // rows that the copying threads load at once
  static_assert(D % 64 == 0 && AT_ONCE * CHUNKS == BN, "a thread finds the block of one row");
  SHARED_BYTES(shared);
  // Aligned to the period of the swizzle.
  unsigned char* const q_tile = shared + (0u - shared_address(shared)) % (8 * ROW);
  unsigned char* const ring = q_tile + TILE;  // [STAGES][K, V]
  u64* const full = (u64*)(ring + 2 * STAGES * TILE);  // of each half of a slot
  u64* const empty = full + 2 * STAGES;

  const int* item = a.work + 7 * blockIdx.x;
  const int key_begin = item[2], key_end = item[3];
  if (item[0] < 0) return;
  const int thread = threadIdx.x, lane = thread % 32;
  const int num_tiles = (key_end - key_begin - 1) / BN + 1;
  if (thread < 2 * STAGES) {
    barrier_make(full + thread, COPYING);
    barrier_make(empty + thread, MULTIPLYING / 32);  // a lane of each warp arrives
  }
  __syncthreads();  // the barriers are there
  auto half_of = [&](int tile, bool is_v) { return tile % STAGES * 2 + is_v; };
  auto phase_of = [&](int tile) { return (u32)(tile / STAGES % 2); };
  const Rows it(a, item);

  if (thread < COPYING) {
    fewer_registers<40>();
    const int chunk = thread % CHUNKS, first = thread / CHUNKS;
    // Rows that are a multiple of eight apart are permuted alike.
    const u32 place = chunk / 8 * PANEL + first * ROW + (chunk % 8 ^ first % 8) * 16;
    for (int row = first; row < BM; row += AT_ONCE) {
      const bool valid = row < it.count;
      const T* from = (const T*)a.query + it.offset(a, valid ? row : 0, D) + chunk * 8;
      copy_async(q_tile + place + (row - first) * ROW, from, valid);
    }
    const int* table = a.tables + item[0] * a.num_columns;
    const T* const keys = (const T*)a.pool + chunk * 8;
    const T* const values = keys + (u64)(a.num_kv_heads << a.block_bits) * D;
    // A thread finds one row of a tile for all threads that copy a part of it: its block, and with
    // that its row number in the pool, which has fewer than 2^32 rows.
    auto key_of = [&](int tile) { return key_begin + tile * BN + first + chunk * AT_ONCE; };
    auto find = [&](int tile) {
      const int key = key_of(tile);
      return table[(key < key_end ? key : key_begin) >> a.block_bits];
    };
    auto row_of = [&](int tile, int block) {
      const int key = key_of(tile);
      const u32 run = ((u32)block * a.num_layers + a.layer) * 2 * a.num_kv_heads + it.kv_head;
      const u32 row = (run << a.block_bits) + (key & ((1 << a.block_bits) - 1));
      return key < key_end ? row : NO_ROW;
    };
    auto load = [&](int tile, bool is_v, u32 found) {
      const int half = half_of(tile, is_v);
      unsigned char* const to = ring + half * TILE + place;
      barrier_wait(empty + half, phase_of(tile) ^ 1);
#pragma unroll
      for (int n = 0; n < CHUNKS; n++) {
        const u32 row = from_lane(found, lane / CHUNKS * CHUNKS + n);
        copy_async(to + n * AT_ONCE * ROW, (is_v ? values : keys) + (u64)row * D, row != NO_ROW);
      }
      copies_arrive(full + half);
    };
    u32 row = row_of(0, find(0));
    int block = find(1);
    load(0, false, row);
    for (int tile = 0; tile < num_tiles; tile++) {
      const u32 next = row_of(tile + 1, block);
      block = find(tile + 2);  // ahead, so that no copy waits for the block table
      if (tile + 1 < num_tiles) load(tile + 1, false, next);  // K's slots are freed before V's
      load(tile, true, row);
      row = next;
    }
    copies_commit();
    copies_wait<0>();
    return;  // the barriers of a block do not wait for threads that have ended
  }

  more_registers<232>();
  const int worker = thread - COPYING, group_row = worker / 128 * 64, warp_row = worker / 32 * 16;
  const int own[2] = {it.position(warp_row + lane / 4), it.position(warp_row + lane / 4 + 8)};
  const int lowest = it.position(warp_row), highest = it.position(warp_row + 15);
  float s[BN / 8][4], o[D / 8][4], shrink[2];
  float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0, 0};
  u32 p[BN / 16][4];
#pragma unroll
  for (int d = 0; d < D / 8; d++) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0;
  bool is_lost = false;  // a wait for a barrier has timed out

  auto wait = [&](int tile, bool is_v) {
    is_lost |= !barrier_wait(full + half_of(tile, is_v), phase_of(tile));
    show_copies();
    return shared_address(ring + half_of(tile, is_v) * TILE);
  };
  auto release = [&](int tile, bool is_v) {
    if (lane == 0) barrier_arrive(empty + half_of(tile, is_v));
  };
  auto ask_scores = [&](int tile) {
    const u32 keys = wait(tile, false), rows = shared_address(q_tile) + group_row * ROW;
    products_begin();
#pragma unroll
    for (int d = 0; d < D / 16; d++) {  // 16 values are a quarter of a panel's row
      const u32 at = d / 4 * PANEL + d % 4 * 32;
      multiply_shared(T(), s, matrix_at(rows + at, 0), matrix_at(keys + at, 0), d > 0);
    }
    products_commit();
  };
  auto ask_values = [&](int tile) {
    const u32 values = wait(tile, true);
    products_begin();
#pragma unroll
    for (int n = 0; n < BN / 16; n++)
      multiply_values(T(), o, p[n], matrix_at(values + n * 16 * ROW, PANEL));
    products_commit();
  };
  auto make_weights = [&](int tile) {
    const int first_key = key_begin + tile * BN;
    const bool is_whole = first_key + BN <= lowest + 1 &&
                          (a.window == 0 || first_key > highest - a.window);
    weigh<BN / 8>(a, s, top, sum, shrink, is_whole, first_key, [&](int h) { return own[h]; });
  };
  auto keep_weights = [&] {
#pragma unroll
    for (int n = 0; n < BN / 16; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        p[n][i] = pair<T>(s[2 * n + i / 2][i % 2 * 2], s[2 * n + i / 2][i % 2 * 2 + 1]);
  };

  ask_scores(0);
  products_wait<0>();
  products_done<BN / 8>(s);
  release(0, false);
  make_weights(0);
  keep_weights();
  for (int tile = 1; tile < num_tiles; tile++) {
    ask_scores(tile);
    ask_values(tile - 1);
    products_wait<1>();
    products_done<BN / 8>(s);
    release(tile, false);
    make_weights(tile);  // while the previous values are added
    products_wait<0>();
    products_done<D / 8>(o);
    release(tile - 1, true);
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[d][i] *= shrink[i / 2];
    keep_weights();
  }
  ask_values(num_tiles - 1);
  products_wait<0>();
  products_done<D / 8>(o);
  if (is_lost) sum[0] = sum[1] = MINUS_INFINITY - MINUS_INFINITY;  // NaN, so that it shows

  float* const rows = (float*)q_tile;
  __syncthreads();  // nobody multiplies what these rows replace
  leave_rows<D>(rows + warp_row * (D + 4), o, top, sum);
  __syncthreads();
  finish<T, D, BM, 1, BM, MULTIPLYING>(a, item, it, rows, worker);
}
#endif
