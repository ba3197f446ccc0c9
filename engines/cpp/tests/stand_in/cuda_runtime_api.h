// A stand-in for CUDA's runtime where there is no device: what the library calls of it, over tracked host memory.
//
// Work on a stream is done when the stream is synchronised and not before, so that a missing synchronisation shows.
// Addresses are checked: a host's where a device's belongs, or the other way round, ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
constexpr unsigned cudaStreamNonBlocking = 1;
struct CUstream_st {
  std::vector<std::function<void()>> pending;
};
using cudaStream_t = CUstream_st*;

namespace stand_in {

inline std::mutex mutex;
inline std::map<const char*, std::size_t> allocations;
inline std::size_t free_bytes = std::size_t{1} << 30;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "stand-in: %s\n", what);
  std::abort();
}
/// Whether bytes lie in one allocation of the device.
inline bool on_device(const void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* start = static_cast<const char*>(data);
  auto found = allocations.upper_bound(start);
  if (found == allocations.begin()) return false;
  --found;
  return start + bytes <= found->first + found->second;
}
inline void run(cudaStream_t stream) {
  for (const auto& work : std::exchange(stream->pending, {})) work();
}

}  // namespace stand_in

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new CUstream_st, cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return stand_in::run(stream), cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stand_in::run(stream);
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = stand_in::free_bytes;
  *total = std::size_t{1} << 30;
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(stand_in::mutex);
  if (bytes > stand_in::free_bytes) return cudaErrorMemoryAllocation;
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*data, 0xff, bytes);  // NaN: what is not cleared shows
  stand_in::free_bytes -= bytes;
  stand_in::allocations[static_cast<char*>(*data)] = bytes;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  const std::lock_guard<std::mutex> lock(stand_in::mutex);
  const auto found = stand_in::allocations.find(static_cast<char*>(data));
  if (found == stand_in::allocations.end()) stand_in::fail("freed what was not allocated");
  stand_in::free_bytes += found->second;
  stand_in::allocations.erase(found);
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  if (!stand_in::on_device(data, bytes)) stand_in::fail("set memory that is not the device's");
  stream->pending.push_back([=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  if (stand_in::on_device(to, bytes) != (kind != cudaMemcpyDeviceToHost)) stand_in::fail("copied to the wrong side");
  if (stand_in::on_device(from, bytes) != (kind != cudaMemcpyHostToDevice))
    stand_in::fail("copied from the wrong side");
  if (kind == cudaMemcpyHostToDevice) {  // of pageable memory: taken at the call, written in the stream's order
    std::vector<char> taken(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    stream->pending.push_back([to, taken] { std::memcpy(to, taken.data(), taken.size()); });
  } else {
    stream->pending.push_back([=] { std::memcpy(to, from, bytes); });
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) stand_in::fail("rows wider than their pitch");
  for (std::size_t i = 0; i < height; ++i)
    cudaMemcpyAsync(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width, kind,
                    stream);
  return cudaSuccess;
}
