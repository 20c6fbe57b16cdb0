// Products in groups: int8 activations by 4-bit or 8-bit weights, in integers and so exact within a group of 32 inputs,
// in fp32 over the groups in ascending order. Needs lanes.inl, dotted, halves, and kGroupRows x kGroupColumns: the rows
// and the vectors of columns that one product keeps in registers.
//
// A block is one group of one panel: [Bits][32] units of codes, then 32 scales and 32 minimums. A unit of 8-bit codes
// is 4 neighbouring inputs of one column; one of 4-bit codes is 8, the first four in the low halves of its bytes.

struct HalfScales {
  using Element = uint16_t;
  TENUTO_INLINE Vec load(const Element* from) { return halves(from); }
};

struct FullScales {
  using Element = float;
  TENUTO_INLINE Vec load(const Element* from) {
    Vec out;
    __builtin_memcpy(&out, from, sizeof out);
    return out;
  }
};

TENUTO_INLINE Vec splat_bits(Unit bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return splat(value);
}

// dot [Rows][columns] += the integer products of one group
template <int Bits, int Rows>
TENUTO_INLINE void dot_group(const Unit* a, size_t stride, const Unit* codes, IVec (&dot)[Rows][kGroupColumns]) {
  for (int s = 0; s < Bits; s++, codes += kPanel) {
    IVec w[kGroupColumns];
    for (int c = 0; c < kGroupColumns; c++) w[c] = load(codes + kLanes * c);
    if constexpr (Bits == 8) {
      for (int r = 0; r < Rows; r++) {
        const IVec x = splat(a[r * stride + s]);
        for (int c = 0; c < kGroupColumns; c++) dot[r][c] = dotted(dot[r][c], w[c], x);
      }
    } else {
      IVec high[kGroupColumns];
      for (int c = 0; c < kGroupColumns; c++) {
        high[c] = (w[c] >> 4) & 0x0f0f0f0f;
        w[c] &= 0x0f0f0f0f;
      }
      for (int r = 0; r < Rows; r++) {
        const IVec first = splat(a[r * stride + 2 * s]), second = splat(a[r * stride + 2 * s + 1]);
        for (int c = 0; c < kGroupColumns; c++) dot[r][c] = dotted(dot[r][c], w[c], first);
        for (int c = 0; c < kGroupColumns; c++) dot[r][c] = dotted(dot[r][c], high[c], second);
      }
    }
  }
}

constexpr int kLine = 64 / sizeof(Unit), kAheadGroups = 12;  // as kAhead of the other formats

// out [Rows][32] = a [Rows][groups] x panel [groups][32]
template <int Bits, class Scales, int Rows>
void grouped_of(const Unit* a, size_t stride, const Unit* panel, int groups, float* out) {
  using Element = typename Scales::Element;
  constexpr int codes = Bits * kPanel, block = codes + 2 * kPanel * sizeof(Element) / sizeof(Unit);
  for (int column = 0; column < kPanel; column += kLanes * kGroupColumns) {
    Vec sum[Rows][kGroupColumns] = {};
    const Unit* b = panel;
    const Unit* x = a;
    for (int g = 0; g < groups; g++, b += block, x += kGroupUnits) {
      if constexpr (Rows > 1)  // one row calculates longer than its weights take to come
        for (int at = 0; at < block; at += kLine) __builtin_prefetch(b + kAheadGroups * block + at);
      IVec dot[Rows][kGroupColumns] = {};
      dot_group<Bits, Rows>(x, stride, b + column, dot);
      const auto* scales = reinterpret_cast<const Element*>(b + codes) + column;
      Vec scale[kGroupColumns], minimum[kGroupColumns];
      for (int c = 0; c < kGroupColumns; c++) {
        scale[c] = Scales::load(scales + kLanes * c);
        minimum[c] = Scales::load(scales + kPanel + kLanes * c);
      }
      for (int r = 0; r < Rows; r++) {
        const Vec one = splat_bits(x[r * stride + 8]), all = splat_bits(x[r * stride + 9]);
        for (int c = 0; c < kGroupColumns; c++) {
          const Vec scaled = __builtin_convertvector(dot[r][c], Vec) * scale[c];
          sum[r][c] = fused(minimum[c], all, fused(scaled, one, sum[r][c]));
        }
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int c = 0; c < kGroupColumns; c++) store(out + r * kPanel + column + kLanes * c, sum[r][c]);
  }
}

template <int Bits, class Scales, int Rows = kGroupRows>
void grouped_exactly(const Unit* a, size_t stride, int rows, const Unit* panel, int groups, float* out) {
  if (rows == Rows) return grouped_of<Bits, Scales, Rows>(a, stride, panel, groups, out);
  if constexpr (Rows > 1) grouped_exactly<Bits, Scales, Rows - 1>(a, stride, rows, panel, groups, out);
}

template <int Bits, class Scales>
void grouped(const Unit* a, size_t stride, int rows, const Unit* panel, int groups, float* out) {
  each_share(rows, kGroupRows, [&](int first, int share) {
    grouped_exactly<Bits, Scales>(a + first * stride, stride, share, panel, groups, out + first * kPanel);
  });
}

static inline void take_grouped(Product (&products)[kPanelKinds]) {
  products[0] = grouped<4, HalfScales>;
  products[kWideScales] = grouped<4, FullScales>;
  products[kWideCodes] = grouped<8, HalfScales>;
  products[kWideScales | kWideCodes] = grouped<8, FullScales>;
}
