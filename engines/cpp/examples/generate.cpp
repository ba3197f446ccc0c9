// mla-generate: token ids in, token ids out, greedily; the smallest program around the library.
#include <mla/mla.hpp>

#include <iostream>
#include <thread>

namespace {

constexpr const char* usage =
    "usage: mla-generate DIR --tokens 1,2,3 [--tokens 4,5 ...] [--max-new-tokens 16] [--stop 1,2] [--ignore-eos]\n"
    "                    [--threads N] [--chunk 512] [--formulation NAME] [--map-weights] [--verify] [--json]\n\n"
    "Continues every --tokens greedily, all of them as one batch, with the model exported in DIR.\n"
    "--json prints one object with tokens and times.\n";

constexpr std::int64_t most_tokens = std::int64_t{1} << 31;  // ids, and new tokens: no model has as many

struct Arguments {
  std::string folder;
  std::vector<std::vector<std::int64_t>> prompts;
  std::int64_t max_new_tokens = 16;
  std::vector<std::int64_t> stops;
  bool ignore_eos = false, json = false;
  mla::Options model;
  mla::ContextOptions context;
};

std::int64_t number(const std::string& option, const std::string& word, std::int64_t low, std::int64_t high) {
  const bool negative = word.size() > 1 && word[0] == '-';
  const std::string digits = word.substr(negative ? 1 : 0);
  const bool whole =
      !digits.empty() && digits.size() < 19 && digits.find_first_not_of("0123456789") == std::string::npos;
  const std::int64_t value = whole ? std::stoll(word) : 0;
  if (!whole || value < low || value > high)
    throw mla::InputError(mla::text(option, " ", word.empty() ? "''" : word.substr(0, 40),
                                    ": expected a whole number from ", low, " to ", high));
  return value;
}

std::vector<std::int64_t> numbers(const std::string& option, const std::string& list) {
  std::vector<std::int64_t> found;
  std::istringstream in(list + ',');
  for (std::string word; std::getline(in, word, ',');) {
    try {
      found.push_back(number(option, word, 0, most_tokens));
    } catch (const mla::InputError& error) {
      throw mla::InputError(mla::text(error.what(), "; token ids with commas between, such as 1,2,3"));
    }
  }
  return found;
}

Arguments parse(int count, char** words) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == count) throw mla::InputError(word + " needs a value; see --help");
      return words[++i];
    };
    if (word == "--tokens") arguments.prompts.push_back(numbers(word, value()));
    else if (word == "--max-new-tokens") arguments.max_new_tokens = number(word, value(), 1, most_tokens);
    else if (word == "--stop") arguments.stops = numbers(word, value());
    else if (word == "--threads") arguments.model.threads = static_cast<int>(number(word, value(), 0, 1024));
    else if (word == "--chunk") arguments.context.chunk = number(word, value(), 1, most_tokens);
    else if (word == "--formulation") arguments.model.formulation = value();
    else if (word == "--ignore-eos") arguments.ignore_eos = true;
    else if (word == "--map-weights") arguments.model.map_weights = true;
    else if (word == "--verify") arguments.model.verify = true;
    else if (word == "--json") arguments.json = true;
    else if (arguments.folder.empty() && word[0] != '-') arguments.folder = word;
    else throw mla::InputError(word + ": no such option; see --help");
  }
  if (arguments.folder.empty()) throw mla::InputError("no folder given; expected an export; see --help");
  if (arguments.prompts.empty()) throw mla::InputError("no --tokens given; expected a prompt such as --tokens 1,2,3");
  return arguments;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + std::ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void run(const Arguments& arguments) {
  const mla::Model model(arguments.folder, arguments.model);
  mla::ContextOptions options = arguments.context;
  options.batch = static_cast<std::int64_t>(arguments.prompts.size());
  mla::Context context = model.context(options);
  std::vector<std::int64_t> stops = arguments.stops;
  if (!arguments.ignore_eos)
    for (std::int64_t stop : mla::stop_tokens(model.manifest())) stops.push_back(stop);
  mla::Times times;
  const auto answers = mla::generate(context, arguments.prompts, arguments.max_new_tokens, stops, {}, &times);
  if (!arguments.json) {
    for (const mla::Answer& answer : answers) {
      for (std::size_t i = 0; i < answer.tokens.size(); ++i) std::cout << (i ? "," : "") << answer.tokens[i];
      std::cout << '\n';
    }
    std::cerr << "first token " << 1e3 * times.first_token << " ms, then " << 1e3 * median(times.steps)
              << " ms a step; cache " << context.cache().nbytes() << " bytes\n";
    return;
  }
  mla::Json all = mla::Json::array();
  for (const mla::Answer& answer : answers)
    all.push_back({{"tokens", answer.tokens}, {"finish_reason", answer.finish_reason}});
  std::cout << mla::Json{{"answers", all},
                         {"seconds_to_first_token", times.first_token},
                         {"decode_ms", 1e3 * median(times.steps)},
                         {"steps", times.steps.size()},
                         {"cache_bytes", context.cache().nbytes()}}
                   .dump()
            << std::endl;
}

}  // namespace

int main(int count, char** words) {
  try {
    for (int i = 1; i < count; ++i)
      if (std::string(words[i]) == "--help" || std::string(words[i]) == "-h") return std::cout << usage, 0;
    run(parse(count, words));
    return 0;
  } catch (const mla::InputError& error) {
    std::cerr << "mla-generate: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "mla-generate: " << error.what() << '\n';
    return 1;
  }
}
