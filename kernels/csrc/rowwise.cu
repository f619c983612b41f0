// What stands between the matrices of a layer, one pass each.
#include "prims.cuh"

struct Normalize {
  void* x;             // [R, K]; changed where something is added
  const void* added;   // [R, K], or null
  const void* weight;  // [K]
  void* out;           // [R, K]
  int size;            // K
  float eps;
};

// out = x / sqrt(mean(x^2) + eps) * weight of one row, after x += added: the sum, rounded, is what
// the next layer adds to, and what is normalized.  A thread block for each row.
template <typename T>
__global__ void __launch_bounds__(128) normalize(const Normalize a) {
  SHARED_BYTES(shared);
  float* const sums = (float*)shared;  // of each warp
  const long long start = (long long)blockIdx.x * a.size;
  T* const x = (T*)a.x + start;
  const T *const added = (const T*)a.added + start, *const weight = (const T*)a.weight;
  float sum = 0;
  for (int i = threadIdx.x; i < a.size; i += 128) {
    T value = x[i];
    if (a.added) x[i] = value = narrow<T>(widen(value) + widen(added[i]));
    sum += widen(value) * widen(value);
  }
  for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const float total = sums[0] + sums[1] + sums[2] + sums[3];
  const float scale = 1.f / sqrtf(total / a.size + a.eps);
  for (int i = threadIdx.x; i < a.size; i += 128)  // each thread what it wrote itself
    ((T*)a.out + start)[i] = narrow<T>(widen(x[i]) * scale * widen(weight[i]));
}

struct Gate {
  const void* gate_up;  // [R, 2 K]: gate, then up
  void* out;            // [R, K]
  int size;             // K
};

// out = silu(gate) * up, one value a thread; blockIdx.y is the row.
template <typename T>
__global__ void __launch_bounds__(128) gate(const Gate a) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= a.size) return;
  const T* row = (const T*)a.gate_up + (long long)blockIdx.y * 2 * a.size;
  const float x = widen(row[i]), up = widen(row[a.size + i]);
  const float sigmoid = 1.f / (1.f + power_of_two(x * -1.4426950408889634f));
  ((T*)a.out)[(long long)blockIdx.y * a.size + i] = narrow<T>(x * sigmoid * up);
}
