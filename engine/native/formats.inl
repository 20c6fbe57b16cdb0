// The two number formats of weights, activations and pages.

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
