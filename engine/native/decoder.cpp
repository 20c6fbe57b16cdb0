#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace tenuto {
namespace {

constexpr int kRowsPerItem = 8;  // of the work that goes row by row
constexpr int kMaxGatePanels = 2;
constexpr int kFewRows = 8;
constexpr int kLooksAwake = 1000;  // then with a nap between two: the readers need the cores too
constexpr size_t kBytesPerItem = 96 << 10;
constexpr int kLeastItemsPerThread = 3;
constexpr int kRowsPerProduct = 252;  // activations that stay in a core's cache while the panels pass: 18 x 14 rows

size_t arena_bytes(const Shape& s, const Source& source) {
  size_t bytes = packed_bytes(source.head, s.vocab, s.steps(s.hidden));
  for (int i = 0; i < s.layers; i++) {
    const LayerSource& layer = source.layers[i];
    bytes += packed_bytes(layer.qkv, s.qkv_width(), s.steps(s.hidden)) +
             packed_bytes(layer.o, s.hidden, s.steps(s.query_width())) +
             packed_bytes(layer.gate_up, 2 * s.ffn, s.steps(s.hidden)) +
             packed_bytes(layer.down, s.hidden, s.steps(s.ffn));
  }
  return bytes;
}

// Items that share out the panels of a matrix. A few rows take them as fast as memory gives them, and a longer run is
// read faster and claimed more seldom; many rows calculate. A multiple of the threads, so that all end together.
int panel_items(const Matrix& matrix, int panels, int rows, int threads) {
  if (rows > kFewRows) return panels;
  const int by_size = static_cast<int>(matrix.bytes / kBytesPerItem);
  const int items = std::max(by_size, kLeastItemsPerThread * threads);
  return std::min(panels, (items + threads - 1) / threads * threads);
}

// Whether a layer of the pages that come has come; waits until that is known. Whoever reads them keeps the deadline.
bool await_layer(const int32_t* landed, int layer) {
  for (int looks = 0;; looks++) {
    const int32_t layers = __atomic_load_n(landed, __ATOMIC_ACQUIRE);
    if (layers < 0) return false;
    if (layers > layer) return true;
    if (looks >= kLooksAwake) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

Decoder::Decoder(const Shape& shape, const Source& source, Isa isa, int threads)
    : shape_(shape),
      kernels_(kernels_for(isa, shape.format)),
      crew_(threads),
      arena_(arena_bytes(shape, source)),
      embed_(static_cast<const char*>(source.embed)),
      norm_(source.norm),
      cos_(source.cos),
      sin_(source.sin) {
  for (int i = 0; i < shape.layers; i++) {
    const LayerSource& from = source.layers[i];
    layers_.push_back({from.attn_norm, from.qkv_bias, from.q_norm, from.k_norm, from.ffn_norm, from.window,
                       pack(crew_, arena_, from.qkv, shape.qkv_width(), shape.steps(shape.hidden)),
                       pack(crew_, arena_, from.o, shape.hidden, shape.steps(shape.query_width())),
                       pack_gated(crew_, arena_, from.gate_up, 2 * shape.ffn, shape.steps(shape.hidden)),
                       pack(crew_, arena_, from.down, shape.hidden, shape.steps(shape.ffn))});
  }
  head_ = pack(crew_, arena_, source.head, shape.vocab, shape.steps(shape.hidden));
}

CapturedStep::CapturedStep(Decoder& decoder, const Step& step, int pages) : decoder_(decoder), step_(step) {
  scratch_.reserve_decode(decoder.shape_, decoder.crew_.threads(), step.token_count, pages);
  scratch_.record(decoder.shape_, step);
}

void CapturedStep::replay() {
  scratch_.plan(decoder_.shape_, decoder_.crew_.threads(), step_);
  decoder_.perform(step_, scratch_);
}

bool Decoder::run(const Step& step) {
  scratch_.reserve(shape_, step.token_count);
  scratch_.plan(shape_, crew_.threads(), step);
  scratch_.record(shape_, step);
  return perform(step, scratch_);
}

void Decoder::watch(Job* diary, int capacity) {
  diary_ = diary;
  diary_capacity_ = diary ? capacity : 0;
  watched_ = 0;
}

bool Decoder::perform(const Step& step, Scratch& scratch) {
  for (const Job& job : scratch.jobs) {
    // The first job of a layer that touches pages: it writes into the last one, which may be among those that come.
    if (job.kind == JobKind::kPlace && step.landed && !await_layer(step.landed, job.layer)) return false;
    perform(job, step, scratch);
  }
  return true;
}

void Decoder::perform(const Job& job, const Step& step, Scratch& scratch) {
  const Layer& layer = layers_[job.layer];
  const int rows = step.token_count;
  switch (job.kind) {
    case JobKind::kEmbed: return embed(job, step);
    case JobKind::kAttentionNorm: return normalise(job, layer.attn_norm, rows, nullptr);
    case JobKind::kQkv: return project(job, rows);
    case JobKind::kPlace: return place(job, step);
    case JobKind::kAttend: return attend(job, step, scratch);
    case JobKind::kMerge: return merge(job, step, scratch);
    case JobKind::kOutput: return add(job, layer.o, rows);
    case JobKind::kFeedNorm: return normalise(job, layer.ffn_norm, rows, nullptr);
    case JobKind::kGateUp: return gate(job, rows);
    case JobKind::kDown: return add(job, layer.down, rows);
    case JobKind::kHeadNorm: return normalise(job, norm_, step.wanted_count, step.wanted);
    case JobKind::kHead: return head(job, step.wanted_count);
  }
}

template <class Work>
void Decoder::dispatch(const Job& job, int items, const Work& work) {
  if (watched_ < diary_capacity_) {
    diary_[watched_] = job;
    diary_[watched_++].items = items;
  }
  crew_.run(items, work);
}

template <class Work>
void Decoder::each_row(const Job& job, int rows, const Work& work) {
  dispatch(job, (rows + kRowsPerItem - 1) / kRowsPerItem, [&](int item) {
    const int end = std::min(rows, (item + 1) * kRowsPerItem);
    for (int row = item * kRowsPerItem; row < end; row++) work(row);
  });
}

void Decoder::embed(const Job& job, const Step& step) {
  const size_t row_bytes = static_cast<size_t>(shape_.hidden) * shape_.element_bytes();
  auto* hidden = static_cast<float*>(job.to);
  each_row(job, step.token_count, [&](int row) {
    kernels_.widen(embed_ + step.tokens[row] * row_bytes, shape_.hidden,
                   hidden + static_cast<size_t>(row) * shape_.hidden);
  });
}

// `which`: the rows to take, or null: all of them.
void Decoder::normalise(const Job& job, const float* weight, int rows, const int32_t* which) {
  const auto* hidden = static_cast<const float*>(job.from);
  auto* out = static_cast<Unit*>(job.to);
  each_row(job, rows, [&](int row) {
    kernels_.norm(hidden + static_cast<size_t>(which ? which[row] : row) * shape_.hidden, weight, shape_.hidden,
                  shape_.norm_eps, out + row * shape_.activation_units(shape_.hidden));
  });
}

void Decoder::project(const Job& job, int rows) {
  const Layer& layer = layers_[job.layer];
  auto* qkv = static_cast<float*>(job.to);
  multiply(job, layer.qkv, rows, [&](int row, int column, int columns, const float* from) {
    float* to = qkv + static_cast<size_t>(row) * shape_.qkv_width() + column;
    for (int c = 0; c < columns; c++) to[c] = layer.qkv_bias ? from[c] + layer.qkv_bias[column + c] : from[c];
  });
}

// Normalises queries and keys where the model does, rotates them, and puts keys and values into their pages.
void Decoder::place(const Job& job, const Step& step) {
  const int half = shape_.head_size / 2;
  const Layer& layer = layers_[job.layer];
  auto* qkv = static_cast<float*>(const_cast<void*>(job.from));
  dispatch(job, step.tile_count, [&](int index) {
    const Tile& tile = step.tiles[index];
    Unit* page = step.pool + step.blocks[tile.blocks_at + tile.pages - 1] * shape_.page_units();
    for (int i = 0; i < tile.rows; i++) {
      const int row = tile.page_row + i;
      const size_t turn = (static_cast<size_t>(tile.pages - 1) * kPage + row) * half;
      kernels_.place(shape_, {qkv + static_cast<size_t>(tile.first + i) * shape_.qkv_width(), cos_ + turn, sin_ + turn,
                              layer.q_norm, layer.k_norm, page + run_at(job.layer, 0), page + run_at(job.layer, 1),
                              row});
    }
  });
}

void Decoder::attend(const Job& job, const Step& step, Scratch& scratch) {
  dispatch(job, static_cast<int>(scratch.parts.size()), [&](int i) {
    kernels_.attend(shape_, attending(job, step, scratch.parts[i], scratch));
  });
}

void Decoder::merge(const Job& job, const Step& step, Scratch& scratch) {
  dispatch(job, static_cast<int>(scratch.merges.size()), [&](int i) {
    kernels_.merge(shape_, attending(job, step, scratch.merges[i], scratch));
  });
}

Attending Decoder::attending(const Job& job, const Step& step, const Part& part, Scratch& scratch) const {
  const Tile& tile = step.tiles[part.item / shape_.kv_heads];
  const int head = part.item % shape_.kv_heads, group = shape_.heads / shape_.kv_heads;
  const size_t first = tile.first, width = shape_.qkv_width(), run = head * shape_.head_units();
  Attending out{};
  out.query = scratch.qkv.data() + first * width + head * group * shape_.head_size;
  out.query_stride = width;
  out.out_stride = shape_.activation_units(shape_.query_width());
  out.out = static_cast<Unit*>(job.to) + first * out.out_stride +
            shape_.activation_units(head * group * shape_.head_size);
  out.pool = step.pool;
  out.blocks = step.blocks + tile.blocks_at;
  out.pages = tile.pages;
  out.keys_at = run_at(job.layer, 0) + run;
  out.values_at = run_at(job.layer, 1) + run;
  out.first_row = tile.page_row;
  out.rows = tile.rows;
  out.window = layers_[job.layer].window;
  out.segment = part.segment;
  out.partial = scratch.partial.data() + part.partial_at;
  return out;
}

// Units from the start of a page to the K runs (0) or the V runs (1) of a layer.
size_t Decoder::run_at(int layer, int which) const {
  return (static_cast<size_t>(layer) * 2 + which) * shape_.kv_heads * shape_.head_units();
}

void Decoder::gate(const Job& job, int rows) {
  const Matrix& matrix = layers_[job.layer].gate_up;
  const int panels = shape_.gate_panels();
  const size_t stride = shape_.activation_units(shape_.ffn), piece = shape_.activation_units(panels * kPanel / 2);
  each_panel(job, matrix, panels, rows, [&](int panel, int first, int count) {
    alignas(64) float both[kMaxGatePanels * kRowsPerProduct * kPanel];
    for (int p = 0; p < panels; p++) product(matrix, panel + p, job.from, first, count, both + p * count * kPanel);
    kernels_.gate(both, count, static_cast<Unit*>(job.to) + first * stride + panel / panels * piece, stride);
  });
}

void Decoder::head(const Job& job, int rows) {
  auto* logits = static_cast<float*>(job.to);
  multiply(job, head_, rows, [&](int row, int column, int columns, const float* from) {
    std::copy_n(from, columns, logits + static_cast<size_t>(row) * shape_.vocab + column);
  });
}

void Decoder::add(const Job& job, const Matrix& matrix, int rows) {
  auto* hidden = static_cast<float*>(job.to);
  multiply(job, matrix, rows, [&](int row, int column, int columns, const float* from) {
    float* to = hidden + static_cast<size_t>(row) * shape_.hidden + column;
    for (int c = 0; c < columns; c++) to[c] += from[c];
  });
}

// work(panel, first row, rows) for every `together`th panel and every block of rows.
template <class Work>
void Decoder::each_panel(const Job& job, const Matrix& matrix, int together, int rows, const Work& work) {
  const int panels = matrix.panel_count() / together, blocks = (rows + kRowsPerProduct - 1) / kRowsPerProduct;
  const int items = panel_items(matrix, panels, rows, crew_.threads());
  dispatch(job, blocks * items, [&](int item) {
    const int first = item / items * kRowsPerProduct, count = std::min(rows - first, kRowsPerProduct);
    const int end = (item % items + 1) * panels / items;
    for (int panel = item % items * panels / items; panel < end; panel++) work(panel * together, first, count);
  });
}

// What the job reads [rows][inputs] x matrix; store(row, column, columns, values) is called for each row of each panel.
template <class Store>
void Decoder::multiply(const Job& job, const Matrix& matrix, int rows, const Store& store) {
  each_panel(job, matrix, 1, rows, [&](int panel, int first, int count) {
    alignas(64) float out[kRowsPerProduct * kPanel];
    product(matrix, panel, job.from, first, count, out);
    const int columns = std::min(kPanel, matrix.outputs - panel * kPanel);
    for (int r = 0; r < count; r++) store(first + r, panel * kPanel, columns, out + r * kPanel);
  });
}

// out [rows][32] = rows of a from `first` on x one panel
void Decoder::product(const Matrix& matrix, int panel, const void* a, int first, int rows, float* out) const {
  const size_t stride = static_cast<size_t>(matrix.steps) * (shape_.is_grouped() ? kGroupUnits : 1);
  const Matrix::Panel& b = matrix.panels[panel];
  kernels_.product[b.kind](static_cast<const Unit*>(a) + first * stride, stride, rows, b.start, matrix.steps, out);
}

}  // namespace tenuto
