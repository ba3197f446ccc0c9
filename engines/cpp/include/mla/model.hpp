// A model opened once, and contexts of it: prefill, decode and append over a latent cache. One context per thread.
#pragma once

#if defined(MLA_BACKEND_ORT) + defined(MLA_BACKEND_TRT) + defined(MLA_BACKEND_TRT_RTX) != 1
#error "define one of MLA_BACKEND_ORT, MLA_BACKEND_TRT and MLA_BACKEND_TRT_RTX (CMake: find_package(mla), mla::mla)"
#endif

#include "mla/cache.hpp"
#ifdef MLA_BACKEND_ORT
#include "mla/ort_session.hpp"
#else
#include "mla/trt_session.hpp"
#endif

namespace mla {

#ifdef MLA_BACKEND_ORT
using BackendRuntime = OrtRuntime;
#else
using BackendRuntime = TrtRuntime;
#endif

namespace detail {

/// What a context's last step gave: rows [batch, V], and which of them it gave.
struct StepLogits {
  std::size_t vocabulary = 0;
  std::uint64_t step = 0;  // counts steps, so that logits of an earlier one are known as such
  std::vector<float> rows;
  std::vector<char> fresh;
};

}  // namespace detail

/// Logits after a step, one row a sequence. The memory is shared with the context, whose next `prefill` or `decode`
/// writes over it: from then on `row` is an InputError. Copy a row that is wanted longer.
class Logits {
 public:
  explicit Logits(std::shared_ptr<const detail::StepLogits> of) : of_(std::move(of)), step_(of_->step) {}
  std::size_t vocabulary() const { return of_->vocabulary; }
  /// Logits [V] at the last new token of a sequence; they stay until the context's next step, and as long as this
  /// object or the context is there. InputError where the step gave the sequence none, or a later step has begun.
  const float* row(std::size_t slot) const {
    if (of_->step != step_)
      throw InputError(
          "these logits are of an earlier step, and the context has gone on; read them before its next step, or copy "
          "the rows");
    if (slot >= of_->fresh.size() || !of_->fresh[slot])
      throw InputError(text("slot ", slot, " had no token in this step; expected one that had"));
    return &of_->rows[slot * of_->vocabulary];
  }

 private:
  std::shared_ptr<const detail::StepLogits> of_;
  std::uint64_t step_;
};

/// How a context is made. `rows`: room at first, of each sequence, 0 for 256 or `most`, whichever is less; `most`: the
/// most it may grow to, 0 for all there is; more rows come by `bucket`; `chunk`: tokens of a prefill step at most.
struct ContextOptions {
  std::int64_t batch = 1, rows = 0, most = 0, bucket = 256, chunk = 512;
};

namespace detail {

struct ModelState {
  Manifest manifest;
  std::unique_ptr<Runtime> runtime;
};

}  // namespace detail

/// Some sequences and their cache. Movable, not for use by two threads at a time.
class Context {
 public:
  static constexpr std::int64_t idle = -1;  ///< in `decode`: this sequence gets no token

  Context(std::shared_ptr<const detail::ModelState> state, const ContextOptions& options)
      : state_(std::move(state)),
        memory_(state_->runtime->memory()),
        chunk_(options.chunk),
        prefill_(open("prefill")),
        decode_(open("decode")),
        cache_(make_cache(options)) {
    if (chunk_ < 1) throw InputError(text("chunk is ", chunk_, "; expected at least 1"));
    logits_->vocabulary = vocabulary();
    logits_->rows.resize(cache_.slots() * vocabulary());
    logits_->fresh.resize(cache_.slots());
  }

  LatentCache& cache() { return cache_; }
  const LatentCache& cache() const { return cache_; }
  const std::vector<std::int64_t>& lengths() const { return cache_.lengths(); }
  std::size_t batch() const { return cache_.active(); }

  /// Read tokens behind what each sequence holds, in chunks; `tokens` has a list for each, which may be empty. What
  /// cannot be done is an InputError before the first step.
  Logits prefill(const std::vector<std::vector<std::int64_t>>& tokens) {
    check(tokens);
    begin_step();
    const auto group = static_cast<std::size_t>(std::min<std::int64_t>(std::int64_t(batch()), prefill_.limits.B));
    for (std::size_t first = 0; first < batch(); first += group)
      prefill_group(tokens, first, std::min(group, batch() - first));
    return Logits(logits_);
  }
  /// One further token of each sequence, or `idle`.
  Logits decode(const std::vector<std::int64_t>& tokens) {
    if (tokens.size() != batch())
      throw InputError(text(tokens.size(), " tokens; expected ", batch(), ", one for each sequence"));
    std::int64_t longest = 0;
    for (std::size_t b = 0; b < batch(); ++b) {
      if (tokens[b] == idle) continue;
      check_token(tokens[b], b);
      longest = std::max(longest, lengths()[b] + 1);
    }
    if (longest == 0) throw InputError("every sequence is idle; expected a token");
    cache_.reserve(longest);
    begin_step();
    const auto group = static_cast<std::size_t>(std::min<std::int64_t>(std::int64_t(batch()), decode_.limits.B));
    for (std::size_t first = 0; first < batch(); first += group) {
      const std::size_t count = std::min(group, batch() - first);
      ids_.resize(count);
      counts_.resize(count);
      for (std::size_t b = 0; b < count; ++b) {
        counts_[b] = tokens[first + b] == idle ? 0 : 1;
        ids_[b] = counts_[b] ? tokens[first + b] : 0;
      }
      step(decode_, first, 1);
    }
    return Logits(logits_);
  }
  /// Write rows behind a sequence, read from another context of the same export: a prefix computed elsewhere.
  void append(std::size_t slot, const Rows& rows) { cache_.append(slot, rows); }
  /// Forget all sequences.
  void clear() { cache_.clear(); }

 private:
  struct Opened {
    Limits limits;
    std::unique_ptr<Session> session;
    Ports ports;
    Bindings inputs, outputs;
    Buffer logits;
  };

  std::size_t vocabulary() const { return static_cast<std::size_t>(state_->manifest.vocab_size); }
  void begin_step() {
    ++logits_->step;
    std::fill(logits_->fresh.begin(), logits_->fresh.end(), 0);
  }
  Opened open(const std::string& kind) const {
    const Graph& graph = state_->runtime->graph(kind);
    return {state_->runtime->limits(kind),
            state_->runtime->session(kind, memory_),
            Ports(state_->manifest, graph, CacheLayout::of(state_->manifest, graph)),
            Bindings(graph.inputs),
            Bindings(graph.outputs),
            Buffer()};
  }
  LatentCache make_cache(const ContextOptions& options) const {
    const std::int64_t limit = std::min({state_->manifest.max_context, prefill_.limits.S, decode_.limits.S});
    const std::int64_t most = options.most ? options.most : limit;
    if (most < 1 || most > limit)
      throw InputError(text("most is ", most, " rows; expected 1 to ", limit,
                            ", what this export takes, or 0 for all of them; export with a larger --max-context"));
    CacheLayout layout = CacheLayout::of(state_->manifest, prefill_.session->graph());
    const CacheLayout other = CacheLayout::of(state_->manifest, decode_.session->graph());
    if (!(layout.parts == other.parts))
      throw InputError(
          text(state_->manifest.folder.string(), ": prefill and decode keep different caches; export again"));
    if (layout.form == CacheForm::concat && options.batch > std::min(prefill_.limits.B, decode_.limits.B))
      throw InputError(text("batch is ", options.batch, "; the engines take fewer, and concat steps all at once"));
    if (layout.form == CacheForm::scatter && most != limit)
      throw InputError(text("most is ", most, " rows; the scatter form's caches have all ", limit,
                            " from the beginning; leave it out, or export with --max-context ", most));
    const std::int64_t rows = options.rows ? options.rows : std::min<std::int64_t>(256, most);
    return {std::move(layout), memory_, options.batch, rows, most, options.bucket};
  }
  void check_token(std::int64_t token, std::size_t sequence) const {
    if (token < 0 || token >= state_->manifest.vocab_size)
      throw InputError(text("sequence ", sequence, " holds token ", token, "; expected 0 to ",
                            state_->manifest.vocab_size - 1, ", the model's vocabulary"));
  }
  void check(const std::vector<std::vector<std::int64_t>>& tokens) {
    if (tokens.size() != batch())
      throw InputError(text(tokens.size(), " lists of tokens; expected ", batch(), ", one for each sequence"));
    std::int64_t longest = 0, most = 0;
    for (std::size_t b = 0; b < batch(); ++b) {
      for (std::int64_t token : tokens[b]) check_token(token, b);
      const auto count = static_cast<std::int64_t>(tokens[b].size());
      if (cache_.layout().form == CacheForm::concat && tokens[b].size() != tokens[0].size())
        throw InputError(
            "prompts of several lengths; the concat form keeps one length for all; export with --cache "
            "append, or generate one by one");
      most = std::max(most, count);
      longest = std::max(longest, lengths()[b] + count);
    }
    if (most == 0) throw InputError("no tokens; expected at least one");
    cache_.reserve(longest);
  }
  void prefill_group(const std::vector<std::vector<std::int64_t>>& tokens, std::size_t first, std::size_t count) {
    std::size_t longest = 0;
    for (std::size_t b = 0; b < count; ++b) longest = std::max(longest, tokens[first + b].size());
    const auto chunk = static_cast<std::size_t>(std::min(chunk_, prefill_.limits.T));
    for (std::size_t start = 0; start < longest; start += chunk) {
      const std::size_t T = std::min(chunk, longest - start);
      ids_.assign(count * T, 0);
      counts_.assign(count, 0);
      for (std::size_t b = 0; b < count; ++b) {
        const auto& list = tokens[first + b];
        const std::size_t end = std::min(list.size(), start + T);
        for (std::size_t t = start; t < end; ++t) ids_[b * T + t - start] = list[t];
        counts_[b] = end > start ? static_cast<std::int64_t>(end - start) : 0;
      }
      step(prefill_, first, static_cast<std::int64_t>(T));
    }
  }
  /// Run `ids_` [B, T], of which `counts_` [B] are real, in the slots from `first` on; keep rows and logits.
  void step(Opened& opened, std::size_t first, std::int64_t T) {
    const std::size_t count = counts_.size(), rows = opened.ports.every_logits ? count * std::size_t(T) : count;
    const auto B = static_cast<std::int64_t>(count), V = state_->manifest.vocab_size;
    cache_.feed(opened.ports, first, count, T, opened.inputs, opened.outputs);
    opened.inputs[opened.ports.ids] = {ids_.data(), DType::int64, {B, T}};
    if (opened.ports.last_token) {
      last_.resize(count);
      for (std::size_t b = 0; b < count; ++b) last_[b] = std::max<std::int64_t>(counts_[b] - 1, 0);
      opened.inputs[*opened.ports.last_token] = {last_.data(), DType::int64, {B}};
    }
    const std::size_t wide = vocabulary() * sizeof(float);
    if (opened.logits.size() < rows * wide) opened.logits = Buffer(memory_, rows * wide);
    opened.outputs[opened.ports.logits] = {opened.logits.data(), DType::fp32,
                                           opened.ports.every_logits ? Shape{B, T, V} : Shape{B, V}};
    opened.session->run(opened.inputs, opened.outputs);
    cache_.commit(counts_);
    for (std::size_t b = 0; b < count; ++b) {
      if (counts_[b] == 0) continue;  // the last chunk that a sequence has tokens in is the one that counts
      const std::size_t row = opened.ports.every_logits ? b * std::size_t(T) + std::size_t(counts_[b]) - 1 : b;
      memory_->read(&logits_->rows[(first + b) * vocabulary()], opened.logits.data() + row * wide, wide);
      logits_->fresh[first + b] = 1;
    }
  }

  std::shared_ptr<const detail::ModelState> state_;
  std::shared_ptr<Memory> memory_;
  std::int64_t chunk_;
  Opened prefill_, decode_;
  LatentCache cache_;
  std::vector<std::int64_t> ids_, counts_, last_;
  std::shared_ptr<detail::StepLogits> logits_ = std::make_shared<detail::StepLogits>();
};

/// An export opened for generation: its weights, held once. Copies share them; threads may share it.
class Model {
 public:
  /// InputError for a folder that is not intact, not a whole model, or that this backend cannot open; NoDevice where
  /// the backend needs a GPU and there is none.
  explicit Model(const fs::path& folder, const Options& options = {}) {
    auto state = std::make_shared<detail::ModelState>();
    state->manifest = Manifest::open(folder, options.verify);
    if (state->manifest.contract != "model")
      throw InputError(text(folder.string(), ": holds one attention, not a model; export with --scope model"));
    state->runtime = std::make_unique<BackendRuntime>(state->manifest, options);
    state_ = std::move(state);
  }

  const Manifest& manifest() const { return state_->manifest; }
  const Runtime& runtime() const { return *state_->runtime; }
  /// Sequences of their own over the shared weights: one context for each thread.
  Context context(const ContextOptions& options = {}) const { return {state_, options}; }

 private:
  std::shared_ptr<const detail::ModelState> state_;
};

}  // namespace mla
