// Copies and digests pieces (chunks) of memory, to which another worker may write, in one pass.
#include "prims.cuh"

struct Pieces {
  const void* source;
  const u64* places;   // [n] offset of each piece from `source`, in bytes
  void* target;        // null: only digest
  const u64* targets;  // [n] offset of each copy from `target`, in bytes
  u64* sums;           // [n, parts]; the digest is their sum modulo 2^64
  u64 seed;
  int num_units, num_parts;  // units of 16 bytes in a piece; thread blocks per piece
};

struct alignas(16) Unit {
  u64 words[2];
};

constexpr int THREADS = 128, UNITS = 8;  // units that a thread loads before it uses the first

// The term of a word in the digest (SPEC 6.8).  It is a bijection of the word, a different one at
// each position, so that a single wrong word always changes the digest.
PRIM u64 mix(u64 word, u64 place, u64 seed) {
  u64 x = (word ^ seed) + (place + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93ull;
  return x ^ x >> 29;
}

// Copy pieces and sum the terms of their words, one thread block for each part of a piece.  A word
// is loaded once, for the copy and for the digest, so the digest matches the copy even if another
// worker writes to the source meanwhile.
__global__ void __launch_bounds__(THREADS) copy_pieces(const Pieces a) {
  SHARED_BYTES(shared);
  u64* sums = (u64*)shared;
  const int piece = blockIdx.x / a.num_parts, part = blockIdx.x % a.num_parts;
  const Unit* from = (const Unit*)((const char*)a.source + a.places[piece]);
  Unit* to = a.target ? (Unit*)((char*)a.target + a.targets[piece]) : nullptr;
  const int first = part * THREADS * UNITS + threadIdx.x;
  Unit loaded[UNITS];
#pragma unroll
  for (int k = 0; k < UNITS; k++)
    if (first + k * THREADS < a.num_units) loaded[k] = from[first + k * THREADS];
  u64 sum = 0;
#pragma unroll
  for (int k = 0; k < UNITS; k++) {
    const int i = first + k * THREADS;
    if (i >= a.num_units) break;
    if (to) to[i] = loaded[k];
    const u64 place = 2 * ((u64)piece * a.num_units + i);
    sum += mix(loaded[k].words[0], place, a.seed) + mix(loaded[k].words[1], place + 1, a.seed);
  }
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sums[0];
}
