// Where a cache lives: memory of the host, or of the device that a backend runs on. Zero-filled, owned, never leaked.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "mla/error.hpp"

namespace mla {

/// A place to keep caches and outputs in. Used by one thread at a time.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Zero-filled bytes; InputError where there are not as many.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  /// Copy `height` rows of `width` bytes within this memory; the rows may not overlap.
  virtual void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height) = 0;
  virtual void zero(void* to, std::size_t bytes) = 0;
  /// Copy to the host; what was asked of the memory before is done first.
  virtual void read(void* host, const void* from, std::size_t bytes) = 0;
  virtual void write(void* to, const void* host, std::size_t bytes) = 0;
  /// What addresses that a backend binds must be multiples of, in bytes.
  virtual std::size_t alignment() const { return 1; }
};

/// The host's own memory.
class HostMemory final : public Memory {
 public:
  void* allocate(std::size_t bytes) override {
    void* data = std::calloc(bytes ? bytes : 1, 1);  // zeros that take no memory before they are written
    if (!data) throw InputError(text(bytes, " bytes of cache cannot be had here; lower the capacity or the batch"));
    return data;
  }
  void release(void* data) noexcept override { std::free(data); }
  void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                 std::size_t height) override {
    auto* target = static_cast<char*>(to);
    const auto* source = static_cast<const char*>(from);
    for (std::size_t i = 0; i < height; ++i) std::memcpy(target + i * to_pitch, source + i * from_pitch, width);
  }
  void zero(void* to, std::size_t bytes) override { std::memset(to, 0, bytes); }
  void read(void* host, const void* from, std::size_t bytes) override { std::memcpy(host, from, bytes); }
  void write(void* to, const void* host, std::size_t bytes) override { std::memcpy(to, host, bytes); }
};

/// Bytes in a memory, freed with the buffer.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<Memory> memory, std::size_t bytes)
      : memory_(std::move(memory)), data_(memory_->allocate(bytes)), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept
      : memory_(std::move(other.memory_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (data_) memory_->release(data_);
  }
  char* data() const { return static_cast<char*>(data_); }
  std::size_t size() const { return bytes_; }

 private:
  std::shared_ptr<Memory> memory_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace mla
