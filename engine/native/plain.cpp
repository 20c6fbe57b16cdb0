// Kernels for any processor: vectors of four floats, products and sums rounded separately.
#include "kernels.h"

namespace tenuto {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IVec __attribute__((vector_size(16)));
constexpr int kRows = 4, kColumns = 2, kWide = 2, kGroupRows = 2, kGroupColumns = 2;

inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) { return a * b + c; }

#include "portable.inl"
#include "lanes.inl"
#include "formats.inl"
#include "attention.inl"
#include "kernels.inl"

TENUTO_INLINE IVec dotted(IVec acc, IVec w, IVec a) { return dotted_bytes(acc, w, a); }
TENUTO_INLINE Vec halves(const uint16_t* from) { return halves_of(from); }

#include "grouped.inl"

}  // namespace

Kernels kernels_plain(Format format) {
  Kernels kernels = table_of(format);
  if (format == Format::kW4a8) take_grouped(kernels.product);
  return kernels;
}

}  // namespace tenuto
