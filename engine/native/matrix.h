// Weight matrices, packed once into panels that a product reads from front to back.
#pragma once

#include <cstddef>
#include <memory>

#include "crew.h"
#include "kernels.h"

namespace tenuto {

// Anonymous memory on huge pages where the kernel has them: a step reads all of it.
class Arena {
 public:
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Unit* take(size_t units);

 private:
  char* start_;
  size_t bytes_, used_ = 0;
};

// outputs x inputs weights as panels of 32 outputs: [panels][inputs/u][32] units; missing outputs are zeros.
struct Matrix {
  const Unit* panels = nullptr;
  int outputs = 0;
  int steps = 0;  // inputs / u

  int panel_count() const { return (outputs + kPanel - 1) / kPanel; }
  const Unit* panel(int index) const { return panels + static_cast<size_t>(index) * steps * kPanel; }
};

size_t packed_units(int outputs, int steps);

// Packs rows [outputs][steps] of units.
Matrix pack(Crew& crew, Arena& arena, const Unit* rows, int outputs, int steps);

// The same for [gates; ups][steps]: each panel holds 16 gates and the 16 ups that belong to them.
Matrix pack_gated(Crew& crew, Arena& arena, const Unit* rows, int outputs, int steps);

}  // namespace tenuto
