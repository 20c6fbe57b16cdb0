// Arithmetic on vectors of fp32 and of units, as wide as the instruction set has them. The including file sets the
// target, opens a namespace of its own, and brings in this order:
//
//   Vec, IVec                GCC vectors of float and of int32_t
//   fused(a, b, c)           a * b + c
//   paired(acc, a, b)        acc + a.low * b.low + a.high * b.high; a and b are bf16 pairs
//   lanes.inl
//   highest(Vec), total(Vec) the greatest lane; the sum of all lanes, in a fixed order
//   narrow(Vec, uint16_t*)   to bf16, to nearest even
//   formats.inl, attention.inl, kernels.inl
//   dotted(IVec acc, IVec w, IVec a)  acc + the sum of w.byte * a.byte over the four bytes of a lane; w is unsigned, a
//                            signed; exact
//   halves(const uint16_t*)  fp16 as fp32
//   grouped.inl

#define TENUTO_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = sizeof(Vec) / sizeof(float);

TENUTO_INLINE Vec load(const float* from) {
  Vec out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}
TENUTO_INLINE IVec load(const Unit* from) {
  IVec out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}
TENUTO_INLINE void store(float* to, Vec value) { __builtin_memcpy(to, &value, sizeof value); }

TENUTO_INLINE Vec splat(float value) { return value - Vec{}; }
TENUTO_INLINE IVec splat(Unit value) { return static_cast<int32_t>(value) - IVec{}; }
TENUTO_INLINE Vec greater(Vec a, Vec b) { return a > b ? a : b; }

// Calls work(first, share) over rows, dealt out evenly over as few shares of at most `most` as can take them.
template <class Work>
TENUTO_INLINE void each_share(int rows, int most, const Work& work) {
  for (int first = 0, shares = (rows + most - 1) / most; shares; shares--) {
    const int share = (rows - first + shares - 1) / shares;
    work(first, share);
    first += share;
  }
}

// e^x to about 2 ulp (the polynomial of Cephes expf); 0 below -87, e^88 above 88.
TENUTO_INLINE Vec exponential(Vec given) {
  const Vec x = given > splat(88.0f) ? splat(88.0f) : given;
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  Vec r = fused(n, splat(-0.693359375f), x);
  r = fused(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(0.5f));
  p = fused(p, r * r, r + 1.0f);
  const IVec power = ((IVec)shifted << 23) + 0x3f800000;
  return given < splat(-87.0f) ? Vec{} : p * (Vec)power;
}
