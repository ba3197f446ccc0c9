// mla-scenario: steps of a scenario from stdin, what came of each to stdout, both JSON; tests/test_cpp.py compares.
#include <mla/engines.hpp>
#include <mla/mla.hpp>

#include <iostream>
#include <optional>
#include <thread>

namespace {

using mla::Json;
using Tokens = std::vector<std::int64_t>;

mla::Options options_of(const Json& data) {
  mla::Options options;
#ifdef MLA_BACKEND_ORT
  options.threads = data.value("threads", 1);
#endif
  options.share_scratch = data.value("share_scratch", true);
  options.map_weights = data.value("map_weights", false);
  options.operators = data.value("operators", "");
  options.verify = data.value("verify", false);
  options.formulation = data.value("formulation", "");
  return options;
}

mla::ContextOptions context_of(const Json& data) {
  mla::ContextOptions options;
  options.batch = data.value("batch", options.batch);
  options.rows = data.value("rows", options.rows);
  options.most = data.value("most", options.most);
  options.bucket = data.value("bucket", options.bucket);
  options.chunk = data.value("chunk", options.chunk);
  return options;
}

/// The greedy token of each sequence, null where the step gave it none; its logits where the scenario wants them.
Json told(const mla::Logits& logits, std::size_t batch, bool whole) {
  Json tokens = Json::array(), rows = Json::array();
  for (std::size_t b = 0; b < batch; ++b) {
    try {
      const float* row = logits.row(b);
      tokens.push_back(mla::greedy(row, logits.vocabulary(), 0, b));
      rows.push_back(Json(std::vector<float>(row, row + (whole ? logits.vocabulary() : 0))));
    } catch (const mla::InputError&) {
      tokens.push_back(nullptr);
      rows.push_back(nullptr);
    }
  }
  Json result = {{"tokens", tokens}};
  if (whole) result["logits"] = rows;
  return result;
}

Json answers_of(const std::vector<mla::Answer>& answers) {
  Json all = Json::array();
  for (const mla::Answer& answer : answers)
    all.push_back({{"tokens", answer.tokens}, {"reason", answer.finish_reason}});
  return all;
}

/// Every thread answers every prompt in a context of its own, each from another prompt on.
Json in_threads(const mla::Model& model, const Json& step) {
  const auto prompts = step.at("prompts").get<std::vector<Tokens>>();
  const auto count = step.at("threads").get<std::size_t>();
  const auto wanted = step.at("max_new_tokens").get<std::int64_t>();
  std::vector<std::vector<Tokens>> found(count, std::vector<Tokens>(prompts.size()));
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < count; ++t)
    threads.emplace_back([&, t] {
      try {
        mla::Context context = model.context();
        for (std::size_t i = 0; i < prompts.size(); ++i) {
          const std::size_t which = (i + t * prompts.size() / count) % prompts.size();
          found[t][which] = mla::generate(context, {prompts[which]}, wanted)[0].tokens;
        }
      } catch (const std::exception& error) {
        errors[t] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return {{"tokens", found}, {"errors", errors}};
}

Json engines_of(const Json& step) {
  const mla::Manifest manifest = mla::Manifest::open(step.at("folder").get<std::string>());
  const auto engines = mla::Engines::open(manifest, step.at("backend").get<std::string>());
  Json all = Json::array();
  for (const mla::EngineRecord& record : engines.records) {
    Json serves = Json::array();
    for (const auto& service : record.serves)
      serves.push_back({{"kind", service.kind},
                        {"graph", service.graph},
                        {"limits", {service.limits.B, service.limits.T, service.limits.S}}});
    all.push_back({{"engine", record.name}, {"graph", record.graph}, {"file", record.file}, {"serves", serves}});
  }
  return {{"builder", engines.builder}, {"records", all}};
}

class Scenario {
 public:
  Json run(const Json& step) {
    const std::string op = step.at("op").get<std::string>();
    if (op == "open") return open(step);
    if (op == "sha256") return {{"sha256", mla::sha256(step.at("path").get<std::string>())}};
    if (op == "engines") return engines_of(step);
    if (op == "threads") return in_threads(*model_, step);
    if (op == "held") {  // logits that an earlier step left, by now maybe the last that knows of their context
      const float* row = held_->row(0);
      return {{"token", mla::greedy(row, held_->vocabulary(), 0, 0)}};
    }
    mla::Context& context = contexts_.at(step.value("context", std::size_t{0}));
    if (op == "prefill" || op == "decode") {
      const Json& tokens = step.at("tokens");
      const mla::Logits logits =
          op == "prefill" ? context.prefill(tokens.get<std::vector<Tokens>>()) : context.decode(tokens.get<Tokens>());
      if (step.value("hold", false)) held_ = logits;
      return told(logits, context.batch(), step.value("logits", false));
    }
    if (op == "generate")
      return answers_of(mla::generate(context, step.at("prompts").get<std::vector<Tokens>>(),
                                      step.at("max_new_tokens").get<std::int64_t>(), step.value("stops", Tokens{})));
    return change(op, step, context);
  }

 private:
  Json open(const Json& step) {
    contexts_.clear();
    model_ = std::make_unique<mla::Model>(step.at("folder").get<std::string>(), options_of(step));
    for (const Json& context : step.value("contexts", Json::array({Json::object()})))
      contexts_.push_back(model_->context(context_of(context)));
    return {{"stops", mla::stop_tokens(model_->manifest())}};
  }
  Json change(const std::string& op, const Json& step, mla::Context& context) {
    mla::LatentCache& cache = context.cache();
    const auto slot = step.value("slot", std::size_t{0});
    if (op == "state") {
      return {{"lengths", context.lengths()},
              {"active", cache.active()},
              {"capacity", cache.capacity()},
              {"nbytes", cache.nbytes()},
              {"row_bytes", cache.layout().row_bytes()}};
    }
    if (op == "add") return {{"slot", cache.add()}};
    if (op == "remove") return {{"slot", cache.remove(slot)}};
    if (op == "fork") return {{"slot", cache.fork(slot)}};
    if (op == "truncate") cache.truncate(slot, step.at("length").get<std::int64_t>());
    else if (op == "clear") context.clear();
    else if (op == "reserve") cache.reserve(step.at("rows").get<std::int64_t>());
    else if (op == "commit") cache.commit(step.at("counts").get<Tokens>());
    else if (op == "append_from") {
      const mla::LatentCache& source = contexts_.at(step.at("from").get<std::size_t>()).cache();
      context.append(slot, source.read(step.value("from_slot", std::size_t{0}), step.at("begin").get<std::int64_t>(),
                                       step.at("end").get<std::int64_t>()));
    } else if (op == "append_ones") {  // rows whose every bit is set: NaN in every float
      mla::Rows rows;
      rows.count = step.at("count").get<std::int64_t>();
      for (std::size_t i = 0; i < cache.layout().blocks(); ++i)
        rows.blocks.emplace_back(static_cast<std::size_t>(rows.count) * cache.layout().part_of(i).row_bytes(), '\xff');
      context.append(slot, rows);
    } else {
      throw mla::InputError("op " + op + ": expected one that this file knows");
    }
    return {{"done", op}};
  }

  std::unique_ptr<mla::Model> model_;
  std::vector<mla::Context> contexts_;
  std::optional<mla::Logits> held_;
};

}  // namespace

int main() {
  const Json steps = Json::parse(std::cin);
  Scenario scenario;
  Json results = Json::array();
  for (const Json& step : steps) {
    try {
      results.push_back(scenario.run(step));
    } catch (const mla::NoDevice& error) {
      results.push_back({{"error", error.what()}, {"kind", "NoDevice"}});
    } catch (const mla::InputError& error) {
      results.push_back({{"error", error.what()}, {"kind", "InputError"}});
    } catch (const mla::CheckError& error) {
      results.push_back({{"error", error.what()}, {"kind", "CheckError"}});
    }
  }
  std::cout << results.dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
  return 0;
}
