// KV between the model, the paged pool and the wire.
#include "prims.cuh"

struct Append {
  const void* key_value;  // [T, 2, Hkv, D]
  void* pool;             // [N, L, 2, Hkv, B, D]
  const int* slots;       // [T]
  const float* rotation;  // [T, 2, D / 2] cosines and sines, or null: keys come rotated
  int num_kv_heads, head_dim, num_layers, layer, block_bits;
};

// Write one step's K and V of one layer into their slots; a thread block for each token.  The
// rotation pairs dimension d with d + D / 2.
template <typename T>
__global__ void __launch_bounds__(128) append(const Append a) {
  const int token = blockIdx.x, half = a.head_dim / 2, slot = a.slots[token];
  const long long block = slot >> a.block_bits;
  const int offset = slot & ((1 << a.block_bits) - 1);
  const T* from = (const T*)a.key_value + (long long)token * 2 * a.num_kv_heads * a.head_dim;
  for (int i = threadIdx.x; i < 2 * a.num_kv_heads * half; i += 128) {
    int row = i / half, d = i % half;  // row: K of each head, then V of each head
    T low = from[row * a.head_dim + d], high = from[row * a.head_dim + half + d];
    if (a.rotation && row < a.num_kv_heads) {
      const float* cosines = a.rotation + (long long)token * 2 * half;
      float c = cosines[d], s = cosines[half + d], x = widen(low), y = widen(high);
      low = narrow<T>(x * c - y * s);
      high = narrow<T>(y * c + x * s);
    }
    long long to = (block * a.num_layers + a.layer) * 2 * a.num_kv_heads + row;
    T* slot_row = (T*)a.pool + ((to << a.block_bits) + offset) * a.head_dim;
    slot_row[d] = low;
    slot_row[half + d] = high;
  }
}

struct Move {
  void* pool;        // [N, L, 2, Hkv, B, D]
  void* segment;     // [l, 2, h, t, D]
  const int* table;  // blocks of the sequence
  int num_kv_heads, head_dim, num_layers, first_layer, block_bits, first_token, num_tokens;
  int first_head, num_moved_heads;
};

template <typename T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Eight {
  T values[8];
};

// Copy a rectangle of one sequence's KV out of its blocks or into them, eight values a thread.
// blockIdx.y is a row of the segment, (layer, K or V, head).
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
  Eight<POOL>* held = (Eight<POOL>*)a.pool + ((row << a.block_bits) + offset) * eights + i % eights;
  Eight<WIRE>* sent = (Eight<WIRE>*)a.segment + (long long)blockIdx.y * a.num_tokens * eights + i;
  if (INTO_POOL) {
    Eight<WIRE> from = *sent;
    Eight<POOL> to;
#pragma unroll
    for (int k = 0; k < 8; k++) to.values[k] = narrow<POOL>(widen(from.values[k]));
    *held = to;
  } else {
    Eight<POOL> from = *held;
    Eight<WIRE> to;
#pragma unroll
    for (int k = 0; k < 8; k++) to.values[k] = narrow<WIRE>(widen(from.values[k]));
    *sent = to;
  }
}
