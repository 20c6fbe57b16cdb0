// How often this library has asked for memory by `new`, on any thread. What a captured step must never do shows here.
#pragma once

#include <cstdint>

namespace tenuto {

int64_t allocations();

}  // namespace tenuto
