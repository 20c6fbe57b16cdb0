// The number formats of weights, pages and activations. As activations, each takes `kChunk` values at a time.

struct Bf16 {
  using Element = uint16_t;
  static constexpr int kUnit = 2;
  TENUTO_INLINE Vec mac(Vec acc, IVec a, IVec b) { return paired(acc, a, b); }
  TENUTO_INLINE void store(Element* to, Vec value) { narrow(value, to); }
  TENUTO_INLINE float widen(Element from) {
    const Unit bits = static_cast<Unit>(from) << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
  }
};

struct Fp32 {
  using Element = float;
  static constexpr int kUnit = 1;
  TENUTO_INLINE Vec mac(Vec acc, IVec a, IVec b) { return fused((Vec)a, (Vec)b, acc); }
  TENUTO_INLINE void store(Element* to, Vec value) { __builtin_memcpy(to, &value, sizeof value); }
  TENUTO_INLINE float widen(Element from) { return from; }
};

// Activations element by element.
template <class Kind>
struct Elements {
  static constexpr int kChunk = kPage;
  static constexpr int units(int width) { return width / Kind::kUnit; }
  TENUTO_INLINE void put(Unit* row, int at, const Vec (&values)[kChunk / kLanes]) {
    auto* to = reinterpret_cast<typename Kind::Element*>(row) + at;
    for (int v = 0; v < kChunk / kLanes; v++) Kind::store(to + v * kLanes, values[v]);
  }
};

// Activations as int8 in groups: value = scale * int8, scale = greatest magnitude / 127, to nearest even.
struct Groups {
  static constexpr int kChunk = kGroupInputs;
  static constexpr int units(int width) { return width / kGroupInputs * kGroupUnits; }
  TENUTO_INLINE void put(Unit* row, int at, const Vec (&values)[kChunk / kLanes]) {
    constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    Vec top{};
    for (const Vec& value : values) top = greater(top, greater(value, -value));
    const float most = highest(top), scale = most / 127.0f;
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    Unit* to = row + at / kGroupInputs * kGroupUnits;
    IVec sums{};
    for (int v = 0; v < kChunk / kLanes; v++) {
      const IVec codes = (IVec)(values[v] * inverse + shift) - 0x4b400000;
      sums += codes;
      int8_t bytes[kLanes];
      for (int i = 0; i < kLanes; i++) bytes[i] = static_cast<int8_t>(codes[i]);
      __builtin_memcpy(to + v * kLanes / 4, bytes, sizeof bytes);
    }
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += sums[i];
    const float both[2] = {scale, scale * static_cast<float>(sum)};
    __builtin_memcpy(to + kGroupInputs / 4, both, sizeof both);
  }
};

// row [width] = values, given a vector of them at a time by value_at(index).
template <class Act, class ValueAt>
TENUTO_INLINE void put_all(Unit* row, int width, const ValueAt& value_at) {
  for (int at = 0; at < width; at += Act::kChunk) {
    Vec values[Act::kChunk / kLanes];
    for (int v = 0; v < Act::kChunk / kLanes; v++) values[v] = value_at(at + v * kLanes);
    Act::put(row, at, values);
  }
}
