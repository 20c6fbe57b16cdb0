// One llama or qwen2 decoder: its packed weights and what one step does with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "kernels.h"
#include "matrix.h"

namespace tenuto {

// Where one layer's weights lie: matrices in the model's format, norms and the bias in fp32. Part of the C interface.
struct LayerSource {
  const float* attn_norm;
  const Unit* qkv;        // [(heads + 2 kv_heads) d][hidden]
  const float* qkv_bias;  // null where the model has none
  const Unit* o;          // [hidden][heads d]
  const float* ffn_norm;
  const Unit* gate_up;    // [2 ffn][hidden]
  const Unit* down;       // [hidden][ffn]
};

// Part of the C interface. Norms, biases, the embedding and the tables are used where they lie; matrices are copied.
struct Source {
  const void* embed;      // [vocab][hidden]
  const Unit* head;       // [vocab][hidden]
  const float* norm;
  const float* cos;       // [context][d/2]
  const float* sin;
  const LayerSource* layers;
};

// Live rows of one page tile. Part of the C interface.
struct Tile {
  int32_t first;       // index of its first token among the step's tokens
  int32_t rows;
  int32_t page_row;    // row within the page of its first token
  int32_t pages;       // pages 0 .. pages-1; the tile is in the last of them
  int32_t blocks_at;   // index of its first block number in the step's block list
};

// One step's work. Part of the C interface.
struct Step {
  Unit* pool;              // pages back to back
  const int32_t* tokens;   // [token_count]
  const int32_t* blocks;
  const Tile* tiles;
  const int32_t* wanted;   // token indices whose logits are wanted
  float* logits;           // [wanted_count][vocab]
  int32_t token_count, tile_count, wanted_count;
};

class Decoder {
 public:
  Decoder(const Shape& shape, const Source& source, Isa isa, int threads);
  void run(const Step& step);

 private:
  struct Layer {
    const float* attn_norm;
    const float* qkv_bias;
    const float* ffn_norm;
    Matrix qkv, o, gate_up, down;
  };

  void embed(const Step& step);
  void attend(const Step& step, int layer);
  void attend_in_segments(const Step& step, int layer);
  Attending attending(const Step& step, int layer, int item);
  void place(const Step& step, int layer);
  void feed(const Layer& layer, int rows);
  void logits(const Step& step);
  void normalise(const float* from, int rows, const float* weight);
  template <class Store>
  void multiply(const Matrix& matrix, const char* a, int rows, const Store& store);
  void add_to_hidden(const Matrix& matrix, const char* a, int rows);
  size_t run_at(int layer, int which) const;
  void reserve(int rows);

  const Shape shape_;
  const Kernels& kernels_;
  Crew crew_;
  Arena arena_;
  std::vector<Layer> layers_;
  Matrix head_;
  const char* embed_;
  const float* norm_;
  const float* cos_;
  const float* sin_;
  // scratch, grown to the largest step so far
  std::vector<float> hidden_;   // [rows][hidden]
  std::vector<float> qkv_;      // [rows][qkv_width]
  std::vector<char> narrow_;    // [rows][max(hidden, query_width)] activations
  std::vector<char> gated_;     // [rows][ffn] activations
  std::vector<float> partial_;  // partial results of attention
};

}  // namespace tenuto
