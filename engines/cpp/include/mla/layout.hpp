// How a graph's tensors make up a cache: its form, the parts of a row, and where in the graph each of them is bound.
#pragma once

#include "mla/manifest.hpp"

namespace mla {

enum class CacheForm { append, scatter, concat };

/// One part of a cache row: the latent with its rotary key, or, in a quantised cache, latent, scale and rotary key.
struct CachePart {
  std::string name;
  std::int64_t width = 0;
  DType dtype = DType::fp32;

  std::size_t row_bytes() const { return static_cast<std::size_t>(width) * item_size(dtype); }
  bool operator==(const CachePart& other) const {
    return name == other.name && width == other.width && dtype == other.dtype;
  }
};

/// What all graphs of an export agree on: the form, the parts of a row, how many attentions.
struct CacheLayout {
  CacheForm form = CacheForm::append;
  std::vector<CachePart> parts;
  std::size_t attentions = 1;
  std::int64_t row_multiple = 1;  // of the rows of past that one sequence's step is offered

  /// Bytes that one token takes in all attentions together.
  std::size_t row_bytes() const {
    std::size_t sum = 0;
    for (const CachePart& part : parts) sum += part.row_bytes();
    return sum * attentions;
  }
  std::size_t blocks() const { return parts.size() * attentions; }
  const CachePart& part_of(std::size_t block) const { return parts[block / attentions]; }

  /// The layout that a graph's own signature states. InputError where the signature is no cache of this contract.
  static CacheLayout of(const Manifest& manifest, const Graph& graph) {
    CacheLayout layout;
    layout.attentions = static_cast<std::size_t>(manifest.attentions);
    layout.row_multiple = manifest.row_multiple;
    if (manifest.cache_form == "append") {
      layout.form = CacheForm::append;
    } else if (manifest.cache_form == "scatter") {
      layout.form = CacheForm::scatter;
    } else if (manifest.cache_form == "concat") {
      layout.form = CacheForm::concat;
    } else {
      throw InputError(text(manifest.folder.string(), ": cache form ", manifest.cache_form,
                            "; expected append, scatter or concat: a graph without a past generates nothing"));
    }
    const char* names[] = {"latent", "scale", "rope"};
    for (const char* name : names) {
      if (const auto place = graph.input(layout.past_name(name, 0))) {
        const TensorSpec& spec = graph.inputs[*place];
        layout.parts.push_back({name, spec.dims.back().fixed, spec.dtype});
      }
    }
    layout.check(manifest, graph);
    return layout;
  }
  std::string past_name(const std::string& part, std::size_t attention) const {
    return form == CacheForm::scatter ? text(part, "_cache.", attention) : text("past_", part, ".", attention);
  }
  std::string fresh_name(const std::string& part, std::size_t attention) const {
    if (form == CacheForm::scatter) return text(part, "_cache_out.", attention);
    return text(form == CacheForm::append ? "new_" : "present_", part, ".", attention);
  }

 private:
  void check(const Manifest& manifest, const Graph& graph) const {
    const std::int64_t rows = manifest.max_context;
    const std::string S = form == CacheForm::scatter ? text("1, ", rows) : "S";
    const std::string fresh = form == CacheForm::scatter ? S : form == CacheForm::append ? "T" : "S+T";
    std::size_t caches = 0;
    for (const TensorSpec& spec : graph.inputs)
      caches += spec.name.rfind("past_", 0) == 0 || spec.name.rfind("latent_cache.", 0) == 0;
    if (parts.empty() || caches != blocks() + 1)
      throw InputError(text(manifest.folder.string(), ": ", graph.name, " has ", caches, " inputs of a past; expected ",
                            "past_lengths and the parts of ", attentions, " caches; export again"));
    for (const CachePart& part : parts)
      for (std::size_t i = 0; i < attentions; ++i) {
        expect(manifest, graph, graph.inputs, graph.input(past_name(part.name, i)), past_name(part.name, i), S, part);
        expect(manifest, graph, graph.outputs, graph.output(fresh_name(part.name, i)), fresh_name(part.name, i), fresh,
               part);
      }
  }
  static void expect(const Manifest& manifest, const Graph& graph, const std::vector<TensorSpec>& specs,
                     std::optional<std::size_t> place, const std::string& name, const std::string& middle,
                     const CachePart& part) {
    const std::string wanted = text("[B, ", middle, ", ", part.width, "]");
    if (!place || specs[*place].shape_text() != wanted || specs[*place].dtype != part.dtype || part.width < 1)
      throw InputError(text(manifest.folder.string(), ": ", graph.name, ": ", name, " is ",
                            place ? specs[*place].shape_text() : "absent", "; expected ", wanted, " of ",
                            name_of(part.dtype), "; export again"));
  }
};

/// Where a graph takes and gives what a cache and a generation need.
struct Ports {
  std::vector<std::size_t> past, fresh;  // by block: part * attentions + attention
  std::size_t ids = 0, lengths = 0, logits = 0;
  std::optional<std::size_t> last_token;
  bool every_logits = false;  // logits [B, T, V]

  Ports(const Manifest& manifest, const Graph& graph, const CacheLayout& layout) {
    for (const CachePart& part : layout.parts)
      for (std::size_t i = 0; i < layout.attentions; ++i) {
        past.push_back(require(manifest, graph, graph.input(layout.past_name(part.name, i)), part.name));
        fresh.push_back(require(manifest, graph, graph.output(layout.fresh_name(part.name, i)), part.name));
      }
    ids = require(manifest, graph, graph.input("input_ids"), "input_ids");
    lengths = require(manifest, graph, graph.input("past_lengths"), "past_lengths");
    logits = require(manifest, graph, graph.output("logits"), "logits");
    last_token = graph.input("last_token");
    every_logits = graph.outputs[logits].dims.size() == 3;
    const TensorSpec& spec = graph.outputs[logits];
    if (spec.dtype != DType::fp32 ||
        spec.shape_text() != text(every_logits ? "[B, T, " : "[B, ", manifest.vocab_size, "]"))
      throw InputError(text(manifest.folder.string(), ": ", graph.name, ": logits are ", spec.shape_text(), " of ",
                            name_of(spec.dtype), "; expected [B, ", manifest.vocab_size, "] of fp32; export again"));
  }

 private:
  static std::size_t require(const Manifest& manifest, const Graph& graph, std::optional<std::size_t> place,
                             const std::string& name) {
    if (place) return *place;
    throw InputError(text(manifest.folder.string(), ": ", graph.name, " has no ", name,
                          "; expected input_ids to "
                          "logits, a whole model and not some of its layers; export it again without --layers"));
  }
};

}  // namespace mla
