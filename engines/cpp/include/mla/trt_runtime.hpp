// TensorRT or TensorRT-RTX on the device: memory and a stream for each context, engines held once, scratch shared.
#pragma once

#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <mutex>

#include "mla/engines.hpp"

namespace mla {

namespace detail {

#ifdef MLA_BACKEND_TRT_RTX
inline constexpr const char* trt_backend = "trt-rtx";
#else
inline constexpr const char* trt_backend = "trt";
#endif

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(text(what, ": CUDA: ", cudaGetErrorString(status)));
}

/// NoDevice unless there is one; asked before anything of TensorRT is touched.
inline void require_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return;
  throw NoDevice(text("not run: no CUDA device (",
                      status == cudaSuccess ? "none is visible" : cudaGetErrorString(status), "); ", trt_backend,
                      " engines run only on a GPU"));
}

/// InputError where the library is of another version than the headers that this was compiled with: its classes would
/// be laid out differently, and calls into them end anywhere.
inline void require_version() {
  const int major = getInferLibMajorVersion(), minor = getInferLibMinorVersion();
  if (major != NV_TENSORRT_MAJOR || minor != NV_TENSORRT_MINOR)
    throw InputError(text("compiled with TensorRT headers ", NV_TENSORRT_MAJOR, ".", NV_TENSORRT_MINOR,
                          ", the library is ", major, ".", minor, "; compile with the headers of that library"));
}

/// What TensorRT says, its last errors kept for messages. Threads may share it.
class TrtLogger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    if (severity > Severity::kERROR) return;
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      last_ = message;
    } catch (...) {  // no memory for a message: the failure itself is reported all the same
    }
  }
  std::string reason() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_.empty() ? "TensorRT gave no reason" : last_.substr(0, last_.find('\n'));
  }

 private:
  mutable std::mutex mutex_;
  std::string last_;
};

}  // namespace detail

/// Device memory of one context, and the stream that all its work is ordered on.
class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(int device) : device_(device) {
    use();
    detail::check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() override { cudaStreamDestroy(stream_); }

  cudaStream_t stream() const { return stream_; }
  std::size_t alignment() const override { return 256; }
  /// Make its device the calling thread's: a new thread starts on device 0.
  void use() const { detail::check_cuda(cudaSetDevice(device_), "choosing the device"); }
  void* allocate(std::size_t bytes) override {
    use();
    void* data = nullptr;
    if (cudaMalloc(&data, bytes ? bytes : 1) != cudaSuccess) {
      cudaGetLastError();  // clears it: the device is well, only full
      std::size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      throw InputError(text(bytes, " bytes cannot be had on the device, ", free, " of ", total,
                            " are free; lower the "
                            "capacity or the batch"));
    }
    const cudaError_t status = cudaMemsetAsync(data, 0, bytes, stream_);
    if (status != cudaSuccess) release(data);
    detail::check_cuda(status, "clearing memory");
    return data;
  }
  void release(void* data) noexcept override {
    cudaStreamSynchronize(stream_);
    cudaFree(data);
  }
  void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                 std::size_t height) override {
    use();
    const auto status = height == 1 ? cudaMemcpyAsync(to, from, width, cudaMemcpyDeviceToDevice, stream_)
                                    : cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height,
                                                        cudaMemcpyDeviceToDevice, stream_);
    detail::check_cuda(status, "copying rows");
  }
  void zero(void* to, std::size_t bytes) override {
    use();
    detail::check_cuda(cudaMemsetAsync(to, 0, bytes, stream_), "clearing rows");
  }
  void read(void* host, const void* from, std::size_t bytes) override {
    use();
    detail::check_cuda(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream_), "reading from the device");
    detail::check_cuda(cudaStreamSynchronize(stream_), "reading from the device");
  }
  void write(void* to, const void* host, std::size_t bytes) override {
    use();
    detail::check_cuda(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream_), "writing to the device");
    detail::check_cuda(cudaStreamSynchronize(stream_), "writing to the device");
  }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
};

/// Scratch that contexts of a model take turns in: as large as the hungriest of them needs.
class SharedScratch {
 public:
  SharedScratch(int device, std::size_t bytes) : buffer_(std::make_shared<DeviceMemory>(device), bytes) {}
  void* data() const { return buffer_.data(); }
  std::mutex& turn() const { return turn_; }

 private:
  Buffer buffer_;
  mutable std::mutex turn_;
};

/// One plan on the device, shared by all contexts.
struct TrtEngine {
  std::unique_ptr<nvinfer1::ICudaEngine> engine;
  std::string file;
};

}  // namespace mla
