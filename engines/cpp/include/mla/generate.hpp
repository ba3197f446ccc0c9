// Greedy generation over a context: ragged prompts side by side, the same tokens as `python -m engines generate`.
#pragma once

#include <chrono>
#include <cmath>
#include <functional>

#include "mla/model.hpp"

namespace mla {

/// What one prompt was answered with. `finish_reason`: `stop` (a stop token, which is in `tokens`) or `length`.
struct Answer {
  std::vector<std::int64_t> tokens;
  std::string finish_reason;
};

/// Seconds of the backend and the choice of tokens: to the first token, and of each decode step.
struct Times {
  double first_token = 0;
  std::vector<double> steps;
};

/// The likeliest token of logits [V], the lowest id among equals. CheckError where they are no distribution.
inline std::int64_t greedy(const float* logits, std::size_t vocabulary, std::size_t step, std::size_t sequence) {
  std::size_t best = 0, wrong = 0, finite = 0;
  for (std::size_t i = 0; i < vocabulary; ++i) {
    wrong += std::isnan(logits[i]) || logits[i] == HUGE_VALF;
    finite += std::isfinite(logits[i]) ? 1 : 0;
    if (logits[i] > logits[best]) best = i;
  }
  if (wrong || !finite)
    throw CheckError(text("step ", step, ", sequence ", sequence, ": no token can be chosen from the logits, ", wrong,
                          " of ", vocabulary, " are NaN or +infinity, ", finite,
                          " finite; expected finite numbers; a "
                          "16-bit export may have overflowed, export with --dtype fp32 to compare"));
  return static_cast<std::int64_t>(best);
}

/// The tokens that end an answer: `eos_token_id` of the export's generation_config.json, else of its config.json.
inline std::vector<std::int64_t> stop_tokens(const Manifest& manifest) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path path = manifest.folder / name;
    if (!is_file(path)) continue;
    const std::string remedy = "export again";
    const Json data = read_json(path, remedy);
    const Reader root(data, path.string(), remedy);
    const char* key = "eos_token_id";
    const bool wrapped = !root.has(key) && root.has("text_config") && root.at("text_config").has(key);
    if (!wrapped && !root.has(key)) continue;
    const Reader value = wrapped ? root.at("text_config").at(key) : root.at(key);
    std::vector<std::int64_t> stops;
    for (const Reader& item : value.json().is_array() ? value.items() : std::vector<Reader>{value})
      stops.push_back(item.integer(0));
    if (!stops.empty()) return stops;
  }
  return {};
}

/// Answer every prompt, greedily, until a stop token or `max_new_tokens`. The context is cleared first and has as many
/// slots as there are prompts. `on_token` hears each token as it is made. InputError, before the first step, for what
/// does not fit.
inline std::vector<Answer> generate(Context& context, const std::vector<std::vector<std::int64_t>>& prompts,
                                    std::int64_t max_new_tokens, const std::vector<std::int64_t>& stops = {},
                                    const std::function<void(std::size_t, std::int64_t)>& on_token = {},
                                    Times* times = nullptr) {
  using Clock = std::chrono::steady_clock;
  context.clear();
  if (prompts.size() != context.batch())
    throw InputError(text(prompts.size(), " prompts; expected ", context.batch(), ", one for each slot"));
  if (max_new_tokens < 1) throw InputError(text("max_new_tokens is ", max_new_tokens, "; expected at least 1"));
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    const auto size = static_cast<std::int64_t>(prompts[b].size());
    if (size == 0) throw InputError(text("prompt ", b, " has no tokens; expected at least one"));
    if (max_new_tokens > context.cache().most() - size)
      throw InputError(text("prompt ", b, " has ", size, " tokens, and ", max_new_tokens,
                            " new ones are asked for; this "
                            "cache takes up to ",
                            context.cache().most(),
                            " in all; shorten the prompt, ask for fewer, or "
                            "export with a larger --max-context"));
  }
  std::vector<Answer> answers(prompts.size());
  std::vector<std::int64_t> next(prompts.size(), Context::idle), fed;
  const bool alike = context.cache().layout().form == CacheForm::concat;  // those that ended go on: one length for all
  const auto choose = [&](const Logits& logits, std::size_t index) {
    bool running = false;
    for (std::size_t b = 0; b < answers.size(); ++b) {
      if (index && next[b] == Context::idle) continue;
      next[b] = greedy(logits.row(b), logits.vocabulary(), index, b);
      answers[b].tokens.push_back(next[b]);
      if (on_token) on_token(b, next[b]);
      const bool stopped = std::find(stops.begin(), stops.end(), next[b]) != stops.end();
      if (stopped || static_cast<std::int64_t>(index) + 1 == max_new_tokens) {
        answers[b].finish_reason = stopped ? "stop" : "length";
        next[b] = Context::idle;
      }
      running = running || next[b] != Context::idle;
    }
    return running;
  };
  auto begin = Clock::now();
  bool running = choose(context.prefill(prompts), 0);
  const auto lap = [&] {
    const auto end = Clock::now();
    const double seconds = std::chrono::duration<double>(end - begin).count();
    begin = end;
    return seconds;
  };
  const double first = lap();
  if (times) *times = {first, {}};
  for (std::size_t index = 1; running; ++index) {
    fed = next;
    if (alike) std::replace(fed.begin(), fed.end(), Context::idle, std::int64_t{0});
    running = choose(context.decode(fed), index);
    const double seconds = lap();
    if (times) times->steps.push_back(seconds);
  }
  return answers;
}

}  // namespace mla
