// Moves queries, keys and values between the model, the paged pool and the wire.
#include "prims.cuh"

struct Heads {
  const void* heads;      // [T, Hq + 2 Hkv, D]: a token's queries, keys and values, contiguous
  void* query;            // [T, Hq, D]
  void* pool;             // [N, L, 2, Hkv, B, D]
  const int* slots;       // [T]
  const float* rotation;  // [T, 2, D / 2] cosines and sines
  const float* norm;      // [Hq + Hkv, D] weights of an RMS norm of each head, or null
  int num_tokens, num_heads, num_kv_heads, head_dim, num_layers, layer, block_bits;
  int stride;  // values from one token's heads to the next one's
  int lanes;   // threads for each head, a power of two up to a warp
  float eps;
};

// Norm and rotate one step's heads of one layer, as the projection wrote them, a row for each token.
// Queries are written to `query`, keys and values to their slots in the pool.
//   norm, over the D dimensions of a query or key: x / sqrt(mean(x^2) + eps) * weight
//   rotation, x of dimension d and y of d + D / 2: (x, y) -> (x cos - y sin, y cos + x sin)
// Both are computed in float32, and the result is rounded once.  Values are copied.
//
// `lanes` adjacent threads share one head of one token and sum its squares by shuffles.  Each has
// WIDE dimensions of the lower half and the same of the upper one: 16 bytes each, or 8 where the half
// is no multiple of 16.  If D / 2 / WIDE is no power of two, the last lanes have no dimensions.
// Heads follow one another over warps and thread blocks, token by token.
template <typename T, int WIDE>
__global__ void __launch_bounds__(128) rotate_and_append(const Heads a) {
  typedef Wide<T, WIDE> Unit;
  typedef Wide<float, WIDE> Floats;
  const int num_rows = a.num_heads + 2 * a.num_kv_heads, units = a.head_dim / 2 / WIDE;
  const int thread = blockIdx.x * 128 + threadIdx.x, i = thread % a.lanes;
  const int token = thread / a.lanes / num_rows, row = thread / a.lanes % num_rows;
  const bool is_mine = token < a.num_tokens && i < units;
  const bool is_value = row >= a.num_heads + a.num_kv_heads;
  Unit low, high;
  Floats x = {}, y = {};
  if (is_mine) {
    const T* const from = (const T*)a.heads + (long long)token * a.stride + row * a.head_dim;
    low = ((const Unit*)from)[i];
    high = ((const Unit*)from)[units + i];
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
      x.values[k] = widen(low.values[k]);
      y.values[k] = widen(high.values[k]);
    }
  }
  float scale = 1;
  if (a.norm) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < WIDE; k++)
      squares += x.values[k] * x.values[k] + y.values[k] * y.values[k];
    for (int mask = a.lanes / 2; mask; mask /= 2) squares += from_lane_xor(squares, mask);
    scale = 1.f / sqrtf(squares / a.head_dim + a.eps);
  }
  if (!is_mine) return;
  if (!is_value) {
    if (a.norm) {
      const Floats* const weights = (const Floats*)(a.norm + row * a.head_dim);
      const Floats to_x = weights[i], to_y = weights[units + i];
#pragma unroll
      for (int k = 0; k < WIDE; k++) {
        x.values[k] *= scale * to_x.values[k];
        y.values[k] *= scale * to_y.values[k];
      }
    }
    const Floats* const angles = (const Floats*)(a.rotation + (long long)token * a.head_dim);
    const Floats cosine = angles[i], sine = angles[units + i];
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
      low.values[k] = narrow<T>(x.values[k] * cosine.values[k] - y.values[k] * sine.values[k]);
      high.values[k] = narrow<T>(y.values[k] * cosine.values[k] + x.values[k] * sine.values[k]);
    }
  }
  T* to;
  if (row < a.num_heads) {
    to = (T*)a.query + ((long long)token * a.num_heads + row) * a.head_dim;
  } else {
    const int slot = a.slots[token], offset = slot & ((1 << a.block_bits) - 1);
    const long long layer = (long long)(slot >> a.block_bits) * a.num_layers + a.layer;
    const long long block = layer * 2 * a.num_kv_heads + row - a.num_heads;  // of the head's K or V
    to = (T*)a.pool + ((block << a.block_bits) + offset) * a.head_dim;
  }
  ((Unit*)to)[i] = low;
  ((Unit*)to)[units + i] = high;
}

struct Move {
  void* pool;        // [N, L, 2, Hkv, B, D]
  void* segment;     // [l, 2, h, t, D]
  const int* table;  // blocks of the sequence
  int num_kv_heads, head_dim, num_layers, first_layer, block_bits, first_token, num_tokens;
  int first_head, num_moved_heads;
};

// Copy a rectangle of one sequence's KV from its blocks to a contiguous segment, or back, eight
// values per thread, converted between the two dtypes. blockIdx.y is a row of the segment: (layer,
// K or V, head).
template <typename POOL, typename WIRE, bool INTO_POOL>
__global__ void __launch_bounds__(128) move(const Move a) {
  const int eights = a.head_dim / 8, i = blockIdx.x * 128 + threadIdx.x;
  if (i >= a.num_tokens * eights) return;
  const int token = a.first_token + i / eights;
  const int half = blockIdx.y / a.num_moved_heads;  // a layer's K, its V, the next one's K, ...
  const int head = a.first_head + blockIdx.y % a.num_moved_heads;
  const long long block = a.table[token >> a.block_bits];
  const long long row = ((block * a.num_layers + a.first_layer) * 2 + half) * a.num_kv_heads + head;
  const int offset = token & ((1 << a.block_bits) - 1);
  Wide<POOL, 8>* held = (Wide<POOL, 8>*)a.pool + ((row << a.block_bits) + offset) * eights + i % eights;
  Wide<WIRE, 8>* sent = (Wide<WIRE, 8>*)a.segment + (long long)blockIdx.y * a.num_tokens * eights + i;
  if (INTO_POOL) {
    Wide<WIRE, 8> from = *sent;
    Wide<POOL, 8> to;
#pragma unroll
    for (int k = 0; k < 8; k++) to.values[k] = narrow<POOL>(widen(from.values[k]));
    *held = to;
  } else {
    Wide<POOL, 8> from = *held;
    Wide<WIRE, 8> to;
#pragma unroll
    for (int k = 0; k < 8; k++) to.values[k] = narrow<WIRE>(widen(from.values[k]));
    *sent = to;
  }
}
