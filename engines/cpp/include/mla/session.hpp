// The session contract: a graph opened, and one check of what a step is given, for every backend alike.
#pragma once

#include <algorithm>
#include <memory>

#include "mla/manifest.hpp"
#include "mla/memory.hpp"

namespace mla {

namespace detail {

inline void check_range(const Graph& graph, const char* name, const Tensor& tensor, std::int64_t most,
                        const char* what) {
  const auto* values = static_cast<const std::int64_t*>(tensor.data);
  const auto [low, high] = std::minmax_element(values, values + tensor.shape.count());
  if (*low < 0 || *high > most)
    throw InputError(
        text(graph.name, ": ", name, " reaches from ", *low, " to ", *high, "; expected 0 to ", most, ", ", what));
}

/// What a graph cannot check itself: an engine that reads rows it was not given does not fail, it answers wrongly.
inline void check_lengths(const Manifest& manifest, const Graph& graph, const Tensor& lengths, const Sizes& sizes) {
  const auto* values = static_cast<const std::int64_t*>(lengths.data);
  const auto [low, high] = std::minmax_element(values, values + sizes.B);
  const std::int64_t rows = sizes.S ? std::min(sizes.S, manifest.max_context) : manifest.max_context;
  if (*low < 0 || *high > rows)
    throw InputError(text(graph.name, ": past_lengths from ", *low, " to ", *high, "; expected 0 to ", rows,
                          ", the rows "
                          "of past offered"));
  if (manifest.cache_form == "scatter" && *high + sizes.T > manifest.max_context)
    throw InputError(text(graph.name, ": ", *high, " rows and ", sizes.T, " new tokens exceed S_max ",
                          manifest.max_context, "; prefill in smaller chunks or export with a larger --max-context"));
  if (manifest.cache_form == "concat" && (*low != *high || (*high != sizes.S && !(*high == 0 && sizes.S == 1))))
    throw InputError(
        text(graph.name, ": past_lengths from ", *low, " to ", *high, " with S = ", sizes.S,
             "; the concat "
             "form joins new rows at S, so every length must be S (or 0 with S = 1); use the append form"));
}

/// Dtypes, shapes and values of a feed against the signature; B, T and S of the step.
inline Sizes check_feed(const Manifest& manifest, const Graph& graph, const Bindings& inputs) {
  Sizes sizes;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const TensorSpec& spec = graph.inputs[i];
    const Tensor& tensor = inputs[i];
    if (!tensor.data) throw InputError(text(graph.name, ": ", spec.name, " is not bound; bind every input"));
    bool fits = tensor.dtype == spec.dtype && tensor.shape.rank == spec.dims.size();
    for (std::size_t d = 0; fits && d < spec.dims.size(); ++d) {
      const Dim& dim = spec.dims[d];
      std::int64_t* known = dim.B ? &sizes.B : dim.T ? &sizes.T : dim.S ? &sizes.S : nullptr;
      if (known && *known == 0) *known = tensor.shape[d];
      fits = tensor.shape[d] >= 1 && tensor.shape[d] == dim.at(sizes);
    }
    if (!fits)
      throw InputError(text(graph.name, ": ", spec.name, " is ", listed(tensor.shape), " of ", name_of(tensor.dtype),
                            "; expected ", spec.shape_text(), " of ", name_of(spec.dtype), " with B = ", sizes.B,
                            ", T = ", sizes.T, ", S = ", sizes.S, ", each at least 1"));
  }
  if (sizes.T > manifest.max_context)
    throw InputError(text(graph.name, ": ", sizes.T, " new tokens; this export takes up to ", manifest.max_context,
                          "; use smaller chunks or export again with a larger --max-context"));
  if (const auto i = graph.input("past_lengths")) check_lengths(manifest, graph, inputs[*i], sizes);
  if (const auto i = graph.input("input_ids"))
    check_range(graph, "input_ids", inputs[*i], manifest.vocab_size - 1, "the vocabulary's ids");
  if (const auto i = graph.input("last_token"))
    check_range(graph, "last_token", inputs[*i], sizes.T - 1, "an index into the T new tokens");
  return sizes;
}

}  // namespace detail

/// One graph, ready to run. Used by one thread at a time: every thread has sessions of its own, over shared weights.
///
/// Integers (`input_ids`, `past_lengths`, `last_token`) are bound from the host; everything else lies in the session's
/// memory.
class Session {
 public:
  Session(const Manifest& manifest, const Graph& graph) : manifest_(&manifest), graph_(&graph) {}
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Graph& graph() const { return *graph_; }

  /// Run one step over memory that the caller owns, outputs included; when it returns they can be read. In the scatter
  /// form `latent_cache.{i}` and `latent_cache_out.{i}` are bound to one address. InputError for a feed that breaks the
  /// contract.
  void run(const Bindings& inputs, const Bindings& outputs) {
    if (&inputs.specs() != &graph_->inputs || &outputs.specs() != &graph_->outputs)
      throw InputError(text(graph_->name, ": bindings of another graph; make them of this session's"));
    const Sizes sizes = detail::check_feed(*manifest_, *graph_, inputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Shape expected = graph_->outputs[i].shape(sizes);
      const Tensor& tensor = outputs[i];
      if (!tensor.data || tensor.dtype != graph_->outputs[i].dtype || !(tensor.shape == expected))
        throw InputError(text(graph_->name, ": ", graph_->outputs[i].name, " is ", listed(tensor.shape), " of ",
                              name_of(tensor.dtype), "; expected ", listed(expected), " of ",
                              name_of(graph_->outputs[i].dtype)));
    }
    run_checked(inputs, outputs, sizes);
  }

 protected:
  virtual void run_checked(const Bindings& inputs, const Bindings& outputs, const Sizes& sizes) = 0;
  const Manifest& manifest() const { return *manifest_; }

 private:
  const Manifest* manifest_;
  const Graph* graph_;
};

/// The largest sizes that a backend runs a graph at, where it has limits of its own.
struct Limits {
  std::int64_t B = 65536, T = std::int64_t{1} << 31, S = std::int64_t{1} << 31;
};

/// How a model is opened. `threads` 0 lets ONNX Runtime choose.
struct Options {
  int threads = 0;           ///< of each step (ONNX Runtime); a server of n contexts on n cores sets 1
  bool spin = false;         ///< idle threads busy-wait: about 1 % of a step, and the cores of everyone else
  bool map_weights = false;  ///< leave weights in the file's pages: opens at once, shared by processes; see docs/cpp.md
  bool share_scratch = true;  ///< TensorRT: one block of scratch for all contexts, whose steps then take turns
  bool verify = false;        ///< hash weight files too
  std::string formulation;    ///< of the decode graph, and of the prefill's where it has one of that name
  std::string operators;      ///< ONNX Runtime: the library of mla::LatentAttention; empty: MLA_OPERATOR names it
};

/// A model's graphs in a backend: weights, held once. Threads may share it.
class Runtime {
 public:
  virtual ~Runtime() = default;
  /// The graph that serves a kind, `prefill` or `decode`. One graph may serve both.
  virtual const Graph& graph(const std::string& kind) const = 0;
  virtual Limits limits(const std::string& kind) const = 0;
  /// Memory for a context's cache and outputs.
  virtual std::shared_ptr<Memory> memory() const = 0;
  /// A session of the graph that serves `kind`, over a context's memory.
  virtual std::unique_ptr<Session> session(const std::string& kind, const std::shared_ptr<Memory>& memory) const = 0;
};

}  // namespace mla
