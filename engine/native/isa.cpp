// Which instruction set this processor and its operating system offer.
#include "kernels.h"

namespace tenuto {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return Isa::kAvx512Bf16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kPlain;
}

const Kernels& kernels_for(Isa isa, bool fp32) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16) return kernels_avx512(fp32);
  if (isa == Isa::kAvx2) return kernels_avx2(fp32);
#endif
  return kernels_plain(fp32);
}

}  // namespace tenuto
