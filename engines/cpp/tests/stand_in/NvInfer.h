// A stand-in for TensorRT where there is no device: what the library calls of it, with ONNX Runtime as the engine.
//
// A plan is a JSON: {"graph": "decode.qkt.onnx", "host": ["past_lengths"], "profiles": [{"B": 3, "T": 1, "S": 512,
// "scratch": 4096}]}. It keeps TensorRT's rules: shapes within the profile, addresses aligned to 256 bytes, device
// tensors on the device, scratch large enough and used by one step at a time.
#pragma once

#include <cuda_runtime_api.h>
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#define NV_TENSORRT_MAJOR 10
#define NV_TENSORRT_MINOR 14

inline std::int32_t getInferLibMajorVersion() { return NV_TENSORRT_MAJOR; }
inline std::int32_t getInferLibMinorVersion() { return NV_TENSORRT_MINOR; }

namespace nvinfer1 {

struct Dims {
  std::int32_t nbDims;
  std::int64_t d[8];
};
enum class TensorLocation : std::int32_t { kDEVICE, kHOST };
enum class ExecutionContextAllocationStrategy : std::int32_t { kSTATIC, kON_PROFILE_CHANGE, kUSER_MANAGED };

class ILogger {
 public:
  enum class Severity : std::int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
  virtual void log(Severity severity, const char* message) noexcept = 0;
  virtual ~ILogger() = default;
};

class ICudaEngine;

class IExecutionContext {
 public:
  explicit IExecutionContext(ICudaEngine& engine) : engine_(engine) {}
  bool setOptimizationProfileAsync(std::int32_t profile, cudaStream_t) noexcept;
  void setDeviceMemoryV2(void* memory, std::int64_t size) noexcept {
    scratch_ = memory;
    scratch_size_ = size;
  }
  bool setInputShape(const char* name, const Dims& dims) noexcept;
  bool setTensorAddress(const char* name, void* data) noexcept;
  bool enqueueV3(cudaStream_t stream) noexcept;

 private:
  void run();

  ICudaEngine& engine_;
  std::size_t profile_ = 0;
  void* scratch_ = nullptr;
  std::int64_t scratch_size_ = -1;
  std::map<std::string, std::vector<std::int64_t>> shapes_;
  std::map<std::string, void*> addresses_;
};

class ICudaEngine {
 public:
  ICudaEngine(const nlohmann::json& plan, ILogger& logger)
      : plan(plan), logger(logger), session(env(), plan["graph"].get<std::string>().c_str(), Ort::SessionOptions()) {
    for (std::size_t i = 0; i < session.GetInputCount() + session.GetOutputCount(); ++i) {
      const bool input = i < session.GetInputCount();
      Ort::AllocatorWithDefaultOptions allocator;
      const std::size_t j = input ? i : i - session.GetInputCount();
      const auto name =
          input ? session.GetInputNameAllocated(j, allocator) : session.GetOutputNameAllocated(j, allocator);
      const auto type = input ? session.GetInputTypeInfo(j) : session.GetOutputTypeInfo(j);
      const auto info = type.GetTensorTypeAndShapeInfo();
      Tensor tensor{input, info.GetElementType(), info.GetShape(), {}};
      std::vector<const char*> symbols(tensor.shape.size());
      info.GetSymbolicDimensions(symbols.data(), symbols.size());
      tensor.symbols.assign(symbols.begin(), symbols.end());
      tensors.emplace(name.get(), std::move(tensor));
    }
  }
  IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy) noexcept {
    return new IExecutionContext(*this);
  }
  std::int32_t getNbOptimizationProfiles() const noexcept { return std::int32_t(plan["profiles"].size()); }
  std::int64_t getDeviceMemorySizeForProfileV2(std::int32_t profile) const noexcept {
    return plan["profiles"][std::size_t(profile)]["scratch"];
  }
  TensorLocation getTensorLocation(const char* name) const noexcept {
    const auto& host = plan["host"];
    return std::find(host.begin(), host.end(), name) == host.end() ? TensorLocation::kDEVICE : TensorLocation::kHOST;
  }

  struct Tensor {
    bool input;
    ONNXTensorElementDataType type;
    std::vector<std::int64_t> shape;
    std::vector<std::string> symbols;
  };
  nlohmann::json plan;
  ILogger& logger;
  Ort::Session session;
  std::map<std::string, Tensor> tensors;

 private:
  static Ort::Env& env() {
    static Ort::Env made(ORT_LOGGING_LEVEL_ERROR, "stand-in");
    return made;
  }
};

inline bool IExecutionContext::setOptimizationProfileAsync(std::int32_t profile, cudaStream_t) noexcept {
  profile_ = std::size_t(profile);
  return profile >= 0 && profile < engine_.getNbOptimizationProfiles();
}

inline bool IExecutionContext::setInputShape(const char* name, const Dims& dims) noexcept {
  const auto found = engine_.tensors.find(name);
  if (found == engine_.tensors.end() || !found->second.input) return false;
  const auto& limits = engine_.plan["profiles"][profile_];
  for (std::int32_t i = 0; i < dims.nbDims; ++i) {
    const std::string& symbol = found->second.symbols[std::size_t(i)];
    if (!symbol.empty() && dims.d[i] > limits[symbol].get<std::int64_t>()) return false;
    if (symbol.empty() && dims.d[i] != found->second.shape[std::size_t(i)]) return false;
  }
  shapes_[name].assign(dims.d, dims.d + dims.nbDims);
  return true;
}

inline bool IExecutionContext::setTensorAddress(const char* name, void* data) noexcept {
  if (engine_.tensors.count(name) == 0) return false;
  const bool host = engine_.getTensorLocation(name) == TensorLocation::kHOST;
  if (!host && reinterpret_cast<std::uintptr_t>(data) % 256) stand_in::fail("an address that is not aligned");
  addresses_[name] = data;
  return true;
}

namespace detail {
inline std::set<void*> scratch_in_use;  // guarded by stand_in::mutex
}

inline bool IExecutionContext::enqueueV3(cudaStream_t stream) noexcept {
  if (addresses_.size() != engine_.tensors.size()) {
    engine_.logger.log(ILogger::Severity::kERROR, "a tensor without an address");
    return false;
  }
  const std::int64_t needed = engine_.getDeviceMemorySizeForProfileV2(std::int32_t(profile_));
  if (scratch_size_ < needed || !stand_in::on_device(scratch_, std::size_t(needed)))
    stand_in::fail("too little scratch");
  {
    const std::lock_guard<std::mutex> lock(stand_in::mutex);
    if (!detail::scratch_in_use.insert(scratch_).second) stand_in::fail("two steps in one scratch");
  }
  stream->pending.push_back([this] { run(); });
  return true;
}

inline void IExecutionContext::run() {
  std::memset(scratch_, 0x5a, std::size_t(scratch_size_));
  std::map<std::string, std::int64_t> sizes;
  for (const auto& [name, shape] : shapes_)
    for (std::size_t i = 0; i < shape.size(); ++i)
      if (const std::string& symbol = engine_.tensors.at(name).symbols[i]; !symbol.empty()) sizes[symbol] = shape[i];
  const auto host = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::IoBinding binding(engine_.session);
  for (const auto& [name, tensor] : engine_.tensors) {
    std::vector<std::int64_t> shape = tensor.shape;
    std::size_t bytes = tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64     ? 8
                        : tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2
                                                                               : 4;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const std::string& symbol = tensor.symbols[i];
      if (!symbol.empty()) shape[i] = sizes.count(symbol) ? sizes[symbol] : sizes["S"] + sizes["T"];
      bytes *= std::size_t(shape[i]);
    }
    void* data = addresses_.at(name);
    const bool on_host = engine_.getTensorLocation(name.c_str()) == TensorLocation::kHOST;
    if (stand_in::on_device(data, bytes) == on_host) stand_in::fail(("the wrong side: " + name).c_str());
    Ort::Value value = Ort::Value::CreateTensor(host, data, bytes, shape.data(), shape.size(), tensor.type);
    if (tensor.input) binding.BindInput(name.c_str(), value);
    else binding.BindOutput(name.c_str(), value);
  }
  engine_.session.Run(Ort::RunOptions(), binding);
  const std::lock_guard<std::mutex> lock(stand_in::mutex);
  detail::scratch_in_use.erase(scratch_);
}

class IRuntime {
 public:
  explicit IRuntime(ILogger& logger) : logger_(logger) {}
  ICudaEngine* deserializeCudaEngine(const void* data, std::size_t size) noexcept {
    const auto plan =
        nlohmann::json::parse(static_cast<const char*>(data), static_cast<const char*>(data) + size, nullptr, false);
    if (plan.is_object()) return new ICudaEngine(plan, logger_);
    logger_.log(ILogger::Severity::kERROR, "not a plan");
    return nullptr;
  }

 private:
  ILogger& logger_;
};

inline IRuntime* createInferRuntime(ILogger& logger) { return new IRuntime(logger); }

}  // namespace nvinfer1
