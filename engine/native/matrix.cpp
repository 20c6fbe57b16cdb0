#include "matrix.h"

#include <sys/mman.h>

#include <cassert>
#include <new>

namespace tenuto {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Panel column -> weight row, or -1.
template <class RowOf>
Matrix pack_rows(Crew& crew, Arena& arena, const Unit* rows, int outputs, int steps, const RowOf& row_of) {
  Matrix matrix;
  matrix.outputs = outputs;
  matrix.steps = steps;
  Unit* packed = arena.take(packed_units(outputs, steps));
  matrix.panels = packed;
  crew.run(matrix.panel_count(), [&](int panel) {
    const Unit* source[kPanel];
    for (int c = 0; c < kPanel; c++) {
      const int row = row_of(panel, c);
      source[c] = row < 0 ? nullptr : rows + static_cast<size_t>(row) * steps;
    }
    Unit* to = packed + static_cast<size_t>(panel) * steps * kPanel;
    for (int k = 0; k < steps; k++)
      for (int c = 0; c < kPanel; c++) *to++ = source[c] ? source[c][k] : 0;
  });
  return matrix;
}

}  // namespace

Arena::Arena(size_t bytes) : bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  start_ = static_cast<char*>(memory);
#if defined(MADV_HUGEPAGE)
  madvise(start_, bytes_, MADV_HUGEPAGE);
#endif
}

Arena::~Arena() { munmap(start_, bytes_); }

Unit* Arena::take(size_t units) {
  const size_t bytes = units * sizeof(Unit);
  assert(used_ + bytes <= bytes_);
  Unit* out = reinterpret_cast<Unit*>(start_ + used_);
  used_ += bytes;
  return out;
}

size_t packed_units(int outputs, int steps) {
  return static_cast<size_t>((outputs + kPanel - 1) / kPanel) * kPanel * steps;
}

Matrix pack(Crew& crew, Arena& arena, const Unit* rows, int outputs, int steps) {
  return pack_rows(crew, arena, rows, outputs, steps, [outputs](int panel, int column) {
    const int row = panel * kPanel + column;
    return row < outputs ? row : -1;
  });
}

Matrix pack_gated(Crew& crew, Arena& arena, const Unit* rows, int outputs, int steps) {
  return pack_rows(crew, arena, rows, outputs, steps, [outputs](int panel, int column) {
    const int at = panel * (kPanel / 2) + column % (kPanel / 2);
    return column < kPanel / 2 ? at : outputs / 2 + at;
  });
}

}  // namespace tenuto
