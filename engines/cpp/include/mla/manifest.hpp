// `manifest.json` of an export: which graphs it holds, how they keep their cache, and whether its files are intact.
#pragma once

#include <algorithm>
#include <map>
#include <optional>

#include "mla/file.hpp"
#include "mla/tensor.hpp"

namespace mla {

inline constexpr std::int64_t manifest_format = 1;
inline constexpr std::uintmax_t always_hashed = std::uintmax_t{1} << 22;  // bytes; larger files when their time differs

/// One graph of an export. `is_default` marks the one that a session opens for its kind.
struct Graph {
  std::string name, kind, formulation, file;
  bool is_default = false;
  std::vector<TensorSpec> inputs, outputs;

  /// The place of an input, or of an output; none where the graph has no such tensor.
  std::optional<std::size_t> input(std::string_view name_) const { return find(inputs, name_); }
  std::optional<std::size_t> output(std::string_view name_) const { return find(outputs, name_); }

 private:
  static std::optional<std::size_t> find(const std::vector<TensorSpec>& specs, std::string_view wanted) {
    for (std::size_t i = 0; i < specs.size(); ++i)
      if (specs[i].name == wanted) return i;
    return std::nullopt;
  }
};

namespace detail {

/// One file against its record: size, and SHA-256 where it is small, where its time differs, or on `verify`.
inline void check_file(const fs::path& folder, const std::string& name, const Reader& record, const std::string& remedy,
                       bool verify) {
  if (!stays_inside(name))
    throw InputError(
        text((folder / "manifest.json").string(), ": names a file outside its folder, ", name, "; ", remedy));
  const fs::path path = folder / name;
  std::uintmax_t size = 0;
  std::int64_t time = 0;
  if (!file_status(path, size, time)) throw InputError(text(folder.string(), ": ", name, " is missing; ", remedy));
  const auto expected = static_cast<std::uintmax_t>(record.at("size").integer(0));
  if (size != expected)
    throw InputError(text(path.string(), ": ", size, " bytes, the manifest says ", expected, "; ", remedy));
  const std::string known = record.at("sha256").string();
  if (!verify && size >= always_hashed && time == record.at("mtime_ns").integer(0)) return;
  const std::string found = sha256(path);
  if (found != known)
    throw InputError(text(path.string(), ": SHA-256 ", found.substr(0, 12), "..., the manifest says ",
                          known.substr(0, 12), "...; it was changed; ", remedy));
}

/// A manifest's JSON, its format known and its files intact; `command` makes the folder again.
inline Json read_manifest(const fs::path& folder, const std::string& what, const std::string& command, bool verify) {
  const fs::path path = folder / "manifest.json";
  if (!is_file(path)) {
    if (is_file(folder / "config.json"))
      throw InputError(text(folder.string(), ": a checkpoint, not ", what,
                            "; export it first, to a folder of its own: python -m exporter export ",
                            quoted(folder.string()), " --out DIR"));
    throw InputError(text(folder.string(), ": no manifest.json; expected ", what, "; make it with: ", command));
  }
  const std::string remedy = "rebuild with: " + command;
  Json data = read_json(path, remedy);
  const Reader root(data, path.string(), remedy);
  const std::int64_t format = root.at("format").integer(0);
  if (format != manifest_format)
    throw InputError(text(path.string(), ": format ", format, ", this library reads ", manifest_format, "; ", remedy));
  for (const auto& [name, record] : root.at("files").members()) check_file(folder, name, record, remedy, verify);
  return data;
}

inline DType read_dtype(const Reader& value) {
  const std::string name = value.string();
  for (std::size_t i = 0; i < dtype_names.size(); ++i)
    if (dtype_names[i] == name) return static_cast<DType>(i);
  value.wrong("fp32, fp16, bf16, fp8, int8 or int64");
}

inline Dim read_dim(const Reader& value) {
  Dim dim;
  if (!value.json().is_string()) {
    dim.fixed = value.integer(1, std::int64_t{1} << 31);
    return dim;
  }
  const std::string name = value.string();
  if (name != "B" && name != "T" && name != "S" && name != "S+T") value.wrong("B, T, S, S+T or a number");
  dim.B = name == "B";
  dim.T = name == "T" || name == "S+T";
  dim.S = name == "S" || name == "S+T";
  return dim;
}

inline std::vector<TensorSpec> read_specs(const Reader& list) {
  std::vector<TensorSpec> specs;
  for (const Reader& item : list.items()) {
    TensorSpec spec;
    spec.name = item.at("name").string();
    spec.dtype = read_dtype(item.at("dtype"));
    for (const Reader& dim : item.at("shape").items()) spec.dims.push_back(read_dim(dim));
    if (spec.dims.empty() || spec.dims.size() > Shape{}.dims.size()) item.at("shape").wrong("1 to 4 sizes");
    specs.push_back(std::move(spec));
  }
  return specs;
}

inline Graph read_graph(const Reader& item, const Reader& files) {
  Graph graph;
  graph.name = item.at("name").string();
  graph.kind = item.at("kind").string();
  graph.formulation = item.at("formulation").string();
  graph.is_default = item.at("default").boolean();
  graph.file = item.at("file").string();
  if (!files.has(graph.file.c_str())) item.at("file").wrong("a file that the manifest has a record of");
  graph.inputs = read_specs(item.at("inputs"));
  graph.outputs = read_specs(item.at("outputs"));
  return graph;
}

/// What a folder's manifest says, unchecked; an empty object where there is none to read.
inline Json facts_of(const fs::path& folder) {
  const fs::path path = folder / "manifest.json";
  std::uintmax_t size = 0;
  std::int64_t time = 0;
  if (!file_status(path, size, time) || size > largest_json) return Json::object();
  std::ifstream in(path, std::ios::binary);
  Json data = Json::parse(in, nullptr, false);
  return data.is_object() ? data : Json::object();
}

inline bool is_parallel(const Json& facts) { return facts.value("contract", Json()) == "tensor_parallel"; }

/// The tensor-parallel export that a folder is, or would be, a rank of; none for any other folder.
inline std::optional<fs::path> whole_of(const fs::path& folder) {
  fs::path place = folder.has_filename() ? folder : folder.parent_path();  // a slash at the end names nothing
  if (place.filename() == "." || place.filename() == "..") {
    std::error_code unreadable;
    place = fs::weakly_canonical(place, unreadable);
  }
  const std::string name = place.filename().string(), digits = name.substr(std::min<std::size_t>(name.size(), 4));
  if (name.rfind("rank", 0) != 0 || digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  const fs::path parent = place.has_parent_path() ? place.parent_path() : fs::path(".");
  return is_parallel(facts_of(parent)) ? std::optional(parent) : std::nullopt;
}

/// The arguments of the command that makes an export again, as far as its manifest tells them.
inline std::string arguments_of(const Json& facts) {
  const Json words = facts.value("arguments", Json());
  if (!words.is_array() || words.empty()) return "MODEL";
  std::string joined;
  for (const Json& word : words) {
    if (!word.is_string()) return "MODEL";
    joined += (joined.empty() ? "" : " ") + quoted(word.get<std::string>());
  }
  return joined;
}

/// The command that makes an export again. A rank of a tensor-parallel export is never made by itself: of one that lies
/// beside the others it is the command of them all, of one that was moved it names no folder.
inline std::string export_command(const fs::path& folder) {
  const std::optional<fs::path> whole = whole_of(folder);
  const fs::path target = whole.value_or(folder);
  const Json facts = facts_of(target);
  const std::string command = "python -m exporter export " + arguments_of(facts) + " --out ";
  if (facts.contains("tensor_parallel") && !is_parallel(facts)) return command + "DIR";
  std::error_code unreadable;
  return command + quoted(target.string()) + (fs::exists(target, unreadable) ? " --overwrite" : "");
}

}  // namespace detail

/// An export that was opened and found intact. Immutable; threads may share it.
class Manifest {
 public:
  /// Open a folder that `python -m exporter export` made. InputError for anything that does not match, with the command
  /// that makes it again. `verify` hashes large files as well, not only where their time differs.
  static Manifest open(const fs::path& folder, bool verify = false) {
    const std::string command = detail::export_command(folder);
    const Json data = detail::read_manifest(folder, "an exported folder", command, verify);
    refuse_parallel(folder, data);
    const Reader root(data, (folder / "manifest.json").string(), "rebuild with: " + command);
    Manifest made;
    made.folder = folder;
    made.contract = root.at("contract").string();
    made.cache_form = root.at("cache").string();
    made.dtype = root.at("dtype").string();
    made.max_context = root.at("max_context").integer(1, std::int64_t{1} << 31);
    if (root.has("row_multiple")) made.row_multiple = root.at("row_multiple").integer(1, 1 << 16);
    made.attentions = root.has("attentions") ? root.at("attentions").integer(1, 1 << 16) : 1;
    if (made.contract == "model")
      made.vocab_size = root.at("decoder").at("vocab_size").integer(1, std::int64_t{1} << 31);
    for (const Reader& item : root.at("graphs").items())
      made.graphs.push_back(detail::read_graph(item, root.at("files")));
    made.read_weights(root.at("weights"));
    return made;
  }

  fs::path folder;
  std::string contract, cache_form, dtype;
  std::int64_t max_context = 0, attentions = 1, vocab_size = 0;
  /// What the rows of past that are offered should be a multiple of: a decode step is then fastest.
  std::int64_t row_multiple = 1;
  std::vector<Graph> graphs;
  /// Weight files as graphs name them -> where they really are; empty where all are in the graphs' reach.
  std::map<std::string, fs::path> handed;

  /// The default graph of a kind, or the one of `formulation`. InputError lists those that there are.
  const Graph& graph(const std::string& kind, const std::string& formulation = "") const {
    std::vector<std::string> present;
    for (const Graph& g : graphs) {
      if (g.kind == kind && (formulation.empty() ? g.is_default : g.formulation == formulation)) return g;
      present.push_back(g.name);
    }
    throw InputError(text(folder.string(), ": no ", kind, " graph", formulation.empty() ? "" : " of formulation ",
                          formulation, "; present: ", listed(present)));
  }
  /// The graph of a name, which another manifest gave.
  const Graph& graph_named(const std::string& name) const {
    for (const Graph& g : graphs)
      if (g.name == name) return g;
    throw InputError(
        text(folder.string(), ": no graph ", name, "; the engines are of another export; build them again"));
  }

 private:
  /// A model that was split over processes, or a part of it: sums between its segments are not this library's.
  static void refuse_parallel(const fs::path& folder, const Json& data) {
    if (!data.contains("tensor_parallel")) return;
    const bool all = detail::is_parallel(data);
    const std::optional<fs::path> whole = all ? std::optional(folder) : detail::whole_of(folder);
    throw InputError(text(folder.string(), all ? ": a" : ": one rank of a",
                          " tensor-parallel export, which runs with: python -m engines parallel ",
                          whole ? quoted(whole->string()) : "DIR, the folder of all its ranks",
                          "; for one graph export without --tensor-parallel"));
  }
  /// Linked weights: where each file is, in the size and time of the export.
  void read_weights(const Reader& weights) {
    if (weights.has("mode") && weights.at("mode").string() == "none")
      throw InputError(text(folder.string(),
                            ": exported with --weights none, its graphs have no weights to run with; "
                            "export with --weights copy or link"));
    if (!weights.has("linked")) return;
    const std::string again = "point the export to it with: python -m exporter export CHECKPOINT --out " +
                              quoted(folder.string()) + " --relink";
    for (const auto& [name, record] : weights.at("linked").members()) {
      if (!stays_inside(name)) record.wrong("a record of a file in the export's folder");
      const bool elsewhere = record.at("how").string() != "hardlink";
      const fs::path place = elsewhere ? fs::path(record.at("path").string()) : folder / name;
      std::uintmax_t size = 0;
      std::int64_t time = 0;
      if (!file_status(place, size, time))
        throw InputError(text(folder.string(), ": its weights lie in ", place.string(),
                              ", which is not there; if the checkpoint moved, ", again));
      if (size != static_cast<std::uintmax_t>(record.at("size").integer(0)) || time != record.at("mtime_ns").integer(0))
        throw InputError(text(folder.string(), ": ", place.string(),
                              " was changed since the export (its size or time "
                              "differs); export again, or, if its content is the same, ",
                              again));
      if (elsewhere) handed.emplace(name, place);
    }
    if (handed.empty() || !weights.has("file")) return;
    const std::string own = weights.at("file").string();  // who is handed one file must be handed all
    if (stays_inside(own) && is_file(folder / own)) handed.emplace(own, folder / own);
  }
};

}  // namespace mla
