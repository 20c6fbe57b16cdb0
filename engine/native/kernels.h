// What one thread computes on one item of a job, in one table per instruction set and number format.
//
// All matrices, activations and pages are made of 4-byte units: one fp32, or two neighbouring bf16. A step of a sum
// takes one unit from each side, so both formats share their layouts and their loops. u is the elements of a unit.
//
// In w4a8 pages hold bf16, and the inputs of a product are taken in groups of 32. A group of activations is 32 int8,
// its scale, and its scale times the sum of its int8: 10 units. A group of weights is 32 codes of 4 or 8 bits, each
// code * scale + minimum, with scale and minimum in fp16 or fp32: four kinds of panel. See grouped.inl.
//
// Every sum runs over its steps in ascending order in one accumulator lane, whatever the number of rows. So the bits of
// a row depend on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tenuto {

constexpr int kPage = 16;         // tokens of a page, and lanes of all vector code
constexpr int kPanel = 32;        // output columns of a packed panel
constexpr int kGroupInputs = 32;  // inputs of a product that share a scale, in w4a8
constexpr int kGroupUnits = 10;   // units of a group of activations: 8 of int8, scale, scale * sum
constexpr int kPanelKinds = 4;
constexpr int kMaxRows = 14;      // rows that the widest kernel keeps in registers
constexpr int kMaxHeadSize = 256;
constexpr int kSegment = 16;      // pages whose attention is one partial result; these merge in position order

using Unit = uint32_t;

enum class Format : int32_t { kBf16 = 0, kFp32 = 1, kW4a8 = 2 };

// The sizes of one decoder. The same struct crosses the C interface.
struct Shape {
  int32_t layers, hidden, ffn, heads, kv_heads, head_size, vocab, context;
  float norm_eps;
  Format format;

  bool is_grouped() const { return format == Format::kW4a8; }
  // Of pages and of the embedding.
  int unit_elements() const { return format == Format::kFp32 ? 1 : 2; }
  int element_bytes() const { return format == Format::kFp32 ? 4 : 2; }
  // Of the inputs of products.
  int steps(int inputs) const { return is_grouped() ? inputs / kGroupInputs : inputs / unit_elements(); }
  size_t activation_units(int inputs) const {
    return static_cast<size_t>(steps(inputs)) * (is_grouped() ? kGroupUnits : 1);
  }
  // Panels of gates and ups that make one whole piece of activations.
  int gate_panels() const { return is_grouped() ? 2 * kGroupInputs / kPanel : 1; }
  int query_width() const { return heads * head_size; }
  int qkv_width() const { return (heads + 2 * kv_heads) * head_size; }
  size_t head_units() const { return static_cast<size_t>(kPage) * head_size / unit_elements(); }
  size_t page_units() const { return 2 * layers * kv_heads * head_units(); }
};

// One row on its way into its page. A page is [layer][k/v][kv_head] runs; a run of K is [d/u][16] units and one of V is
// [16/u][d] units, so that both attention products load 16 neighbouring units per step.
struct Placing {
  float* qkv;          // [heads + 2 kv_heads][d]; queries are rotated in place
  const float* cos;    // [d/2] of this position
  const float* sin;
  const float* q_norm; // [d] each, or null
  const float* k_norm;
  Unit* keys;          // first K run of this layer in this page
  Unit* values;        // first V run
  int row;             // row within the page
};

// Attention of one tile for one key head: queries [rows][group] against pages 0 .. pages-1, or against one segment of
// them. The whole is made of the same segments, so it has the same bits either way.
struct Attending {
  const float* query;  // query of row 0, group member 0: rotated; a row is query_stride floats further
  size_t query_stride;
  Unit* out;           // like query, as activations, out_stride units per row
  size_t out_stride;
  const Unit* pool;    // pages back to back
  const int32_t* blocks;
  int pages;
  size_t keys_at;      // units from the start of a page to its K run, and to its V run
  size_t values_at;
  int first_row;       // row within the last page of the first query
  int rows;
  int window;          // keys that a query sees, its own among them; 0: all
  int segment;         // the segment to leave in `partial`, or -1: all of them, merged into `out`
  float* partial;      // [rows * group][segments][partial_floats]: where segment s of query q is at [q][s]
};

// One query's partial result: d weighted values, relative to the greatest score; that score; the sum of weights. Where
// the query sees no key of the segment, the score is minus infinity and all else zero.
inline size_t partial_floats(const Shape& shape) { return shape.head_size + 2; }
inline int segment_count(int pages) { return (pages + kSegment - 1) / kSegment; }

// out [rows][32] = a [rows][steps] x panel [steps][32]; the stride is in units.
using Product = void (*)(const Unit* a, size_t stride, int rows, const Unit* panel, int steps, float* out);

struct Kernels {
  // out = x / rms(x) * weight, as activations.
  void (*norm)(const float* x, const float* weight, int width, float eps, Unit* out);
  // By the panel's kind, which is 0 but for w4a8.
  Product product[kPanelKinds];
  // both [gate_panels][rows][16 gates, 16 ups] -> out [rows] activations, `stride` units apart.
  void (*gate)(const float* both, int rows, Unit* out, size_t stride);
  void (*place)(const Shape& shape, const Placing& item);
  void (*attend)(const Shape& shape, const Attending& item);
  // Merges the partial results of all segments of an item into its `out`.
  void (*merge)(const Shape& shape, const Attending& item);
  // One row of the embedding table as fp32.
  void (*widen)(const void* row, int width, float* out);
  // Fp32 as activations.
  void (*narrow)(const float* from, int width, Unit* out);
};

// Kinds of grouped panels: bits of a code 4 or 8, scales in fp16 or fp32.
constexpr int kWideScales = 1, kWideCodes = 2;

// One group of one panel: 32 codes of 32 columns, their scales, their minimums.
inline size_t grouped_block_bytes(int kind) {
  return (kind & kWideCodes ? 1024 : 512) + 2 * kPanel * (kind & kWideScales ? sizeof(float) : sizeof(uint16_t));
}

// Each holds those before it. Without VNNI, w4a8 takes its products from AVX2.
enum class Isa : int32_t { kPlain = 0, kAvx2 = 1, kAvx512Bf16 = 2, kAvx512Vnni = 3 };

Isa best_isa();
Kernels kernels_for(Isa isa, Format format);

Kernels kernels_plain(Format format);
Kernels kernels_avx2(Format format);
Kernels kernels_avx512(Format format);  // without products where the format is w4a8
void take_products_avx2(Product (&products)[kPanelKinds]);
void take_products_vnni(Product (&products)[kPanelKinds]);

}  // namespace tenuto
