// Pieces of memory that another worker may write to: copied and digested in one pass.
#include "prims.cuh"

struct Pieces {
  const void* source;
  const u64* places;   // [n] where each piece begins, in bytes behind `source`
  void* target;        // null: nothing is copied
  const u64* targets;  // [n] where each piece goes, in bytes behind `target`
  u64* sums;           // [n, parts]; the digest is their sum
  u64 seed;
  int num_units, num_parts;  // of a piece: 16 bytes each; and thread blocks
};

struct alignas(16) Unit {
  u64 words[2];
};

constexpr int THREADS = 128, UNITS = 8;  // a thread has so many units under way

// A bijection of the word, another one at each place: one word that is not right is always noticed.
PRIM u64 mix(u64 word, u64 place, u64 seed) {
  u64 x = (word ^ seed) + (place + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93ull;
  return x ^ x >> 29;
}

// Of what is copied each word is read once, so the digest is of the copy.  A thread block for each
// part of a piece.
__global__ void __launch_bounds__(THREADS) copy_pieces(const Pieces a) {
  SHARED_BYTES(shared);
  u64* sums = (u64*)shared;
  const int piece = blockIdx.x / a.num_parts, part = blockIdx.x % a.num_parts;
  const Unit* from = (const Unit*)((const char*)a.source + a.places[piece]);
  Unit* to = a.target ? (Unit*)((char*)a.target + a.targets[piece]) : nullptr;
  const int first = part * THREADS * UNITS + threadIdx.x;
  Unit held[UNITS];
#pragma unroll
  for (int k = 0; k < UNITS; k++)
    if (first + k * THREADS < a.num_units) held[k] = from[first + k * THREADS];
  u64 sum = 0;
#pragma unroll
  for (int k = 0; k < UNITS; k++) {
    const int i = first + k * THREADS;
    if (i >= a.num_units) break;
    if (to) to[i] = held[k];
    const u64 place = 2 * ((u64)piece * a.num_units + i);
    sum += mix(held[k].words[0], place, a.seed) + mix(held[k].words[1], place + 1, a.seed);
  }
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sums[0];
}
