// Kernels for AVX-512 with bf16 dot products: vectors of sixteen floats.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

namespace tenuto {
namespace {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
constexpr int kRows = kMaxRows, kColumns = 2, kWide = 4;

inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) Vec paired(Vec acc, IVec a, IVec b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

#include "lanes.inl"

TENUTO_INLINE float highest(Vec value) { return _mm512_reduce_max_ps(value); }
TENUTO_INLINE float total(Vec value) { return _mm512_reduce_add_ps(value); }
TENUTO_INLINE void narrow(Vec value, uint16_t* to) {
  const __m256bh bits = _mm512_cvtneps_pbh(value);
  __builtin_memcpy(to, &bits, sizeof bits);
}

#include "formats.inl"
#include "attention.inl"
#include "kernels.inl"

}  // namespace

Kernels kernels_avx512(Format format) { return table_of(format); }

}  // namespace tenuto

#pragma GCC pop_options

#endif
