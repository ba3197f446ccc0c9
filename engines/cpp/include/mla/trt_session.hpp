// A TensorRT engine's step: an execution context of its own, addresses set by name, enqueued on the context's stream.
#pragma once

#include <array>

#include "mla/trt_runtime.hpp"

namespace mla {

/// One execution context in one optimisation profile. `built_from`: the graph that the engine was built from; a
/// prefill's engine that serves decode steps wants `last_token` besides, which is then T - 1.
class TrtSession final : public Session {
 public:
  TrtSession(const Manifest& manifest, const Graph& graph, const Graph& built_from, nvinfer1::ICudaEngine& engine,
             std::size_t profile, std::shared_ptr<DeviceMemory> memory, std::shared_ptr<const SharedScratch> shared,
             std::shared_ptr<detail::TrtLogger> logger)
      : Session(manifest, graph),
        built_from_(&built_from),
        memory_(std::move(memory)),
        shared_(std::move(shared)),
        logger_(std::move(logger)) {
    const auto index = static_cast<std::int32_t>(profile);
    context_.reset(engine.createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
    if (!context_ || index >= engine.getNbOptimizationProfiles() ||
        !context_->setOptimizationProfileAsync(index, memory_->stream()))
      throw InputError(
          text(built_from.name, ": no context in optimisation profile ", profile, ": ", logger_->reason()));
    detail::check_cuda(cudaStreamSynchronize(memory_->stream()), "choosing a profile");
    const std::int64_t bytes = engine.getDeviceMemorySizeForProfileV2(index);
    if (!shared_) own_ = Buffer(memory_, static_cast<std::size_t>(bytes));
    context_->setDeviceMemoryV2(shared_ ? shared_->data() : own_.data(), bytes);
    for (std::size_t i = 0; i < built_from.inputs.size(); ++i) {
      const std::string& name = built_from.inputs[i].name;
      const auto place = graph.input(name);
      if (!place && name != "last_token")
        throw InputError(text("an engine of ", built_from.name, " cannot serve ", graph.name, ": it wants ", name));
      const bool host = engine.getTensorLocation(name.c_str()) == nvinfer1::TensorLocation::kHOST;
      feeds_.push_back({place, built_from.inputs[i].dtype == DType::int64, host, Buffer()});
    }
  }

 private:
  struct FeedPort {
    std::optional<std::size_t> place;  // in the graph's inputs; none: last_token of a decode step
    bool integers, on_host;
    Buffer staged;
  };

  void run_checked(const Bindings& inputs, const Bindings& outputs, const Sizes& sizes) override {
    memory_->use();
    std::unique_lock<std::mutex> turn;
    if (shared_) turn = std::unique_lock<std::mutex>(shared_->turn());  // until the step is done: the scratch is in use
    for (std::size_t i = 0; i < feeds_.size(); ++i) bind_input(i, inputs, sizes);
    for (std::size_t i = 0; i < outputs.size(); ++i) set_address(graph().outputs[i].name, outputs[i].data, false);
    if (!context_->enqueueV3(memory_->stream()))
      throw Error(text(graph().name, ": the engine refused to run: ", logger_->reason()));
    detail::check_cuda(cudaStreamSynchronize(memory_->stream()), "a step");
  }
  void bind_input(std::size_t i, const Bindings& inputs, const Sizes& sizes) {
    FeedPort& port = feeds_[i];
    const std::string& name = built_from_->inputs[i].name;
    Tensor tensor;
    if (port.place) {
      tensor = inputs[*port.place];
    } else {
      last_.assign(static_cast<std::size_t>(sizes.B), sizes.T - 1);
      tensor = {last_.data(), DType::int64, {sizes.B}};
    }
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(tensor.shape.rank);
    std::copy(tensor.shape.begin(), tensor.shape.end(), dims.d);
    if (!context_->setInputShape(name.c_str(), dims))
      throw InputError(text(graph().name, ": ", name, " ", listed(tensor.shape),
                            " is outside the engine's profile; "
                            "rebuild with larger limits"));
    void* data = tensor.data;
    if (port.integers && !port.on_host) {  // bound from the host, read on the device
      if (port.staged.size() < tensor.nbytes()) port.staged = Buffer(memory_, tensor.nbytes());
      detail::check_cuda(
          cudaMemcpyAsync(port.staged.data(), data, tensor.nbytes(), cudaMemcpyHostToDevice, memory_->stream()),
          "uploading integers");
      data = port.staged.data();
    }
    set_address(name, data, port.on_host);
  }
  void set_address(const std::string& name, void* data, bool on_host) {
    if (!on_host && reinterpret_cast<std::uintptr_t>(data) % 256 != 0)
      throw InputError(text(graph().name, ": ", name,
                            " is not aligned to 256 bytes, as TensorRT demands; give the context "
                            "a capacity (`most`) that is a multiple of 256 rows"));
    if (!context_->setTensorAddress(name.c_str(), data))
      throw Error(text(graph().name, ": the engine has no tensor ", name, ": ", logger_->reason()));
  }

  const Graph* built_from_;
  std::shared_ptr<DeviceMemory> memory_;
  std::shared_ptr<const SharedScratch> shared_;
  std::shared_ptr<detail::TrtLogger> logger_;
  Buffer own_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;  // freed before the scratch it was given
  std::vector<FeedPort> feeds_;
  std::vector<std::int64_t> last_;
};

/// An export's engines on the current CUDA device: each plan once, whatever the number of contexts.
class TrtRuntime final : public Runtime {
 public:
  TrtRuntime(const Manifest& manifest, const Options& options) : manifest_(&manifest) {
    detail::require_device();
    detail::require_version();
    detail::check_cuda(cudaGetDevice(&device_), "the device");
    if (!options.formulation.empty() || options.map_weights || options.threads || !options.operators.empty())
      throw InputError(
          "formulation, map_weights, threads and operators are ONNX Runtime's; leave them out: an engine was built so");
    made_ = Engines::open(manifest, detail::trt_backend);
    runtime_.reset(nvinfer1::createInferRuntime(*logger_));
    if (!runtime_) throw InputError(text("TensorRT's runtime cannot be made here: ", logger_->reason()));
    std::int64_t scratch = 0;
    for (const char* kind : {"prefill", "decode"}) {
      const auto [record, profile] = made_.serving(kind);
      nvinfer1::ICudaEngine& engine = load(*record);
      scratch = std::max(scratch, engine.getDeviceMemorySizeForProfileV2(static_cast<std::int32_t>(profile)));
    }
    if (options.share_scratch) shared_ = std::make_shared<SharedScratch>(device_, static_cast<std::size_t>(scratch));
  }

  const Graph& graph(const std::string& kind) const override {
    const auto [record, profile] = made_.serving(kind);
    return manifest_->graph_named(record->serves[profile].graph);
  }
  Limits limits(const std::string& kind) const override {
    const auto [record, profile] = made_.serving(kind);
    return record->serves[profile].limits;
  }
  std::shared_ptr<Memory> memory() const override { return std::make_shared<DeviceMemory>(device_); }
  std::unique_ptr<Session> session(const std::string& kind, const std::shared_ptr<Memory>& memory) const override {
    const auto [record, profile] = made_.serving(kind);
    for (const TrtEngine& loaded : engines_)
      if (loaded.file == record->file)
        return std::make_unique<TrtSession>(*manifest_, graph(kind), manifest_->graph_named(record->graph),
                                            *loaded.engine, profile, std::static_pointer_cast<DeviceMemory>(memory),
                                            shared_, logger_);
    throw Error(text(record->file, ": not loaded"));
  }

 private:
  nvinfer1::ICudaEngine& load(const EngineRecord& record) {
    for (TrtEngine& loaded : engines_)
      if (loaded.file == record.file) return *loaded.engine;
    const MappedFile plan(made_.folder / record.file);
    std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
    if (!engine)
      throw InputError(text((made_.folder / record.file).string(), ": built by ", detail::trt_backend, " ",
                            made_.builder, "; it cannot be loaded on this GPU (", logger_->reason(), "); ",
                            made_.remedy()));
    engines_.push_back({std::move(engine), record.file});
    return *engines_.back().engine;
  }

  const Manifest* manifest_;
  int device_ = 0;  // the one that was current when the model was opened; every context runs there
  Engines made_;
  std::shared_ptr<detail::TrtLogger> logger_ = std::make_shared<detail::TrtLogger>();
  std::unique_ptr<nvinfer1::IRuntime> runtime_;  // outlives its engines: members go in reverse
  std::vector<TrtEngine> engines_;
  std::shared_ptr<const SharedScratch> shared_;
};

}  // namespace mla
