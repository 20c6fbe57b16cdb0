#include "decoder.h"

#include <algorithm>

namespace tenuto {
namespace {

constexpr int kItemsPerThread = 4;  // of attention, or its segments are shared out
constexpr int kRowsPerItem = 8;     // of the work that goes row by row
constexpr int kRowsPerProduct = 252;  // activations that stay in a core's cache while the panels pass: 21 x 12 rows

size_t arena_bytes(const Shape& s) {
  const int u = s.unit_elements();
  const size_t layer = packed_units(s.qkv_width(), s.hidden / u) + packed_units(s.hidden, s.query_width() / u) +
                       packed_units(2 * s.ffn, s.hidden / u) + packed_units(s.hidden, s.ffn / u);
  return (layer * s.layers + packed_units(s.vocab, s.hidden / u)) * sizeof(Unit);
}

template <class Work>
void each_row(Crew& crew, int rows, const Work& work) {
  crew.run((rows + kRowsPerItem - 1) / kRowsPerItem, [&](int item) {
    const int end = std::min(rows, (item + 1) * kRowsPerItem);
    for (int row = item * kRowsPerItem; row < end; row++) work(row);
  });
}

}  // namespace

Decoder::Decoder(const Shape& shape, const Source& source, Isa isa, int threads)
    : shape_(shape),
      kernels_(kernels_for(isa, shape.is_fp32)),
      crew_(threads),
      arena_(arena_bytes(shape)),
      embed_(static_cast<const char*>(source.embed)),
      norm_(source.norm),
      cos_(source.cos),
      sin_(source.sin) {
  const int u = shape.unit_elements();
  for (int i = 0; i < shape.layers; i++) {
    const LayerSource& from = source.layers[i];
    layers_.push_back({from.attn_norm, from.qkv_bias, from.ffn_norm,
                       pack(crew_, arena_, from.qkv, shape.qkv_width(), shape.hidden / u),
                       pack(crew_, arena_, from.o, shape.hidden, shape.query_width() / u),
                       pack_gated(crew_, arena_, from.gate_up, 2 * shape.ffn, shape.hidden / u),
                       pack(crew_, arena_, from.down, shape.hidden, shape.ffn / u)});
  }
  head_ = pack(crew_, arena_, source.head, shape.vocab, shape.hidden / u);
}

void Decoder::run(const Step& step) {
  const int rows = step.token_count;
  reserve(rows);
  embed(step);
  for (int i = 0; i < shape_.layers; i++) {
    attend(step, i);
    feed(layers_[i], rows);
  }
  logits(step);
}

void Decoder::reserve(int rows) {
  const auto grow = [rows](auto& buffer, size_t width) {
    if (buffer.size() < rows * width) buffer.resize(rows * width);
  };
  const size_t element = shape_.element_bytes();
  grow(hidden_, shape_.hidden);
  grow(qkv_, shape_.qkv_width());
  grow(narrow_, std::max(shape_.hidden, shape_.query_width()) * element);
  grow(gated_, shape_.ffn * element);
}

void Decoder::embed(const Step& step) {
  const size_t row_bytes = static_cast<size_t>(shape_.hidden) * shape_.element_bytes();
  each_row(crew_, step.token_count, [&](int row) {
    kernels_.widen(embed_ + step.tokens[row] * row_bytes, shape_.hidden,
                   &hidden_[static_cast<size_t>(row) * shape_.hidden]);
  });
}

void Decoder::attend(const Step& step, int index) {
  const Layer& layer = layers_[index];
  const size_t width = shape_.qkv_width();
  normalise(hidden_.data(), step.token_count, layer.attn_norm);
  multiply(layer.qkv, narrow_.data(), step.token_count, [&](int row, int column, int columns, const float* from) {
    float* to = &qkv_[row * width + column];
    for (int c = 0; c < columns; c++) to[c] = layer.qkv_bias ? from[c] + layer.qkv_bias[column + c] : from[c];
  });
  place(step, index);

  const int items = step.tile_count * shape_.kv_heads;
  if (items < kItemsPerThread * crew_.threads()) {
    attend_in_segments(step, index);
  } else {
    // Last tiles first: they have the most pages to walk, and the small ones fill the gaps at the end.
    crew_.run(items, [&](int item) { kernels_.attend(shape_, attending(step, index, items - 1 - item)); });
  }
  add_to_hidden(layer.o, narrow_.data(), step.token_count);
}

// For few tiles, or few heads: the segments of each are shared out too.
void Decoder::attend_in_segments(const Step& step, int layer) {
  struct Part {
    int item, segment;
    size_t partial_at;
  };
  const int items = step.tile_count * shape_.kv_heads, group = shape_.heads / shape_.kv_heads;
  std::vector<Part> parts;
  std::vector<size_t> starts;
  size_t floats = 0;
  for (int item = 0; item < items; item++) {
    const Tile& tile = step.tiles[item / shape_.kv_heads];
    const int segments = segment_count(tile.pages);
    starts.push_back(floats);
    for (int s = 0; s < segments; s++) parts.push_back({item, s, floats});
    floats += static_cast<size_t>(tile.rows) * group * segments * partial_floats(shape_);
  }
  if (partial_.size() < floats) partial_.resize(floats);
  crew_.run(static_cast<int>(parts.size()), [&](int i) {
    Attending one = attending(step, layer, parts[i].item);
    one.segment = parts[i].segment;
    one.partial = &partial_[parts[i].partial_at];
    kernels_.attend(shape_, one);
  });
  for (int item = 0; item < items; item++) {
    Attending whole = attending(step, layer, item);
    whole.partial = &partial_[starts[item]];
    kernels_.merge(shape_, whole);
  }
}

// Item i is head i % kv_heads of tile i / kv_heads.
Attending Decoder::attending(const Step& step, int layer, int item) {
  const Tile& tile = step.tiles[item / shape_.kv_heads];
  const int head = item % shape_.kv_heads, group = shape_.heads / shape_.kv_heads;
  const size_t first = tile.first, width = shape_.qkv_width(), run = head * shape_.head_units();
  Attending out{};
  out.query = &qkv_[first * width + head * group * shape_.head_size];
  out.query_stride = width;
  out.out = narrow_.data() + (first * shape_.heads + head * group) * shape_.head_size * shape_.element_bytes();
  out.out_stride = shape_.query_width();
  out.pool = step.pool;
  out.blocks = step.blocks + tile.blocks_at;
  out.pages = tile.pages;
  out.keys_at = run_at(layer, 0) + run;
  out.values_at = run_at(layer, 1) + run;
  out.first_row = tile.page_row;
  out.rows = tile.rows;
  out.segment = -1;
  return out;
}

// Units from the start of a page to the K runs (0) or the V runs (1) of a layer.
size_t Decoder::run_at(int layer, int which) const {
  return (static_cast<size_t>(layer) * 2 + which) * shape_.kv_heads * shape_.head_units();
}

// Rotates queries and keys, and puts keys and values into their pages.
void Decoder::place(const Step& step, int layer) {
  const int half = shape_.head_size / 2;
  crew_.run(step.tile_count, [&](int index) {
    const Tile& tile = step.tiles[index];
    Unit* page = step.pool + step.blocks[tile.blocks_at + tile.pages - 1] * shape_.page_units();
    for (int i = 0; i < tile.rows; i++) {
      const int row = tile.page_row + i;
      const size_t turn = (static_cast<size_t>(tile.pages - 1) * kPage + row) * half;
      kernels_.place(shape_, {&qkv_[static_cast<size_t>(tile.first + i) * shape_.qkv_width()], cos_ + turn,
                              sin_ + turn, page + run_at(layer, 0), page + run_at(layer, 1), row});
    }
  });
}

void Decoder::feed(const Layer& layer, int rows) {
  normalise(hidden_.data(), rows, layer.ffn_norm);
  const Matrix& matrix = layer.gate_up;
  const size_t element = shape_.element_bytes();
  const int blocks = (rows + kRowsPerProduct - 1) / kRowsPerProduct;
  crew_.run(blocks * matrix.panel_count(), [&](int item) {
    const int panel = item % matrix.panel_count();
    const int first = item / matrix.panel_count() * kRowsPerProduct;
    const int count = std::min(rows - first, kRowsPerProduct);
    alignas(64) float both[kRowsPerProduct * kPanel];
    kernels_.product(reinterpret_cast<const Unit*>(narrow_.data()) + static_cast<size_t>(first) * matrix.steps,
                     matrix.steps, count, matrix.panel(panel), matrix.steps, both);
    kernels_.gate(both, count,
                  gated_.data() + (static_cast<size_t>(first) * shape_.ffn + panel * (kPanel / 2)) * element,
                  shape_.ffn);
  });
  add_to_hidden(layer.down, gated_.data(), rows);
}

void Decoder::logits(const Step& step) {
  if (!step.wanted_count) return;
  each_row(crew_, step.wanted_count, [&](int i) {
    kernels_.norm(&hidden_[static_cast<size_t>(step.wanted[i]) * shape_.hidden], norm_, shape_.hidden, shape_.norm_eps,
                  narrow_.data() + static_cast<size_t>(i) * shape_.hidden * shape_.element_bytes());
  });
  multiply(head_, narrow_.data(), step.wanted_count, [&](int row, int column, int columns, const float* from) {
    std::copy_n(from, columns, step.logits + static_cast<size_t>(row) * shape_.vocab + column);
  });
}

void Decoder::normalise(const float* from, int rows, const float* weight) {
  each_row(crew_, rows, [&](int row) {
    kernels_.norm(from + static_cast<size_t>(row) * shape_.hidden, weight, shape_.hidden, shape_.norm_eps,
                  narrow_.data() + static_cast<size_t>(row) * shape_.hidden * shape_.element_bytes());
  });
}

// a [rows][inputs] x matrix; store(row, column, columns, values) is called for each row of each panel.
template <class Store>
void Decoder::multiply(const Matrix& matrix, const char* a, int rows, const Store& store) {
  const auto* units = reinterpret_cast<const Unit*>(a);
  const int blocks = (rows + kRowsPerProduct - 1) / kRowsPerProduct;
  crew_.run(blocks * matrix.panel_count(), [&](int item) {
    const int panel = item % matrix.panel_count();
    const int first = item / matrix.panel_count() * kRowsPerProduct;
    const int count = std::min(rows - first, kRowsPerProduct);
    alignas(64) float out[kRowsPerProduct * kPanel];
    kernels_.product(units + static_cast<size_t>(first) * matrix.steps, matrix.steps, count, matrix.panel(panel),
                     matrix.steps, out);
    const int columns = std::min(kPanel, matrix.outputs - panel * kPanel);
    for (int r = 0; r < count; r++) store(first + r, panel * kPanel, columns, out + r * kPanel);
  });
}

void Decoder::add_to_hidden(const Matrix& matrix, const char* a, int rows) {
  multiply(matrix, a, rows, [&](int row, int column, int columns, const float* from) {
    float* to = &hidden_[static_cast<size_t>(row) * shape_.hidden + column];
    for (int c = 0; c < columns; c++) to[c] += from[c];
  });
}

}  // namespace tenuto
