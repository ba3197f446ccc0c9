// mla-server: an example of a multithreaded server. Weights once, one context per worker thread, JSON in and out.
//
//     POST /generate  {"tokens": [1, 306, 4658], "max_new_tokens": 16}
//                     answers {"tokens": [...], "finish_reason": "length"}
//     GET  /health    answers {"status": "ok", "contexts": 4}
#include <httplib.h>
#include <signal.h>

#include <condition_variable>
#include <iostream>
#include <mla/mla.hpp>
#include <mutex>
#include <optional>
#include <thread>

namespace {

constexpr const char* usage =
    "usage: mla-server DIR [--host 127.0.0.1] [--port 8080] [--contexts 4] [--threads 1] [--max-rows N]\n"
    "                  [--map-weights]\n\n"
    "Serves the model exported in DIR. --contexts requests run side by side, each in steps of --threads threads;\n"
    "--max-rows bounds a request's prompt and answer together, and so the memory of its cache. --port 0 takes a free\n"
    "port and prints it.\n";

constexpr std::size_t largest_body = std::size_t{16} << 20;  // bytes
const std::string advice = "send {\"tokens\": [1, 2, 3], \"max_new_tokens\": 16}";

struct Arguments {
  std::string folder, host = "127.0.0.1";
  std::int64_t port = 8080, contexts = 4;
  mla::Options model;
  mla::ContextOptions context;
};

Arguments parse(int count, char** words) {
  Arguments arguments;
#ifdef MLA_BACKEND_ORT
  arguments.model.threads = 1;  // requests run side by side: threads within one would only get in their way
#endif
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == count) throw mla::InputError(word + " needs a value; see --help");
      return words[++i];
    };
    const auto number = [&](std::int64_t low, std::int64_t high) {
      const std::string found = value();
      const bool digits =
          !found.empty() && found.size() < 10 && found.find_first_not_of("0123456789") == std::string::npos;
      if (!digits || std::stoll(found) < low || std::stoll(found) > high)
        throw mla::InputError(mla::text(word, " ", found, ": expected ", low, " to ", high));
      return static_cast<std::int64_t>(std::stoll(found));
    };
    if (word == "--host") arguments.host = value();
    else if (word == "--port") arguments.port = number(0, 65535);
    else if (word == "--contexts") arguments.contexts = number(1, 1024);
    else if (word == "--threads") arguments.model.threads = static_cast<int>(number(0, 1024));
    else if (word == "--max-rows") arguments.context.most = number(1, 999999999);
    else if (word == "--map-weights") arguments.model.map_weights = true;
    else if (arguments.folder.empty() && word[0] != '-') arguments.folder = word;
    else throw mla::InputError(word + ": no such option; see --help");
  }
  if (arguments.folder.empty()) throw mla::InputError("no folder given; expected an export; see --help");
  return arguments;
}

/// Contexts that wait for a request. There are as many as worker threads, so that none waits for another.
class Contexts {
 public:
  Contexts(const mla::Model& model, const mla::ContextOptions& options, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) idle_.push_back(std::make_unique<mla::Context>(model.context(options)));
  }
  /// A context of the caller's own until the lease ends.
  class Lease {
   public:
    explicit Lease(Contexts& owner) : owner_(owner) {
      std::unique_lock<std::mutex> lock(owner_.mutex_);
      owner_.freed_.wait(lock, [&] { return !owner_.idle_.empty(); });
      context_ = std::move(owner_.idle_.back());
      owner_.idle_.pop_back();
    }
    ~Lease() {
      {
        const std::lock_guard<std::mutex> lock(owner_.mutex_);
        owner_.idle_.push_back(std::move(context_));  // never reallocates: it held as many before
      }
      owner_.freed_.notify_one();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    mla::Context& operator*() { return *context_; }

   private:
    Contexts& owner_;
    std::unique_ptr<mla::Context> context_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<std::unique_ptr<mla::Context>> idle_;
};

/// A request's body, checked; InputError says what is wrong with it.
std::pair<std::vector<std::int64_t>, std::int64_t> read_body(const std::string& body) {
  const mla::Json data = mla::Json::parse(body, nullptr, false);
  if (data.is_discarded()) throw mla::InputError("the body is not JSON; " + advice);
  const mla::Reader root(data, "body", advice);
  std::vector<std::int64_t> tokens;
  for (const mla::Reader& token : root.at("tokens").items()) tokens.push_back(token.integer(0));
  return {tokens, root.has("max_new_tokens") ? root.at("max_new_tokens").integer(1, 1 << 30) : 16};
}

void reply(httplib::Response& response, int status, const mla::Json& body) {
  response.status = status;
  response.set_content(body.dump(-1, ' ', false, mla::Json::error_handler_t::replace) + "\n", "application/json");
}

/// A request's body, whatever its Content-Type says: `curl -d` calls every body a form, and httplib by itself takes no
/// form of more than 8 KiB. What is not taken is read to its end all the same, since a client may not listen before it
/// has sent all, and answered with the reason: then there is no body.
std::optional<std::string> receive(const httplib::Request& request, httplib::Response& response,
                                   const httplib::ContentReader& reader) {
  if (request.is_multipart_form_data()) {
    reader([](const auto&) { return true; }, [](const char*, std::size_t) { return true; });
    return reply(response, 415, {{"error", "the body is a multipart form; " + advice}}), std::nullopt;
  }
  std::string body;
  std::size_t size = 0;
  const bool whole = reader([&](const char* data, std::size_t count) {
    size += count;
    if (size <= largest_body) body.append(data, count);
    return true;
  });
  if (size > largest_body || response.status == 413) {  // httplib counts what Content-Length says, we what came
    const std::string limit = mla::text("the body is larger than ", largest_body >> 20, " MiB; send fewer tokens");
    return reply(response, 413, {{"error", limit}}), std::nullopt;
  }
  if (!whole) return reply(response, 400, {{"error", "the body did not come whole; " + advice}}), std::nullopt;
  return body;
}

void answer(const std::string& body, httplib::Response& response, Contexts& contexts,
            const std::vector<std::int64_t>& stops) {
  try {
    const auto [tokens, max_new_tokens] = read_body(body);
    Contexts::Lease context(contexts);
    const mla::Answer made = mla::generate(*context, {tokens}, max_new_tokens, stops)[0];
    reply(response, 200, {{"tokens", made.tokens}, {"finish_reason", made.finish_reason}});
  } catch (const mla::InputError& error) {
    reply(response, 400, {{"error", error.what()}});
  } catch (const std::exception& error) {
    reply(response, 500, {{"error", error.what()}});
  }
}

void serve(const Arguments& arguments) {
  sigset_t ending;  // blocked in every thread; one waits for them, so that ^C ends the server in order
  sigemptyset(&ending);
  sigaddset(&ending, SIGINT);
  sigaddset(&ending, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ending, nullptr);

  const mla::Model model(arguments.folder, arguments.model);
  Contexts contexts(model, arguments.context, arguments.contexts);
  const std::vector<std::int64_t> stops = mla::stop_tokens(model.manifest());
  httplib::Server server;
  const auto workers = static_cast<std::size_t>(arguments.contexts);
  server.new_task_queue = [workers] { return new httplib::ThreadPool(workers); };
  server.set_socket_options([](int socket) {  // by default two servers would share a port, and each other's requests
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  });
  server.set_keep_alive_max_count(1);  // a connection that waits for its next request would hold a worker
  server.set_payload_max_length(largest_body);
  server.Post("/generate", [&](const httplib::Request& request, httplib::Response& response,
                               const httplib::ContentReader& reader) {
    if (const auto body = receive(request, response, reader)) answer(*body, response, contexts, stops);
  });
  server.Get("/health", [&](const httplib::Request&, httplib::Response& response) {
    reply(response, 200, {{"status", "ok"}, {"contexts", arguments.contexts}});
  });
  server.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (response.body.empty())
      reply(response, response.status,
            {{"error", request.method + " " + request.path + ": expected POST /generate or GET /health"}});
  });
  const int port = arguments.port ? static_cast<int>(arguments.port) : server.bind_to_any_port(arguments.host);
  if (arguments.port ? !server.bind_to_port(arguments.host, port) : port < 0)
    throw mla::InputError(mla::text(arguments.host, ":", arguments.port, " cannot be bound; choose another port"));
  std::thread waiter([&] {
    int signal = 0;
    sigwait(&ending, &signal);
    server.stop();
  });
  std::cout << "serving " << arguments.folder << " at http://" << arguments.host << ":" << port << std::endl;
  server.listen_after_bind();
  pthread_kill(waiter.native_handle(), SIGTERM);  // where it ended on its own, the waiter still waits
  waiter.join();
}

}  // namespace

int main(int count, char** words) {
  try {
    for (int i = 1; i < count; ++i)
      if (std::string(words[i]) == "--help" || std::string(words[i]) == "-h") return std::cout << usage, 0;
    serve(parse(count, words));
    return 0;
  } catch (const mla::InputError& error) {
    std::cerr << "mla-server: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "mla-server: " << error.what() << '\n';
    return 1;
  }
}
