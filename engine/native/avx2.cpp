// Kernels for AVX2 with FMA and F16C: vectors of eight floats.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace tenuto {
namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IVec __attribute__((vector_size(32)));
constexpr int kRows = 4, kColumns = 2, kWide = 2, kGroupRows = 4, kGroupColumns = 2;

inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

#include "portable.inl"
#include "lanes.inl"
#include "formats.inl"
#include "attention.inl"
#include "kernels.inl"

// Bytes are widened to 16 bits first: products of bytes summed in pairs in 16 bits, as by maddubs, would saturate.
TENUTO_INLINE IVec dotted(IVec acc, IVec w, IVec a) {
  const __m256i bytes = _mm256_set1_epi16(255), weights = (__m256i)w, values = (__m256i)a;
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, bytes),
                                         _mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(values, 8));
  return acc + (IVec)even + (IVec)odd;
}
TENUTO_INLINE Vec halves(const uint16_t* from) {
  __m128i bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return _mm256_cvtph_ps(bits);
}

#include "grouped.inl"

}  // namespace

Kernels kernels_avx2(Format format) {
  Kernels kernels = table_of(format);
  if (format == Format::kW4a8) take_grouped(kernels.product);
  return kernels;
}

void take_products_avx2(Product (&products)[kPanelKinds]) { take_grouped(products); }

}  // namespace tenuto

#pragma GCC pop_options

#endif
