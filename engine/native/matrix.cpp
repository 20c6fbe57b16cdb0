#include "matrix.h"

#include <sys/mman.h>

#include <cassert>
#include <cstring>
#include <new>

namespace tenuto {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t panel_bytes(const MatrixSource& source, int panel, int steps) {
  return steps * (source.kinds ? grouped_block_bytes(source.kinds[panel]) : kPanel * sizeof(Unit));
}

// A matrix whose panels have their places in the arena, and nothing in them yet.
Matrix laid_out(Arena& arena, const MatrixSource& source, int outputs, int steps) {
  Matrix matrix;
  matrix.outputs = outputs;
  matrix.steps = steps;
  matrix.bytes = packed_bytes(source, outputs, steps);
  for (int panel = 0; panel < panels_of(outputs); panel++)
    matrix.panels.push_back({arena.take(panel_bytes(source, panel, steps)), source.kinds ? source.kinds[panel] : 0});
  return matrix;
}

// Panel column -> weight row, or -1.
template <class RowOf>
Matrix pack_rows(Crew& crew, Arena& arena, const MatrixSource& source, int outputs, int steps, const RowOf& row_of) {
  Matrix matrix = laid_out(arena, source, outputs, steps);
  crew.run(matrix.panel_count(), [&](int panel) {
    const Unit* rows[kPanel];
    for (int c = 0; c < kPanel; c++) {
      const int row = row_of(panel, c);
      rows[c] = row < 0 ? nullptr : source.data + static_cast<size_t>(row) * steps;
    }
    Unit* to = const_cast<Unit*>(matrix.panels[panel].start);
    for (int k = 0; k < steps; k++)
      for (int c = 0; c < kPanel; c++) *to++ = rows[c] ? rows[c][k] : 0;
  });
  return matrix;
}

// Panels that lie back to back, packed, are so in the arena too.
Matrix copy_panels(Crew& crew, Arena& arena, const MatrixSource& source, int outputs, int steps) {
  Matrix matrix = laid_out(arena, source, outputs, steps);
  const Unit* first = matrix.panels[0].start;
  crew.run(matrix.panel_count(), [&](int panel) {
    const Unit* to = matrix.panels[panel].start;
    std::memcpy(const_cast<Unit*>(to), source.data + (to - first), panel_bytes(source, panel, steps));
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

Unit* Arena::take(size_t bytes) {
  assert(used_ + bytes <= bytes_);
  Unit* out = reinterpret_cast<Unit*>(start_ + used_);
  used_ += bytes;
  return out;
}

size_t packed_bytes(const MatrixSource& source, int outputs, int steps) {
  size_t bytes = 0;
  for (int panel = 0; panel < panels_of(outputs); panel++) bytes += panel_bytes(source, panel, steps);
  return bytes;
}

Matrix pack(Crew& crew, Arena& arena, const MatrixSource& source, int outputs, int steps) {
  if (source.kinds) return copy_panels(crew, arena, source, outputs, steps);
  return pack_rows(crew, arena, source, outputs, steps, [outputs](int panel, int column) {
    const int row = panel * kPanel + column;
    return row < outputs ? row : -1;
  });
}

Matrix pack_gated(Crew& crew, Arena& arena, const MatrixSource& source, int outputs, int steps) {
  if (source.kinds) return copy_panels(crew, arena, source, outputs, steps);
  return pack_rows(crew, arena, source, outputs, steps, [outputs](int panel, int column) {
    const int at = panel * (kPanel / 2) + column % (kPanel / 2);
    return column < kPanel / 2 ? at : outputs / 2 + at;
  });
}

}  // namespace tenuto
