// Products in groups for AVX-512 with VNNI. A file of its own, so that no other kernel is compiled to need VNNI.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

namespace tenuto {
namespace {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
constexpr int kGroupRows = 6, kGroupColumns = 2;

inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

#include "lanes.inl"

TENUTO_INLINE IVec dotted(IVec acc, IVec w, IVec a) {
  return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
}
TENUTO_INLINE Vec halves(const uint16_t* from) {
  __m256i bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return _mm512_cvtph_ps(bits);
}

#include "grouped.inl"

}  // namespace

void take_products_vnni(Product (&products)[kPanelKinds]) { take_grouped(products); }

}  // namespace tenuto

#pragma GCC pop_options

#endif
