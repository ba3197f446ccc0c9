// Files as a manifest vouches for them: read whole, mapped, hashed; and JSON whose every wrong value is named.
#pragma once

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "mla/error.hpp"

namespace mla {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // ordered: an engine's `serves` lists kinds in the order of its profiles

inline constexpr std::uintmax_t largest_json = std::uintmax_t{64} << 20;

/// Size in bytes and time of change in nanoseconds of a regular file; false where there is none.
inline bool file_status(const fs::path& path, std::uintmax_t& size, std::int64_t& mtime_ns) {
  struct ::stat status{};
  if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return false;
  size = static_cast<std::uintmax_t>(status.st_size);
  mtime_ns = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  return true;
}

/// Whether there is a regular file; a path that cannot be looked at holds none.
inline bool is_file(const fs::path& path) {
  std::error_code unreadable;
  return fs::is_regular_file(path, unreadable);
}

/// SHA-256 of a file, in hexadecimal.
inline std::string sha256(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  if (!in) throw InputError(text(path.string(), ": cannot be read: ", std::strerror(errno)));
  if (!context || EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) != 1)
    throw Error("OpenSSL has no SHA-256 here; expected a libcrypto that does");
  std::vector<char> block(1 << 20);
  while (in) {
    in.read(block.data(), static_cast<std::streamsize>(block.size()));
    if (EVP_DigestUpdate(context.get(), block.data(), static_cast<std::size_t>(in.gcount())) != 1)
      throw Error("OpenSSL could not go on with SHA-256");
  }
  if (!in.eof()) throw InputError(text(path.string(), ": cannot be read to its end"));
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (EVP_DigestFinal_ex(context.get(), digest, &length) != 1) throw Error("OpenSSL could not end SHA-256");
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) {
    hex += "0123456789abcdef"[digest[i] >> 4];
    hex += "0123456789abcdef"[digest[i] & 15];
  }
  return hex;
}

/// A file mapped for reading: its pages are the file's own, shared by every process that maps it.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path) {
    const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct ::stat status{};
    if (handle >= 0 && ::fstat(handle, &status) == 0 && status.st_size > 0) {
      size_ = static_cast<std::size_t>(status.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, handle, 0);
    }
    const int reason = errno;
    if (handle >= 0) ::close(handle);
    if (data_ == MAP_FAILED) throw InputError(text(path.string(), ": cannot be mapped: ", std::strerror(reason)));
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() { ::munmap(data_, size_); }

  const void* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void* data_ = MAP_FAILED;
  std::size_t size_ = 0;
};

/// A word as a shell reads it.
inline std::string quoted(const std::string& word) {
  constexpr std::string_view plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string result = "'";
  for (char c : word) result += c == '\'' ? std::string("'\"'\"'") : std::string(1, c);
  return result + "'";
}

/// Whether a name from a manifest stays in its folder.
inline bool stays_inside(const std::string& name) {
  const fs::path path(name);
  if (name.empty() || path.is_absolute() || name.find('\0') != std::string::npos) return false;
  for (const fs::path& part : path)
    if (part == "..") return false;
  return true;
}

/// A JSON value that knows where it stands, so that an error can say so; `remedy` ends every message.
class Reader {
 public:
  Reader(const Json& value, std::string where, std::string remedy)
      : value_(&value), where_(std::move(where)), remedy_(std::move(remedy)) {}

  const Json& json() const { return *value_; }
  bool has(const char* key) const { return value_->is_object() && value_->contains(key) && !(*value_)[key].is_null(); }

  Reader at(const char* key) const {
    if (!value_->is_object()) wrong("an object");
    if (!value_->contains(key)) throw InputError(text(where_, ": no ", key, "; expected one; ", remedy_));
    return {(*value_)[key], text(where_, ".", key), remedy_};
  }
  std::vector<Reader> items() const {
    if (!value_->is_array()) wrong("a list");
    std::vector<Reader> found;
    for (std::size_t i = 0; i < value_->size(); ++i)
      found.emplace_back((*value_)[i], text(where_, "[", i, "]"), remedy_);
    return found;
  }
  std::vector<std::pair<std::string, Reader>> members() const {
    if (!value_->is_object()) wrong("an object");
    std::vector<std::pair<std::string, Reader>> found;
    for (auto item = value_->begin(); item != value_->end(); ++item)
      found.emplace_back(item.key(), Reader(item.value(), text(where_, ".", item.key()), remedy_));
    return found;
  }
  std::string string() const {
    if (!value_->is_string()) wrong("a string");
    return value_->get<std::string>();
  }
  bool boolean() const {
    if (!value_->is_boolean()) wrong("true or false");
    return value_->get<bool>();
  }
  std::int64_t integer(std::int64_t low, std::int64_t high = std::numeric_limits<std::int64_t>::max()) const {
    const bool whole = value_->is_number_integer() &&
                       !(value_->is_number_unsigned() && value_->get<std::uint64_t>() > std::uint64_t(high));
    if (!whole || value_->get<std::int64_t>() < low || value_->get<std::int64_t>() > high)
      wrong(text("a whole number from ", low, " to ", high));
    return value_->get<std::int64_t>();
  }
  [[noreturn]] void wrong(const std::string& expected) const {
    // never a structure: dump recurses, and a hostile file is nested without end
    std::string found = value_->is_object() ? "an object" : value_->is_array() ? "a list" : "";
    if (found.empty()) found = value_->dump(-1, ' ', true, Json::error_handler_t::replace);
    if (found.size() > 60) found = found.substr(0, 60) + "...";
    throw InputError(text(where_, " is ", found, "; expected ", expected, "; ", remedy_));
  }

 private:
  const Json* value_;
  std::string where_, remedy_;
};

/// A JSON file, parsed. InputError where it is absent, larger than any manifest, or no JSON.
inline Json read_json(const fs::path& path, const std::string& remedy) {
  std::uintmax_t size = 0;
  std::int64_t time = 0;
  if (!file_status(path, size, time)) throw InputError(text(path.string(), ": no such file; ", remedy));
  if (size > largest_json)
    throw InputError(text(path.string(), ": ", size, " bytes; expected a JSON of less; ", remedy));
  std::ifstream in(path, std::ios::binary);
  Json value = Json::parse(in, nullptr, false);
  if (value.is_discarded()) throw InputError(text(path.string(), ": not JSON, or cut short; ", remedy));
  return value;
}

}  // namespace mla
