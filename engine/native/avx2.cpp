// Kernels for AVX2 with FMA: vectors of eight floats.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace tenuto {
namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IVec __attribute__((vector_size(32)));
constexpr int kRows = 4, kColumns = 2, kWide = 2;

inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

#include "portable.inl"
#include "lanes.inl"
#include "formats.inl"
#include "attention.inl"
#include "kernels.inl"

}  // namespace

const Kernels& kernels_avx2(bool fp32) { return fp32 ? table<Fp32>() : table<Bf16>(); }

}  // namespace tenuto

#pragma GCC pop_options

#endif
