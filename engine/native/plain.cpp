// Kernels for any processor: vectors of four floats, products and sums rounded separately.
#include "kernels.h"

namespace tenuto {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IVec __attribute__((vector_size(16)));
constexpr int kRows = 4, kColumns = 2, kWide = 2;

inline __attribute__((always_inline)) Vec fused(Vec a, Vec b, Vec c) { return a * b + c; }

#include "portable.inl"
#include "lanes.inl"
#include "formats.inl"
#include "attention.inl"
#include "kernels.inl"

}  // namespace

const Kernels& kernels_plain(bool fp32) { return fp32 ? table<Fp32>() : table<Bf16>(); }

}  // namespace tenuto
