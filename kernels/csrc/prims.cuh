// The few instructions that C++ cannot say, one name each.  Kernels use these and nothing below
// them, so that the same kernels run on a CPU in the tests, where SHIM gives other bodies.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;
typedef __half fp16;
typedef __nv_fp8_e4m3 fp8;

#define PRIM __device__ __forceinline__

#ifndef SHIM
#define SHARED_BYTES(name) extern __shared__ __align__(128) unsigned char name[]
#define MINUS_INFINITY __int_as_float(0xff800000)

PRIM u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copy 16 bytes from global to shared memory, or write zeros and read nothing if not `valid`.
PRIM void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same of one 32-bit number.
PRIM void copy_number_async(void* to, const int* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
PRIM void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
PRIM void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
PRIM void load_matrices(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)) : "memory");
}
PRIM void load_transposed(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)) : "memory");
}

// c[16x8] += a[16x16] b[16x8] over a warp; PTX ISA, mma.m16n8k16, says which lane holds what.
#define MMA(type)                                                                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                  \
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                            \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
PRIM void multiply(bf16, float* c, const u32* a, u32 b0, u32 b1) { MMA("bf16"); }
PRIM void multiply(fp16, float* c, const u32* a, u32 b0, u32 b1) { MMA("f16"); }
#undef MMA

PRIM float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename T>
PRIM T from_lane_xor(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

PRIM u32 bits_of(float x) { return __float_as_uint(x); }
PRIM u64 bits_of(double x) { return __double_as_longlong(x); }
PRIM double double_of(u64 bits) { return __longlong_as_double(bits); }
// A product that the compiler does not fuse with an addition.
PRIM double multiply_rounded(double x, double y) { return __dmul_rn(x, y); }
// The float32 with these bits; a cast in C++ may be compiled to take subnormals for 0.
PRIM double widen_exactly(u32 bits) {
  double y;
  asm("cvt.f64.f32 %0,%1;" : "=d"(y) : "f"(__uint_as_float(bits)));
  return y;
}

// Write a value that other thread blocks read in this launch; a `__threadfence` has to follow.
template <typename T>
PRIM void publish(T* to, T value) { *to = value; }
#endif

// Values that a thread reads or writes at once, up to 16 bytes an instruction.
template <typename T, int WIDE>
struct alignas(WIDE * sizeof(T) < 16 ? WIDE * sizeof(T) : 16) Wide {
  T values[WIDE];
};

PRIM float widen(float x) { return x; }
PRIM float widen(bf16 x) { return __bfloat162float(x); }
PRIM float widen(fp16 x) { return __half2float(x); }
PRIM float widen(fp8 x) { return (float)x; }

// Round to nearest, ties to even; what does not fit becomes infinity, in fp8 the largest: as torch does.
template <typename T>
PRIM T narrow(float x);
template <>
PRIM float narrow<float>(float x) { return x; }
template <>
PRIM bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
PRIM fp16 narrow<fp16>(float x) { return __float2half_rn(x); }
template <>
PRIM fp8 narrow<fp8>(float x) {
  fp8 y;
  y.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return y;
}

// Two 16-bit values in one register, the first in the low half.
template <typename T>
PRIM u32 pair(float low, float high) {
  struct alignas(4) { T half[2]; } both = {{narrow<T>(low), narrow<T>(high)}};
  return *(const u32*)&both;
}
