// Norm, product, gate, rotation: each the same code for both formats and all instruction sets.
// Needs lanes.inl, and kRows x kColumns: the rows and the vectors of columns that one product keeps in registers.

template <class Act>
void norm(const float* x, const float* weight, int width, float eps, Unit* out) {
  Vec squares{};
  for (int i = 0; i < width; i += kLanes) squares = fused(load(x + i), load(x + i), squares);
  const Vec scale = splat(1.0f / __builtin_sqrtf(total(squares) / static_cast<float>(width) + eps));
  put_all<Act>(out, width, [&](int i) { return load(x + i) * scale * load(weight + i); });
}

template <class Act>
void narrow_all(const float* from, int width, Unit* out) {
  put_all<Act>(out, width, [&](int i) { return load(from + i); });
}

// What is needed 64 steps later, 8 KiB, is asked of memory now: rows are computed while it comes. Left to the processor,
// the more a step computes, the less it fetches ahead, and each row costs its own time on top of memory's.
constexpr int kAhead = 64 * kPanel;

// out [Rows][32] = a [Rows][steps] x panel [steps][32]
template <class Kind, int Rows>
void product_of(const Unit* a, size_t stride, const Unit* panel, int steps, float* out) {
  for (int column = 0; column < kPanel; column += kLanes * kColumns) {
    Vec sum[Rows][kColumns] = {};
    const Unit* b = panel + column;
    for (int k = 0; k < steps; k++, b += kPanel) {
      for (int c = 0; c < kColumns; c++) __builtin_prefetch(b + kAhead + kLanes * c);
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

template <class Kind>
void product(const Unit* a, size_t stride, int rows, const Unit* panel, int steps, float* out) {
  each_share(rows, kRows, [&](int first, int share) {
    product_exactly<Kind>(a + first * stride, stride, share, panel, steps, out + first * kPanel);
  });
}

template <class Act>
void gate(const float* both, int rows, Unit* out, size_t stride) {
  constexpr int half = kPanel / 2;
  for (int r = 0; r < rows; r++) {
    put_all<Act>(out + r * stride, Act::kChunk, [&](int i) {
      const float* gates = both + (i / half * rows + r) * kPanel + i % half;
      const Vec g = load(gates), up = load(gates + half);
      return g / (exponential(-g) + 1.0f) * up;
    });
  }
}

// head = head / rms(head) * weight
static inline void norm_head(float* head, const float* weight, int width, float eps) {
  Vec squares{};
  for (int i = 0; i < width; i += kLanes) squares = fused(load(head + i), load(head + i), squares);
  const Vec scale = splat(1.0f / __builtin_sqrtf(total(squares) / static_cast<float>(width) + eps));
  for (int i = 0; i < width; i += kLanes) store(head + i, load(head + i) * scale * load(weight + i));
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
  for (int h = 0; h < shape.heads + shape.kv_heads; h++) {
    const float* weight = h < shape.heads ? item.q_norm : item.k_norm;
    if (weight) norm_head(item.qkv + h * d, weight, d, shape.norm_eps);
    rotate(item.qkv + h * d, item.cos, item.sin, d / 2);
  }
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

template <class Kind, class Act>
Kernels table() {
  return {norm<Act>, {}, gate<Act>, place<Kind>, attend<Kind, Act>, merge<Act>, widen<Kind>, narrow_all<Act>};
}

template <class Kind>
Kernels dense_table() {
  Kernels kernels = table<Kind, Elements<Kind>>();
  kernels.product[0] = product<Kind>;
  return kernels;
}

static inline Kernels table_of(Format format) {
  switch (format) {
    case Format::kFp32: return dense_table<Fp32>();
    case Format::kW4a8: return table<Bf16, Groups>();
    default: return dense_table<Bf16>();
  }
}
