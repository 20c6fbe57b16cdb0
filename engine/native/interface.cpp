// The C interface. Functions that can fail return null or 1; nothing is thrown across it.
#include <exception>

#include "allocations.h"
#include "decoder.h"

#define TENUTO_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace tenuto;

template <class Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

Kernels kernels_of(int isa, int format) { return kernels_for(static_cast<Isa>(isa), static_cast<Format>(format)); }

}  // namespace

// The best instruction set of this machine, as a number of Isa.
TENUTO_EXPORT int tenuto_best_isa() { return static_cast<int>(best_isa()); }

// A decoder, or null where its memory cannot be had.
TENUTO_EXPORT void* tenuto_open(const Shape* shape, const Source* source, int isa, int threads) {
  void* decoder = nullptr;
  guarded([&] { decoder = new Decoder(*shape, *source, static_cast<Isa>(isa), threads); });
  return decoder;
}

TENUTO_EXPORT void tenuto_close(void* decoder) { delete static_cast<Decoder*>(decoder); }

// Runs one step. 0; 1 where memory cannot be had, 2 where pages that were to come never came: the pages of the step are
// then undefined.
TENUTO_EXPORT int tenuto_run(void* decoder, const Step* step) {
  bool came = true;
  const int failed = guarded([&] { came = static_cast<Decoder*>(decoder)->run(*step); });
  return failed || came ? failed : 2;
}

// So many layers of a step's pages have come, or, if negative, never will. Any thread, while the step runs.
TENUTO_EXPORT void tenuto_land(int32_t* landed, int layers) { __atomic_store_n(landed, layers, __ATOMIC_RELEASE); }

// A captured step, or null where its memory cannot be had. See CapturedStep.
TENUTO_EXPORT void* tenuto_capture(void* decoder, const Step* step, int pages) {
  void* captured = nullptr;
  guarded([&] { captured = new CapturedStep(*static_cast<Decoder*>(decoder), *step, pages); });
  return captured;
}

// Like tenuto_run.
TENUTO_EXPORT int tenuto_replay(void* captured) {
  return guarded([&] { static_cast<CapturedStep*>(captured)->replay(); });
}

TENUTO_EXPORT void tenuto_release(void* captured) { delete static_cast<CapturedStep*>(captured); }

// Writes the jobs of the steps that follow into `diary`; null: no more.
TENUTO_EXPORT void tenuto_watch(void* decoder, Job* diary, int capacity) {
  static_cast<Decoder*>(decoder)->watch(diary, capacity);
}

// The jobs written since.
TENUTO_EXPORT int tenuto_watched(void* decoder) { return static_cast<Decoder*>(decoder)->watched(); }

TENUTO_EXPORT int64_t tenuto_allocations() { return allocations(); }

// The two kernels whose arithmetic the tests check by itself. One row of fp32 as activations:
TENUTO_EXPORT void tenuto_narrow(int isa, int format, const float* from, int width, Unit* out) {
  kernels_of(isa, format).narrow(from, width, out);
}

// out [rows][32] = a [rows][steps] x one panel of a kind.
TENUTO_EXPORT void tenuto_product(int isa, int format, int kind, const Unit* a, int stride, int rows, const Unit* panel,
                                  int steps, float* out) {
  kernels_of(isa, format).product[kind](a, stride, rows, panel, steps, out);
}
