// What one thread computes on one item of a job, in one table per instruction set and number format.
//
// All matrices, activations and pages are made of 4-byte units: one fp32, or two neighbouring bf16. A step of a sum
// takes one unit from each side, so both formats share their layouts and their loops. u is the elements of a unit.
//
// Every sum runs over its steps in ascending order in one accumulator lane, whatever the number of rows. So the bits of
// a row depend on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tenuto {

constexpr int kPage = 16;         // tokens of a page, and lanes of all vector code
constexpr int kPanel = 32;        // output columns of a packed panel: [K/u][32] units
constexpr int kMaxRows = 12;      // rows of the largest product
constexpr int kMaxHeadSize = 256;
constexpr int kSegment = 16;      // pages whose attention is one partial result; these merge in position order

using Unit = uint32_t;

// The sizes of one decoder. The same struct crosses the C interface.
struct Shape {
  int32_t layers, hidden, ffn, heads, kv_heads, head_size, vocab, context;
  float norm_eps;
  int32_t is_fp32;

  int unit_elements() const { return is_fp32 ? 1 : 2; }
  int element_bytes() const { return is_fp32 ? 4 : 2; }
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
  Unit* keys;          // first K run of this layer in this page
  Unit* values;        // first V run
  int row;             // row within the page
};

// Attention of one tile for one key head: queries [rows][group] against pages 0 .. pages-1, or against one segment of
// them. The whole is made of the same segments, so it has the same bits either way.
struct Attending {
  const float* query;  // query of row 0, group member 0: rotated; a row is query_stride floats further
  size_t query_stride;
  void* out;           // like query, in the activation format, out_stride elements per row
  size_t out_stride;
  const Unit* pool;    // pages back to back
  const int32_t* blocks;
  int pages;
  size_t keys_at;      // units from the start of a page to its K run, and to its V run
  size_t values_at;
  int first_row;       // row within the last page of the first query
  int rows;
  int segment;         // the segment to leave in `partial`, or -1: all of them, merged into `out`
  float* partial;      // [rows * group][segments][partial_floats]: where segment s of query q is at [q][s]
};

// One query's partial result: d weighted values, relative to the greatest score; that score; the sum of weights.
inline size_t partial_floats(const Shape& shape) { return shape.head_size + 2; }
inline int segment_count(int pages) { return (pages + kSegment - 1) / kSegment; }

struct Kernels {
  // out = x / rms(x) * weight, as activations.
  void (*norm)(const float* x, const float* weight, int width, float eps, void* out);
  // out [rows][32] = a [rows][steps] x panel [steps][32]; rows <= kMaxRows; strides in units.
  void (*product)(const Unit* a, size_t stride, int rows, const Unit* panel, int steps, float* out);
  // both [rows][16 gates, 16 ups] -> out [rows][16] activations, `stride` elements apart.
  void (*gate)(const float* both, int rows, void* out, size_t stride);
  void (*place)(const Shape& shape, const Placing& item);
  void (*attend)(const Shape& shape, const Attending& item);
  // Merges the partial results of all segments of an item into its `out`.
  void (*merge)(const Shape& shape, const Attending& item);
  // One row of the embedding table as fp32.
  void (*widen)(const void* row, int width, float* out);
};

enum class Isa : int32_t { kPlain = 0, kAvx2 = 1, kAvx512Bf16 = 2 };

Isa best_isa();
const Kernels& kernels_plain(bool fp32);
const Kernels& kernels_avx2(bool fp32);
const Kernels& kernels_avx512(bool fp32);
const Kernels& kernels_for(Isa isa, bool fp32);

}  // namespace tenuto
