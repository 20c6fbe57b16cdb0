// What crosses the C interface besides Shape. The structs of library.py mirror these.
#pragma once

#include "kernels.h"

namespace tenuto {

// Where a matrix lies before it is packed.
//
// Dense: rows [outputs][steps] of units; `kinds` is null. Grouped: panels back to back, packed, [panels][steps] blocks,
// and the kind of each.
struct MatrixSource {
  const Unit* data;
  const uint8_t* kinds;
};

// Where one layer's weights lie: matrices in the model's format, norms and the bias in fp32.
struct LayerSource {
  const float* attn_norm;
  MatrixSource qkv;       // [(heads + 2 kv_heads) d][hidden]
  const float* qkv_bias;  // null where the model has none
  const float* q_norm;    // [d] each, or null: queries and keys are not normalised
  const float* k_norm;
  MatrixSource o;         // [hidden][heads d]
  const float* ffn_norm;
  MatrixSource gate_up;   // [2 ffn][hidden]
  MatrixSource down;      // [hidden][ffn]
  int32_t window;         // tokens that a query sees, itself among them; 0: all
};

// Norms, biases, the embedding and the tables are used where they lie; matrices are copied.
struct Source {
  const void* embed;      // [vocab][hidden]
  MatrixSource head;      // [vocab][hidden]
  const float* norm;
  const float* cos;       // [context][d/2]
  const float* sin;
  const LayerSource* layers;
};

// Live rows of one page tile.
struct Tile {
  int32_t first;       // index of its first token among the step's tokens
  int32_t rows;
  int32_t page_row;    // row within the page of its first token
  int32_t pages;       // pages 0 .. pages-1; the tile is in the last of them
  int32_t blocks_at;   // index of its first block number in the step's block list
};

// One step's work.
struct Step {
  Unit* pool;              // pages back to back
  const int32_t* tokens;   // [token_count]
  const int32_t* blocks;
  const Tile* tiles;
  const int32_t* wanted;   // token indices whose logits are wanted
  float* logits;           // [wanted_count][vocab]
  int32_t token_count, tile_count, wanted_count;
  const int32_t* landed;   // layers of the step's pages that have come from a tier, negative: they never will; or null
};

enum class JobKind : int32_t {
  kEmbed, kAttentionNorm, kQkv, kPlace, kAttend, kMerge, kOutput, kFeedNorm, kGateUp, kDown, kHeadNorm, kHead
};

// One dispatch of a step: what is read, what is written, and how many items the crew shares.
struct Job {
  JobKind kind;
  int32_t layer;
  const void* from;
  void* to;
  int32_t items;  // known when it is dispatched
};

}  // namespace tenuto
