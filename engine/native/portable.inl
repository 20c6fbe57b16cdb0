// What AVX-512 has instructions for, without them: lane by lane, in a fixed order.

inline __attribute__((always_inline)) float highest(Vec value) {
  float lane[sizeof(Vec) / sizeof(float)];
  __builtin_memcpy(lane, &value, sizeof value);
  for (int half = sizeof lane / sizeof *lane / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
}

inline __attribute__((always_inline)) float total(Vec value) {
  float lane[sizeof(Vec) / sizeof(float)];
  __builtin_memcpy(lane, &value, sizeof value);
  for (int half = sizeof lane / sizeof *lane / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

inline __attribute__((always_inline)) void narrow(Vec value, uint16_t* to) {
  Unit bits[sizeof(Vec) / sizeof(Unit)];
  __builtin_memcpy(bits, &value, sizeof value);
  for (Unit one : bits) *to++ = static_cast<uint16_t>((one + 0x7fff + ((one >> 16) & 1)) >> 16);
}

// A bf16 is the upper half of an fp32.
inline __attribute__((always_inline)) Vec paired(Vec acc, IVec a, IVec b) {
  const int32_t upper = static_cast<int32_t>(0xffff0000u);
  acc = fused((Vec)(a << 16), (Vec)(b << 16), acc);
  return fused((Vec)(a & upper), (Vec)(b & upper), acc);
}

// Each product of bytes fits 16 bits, and their sum 32.
inline __attribute__((always_inline)) IVec dotted_bytes(IVec acc, IVec w, IVec a) {
  for (int shift = 0; shift < 32; shift += 8) acc += ((w >> shift) & 255) * ((a << (24 - shift)) >> 24);
  return acc;
}

// An fp16 with its exponent and fraction moved to those of an fp32 is 2^112 too small, also where it is subnormal.
inline __attribute__((always_inline)) Vec halves_of(const uint16_t* from) {
  IVec bits;
  for (size_t i = 0; i < sizeof(Vec) / sizeof(Unit); i++)
    bits[i] = static_cast<int32_t>((from[i] & 0x8000u) << 16 | (from[i] & 0x7fffu) << 13);
  return (Vec)bits * 0x1p112f;
}
