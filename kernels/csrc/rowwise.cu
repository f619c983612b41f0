// The operators between a transformer's matrix products: the RMS norm of rows and the gate of the
// feed-forward layer.  A thread loads and stores WIDE values at once: 16 bytes, or one value where
// rows do not begin at multiples of 16 bytes.
#include "prims.cuh"

struct Norm {
  void* x;             // [T, K]; with y, becomes x + y
  const void* y;       // [T, K], or null
  const void* weight;  // [K] float32
  void* out;           // [T, K]
  int size;            // K
  float eps;
};

// Return the sum of x over a thread block of whole warps, the same in each thread.
PRIM float sum_of_block(float x) {
  SHARED_BYTES(shared);
  float* const sums = (float*)shared;  // one of each warp
  const int lane = threadIdx.x % 32;
  for (int mask = 16; mask; mask /= 2) x += from_lane_xor(x, mask);
  if (lane == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < blockDim.x / 32 ? sums[lane] : 0;
  for (int mask = 16; mask; mask /= 2) x += from_lane_xor(x, mask);
  return x;
}

// Compute out = x / sqrt(mean(x^2) + eps) * weight, one thread block for each row.  With y, x += y
// comes first and is rounded as it is stored: the norm is of the same residual that the next layer
// reads.
template <typename T, int WIDE>
__global__ void __launch_bounds__(512) rms_norm(const Norm a) {
  typedef Wide<T, WIDE> Unit;
  const int units = a.size / WIDE;
  const long long row = (long long)blockIdx.x * units;
  Unit* const x = (Unit*)a.x + row;
  float squares = 0;
  for (int i = threadIdx.x; i < units; i += blockDim.x) {
    Unit here = x[i];
    if (a.y) {
      Unit more = ((const Unit*)a.y)[row + i];
#pragma unroll
      for (int k = 0; k < WIDE; k++)
        here.values[k] = narrow<T>(widen(here.values[k]) + widen(more.values[k]));
      x[i] = here;
    }
#pragma unroll
    for (int k = 0; k < WIDE; k++) squares += widen(here.values[k]) * widen(here.values[k]);
  }
  const float scale = 1.f / sqrtf(sum_of_block(squares) / a.size + a.eps);
  for (int i = threadIdx.x; i < units; i += blockDim.x) {  // each thread those that it wrote
    Unit from = x[i], to;
    Wide<float, WIDE> weight = ((const Wide<float, WIDE>*)a.weight)[i];
#pragma unroll
    for (int k = 0; k < WIDE; k++)
      to.values[k] = narrow<T>(widen(from.values[k]) * scale * weight.values[k]);
    ((Unit*)a.out)[row + i] = to;
  }
}

struct Gate {
  const void* gate_up;  // [T, 2 K]: gate, then up
  void* out;            // [T, K]
  int rows, size;       // T, K
  float linear, cubic, limit, shift;  // see Activation in contract.py
};

// Make out = activation(gate) * up; the grid spans a row by x and strides over the rows by y.
template <typename T, int WIDE>
__global__ void __launch_bounds__(256) gate(const Gate a) {
  typedef Wide<T, WIDE> Unit;
  const int units = a.size / WIDE, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= units) return;
  for (long long row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const Unit* const gates = (const Unit*)a.gate_up + row * 2 * units;
    Unit gated = gates[i], up = gates[units + i], to;
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
      float x = widen(gated.values[k]), factor = widen(up.values[k]);
      if (x > a.limit) x = a.limit;  // NaN stays NaN
      if (factor > a.limit) factor = a.limit;
      if (factor < -a.limit) factor = -a.limit;
      const float steep = a.linear + a.cubic * x * x;
      // Of a far negative x the exponential is infinite and the quotient -0, as it should be.
      to.values[k] = narrow<T>(x / (1.f + expf(-x * steep)) * (factor + a.shift));
    }
    ((Unit*)a.out)[row * units + i] = to;
  }
}
