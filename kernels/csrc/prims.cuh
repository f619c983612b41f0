// The few instructions that C++ cannot express, with one name each.  Kernels use only these, so
// that the same kernels run on a CPU in the tests, where SHIM replaces their bodies.
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
// Copy one 32-bit number in the same way.
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

// c[16x8] += a[16x16] b[16x8] over a warp; PTX ISA, mma.m16n8k16, defines which lane has which
// element.
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
template <typename T>
PRIM T from_lane(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

PRIM u32 bits_of(float x) { return __float_as_uint(x); }
PRIM u64 bits_of(double x) { return __double_as_longlong(x); }
PRIM double double_of(u64 bits) { return __longlong_as_double(bits); }
// A product that the compiler does not fuse with an addition.
PRIM double multiply_rounded(double x, double y) { return __dmul_rn(x, y); }
// Widen the float32 with these bits; a C++ cast may be compiled to flush subnormals to 0.
PRIM double widen_exactly(u32 bits) {
  double y;
  asm("cvt.f64.f32 %0,%1;" : "=d"(y) : "f"(__uint_as_float(bits)));
  return y;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A barrier in shared memory: a phase of it ends after `count` arrivals.
PRIM void barrier_make(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
PRIM void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrive when all copies that this thread has started are complete.
PRIM void copies_arrive(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Wait for the end of a phase, even or odd; return false if it does not end within some seconds.
PRIM bool barrier_wait(u64* barrier, u32 parity) {
  constexpr long long PATIENCE = 1ll << 33;  // cycles
  u32 is_over;
  const long long begin = clock64();
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is_over) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!is_over && clock64() - begin < PATIENCE);
  return is_over;
}

// Make completed copies visible to the products of matrices in shared memory.
PRIM void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Set the registers of a thread from here on; all warps of a warpgroup must do the same.
template <int COUNT>
PRIM void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
PRIM void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Products of a warpgroup are asynchronous: its warps must not touch the operands in registers
// between `products_begin` and the wait.
PRIM void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PRIM void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
PRIM void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Mark sums as complete: the compiler may read them from here on, and no sooner.
template <int EIGHTS>
PRIM void products_done(float (*c)[4]) {
#pragma unroll
  for (int i = 0; i < 4 * EIGHTS; i++) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}

// c[64xN] += a[64x16] b[16xN] over a warpgroup; a warp has 16 rows as in `multiply`; N is 64 or
// 128.  Matrices in shared memory are given by descriptors, see attention_hopper.cu.
#define SUMS4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SUMS32(i) SUMS4(i), SUMS4(i + 1), SUMS4(i + 2), SUMS4(i + 3), SUMS4(i + 4), SUMS4(i + 5), \
                  SUMS4(i + 6), SUMS4(i + 7)
#define NAMES32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"     \
                "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,"  \
                "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(n, type) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " "
// The rows of b are stored like those of a, as K is like Q; without `add`, c is overwritten.
#define SCORES(T, type)                                                                          \
  PRIM void multiply_shared(T, float (*c)[4], u64 a, u64 b, bool add) {                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %66, 0;\n" WGMMA("128", type)                 \
                 "{" NAMES64 "}, %64, %65, p, 1, 1, 0, 0;\n}"                                    \
                 : SUMS32(0), SUMS32(8) : "l"(a), "l"(b), "r"((u32)add));                        \
  }
// b is stored row by row, N values each, as V is.
#define VALUES(T, type)                                                                          \
  PRIM void multiply_values(T, float (&c)[8][4], const u32* a, u64 b) {                          \
    asm volatile(WGMMA("64", type) "{" NAMES32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"          \
                 : SUMS32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));              \
  }                                                                                              \
  PRIM void multiply_values(T, float (&c)[16][4], const u32* a, u64 b) {                         \
    asm volatile(WGMMA("128", type) "{" NAMES64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"         \
                 : SUMS32(0), SUMS32(8)                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
  }
SCORES(bf16, "bf16")
SCORES(fp16, "f16")
VALUES(bf16, "bf16")
VALUES(fp16, "f16")
#undef SUMS4
#undef SUMS32
#undef NAMES32
#undef NAMES64
#undef WGMMA
#undef SCORES
#undef VALUES
#endif

// Write data that other thread blocks read in this launch; a `__threadfence` must follow.
template <typename T>
PRIM void publish(T* to, T value) { *to = value; }
#endif

// Values that a thread loads or stores at once, up to 16 bytes per instruction.
template <typename T, int WIDE>
struct alignas(WIDE * sizeof(T) < 16 ? WIDE * sizeof(T) : 16) Wide {
  T values[WIDE];
};

PRIM float widen(float x) { return x; }
PRIM float widen(bf16 x) { return __bfloat162float(x); }
PRIM float widen(fp16 x) { return __half2float(x); }
PRIM float widen(fp8 x) { return (float)x; }

// Round to nearest, ties to even; overflow becomes infinity, in fp8 the largest value, as in torch.
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
