// What a step needs besides weights and pages: its buffers, its list of jobs, and its plan of attention.
#pragma once

#include <vector>

#include "interface.h"

namespace tenuto {

// One item of attention: a tile and a key head, or one segment of theirs.
struct Part {
  int32_t item;       // head item % kv_heads of tile item / kv_heads
  int32_t segment;    // -1: all of them
  size_t partial_at;  // where its item's partial results begin
};

struct Scratch {
  std::vector<float> hidden;   // [rows][hidden]
  std::vector<float> qkv;      // [rows][qkv_width]
  std::vector<Unit> narrow;    // [rows][max(hidden, query_width)] activations
  std::vector<Unit> gated;     // [rows][ffn] activations
  std::vector<float> partial;  // partial results of attention
  std::vector<Part> parts;     // of the attention of every layer
  std::vector<Part> merges;    // the items among them that come in segments
  std::vector<Job> jobs;       // in order

  // Room for steps of so many rows.
  void reserve(const Shape& shape, int rows);
  // Room for the attention of decode steps of so many rows with contexts of so many pages.
  void reserve_decode(const Shape& shape, int threads, int rows, int pages);
  // Shares out the attention of a step. It allocates where there is not enough room.
  void plan(const Shape& shape, int threads, const Step& step);
  // Lists the jobs of a step over these buffers.
  void record(const Shape& shape, const Step& step);
};

}  // namespace tenuto
