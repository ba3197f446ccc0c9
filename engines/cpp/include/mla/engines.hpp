// `engines/BACKEND/manifest.json` of an export: the TensorRT engines that were kept, what each serves, up to what size.
#pragma once

#include "mla/manifest.hpp"
#include "mla/session.hpp"

namespace mla {

/// One engine with a plan: the graph it is made of, and for each kind that it serves, in the order of its optimisation
/// profiles, the graph whose steps it answers and the largest sizes of that profile.
struct EngineRecord {
  struct Service {
    std::string kind, graph;
    Limits limits;
  };
  std::string name, graph, file;
  std::vector<Service> serves;
};

/// A backend's engines of one export, found intact. Immutable.
class Engines {
 public:
  /// InputError for engines that were changed, built from another export, or of a kind that only Python loads.
  static Engines open(const Manifest& manifest, const std::string& backend) {
    Engines made;
    made.folder = manifest.folder / "engines" / backend;
    std::error_code unreadable;
    const bool present = fs::exists(made.folder, unreadable);
    const std::string command = "python -m engines build " + quoted(manifest.folder.string()) + " --backend " +
                                backend + (present ? " --overwrite" : "");
    made.remedy_ = "rebuild with: " + command;
    const Json data = detail::read_manifest(made.folder, "engines of " + backend, command, false);
    const Reader root(data, (made.folder / "manifest.json").string(), made.remedy_);
    if (root.at("engines_of").string() != sha256(manifest.folder / "manifest.json"))
      throw InputError(
          text(made.folder.string(), ": built from another export than the one beside it; ", made.remedy_));
    if (root.at("backend").string() != backend) root.at("backend").wrong(backend);
    for (const char* option : {"strip", "weight_streaming"})
      if (root.at("options").at(option).boolean())
        throw InputError(text(made.folder.string(), ": built with ", option,
                              "; this library loads whole plans only; build "
                              "without it: ",
                              made.remedy_));
    if (root.has("builder")) made.builder = root.at("builder").string();
    for (const Reader& item : root.at("engines").items())
      if (item.has("file")) made.records.push_back(read_record(item, root.at("files")));
    return made;
  }

  fs::path folder;
  std::string builder;  // the library's version that built them: a plan loads in exactly that one
  std::vector<EngineRecord> records;

  /// The engine that serves a kind, and its optimisation profile. InputError where none was kept.
  std::pair<const EngineRecord*, std::size_t> serving(const std::string& kind) const {
    for (const EngineRecord& record : records)
      for (std::size_t profile = 0; profile < record.serves.size(); ++profile)
        if (record.serves[profile].kind == kind) return {&record, profile};
    throw InputError(text(folder.string(), ": no engine serves ", kind, "; ", remedy_));
  }
  const std::string& remedy() const { return remedy_; }

 private:
  static EngineRecord read_record(const Reader& item, const Reader& files) {
    EngineRecord record;
    record.name = item.at("engine").string();
    record.graph = item.at("graph").string();
    record.file = item.at("file").string();
    if (!files.has(record.file.c_str())) item.at("file").wrong("a file that the manifest has a record of");
    const std::vector<Reader> profiles = item.at("profiles").items();
    for (const auto& [kind, graph] : item.at("serves").members()) {
      const std::size_t place = record.serves.size();
      if (place == profiles.size()) item.at("serves").wrong("as many kinds as there are optimisation profiles");
      record.serves.push_back({kind, graph.string(), read_limits(profiles[place])});
    }
    return record;
  }
  /// The largest sizes of a profile: each of B, T and S is [min, opt, max].
  static Limits read_limits(const Reader& profile) {
    Limits limits;
    for (const auto& [name, size] : {std::pair{"B", &limits.B}, {"T", &limits.T}, {"S", &limits.S}}) {
      if (!profile.has(name)) continue;  // a scatter graph has no S of its own
      const std::vector<Reader> range = profile.at(name).items();
      if (range.size() != 3) profile.at(name).wrong("min, opt and max");
      *size = range[2].integer(1, std::int64_t{1} << 31);
    }
    return limits;
  }

  std::string remedy_;
};

}  // namespace mla
