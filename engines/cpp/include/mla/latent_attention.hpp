// Attention of a few new tokens over latent rows, in one pass of the cache: what a graph of products reads twice.
//
// Rows go in blocks that stay in the second-level cache: scores of all heads, the softmax so far, the mix of the same
// rows. Pieces of a sequence's rows are independent and joined at the end by their maxima and sums. How rows fall into
// pieces follows from the sequence's own length alone, so an answer depends neither on the threads nor on the batch.
//
// Written for the compiler's vectors (GCC and Clang), as wide as what it compiles for: -march=native.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mla {

/// One call. A row is [latent (`latent` numbers) | rotary key]; a query is as long and holds the softmax scale.
struct LatentAttention {
  const float* queries;         // [batch, tokens * heads, row]
  const float* past;            // [batch, rows, row]; rows from a sequence's length on are never read
  const std::int64_t* lengths;  // [batch], each 0 to `rows`
  const float* fresh;           // [batch, tokens, row]: token t sees those up to t
  float* mixed;                 // [batch, tokens * heads, latent]
  std::ptrdiff_t batch, tokens, heads, rows, row, latent;
};

namespace attention {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 16, kMixHeads = 4, kMixVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 8, kMixHeads = 4, kMixVectors = 2;
#else
constexpr int kLanes = 4, kRows = 8, kMixHeads = 4, kMixVectors = 4;
#endif
constexpr std::ptrdiff_t kBlock = 64;   // rows: of 576 numbers, 147 kB
constexpr std::ptrdiff_t kPiece = 512;  // rows of a piece at least
constexpr std::ptrdiff_t kPieces = 64;  // of a sequence at most
constexpr std::ptrdiff_t kLine = 64;    // bytes that a prefetch brings

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
using Integers = std::int32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline Vector load(const float* from) {  // wherever it lies: one unaligned load
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }
template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To same;
  std::memcpy(&same, &value, sizeof same);
  return same;
}

/// e^x for x <= 0, to a unit in the last place; 0 below -87 and for -inf.
inline Vector exponential(Vector x) {
  constexpr float kLeast = -87.0f, kRounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
  const Vector zero{}, bounded = x > kLeast ? x : zero + kLeast;
  const Vector shifted = bounded * 1.44269504f + kRounder, n = shifted - kRounder;
  const Vector r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Vector y = r * (1.0f / 5040) + 1.0f / 720;
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + term;
  const Integers power = (bits<Integers>(shifted) - 0x4B400000) << 23;  // the rounder's own bits off
  const Vector scaled = bits<Vector>(bits<Integers>(y) + power);
  return x > kLeast ? scaled : zero;
}

/// What pieces of one call need: places in one scratch array of floats.
class Plan {
 public:
  explicit Plan(const LatentAttention& call)
      : call_(call),
        queries_(call.tokens * call.heads),
        padded_((queries_ + kLanes - 1) / kLanes * kLanes),
        part_(padded_ * (call.latent + 2)),
        most_(1) {
    for (std::ptrdiff_t b = 0; b < call.batch; ++b) most_ = std::max(most_, count(call.lengths[b]));
  }

  /// Pieces that `rows` rows of past fall into: one at least, which has the new rows too.
  static std::ptrdiff_t count(std::ptrdiff_t rows) {
    return std::min(std::max((rows + kPiece - 1) / kPiece, std::ptrdiff_t{1}), kPieces);
  }
  /// Rows of each but the last, a multiple of the rows that go together.
  static std::ptrdiff_t size(std::ptrdiff_t rows) {
    const std::ptrdiff_t even = (rows + count(rows) - 1) / count(rows);
    return (even + kRows - 1) / kRows * kRows;
  }

  std::ptrdiff_t pieces() const { return call_.batch * most_; }  // some of shorter sequences are empty
  std::ptrdiff_t heads_in_all() const { return call_.batch * queries_; }
  std::size_t floats() const {
    return static_cast<std::size_t>(call_.batch * padded_ * call_.row + pieces() * part_);
  }

  /// Queries of a sequence, [padded / lanes, row, lanes]: what scores read is contiguous.
  void turn(std::ptrdiff_t b, float* scratch) const {
    float* to = turned(b, scratch);
    const float* from = call_.queries + b * queries_ * call_.row;
    for (std::ptrdiff_t first = 0; first < padded_; first += kLanes)
      for (std::ptrdiff_t k = 0; k < call_.row; ++k)
        for (std::ptrdiff_t i = first; i < first + kLanes; ++i) *to++ = i < queries_ ? from[i * call_.row + k] : 0.0f;
  }

  void piece(std::ptrdiff_t index, float* scratch) const {
    switch (call_.row) {  // the usual widths as constants: addresses of a tile's rows then need no registers
      case 576: return fill<576>(index, scratch);
      case 288: return fill<288>(index, scratch);
      default: return fill<0>(index, scratch);
    }
  }

  /// Joins the pieces of one query of one sequence.
  void join(std::ptrdiff_t index, float* scratch) const {
    const std::ptrdiff_t b = index / queries_, query = index % queries_, pieces = count(call_.lengths[b]);
    const float* parts = part(b, 0, scratch);
    float top = -INFINITY, sum = 0.0f, *to = call_.mixed + index * call_.latent;
    for (std::ptrdiff_t p = 0; p < pieces; ++p) top = std::max(top, parts[p * part_ + query]);
    std::fill(to, to + call_.latent, 0.0f);
    for (std::ptrdiff_t p = 0; p < pieces; ++p) {
      const float *own = parts + p * part_, *mix = own + 2 * padded_ + query * call_.latent;
      const float weight = std::exp(own[query] - top);
      sum += weight * own[padded_ + query];
      for (std::ptrdiff_t d = 0; d < call_.latent; ++d) to[d] += weight * mix[d];
    }
    for (std::ptrdiff_t d = 0; d < call_.latent; ++d) to[d] /= sum;
  }

 private:
  float* turned(std::ptrdiff_t b, float* scratch) const { return scratch + b * padded_ * call_.row; }
  /// A piece's greatest scores [padded], its sums [padded] and its mix [padded, latent].
  float* part(std::ptrdiff_t b, std::ptrdiff_t p, float* scratch) const {
    return scratch + call_.batch * padded_ * call_.row + (b * most_ + p) * part_;
  }

  template <int kRow>
  void fill(std::ptrdiff_t index, float* scratch) const {
    const std::ptrdiff_t b = index / most_, p = index % most_, length = call_.lengths[b];
    if (p >= count(length)) return;
    float* to = part(b, p, scratch);
    std::fill(to, to + padded_, -INFINITY);
    std::fill(to + padded_, to + part_, 0.0f);
    if (p == 0) walk<kRow>(turned(b, scratch), call_.fresh + b * call_.tokens * call_.row, call_.tokens, to, true);
    const std::ptrdiff_t first = p * size(length), end = std::min(length, first + size(length));
    const float* past = call_.past + (b * call_.rows + first) * call_.row;
    if (first < end) walk<kRow>(turned(b, scratch), past, end - first, to, false);
  }

  template <int kRow>
  void walk(const float* queries, const float* rows, std::ptrdiff_t count, float* to, bool causal) const {
    const std::ptrdiff_t row = kRow ? kRow : call_.row;
    alignas(64) float scores[kBlock * kLanes];
    for (std::ptrdiff_t at = 0; at < count; at += kBlock) {
      const std::ptrdiff_t n = std::min(kBlock, count - at);
      const float* block = rows + at * row;
      Ahead ahead(block + n * row, rows + std::min(count, at + 2 * kBlock) * row);
      for (std::ptrdiff_t first = 0; first < padded_; first += kLanes) {
        score<kRow>(queries + first * row, block, n, row, scores);
        if (causal) hide(scores, at, n, first);
        float* mix = to + 2 * padded_ + first * call_.latent;
        weigh(scores, n, to + first, to + padded_ + first, mix, std::min(queries_ - first, std::ptrdiff_t{kLanes}));
        add(scores, block, n, row, mix, std::min(queries_ - first, std::ptrdiff_t{kLanes}), ahead);
      }
    }
  }

  /// Rows that come next, brought nearer a line at a time while others are mixed.
  class Ahead {
   public:
    Ahead(const float* from, const float* end)
        : at_(reinterpret_cast<const char*>(from)), end_(reinterpret_cast<const char*>(end)) {}
    void step() {
      if (at_ >= end_) return;
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
    }

   private:
    const char *at_, *end_;
  };

  /// [n, lanes] scores of some queries, [row, lanes].
  template <int kRow>
  static void score(const float* queries, const float* rows, std::ptrdiff_t n, std::ptrdiff_t row, float* to) {
    constexpr int kTogether = kRow ? kRows : 8;
    std::ptrdiff_t r = 0;
    for (; r + kTogether <= n; r += kTogether) tile<kRow, kTogether>(queries, rows + r * row, row, to + r * kLanes);
    for (; r < n; ++r) tile<kRow, 1>(queries, rows + r * row, row, to + r * kLanes);
  }
  template <int kRow, int kTogether>
  static void tile(const float* queries, const float* rows, std::ptrdiff_t width, float* to) {
    const std::ptrdiff_t row = kRow ? kRow : width;
    Vector sums[kTogether] = {};
    for (std::ptrdiff_t k = 0; k < row; ++k) {
      const Vector query = load(queries + k * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kTogether; ++i) sums[i] += query * rows[i * row + k];
    }
    for (int i = 0; i < kTogether; ++i) store(to + i * kLanes, sums[i]);
  }

  /// New rows after a query's own token are not for it.
  void hide(float* scores, std::ptrdiff_t at, std::ptrdiff_t n, std::ptrdiff_t first) const {
    for (std::ptrdiff_t r = 0; r < n; ++r)
      for (std::ptrdiff_t i = 0; i < kLanes; ++i)
        if ((first + i) / call_.heads < at + r) scores[r * kLanes + i] = -INFINITY;
  }

  /// Scores into weights by the greatest so far; what was mixed by an older one shrinks.
  void weigh(float* scores, std::ptrdiff_t n, float* tops, float* sums, float* mix, std::ptrdiff_t live) const {
    const Vector before = load(tops);
    Vector top = before;
    for (std::ptrdiff_t r = 0; r < n; ++r) {
      const Vector score = load(scores + r * kLanes);
      top = score > top ? score : top;
    }
    const Vector shrink = exponential(before - top);
    Vector sum = load(sums) * shrink;
    for (std::ptrdiff_t r = 0; r < n; ++r) {
      const Vector weight = exponential(load(scores + r * kLanes) - top);
      store(scores + r * kLanes, weight);
      sum += weight;
    }
    store(tops, top);
    store(sums, sum);
    for (std::ptrdiff_t i = 0; i < live; ++i)
      if (shrink[i] != 1.0f)
        for (std::ptrdiff_t d = 0; d < call_.latent; ++d) mix[i * call_.latent + d] *= shrink[i];
  }

  /// mix [live, latent] += weights^T [live, n] @ rows [n, latent].
  void add(const float* weights, const float* rows, std::ptrdiff_t n, std::ptrdiff_t row, float* mix,
           std::ptrdiff_t live, Ahead& ahead) const {
    const std::ptrdiff_t whole = call_.latent / (kMixVectors * kLanes) * (kMixVectors * kLanes);
    std::ptrdiff_t head = 0;
    for (; head + kMixHeads <= live; head += kMixHeads)
      add_heads<kMixHeads>(weights + head, rows, n, row, mix + head * call_.latent, whole, ahead);
    for (; head < live; ++head) add_heads<1>(weights + head, rows, n, row, mix + head * call_.latent, whole, ahead);
  }
  template <int kHeads>
  void add_heads(const float* weights, const float* rows, std::ptrdiff_t n, std::ptrdiff_t row, float* mix,
                 std::ptrdiff_t whole, Ahead& ahead) const {
    const std::ptrdiff_t latent = call_.latent;
    for (std::ptrdiff_t d = 0; d < whole; d += kMixVectors * kLanes) {
      Vector sums[kHeads][kMixVectors];
      for (int i = 0; i < kHeads; ++i)
        for (int j = 0; j < kMixVectors; ++j) sums[i][j] = load(mix + i * latent + d + j * kLanes);
      for (std::ptrdiff_t r = 0; r < n; ++r) {
        ahead.step();
        Vector part[kMixVectors];
        for (int j = 0; j < kMixVectors; ++j) part[j] = load(rows + r * row + d + j * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kHeads; ++i)
          for (int j = 0; j < kMixVectors; ++j) sums[i][j] += part[j] * weights[r * kLanes + i];
      }
      for (int i = 0; i < kHeads; ++i)
        for (int j = 0; j < kMixVectors; ++j) store(mix + i * latent + d + j * kLanes, sums[i][j]);
    }
    for (int i = 0; i < kHeads; ++i)
      for (std::ptrdiff_t r = 0; r < n; ++r)
        for (std::ptrdiff_t d = whole; d < latent; ++d)
          mix[i * latent + d] += rows[r * row + d] * weights[r * kLanes + i];
  }

  LatentAttention call_;
  std::ptrdiff_t queries_, padded_, part_, most_;
};

}  // namespace attention

/// Runs a call: `parallel(n, work)` does work(0) to work(n - 1) in any order, on as many threads as it likes, and
/// `allocate(n)` gives n floats until the end.
template <class Parallel, class Allocate>
void latent_attention(const LatentAttention& call, Parallel&& parallel, Allocate&& allocate) {
  const attention::Plan plan(call);
  float* scratch = allocate(plan.floats());
  parallel(call.batch, [&](std::ptrdiff_t b) { plan.turn(b, scratch); });
  parallel(plan.pieces(), [&](std::ptrdiff_t index) { plan.piece(index, scratch); });
  parallel(plan.heads_in_all(), [&](std::ptrdiff_t index) { plan.join(index, scratch); });
}

}  // namespace mla
