// What goes wrong, in one line: what arrived, what was expected, what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace mla {

/// Base of everything that this library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What was given cannot be used. Programs exit with code 2.
class InputError : public Error {
 public:
  using Error::Error;
};

/// A check ran and failed. Programs exit with code 1.
class CheckError : public Error {
 public:
  using Error::Error;
};

/// Nothing ran, because the backend needs a device that is not there. Programs exit with code 2.
class NoDevice : public InputError {
 public:
  using InputError::InputError;
};

/// The parts of a message, joined as a stream would print them.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Numbers as a message shows them: `[3, 1]`.
template <class Numbers>
std::string listed(const Numbers& numbers) {
  std::ostringstream out;
  const char* between = "[";
  for (const auto& number : numbers) {
    out << between << number;
    between = ", ";
  }
  out << (*between == '[' ? "[]" : "]");
  return out.str();
}

}  // namespace mla
