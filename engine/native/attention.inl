// Attention over pages in position order with online softmax (Milakov and Gimelshein, 2018).
// Needs lanes.inl, and kWide: the vectors per query that are kept in registers.
//
// Keys are taken 64 at a time, four pages, and merged 256 at a time, a segment, by log-sum-exp. A query's arithmetic
// depends on its position alone: not on which queries share its tile or its group, nor on who walks which segment. A
// block or a segment of which a query sees nothing leaves no trace in its results, so it may be walked or left out.

constexpr int kBlock = 4;    // pages per softmax update
constexpr int kSpan = 16;    // queries that walk the pages together
constexpr int kGroup = 4;    // queries per register block
constexpr int kVectors = kBlock * kPage / kLanes;

// Scores of keys first, first + 1, ... of which those before `begin` and those after `last` are minus infinity.
TENUTO_INLINE Vec visible(Vec score, int first, int begin, int last) {
  alignas(64) static const float kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec hidden = splat(-__builtin_inff());
  score = load(kLane) <= splat(static_cast<float>(last - first)) ? score : hidden;
  return load(kLane) >= splat(static_cast<float>(begin - first)) ? score : hidden;
}

// Queries on their walk over one segment.
struct Span {
  alignas(64) Unit query[kSpan][kMaxHeadSize];
  alignas(64) float mixed[kSpan][kMaxHeadSize];  // weighted values so far, relative to `best`
  Vec weight[kSpan];                             // sums of weights so far, per lane
  float best[kSpan];                             // greatest score so far
  int begin[kSpan];                              // position: the first key that it sees
  int last[kSpan];                               // and the last
};

// Four pages of one head. Those after the end repeat the last one, to be masked.
struct Block {
  const Unit* keys[kBlock];
  const Unit* values[kBlock];
  int first;  // page number of the first
  int pages;  // how many there really are
};

// score [Queries][64 keys]
template <class Kind, int Queries, bool Ahead>
TENUTO_INLINE void score_keys(const Span& span, int at, const Block& block, const Block& next, int d,
                              Vec (&score)[Queries][kVectors]) {
  for (int v = 0; v < kVectors; v += kWide) {
    const Unit* keys[kWide];
    for (int w = 0; w < kWide; w++) keys[w] = block.keys[(v + w) * kLanes / kPage] + (v + w) * kLanes % kPage;
    Vec sum[Queries][kWide] = {};
    for (int k = 0; k < d / Kind::kUnit; k++) {
      IVec key[kWide];
      for (int w = 0; w < kWide; w++) key[w] = load(keys[w] + k * kPage);
      if (Ahead && v == 0)
        for (int p = 0; p < kBlock; p++) __builtin_prefetch(next.keys[p] + k * kPage);
      for (int q = 0; q < Queries; q++) {
        const IVec x = splat(span.query[at + q][k]);
        for (int w = 0; w < kWide; w++) sum[q][w] = Kind::mac(sum[q][w], x, key[w]);
      }
    }
    for (int q = 0; q < Queries; q++)
      for (int w = 0; w < kWide; w++) score[q][v + w] = sum[q][w];
  }
}

// Scales and masks the scores of one query and turns them into weights; earlier results are scaled to the new maximum.
template <class Kind>
TENUTO_INLINE void weigh(Span& span, int q, const Block& block, int d, float scale, Vec (&score)[kVectors],
                         typename Kind::Element* weights) {
  const int first = block.first * kPage;
  const bool masked = span.last[q] < first + kBlock * kPage - 1 || span.begin[q] > first;
  Vec top = splat(-__builtin_inff());
  for (int v = 0; v < kVectors; v++) {
    score[v] *= scale;
    if (masked) score[v] = visible(score[v], first + v * kLanes, span.begin[q], span.last[q]);
    top = greater(top, score[v]);
  }
  const float best = highest(top);
  if (best == -__builtin_inff()) {
    for (int v = 0; v < kVectors; v++) Kind::store(weights + v * kLanes, Vec{});
    return;
  }
  if (best > span.best[q]) {
    const Vec fade = exponential(splat(span.best[q] - best));
    span.best[q] = best;
    span.weight[q] *= fade;
    for (int i = 0; i < d; i += kLanes) store(span.mixed[q] + i, load(span.mixed[q] + i) * fade);
  }
  Vec sum{};
  for (int v = 0; v < kVectors; v++) {
    score[v] = exponential(score[v] - span.best[q]);
    Kind::store(weights + v * kLanes, score[v]);
    sum += score[v];
  }
  span.weight[q] += sum;
}

// mixed [Queries][Wide vectors] += weights [Queries][64 keys] x values [64 keys][Wide vectors], from `dim` on
template <class Kind, int Queries, int Wide, bool Ahead>
TENUTO_INLINE void mix_values(Span& span, int at, const Block& block, const Block& next, int d, int dim,
                              const Unit (*weights)[kBlock * kPage]) {
  constexpr int steps = kPage / Kind::kUnit;
  Vec sum[Queries][Wide];
  for (int q = 0; q < Queries; q++)
    for (int w = 0; w < Wide; w++) sum[q][w] = load(span.mixed[at + q] + dim + kLanes * w);
  for (int p = 0; p < block.pages; p++) {
    const Unit* values = block.values[p] + dim;
    const Unit* after = next.values[p] + dim;
    for (int k = 0; k < steps; k++, values += d, after += d) {
      if (Ahead)
        for (int w = 0; w < Wide; w++) __builtin_prefetch(after + kLanes * w);
      IVec value[Wide];
      for (int w = 0; w < Wide; w++) value[w] = load(values + kLanes * w);
      for (int q = 0; q < Queries; q++) {
        const IVec x = splat(weights[q][p * steps + k]);
        for (int w = 0; w < Wide; w++) sum[q][w] = Kind::mac(sum[q][w], x, value[w]);
      }
    }
  }
  for (int q = 0; q < Queries; q++)
    for (int w = 0; w < Wide; w++) store(span.mixed[at + q] + dim + kLanes * w, sum[q][w]);
}

template <class Kind, int Queries, bool Ahead>
void attend_group(Span& span, int at, const Block& block, const Block& next, int d, float scale) {
  Vec score[Queries][kVectors];
  alignas(64) Unit weights[Queries][kBlock * kPage];
  score_keys<Kind, Queries, Ahead>(span, at, block, next, d, score);
  for (int q = 0; q < Queries; q++)
    weigh<Kind>(span, at + q, block, d, scale, score[q],
                reinterpret_cast<typename Kind::Element*>(weights[q]));
  int dim = 0;
  for (; dim + kLanes * kWide <= d; dim += kLanes * kWide)
    mix_values<Kind, Queries, kWide, Ahead>(span, at, block, next, d, dim, weights);
  for (; dim < d; dim += kLanes) mix_values<Kind, Queries, 1, Ahead>(span, at, block, next, d, dim, weights);
}

static inline Block block_of(const Attending& item, size_t page_units, int first) {
  Block block;
  block.first = first;
  block.pages = item.pages - first < kBlock ? item.pages - first : kBlock;
  for (int p = 0; p < kBlock; p++) {
    const int page = first + (p < block.pages ? p : block.pages - 1);
    const Unit* start = item.pool + static_cast<size_t>(item.blocks[page]) * page_units;
    block.keys[p] = start + item.keys_at;
    block.values[p] = start + item.values_at;
  }
  return block;
}

// Query n of a tile is member n % group of row n / group.
struct Place {
  int row, member;
  Place(const Shape& shape, int query)
      : row(query / (shape.heads / shape.kv_heads)), member(query % (shape.heads / shape.kv_heads)) {}
};

template <class Kind>
void read_queries(const Shape& shape, const Attending& item, int first, int queries, Span& span) {
  const int d = shape.head_size;
  for (int q = 0; q < queries; q++) {
    const Place place(shape, first + q);
    const float* from = item.query + place.row * item.query_stride + place.member * d;
    auto* to = reinterpret_cast<typename Kind::Element*>(span.query[q]);
    for (int i = 0; i < d; i += kLanes) Kind::store(to + i, load(from + i));
    span.last[q] = (item.pages - 1) * kPage + item.first_row + place.row;
    span.begin[q] = item.window && span.last[q] >= item.window ? span.last[q] - item.window + 1 : 0;
  }
}

// The group that begins at query `at`. `Ahead`: the block after this one is asked of memory meanwhile.
template <class Kind, bool Ahead>
TENUTO_INLINE void attend_some(Span& span, int at, int queries, const Block& block, const Block& next, int d,
                               float scale) {
  switch (queries - at) {
    case 1: return attend_group<Kind, 1, Ahead>(span, at, block, next, d, scale);
    case 2: return attend_group<Kind, 2, Ahead>(span, at, block, next, d, scale);
    case 3: return attend_group<Kind, 3, Ahead>(span, at, block, next, d, scale);
    default: return attend_group<Kind, kGroup, Ahead>(span, at, block, next, d, scale);
  }
}

template <class Kind>
void walk_segment(const Shape& shape, const Attending& item, int segment, int queries, Span& span) {
  const int d = shape.head_size;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(d));
  for (int q = 0; q < queries; q++) {
    for (int i = 0; i < d; i += kLanes) store(span.mixed[q] + i, Vec{});
    span.weight[q] = Vec{};
    span.best[q] = -__builtin_inff();
  }
  const int end = item.pages < (segment + 1) * kSegment ? item.pages : (segment + 1) * kSegment;
  int page = segment * kSegment;
  while ((page + kBlock) * kPage <= span.begin[0]) page += kBlock;  // the first query sees the earliest keys
  Block next = block_of(item, shape.page_units(), page);
  for (; page < end; page += kBlock) {
    const Block block = next;
    if (page + kBlock < item.pages) next = block_of(item, shape.page_units(), page + kBlock);
    attend_some<Kind, true>(span, 0, queries, block, next, d, scale);
    for (int at = kGroup; at < queries; at += kGroup)
      attend_some<Kind, false>(span, at, queries, block, next, d, scale);
  }
}

static inline void write_partial(const Span& span, int q, int d, float* partial) {
  for (int i = 0; i < d; i += kLanes) store(partial + i, load(span.mixed[q] + i));
  partial[d] = span.best[q];
  partial[d + 1] = total(span.weight[q]);
}

// into = into merged with next, both partial results.
static inline void fold(float* into, const float* next, int d) {
  if (next[d] == -__builtin_inff()) return;
  if (into[d] == -__builtin_inff()) {
    __builtin_memcpy(into, next, (d + 2) * sizeof(float));
    return;
  }
  const float best = into[d] > next[d] ? into[d] : next[d];
  const Vec old_fade = exponential(splat(into[d] - best)), new_fade = exponential(splat(next[d] - best));
  for (int i = 0; i < d; i += kLanes) store(into + i, load(into + i) * old_fade + load(next + i) * new_fade);
  into[d] = best;
  into[d + 1] = into[d + 1] * old_fade[0] + next[d + 1] * new_fade[0];
}

template <class Act>
void write_out(const Shape& shape, const Attending& item, int query, const float* whole) {
  const int d = shape.head_size;
  const Place place(shape, query);
  const Vec share = splat(1.0f / whole[d + 1]);
  put_all<Act>(item.out + place.row * item.out_stride + place.member * Act::units(d), d,
               [&](int i) { return load(whole + i) * share; });
}

template <class Kind, class Act>
void attend_span(const Shape& shape, const Attending& item, int first, int queries) {
  const int d = shape.head_size, segments = segment_count(item.pages);
  Span span;
  read_queries<Kind>(shape, item, first, queries, span);
  if (item.segment >= 0) {
    walk_segment<Kind>(shape, item, item.segment, queries, span);
    for (int q = 0; q < queries; q++)
      write_partial(span, q, d, item.partial + ((first + q) * segments + item.segment) * partial_floats(shape));
    return;
  }
  float whole[kSpan][kMaxHeadSize + 2], next[kMaxHeadSize + 2];
  const int from = span.begin[0] / (kSegment * kPage);
  for (int segment = from; segment < segments; segment++) {
    walk_segment<Kind>(shape, item, segment, queries, span);
    for (int q = 0; q < queries; q++) {
      write_partial(span, q, d, segment > from ? next : whole[q]);
      if (segment > from) fold(whole[q], next, d);
    }
  }
  for (int q = 0; q < queries; q++) write_out<Act>(shape, item, first + q, whole[q]);
}

template <class Kind, class Act>
void attend(const Shape& shape, const Attending& item) {
  const int queries = item.rows * (shape.heads / shape.kv_heads);
  for (int first = 0; first < queries; first += kSpan)
    attend_span<Kind, Act>(shape, item, first, queries - first < kSpan ? queries - first : kSpan);
}

template <class Act>
void merge(const Shape& shape, const Attending& item) {
  const int queries = item.rows * (shape.heads / shape.kv_heads), segments = segment_count(item.pages);
  for (int q = 0; q < queries; q++) {
    float* whole = item.partial + q * segments * partial_floats(shape);
    for (int s = 1; s < segments; s++) fold(whole, whole + s * partial_floats(shape), shape.head_size);
    write_out<Act>(shape, item, q, whole);
  }
}
