// Norm, product, gate, rotation: each the same code for both formats and all instruction sets.
// Needs lanes.inl, and kRows x kColumns: the rows and the vectors of columns that one product keeps in registers.

template <class Kind>
void norm(const float* x, const float* weight, int width, float eps, void* out) {
  auto* to = static_cast<typename Kind::Element*>(out);
  Vec squares{};
  for (int i = 0; i < width; i += kLanes) squares = fused(load(x + i), load(x + i), squares);
  const Vec scale = splat(1.0f / __builtin_sqrtf(total(squares) / static_cast<float>(width) + eps));
  for (int i = 0; i < width; i += kLanes) Kind::store(to + i, load(x + i) * scale * load(weight + i));
}

// out [Rows][32] = a [Rows][steps] x panel [steps][32]
template <class Kind, int Rows>
void product_of(const Unit* a, size_t stride, const Unit* panel, int steps, float* out) {
  for (int column = 0; column < kPanel; column += kLanes * kColumns) {
    Vec sum[Rows][kColumns] = {};
    const Unit* b = panel + column;
    for (int k = 0; k < steps; k++, b += kPanel) {
      IVec w[kColumns];
      for (int c = 0; c < kColumns; c++) w[c] = load(b + kLanes * c);
      for (int r = 0; r < Rows; r++) {
        const IVec x = splat(a[r * stride + k]);
        for (int c = 0; c < kColumns; c++) sum[r][c] = Kind::mac(sum[r][c], x, w[c]);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int c = 0; c < kColumns; c++) store(out + r * kPanel + column + kLanes * c, sum[r][c]);
  }
}

template <class Kind, int Rows = kRows>
void product_exactly(const Unit* a, size_t stride, int rows, const Unit* panel, int steps, float* out) {
  if (rows == Rows) return product_of<Kind, Rows>(a, stride, panel, steps, out);
  if constexpr (Rows > 1) product_exactly<Kind, Rows - 1>(a, stride, rows, panel, steps, out);
}

// Rows are dealt out evenly over as few products as can take them.
template <class Kind>
void product(const Unit* a, size_t stride, int rows, const Unit* panel, int steps, float* out) {
  for (int products = (rows + kRows - 1) / kRows; products; products--) {
    const int share = (rows + products - 1) / products;
    product_exactly<Kind>(a, stride, share, panel, steps, out);
    a += share * stride;
    out += share * kPanel;
    rows -= share;
  }
}

template <class Kind>
void gate(const float* both, int rows, void* out, size_t stride) {
  auto* to = static_cast<typename Kind::Element*>(out);
  for (int r = 0; r < rows; r++) {
    for (int i = 0; i < kPanel / 2; i += kLanes) {
      const Vec g = load(both + r * kPanel + i), up = load(both + r * kPanel + kPanel / 2 + i);
      Kind::store(to + r * stride + i, g / (exponential(-g) + 1.0f) * up);
    }
  }
}

// Rotates halves: first' = first cos - second sin, second' = second cos + first sin.
static inline void rotate(float* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i++) {
    const float first = head[i], second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[i] + first * sin[i];
  }
}

template <class Kind>
void place(const Shape& shape, const Placing& item) {
  using Element = typename Kind::Element;
  constexpr int u = Kind::kUnit;
  const int d = shape.head_size;
  for (int h = 0; h < shape.heads + shape.kv_heads; h++) rotate(item.qkv + h * d, item.cos, item.sin, d / 2);
  alignas(64) Element narrowed[kMaxHeadSize];
  auto* keys = reinterpret_cast<Element*>(item.keys);
  auto* values = reinterpret_cast<Element*>(item.values);
  const float* from = item.qkv + shape.query_width();
  for (int h = 0; h < shape.kv_heads; h++, keys += kPage * d, from += d) {
    for (int i = 0; i < d; i += kLanes) Kind::store(narrowed + i, load(from + i));
    for (int i = 0; i < d; i++) keys[(i / u * kPage + item.row) * u + i % u] = narrowed[i];
  }
  for (int h = 0; h < shape.kv_heads; h++, values += kPage * d, from += d) {
    for (int i = 0; i < d; i += kLanes) Kind::store(narrowed + i, load(from + i));
    for (int i = 0; i < d; i++) values[(item.row / u * d + i) * u + item.row % u] = narrowed[i];
  }
}

template <class Kind>
void widen(const void* row, int width, float* out) {
  const auto* from = static_cast<const typename Kind::Element*>(row);
  for (int i = 0; i < width; i++) out[i] = Kind::widen(from[i]);
}

template <class Kind>
const Kernels& table() {
  static const Kernels kernels = {norm<Kind>, product<Kind>, gate<Kind>, place<Kind>, attend<Kind>, merge<Kind>,
                                  widen<Kind>};
  return kernels;
}
