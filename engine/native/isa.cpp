// Which instruction set this processor and its operating system offer.
#include "kernels.h"

namespace tenuto {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return __builtin_cpu_supports("avx512vnni") ? Isa::kAvx512Vnni : Isa::kAvx512Bf16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Isa::kAvx2;
#endif
  return Isa::kPlain;
}

Kernels kernels_for(Isa isa, Format format) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512Bf16) {
    Kernels kernels = kernels_avx512(format);
    if (format == Format::kW4a8) (isa == Isa::kAvx512Vnni ? take_products_vnni : take_products_avx2)(kernels.product);
    return kernels;
  }
  if (isa == Isa::kAvx2) return kernels_avx2(format);
#endif
  return kernels_plain(format);
}

}  // namespace tenuto
