// The C interface. Functions that can fail return null or a message; nothing is thrown across it.
#include <exception>

#include "decoder.h"

#define TENUTO_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using tenuto::Decoder;
using tenuto::Isa;

}  // namespace

// The best instruction set of this machine, as a number of Isa.
TENUTO_EXPORT int tenuto_best_isa() { return static_cast<int>(tenuto::best_isa()); }

// A decoder, or null where its memory cannot be had.
TENUTO_EXPORT void* tenuto_open(const tenuto::Shape* shape, const tenuto::Source* source, int isa, int threads) {
  try {
    return new Decoder(*shape, *source, static_cast<Isa>(isa), threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Runs one step. 0, or 1 where memory cannot be had; the pages of the step are then undefined.
TENUTO_EXPORT int tenuto_run(void* decoder, const tenuto::Step* step) {
  try {
    static_cast<Decoder*>(decoder)->run(*step);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

TENUTO_EXPORT void tenuto_close(void* decoder) { delete static_cast<Decoder*>(decoder); }
