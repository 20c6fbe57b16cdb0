#include "scratch.h"

#include <algorithm>

namespace tenuto {
namespace {

constexpr int kItemsPerThread = 4;  // of attention, or its segments are shared out too

template <class Buffer>
void grow(Buffer& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

bool is_split(int items, int threads) { return items < kItemsPerThread * threads; }

// The partial results of one tile for one key head.
size_t item_floats(const Shape& shape, int rows, int segments) {
  return static_cast<size_t>(rows) * (shape.heads / shape.kv_heads) * segments * partial_floats(shape);
}

}  // namespace

void Scratch::reserve(const Shape& shape, int rows) {
  const size_t count = rows;
  grow(hidden, count * shape.hidden);
  grow(qkv, count * shape.qkv_width());
  grow(narrow, count * shape.activation_units(std::max(shape.hidden, shape.query_width())));
  grow(gated, count * shape.activation_units(shape.ffn));
}

void Scratch::reserve_decode(const Shape& shape, int threads, int rows, int pages) {
  reserve(shape, rows);
  const int segments = segment_count(pages);
  int most = 0;  // items that may be split: fewer rows than there is room for may run
  for (int items = shape.kv_heads; items <= rows * shape.kv_heads; items += shape.kv_heads)
    if (is_split(items, threads)) most = items;
  parts.reserve(std::max(rows * shape.kv_heads, most * segments));
  merges.reserve(most);
  grow(partial, most * item_floats(shape, 1, segments));
}

void Scratch::plan(const Shape& shape, int threads, const Step& step) {
  const int items = step.tile_count * shape.kv_heads;
  size_t floats = 0;
  parts.clear();
  merges.clear();
  // Last tiles first: they have the most pages to walk, and the small ones fill the gaps at the end.
  for (int item = items - 1; item >= 0; item--) {
    const Tile& tile = step.tiles[item / shape.kv_heads];
    const int segments = segment_count(tile.pages);
    if (!is_split(items, threads) || segments == 1) {
      parts.push_back({item, -1, 0});
      continue;
    }
    for (int s = 0; s < segments; s++) parts.push_back({item, s, floats});
    merges.push_back({item, -1, floats});
    floats += item_floats(shape, tile.rows, segments);
  }
  grow(partial, floats);
}

void Scratch::record(const Shape& shape, const Step& step) {
  jobs.clear();
  const auto add = [this](JobKind kind, int layer, const void* from, void* to) {
    jobs.push_back({kind, layer, from, to, 0});
  };
  add(JobKind::kEmbed, 0, step.tokens, hidden.data());
  for (int layer = 0; layer < shape.layers; layer++) {
    add(JobKind::kAttentionNorm, layer, hidden.data(), narrow.data());
    add(JobKind::kQkv, layer, narrow.data(), qkv.data());
    add(JobKind::kPlace, layer, qkv.data(), step.pool);
    add(JobKind::kAttend, layer, qkv.data(), narrow.data());
    add(JobKind::kMerge, layer, partial.data(), narrow.data());
    add(JobKind::kOutput, layer, narrow.data(), hidden.data());
    add(JobKind::kFeedNorm, layer, hidden.data(), narrow.data());
    add(JobKind::kGateUp, layer, narrow.data(), gated.data());
    add(JobKind::kDown, layer, gated.data(), hidden.data());
  }
  add(JobKind::kHeadNorm, 0, hidden.data(), narrow.data());
  add(JobKind::kHead, 0, narrow.data(), step.logits);
}

}  // namespace tenuto
