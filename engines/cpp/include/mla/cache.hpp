// The latent cache of some sequences, for every cache form: bound as it lies, new rows written behind, grown by bucket.
#pragma once

#include <algorithm>
#include <numeric>

#include "mla/layout.hpp"
#include "mla/memory.hpp"

namespace mla {

inline constexpr std::int64_t most_slots = 65536, most_rows = std::int64_t{1} << 31;

/// Rows of one sequence outside of any cache, on the host: by block (part * attentions + attention) [count, width].
struct Rows {
  std::int64_t count = 0;
  std::vector<std::vector<char>> blocks;
};

/// `slots` sequences at most, in every attention. Used by one thread at a time.
///
/// append: buffers [slots, capacity, width]; a step of one sequence binds the rows that it has, rounded up to the
/// export's row multiple, a step of several binds their slots whole; the lengths hide what is beyond them. scatter:
/// the same of S_max rows, updated in place. concat: what a step returned is the next step's past, two buffers taking
/// turns. Rows that nobody wrote are zeros: NaN would show.
class LatentCache {
 public:
  /// `rows` are made at first; more come in buckets, `most` in all. InputError where they cannot be had.
  LatentCache(CacheLayout layout, std::shared_ptr<Memory> memory, std::int64_t slots, std::int64_t rows,
              std::int64_t most, std::int64_t bucket)
      : layout_(std::move(layout)),
        memory_(std::move(memory)),
        slots_(static_cast<std::size_t>(
            checked("batch", slots, most_slots, "a slot for each sequence that is to run beside the others"))),
        most_(checked("most", most, most_rows, "rows of a sequence")),
        bucket_(checked("bucket", bucket, most_rows, "rows that a cache grows by")),
        lengths_(slots_, 0),
        written_(slots_, 0),
        active_(slots_) {
    checked("rows", rows, most, "the most that a sequence may have in this cache");
    blocks_.resize(layout_.blocks());
    fresh_.resize(layout_.form == CacheForm::scatter ? 0 : layout_.blocks());
    if (layout_.form == CacheForm::concat) {
      concat_rows_ = 1;  // an empty past is one dummy row
      for (std::size_t i = 0; i < blocks_.size(); ++i) blocks_[i] = block(i, 1);
    } else {
      grow(layout_.form == CacheForm::scatter ? most : rounded(rows));
    }
  }

  LatentCache(LatentCache&&) = default;
  LatentCache& operator=(LatentCache&&) = default;

  const CacheLayout& layout() const { return layout_; }
  std::size_t slots() const { return slots_; }
  std::size_t active() const { return active_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  std::int64_t most() const { return most_; }
  /// Rows of a sequence that fit without growing.
  std::int64_t capacity() const {
    if (layout_.form == CacheForm::concat) return concat_rows_;
    return rows_of_.empty() ? 0 : *std::min_element(rows_of_.begin(), rows_of_.end());
  }
  /// Bytes of all buffers, those that a step writes its new rows to included.
  std::size_t nbytes() const {
    std::size_t sum = 0;
    for (const auto* group : {&blocks_, &fresh_})
      for (const Buffer& buffer : *group) sum += buffer.size();
    return sum;
  }

  /// Make room for `rows` of every sequence. If memory runs out the rows that there are stay as they were.
  void reserve(std::int64_t rows) {
    if (rows > most_)
      throw InputError(text(rows, " rows are needed; this cache takes up to ", most_,
                            " (max_context, or the engine's "
                            "limit); use shorter sequences or export with a larger --max-context"));
    if (layout_.form == CacheForm::append && (rows > capacity() || uneven())) {
      const std::int64_t enough = std::max(rows, capacity() + capacity() / 8);  // so that copies stay few
      grow(rows > capacity() ? rounded(enough) : *std::max_element(rows_of_.begin(), rows_of_.end()));
    }
  }

  /// A further sequence, empty; its slot.
  std::size_t add() {
    fed_ = {};
    if (active_ == slots_)
      throw InputError(text("all ", slots_, " slots are taken; remove a sequence, or make more slots"));
    if (layout_.form == CacheForm::concat && lengths_[0] != 0) refuse_ragged("add");
    return active_++;
  }
  /// Forget a sequence: the last one moves into its slot, which is returned as the place that it left.
  std::size_t remove(std::size_t slot) {
    fed_ = {};
    require(slot);
    if (active_ == 1) throw InputError("one sequence is left; expected another to remain; truncate it to 0 instead");
    const std::size_t last = active_ - 1;
    if (slot != last) {
      if (layout_.form != CacheForm::concat) clear(slot, 0);
      copy_slot(last, slot);
    }
    if (layout_.form != CacheForm::concat) clear(last, 0);
    lengths_[last] = 0;
    active_ = last;
    return last;
  }
  /// A copy of a sequence in a slot of its own: two answers to one prompt.
  std::size_t fork(std::size_t slot) {
    require(slot);
    if (layout_.form == CacheForm::concat) refuse_ragged("fork");
    const std::size_t copy = add();
    copy_slot(slot, copy);
    return copy;
  }
  /// Keep the first `length` rows of a sequence; those dropped become zeros.
  void truncate(std::size_t slot, std::int64_t length) {
    fed_ = {};
    require(slot);
    if (length < 0 || length > lengths_[slot])
      throw InputError(text("truncate to ", length, " rows; expected 0 to ", lengths_[slot], ", those that there are"));
    if (layout_.form != CacheForm::concat) {
      clear(slot, length);
    } else if (active_ == 1) {
      concat_rows_ = std::max<std::int64_t>(length, 1);
    } else if (length != lengths_[slot]) {
      refuse_ragged("truncate");
    }
    lengths_[slot] = length;
  }
  /// Forget everything: every slot active and empty.
  void clear() {
    fed_ = {};
    active_ = slots_;
    for (std::size_t slot = 0; slot < slots_; ++slot) {
      if (layout_.form != CacheForm::concat) clear(slot, 0);
      lengths_[slot] = 0;
    }
    if (layout_.form != CacheForm::concat) return;
    concat_rows_ = 1;
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      memory_->zero(blocks_[i].data(), std::min(blocks_[i].size(), bytes(i, 1)));
  }

  /// Rows `begin` to `end` of a sequence, copied to the host.
  Rows read(std::size_t slot, std::int64_t begin, std::int64_t end) const {
    require(slot);
    if (begin < 0 || end < begin || end > lengths_[slot])
      throw InputError(text("rows ", begin, " to ", end, "; expected some of the ", lengths_[slot], " that there are"));
    Rows rows;
    rows.count = end - begin;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      rows.blocks.emplace_back(static_cast<std::size_t>(rows.count) * layout_.part_of(i).row_bytes());
      if (rows.count) memory_->read(rows.blocks[i].data(), row(i, slot, begin), rows.blocks[i].size());
    }
    return rows;
  }
  /// Write rows behind a sequence: what another cache of the same export was read for.
  void append(std::size_t slot, const Rows& rows) {
    fed_ = {};
    require(slot);
    if (layout_.form == CacheForm::concat && active_ > 1) refuse_ragged("append");
    if (rows.count < 0 || rows.blocks.size() != blocks_.size())
      throw InputError(text(rows.blocks.size(), " blocks of ", rows.count, " rows; expected ", blocks_.size(),
                            ", one "
                            "for each part and attention"));
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      if (rows.blocks[i].size() != static_cast<std::size_t>(rows.count) * layout_.part_of(i).row_bytes())
        throw InputError(text("block ", i, " has ", rows.blocks[i].size(), " bytes; expected ", rows.count, " rows of ",
                              layout_.part_of(i).row_bytes()));
    if (rows.count == 0) return;
    const std::int64_t length = lengths_[slot] + rows.count;
    reserve(length);
    if (layout_.form == CacheForm::concat) {
      lengthen(length);
      concat_rows_ = length;
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i)
      memory_->write(row(i, slot, lengths_[slot]), rows.blocks[i].data(), rows.blocks[i].size());
    lengths_[slot] = length;
    written_[slot] = std::max(written_[slot], length);
  }

  /// Bind the past of slots `first` to `first + count`, their lengths, and memory for the rows that T new tokens make.
  void feed(const Ports& ports, std::size_t first, std::size_t count, std::int64_t T, Bindings& inputs,
            Bindings& outputs) {
    if (count == 0 || first + count > active_ || (layout_.form == CacheForm::concat && count != active_))
      throw InputError(text("slots ", first, " to ", first + count, "; expected some of ", active_, ", concat: all"));
    const auto B = static_cast<std::int64_t>(count);
    inputs[ports.lengths] = {&lengths_[first], DType::int64, {B}};
    reserve(*std::max_element(&lengths_[first], &lengths_[first] + count));
    const std::int64_t S = offered(first, count);
    if (layout_.form == CacheForm::concat) lengthen(S + T);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const CachePart& part = layout_.part_of(i);
      Tensor& past = inputs[ports.past[i]];
      if (layout_.form == CacheForm::scatter) {
        past = {row(i, first, 0), part.dtype, {B, 1, most_, part.width}};
        outputs[ports.fresh[i]] = past;  // one address for both: updated in place
      } else {
        past = {row(i, first, 0), part.dtype, {B, S, part.width}};
        const std::int64_t made = layout_.form == CacheForm::append ? T : S + T;
        make_room(i, count, made);
        outputs[ports.fresh[i]] = {fresh_[i].data(), part.dtype, {B, made, part.width}};
      }
    }
    fed_ = {first, count, T};
  }
  /// Keep the first `counts` of the new rows in each slot that `feed` bound; the rest was padding.
  void commit(const std::vector<std::int64_t>& counts) {
    const auto [first, fed, T] = fed_;
    if (fed == 0 || counts.size() != fed)
      throw InputError(text(counts.size(), " counts after a feed of ", fed, " slots; expected one for each, once"));
    std::int64_t longest = 0;
    for (std::size_t b = 0; b < counts.size(); ++b) {
      if (counts[b] < 0 || counts[b] > T || lengths_[first + b] + counts[b] > most_)
        throw InputError(text(listed(counts), " new rows behind ", listed(lengths_), "; expected 0 to ", T,
                              ", and at "
                              "most ",
                              most_, " in all"));
      if (layout_.form == CacheForm::concat && counts[b] != counts[0])
        throw InputError(text("concat keeps one length for all; new tokens ", listed(counts),
                              " differ; export with "
                              "--cache append"));
      longest = std::max(longest, lengths_[first + b] + counts[b]);
    }
    reserve(longest);
    fed_ = {};
    if (layout_.form == CacheForm::append) store(first, counts, T);
    if (layout_.form == CacheForm::concat && counts[0] > 0) take_present(counts[0], T);
    for (std::size_t b = 0; b < counts.size(); ++b) {
      const std::size_t slot = first + b;
      const std::int64_t reached = lengths_[slot] + (layout_.form == CacheForm::scatter ? T : counts[b]);
      lengths_[slot] += counts[b];
      written_[slot] = std::max(written_[slot], std::min(reached, most_));
    }
  }

 private:
  static std::int64_t checked(const char* name, std::int64_t value, std::int64_t high, const char* meaning) {
    if (value < 1 || value > high)
      throw InputError(text(name, " is ", value, "; expected 1 to ", high, ", ", meaning));
    return value;
  }
  /// Whole buckets, and as many rows as let every slot begin where the memory's alignment allows.
  std::int64_t rounded(std::int64_t rows) const {
    std::int64_t up = (rows + bucket_ - 1) / bucket_ * bucket_;
    const std::size_t alignment = memory_->alignment();
    for (const CachePart& part : layout_.parts) {  // steps are powers of two: a multiple of the larger is one of both
      const auto step = static_cast<std::int64_t>(alignment / std::gcd(alignment, part.row_bytes()));
      up = (up + step - 1) / step * step;
    }
    return std::min(up, most_);
  }
  bool uneven() const { return *std::max_element(rows_of_.begin(), rows_of_.end()) != capacity(); }
  std::size_t bytes(std::size_t i, std::int64_t rows) const {
    std::size_t product = slots_;
    for (std::size_t factor : {static_cast<std::size_t>(rows), layout_.part_of(i).row_bytes()})
      if (__builtin_mul_overflow(product, factor, &product))
        throw InputError(text("a cache of ", slots_, " x ", rows, " rows is larger than any memory; lower the batch"));
    return product;
  }
  Buffer block(std::size_t i, std::int64_t rows) const { return Buffer(memory_, bytes(i, rows)); }

  std::int64_t stride(std::size_t i) const { return layout_.form == CacheForm::concat ? concat_rows_ : rows_of_[i]; }
  char* row(std::size_t i, std::size_t slot, std::int64_t row) const {
    const std::size_t before = slot * static_cast<std::size_t>(stride(i)) + static_cast<std::size_t>(row);
    return blocks_[i].data() + before * layout_.part_of(i).row_bytes();
  }
  std::int64_t offered(std::size_t first, std::size_t count) const {
    if (layout_.form == CacheForm::concat) return concat_rows_;
    if (count > 1) return capacity();
    const std::int64_t multiple = layout_.row_multiple;
    return std::max<std::int64_t>(std::min((lengths_[first] + multiple - 1) / multiple * multiple, capacity()), 1);
  }
  void require(std::size_t slot) const {
    if (slot >= active_) throw InputError(text("slot ", slot, "; expected 0 to ", active_ - 1));
  }
  [[noreturn]] static void refuse_ragged(const char* what) {
    throw InputError(text(what, ": the concat form keeps one length for all; export with --cache append"));
  }

  /// Every block with `rows` of each slot, one block at a time, so that no more than one is held twice.
  void grow(std::int64_t rows) {
    rows_of_.resize(blocks_.size(), 0);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (rows_of_[i] >= rows) continue;
      const std::size_t width = layout_.part_of(i).row_bytes();
      Buffer larger = block(i, rows);
      for (std::size_t slot = 0; slot < active_; ++slot)
        if (const auto filled = static_cast<std::size_t>(lengths_[slot]))
          memory_->copy_rows(larger.data() + slot * static_cast<std::size_t>(rows) * width, 0, row(i, slot, 0), 0,
                             filled * width, 1);
      blocks_[i] = std::move(larger);
      rows_of_[i] = rows;
    }
  }
  void clear(std::size_t slot, std::int64_t from) {
    const std::int64_t end = std::max(written_[slot], lengths_[slot]);
    if (end > from)
      for (std::size_t i = 0; i < blocks_.size(); ++i)
        memory_->zero(row(i, slot, from), static_cast<std::size_t>(end - from) * layout_.part_of(i).row_bytes());
    written_[slot] = std::min(written_[slot], from);
  }
  void copy_slot(std::size_t from, std::size_t to) {
    if (const auto filled = static_cast<std::size_t>(lengths_[from]))
      for (std::size_t i = 0; i < blocks_.size(); ++i)
        memory_->copy_rows(row(i, to, 0), 0, row(i, from, 0), 0, filled * layout_.part_of(i).row_bytes(), 1);
    lengths_[to] = written_[to] = lengths_[from];
  }
  void make_room(std::size_t i, std::size_t count, std::int64_t rows) {
    const std::size_t needed = count * static_cast<std::size_t>(rows) * layout_.part_of(i).row_bytes();
    if (fresh_[i].size() >= needed) return;
    const bool grows = layout_.form == CacheForm::concat;
    fresh_[i] = Buffer();  // what it held was kept already
    fresh_[i] = Buffer(memory_, grows ? bytes(i, std::max(rounded(rows) + 1, rows)) : needed);
  }
  void store(std::size_t first, const std::vector<std::int64_t>& counts, std::int64_t T) {
    const bool alike = std::all_of(counts.begin(), counts.end(), [&](auto count) { return count == counts[0]; }) &&
                       std::all_of(&lengths_[first], &lengths_[first] + counts.size(),
                                   [&](auto length) { return length == lengths_[first]; });
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const std::size_t width = layout_.part_of(i).row_bytes(), made = static_cast<std::size_t>(T) * width;
      if (alike && counts[0]) {
        memory_->copy_rows(row(i, first, lengths_[first]), static_cast<std::size_t>(rows_of_[i]) * width,
                           fresh_[i].data(), made, static_cast<std::size_t>(counts[0]) * width, counts.size());
        continue;
      }
      for (std::size_t b = 0; b < counts.size(); ++b)
        if (counts[b])
          memory_->copy_rows(row(i, first + b, lengths_[first + b]), 0, fresh_[i].data() + b * made, 0,
                             static_cast<std::size_t>(counts[b]) * width, 1);
    }
  }
  /// Concat: [past, new] becomes the past. New rows lie at S, so an empty past leaves its dummy row in front.
  void take_present(std::int64_t count, std::int64_t T) {
    const std::int64_t dropped = lengths_[0] == 0 ? concat_rows_ : 0;
    const std::int64_t kept = count + (dropped ? 0 : concat_rows_), present = concat_rows_ + T;
    if (dropped == 0 && count == T) {
      std::swap(blocks_, fresh_);
    } else {
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        const std::size_t width = layout_.part_of(i).row_bytes();
        memory_->copy_rows(blocks_[i].data(), static_cast<std::size_t>(kept) * width,
                           fresh_[i].data() + static_cast<std::size_t>(dropped) * width,
                           static_cast<std::size_t>(present) * width, static_cast<std::size_t>(kept) * width, active_);
      }
    }
    concat_rows_ = kept;
  }
  /// Concat: buffers with room for `rows` of every sequence, what they hold in front.
  void lengthen(std::int64_t rows) {
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].size() >= bytes(i, rows)) continue;
      Buffer larger = block(i, std::max(rounded(rows) + 1, rows));
      memory_->copy_rows(larger.data(), 0, blocks_[i].data(), 0, bytes(i, concat_rows_), 1);
      blocks_[i] = std::move(larger);
    }
  }

  struct Fed {
    std::size_t first = 0, count = 0;
    std::int64_t T = 0;
  };

  CacheLayout layout_;
  std::shared_ptr<Memory> memory_;
  std::size_t slots_;
  std::int64_t most_, bucket_, concat_rows_ = 0;
  std::vector<std::int64_t> lengths_, written_, rows_of_;  // of each slot, each slot, each block
  std::size_t active_;
  std::vector<Buffer> blocks_, fresh_;
  Fed fed_;
};

}  // namespace mla
