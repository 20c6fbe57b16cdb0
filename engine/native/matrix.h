// Weight matrices, packed once into panels that a product reads from front to back.
#pragma once

#include <cstddef>
#include <vector>

#include "crew.h"
#include "interface.h"

namespace tenuto {

// Anonymous memory on huge pages where the kernel has them: a step reads all of it.
class Arena {
 public:
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  Unit* take(size_t bytes);

 private:
  char* start_;
  size_t bytes_, used_ = 0;
};

// outputs x inputs weights as panels of 32 outputs: dense ones are [inputs/u][32] units; missing outputs are zeros.
struct Matrix {
  struct Panel {
    const Unit* start;
    int kind;
  };
  int outputs = 0;
  int steps = 0;
  std::vector<Panel> panels;

  size_t bytes = 0;

  int panel_count() const { return static_cast<int>(panels.size()); }
};

inline int panels_of(int outputs) { return (outputs + kPanel - 1) / kPanel; }
size_t packed_bytes(const MatrixSource& source, int outputs, int steps);

Matrix pack(Crew& crew, Arena& arena, const MatrixSource& source, int outputs, int steps);

// The same for [gates; ups]: each panel holds 16 gates and the 16 ups that belong to them. Grouped panels come so.
Matrix pack_gated(Crew& crew, Arena& arena, const MatrixSource& source, int outputs, int steps);

}  // namespace tenuto
