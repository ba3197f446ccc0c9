// ONNX Runtime on the CPU: graphs opened once for all threads, steps over bound memory, nothing copied.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdlib>
#include <filesystem>

#include "mla/session.hpp"

namespace mla {

namespace detail {

inline ONNXTensorElementDataType ort_type(DType dtype) {
  switch (dtype) {
    case DType::fp32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case DType::fp16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case DType::bf16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case DType::fp8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
    case DType::int8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case DType::int64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  }
  throw Error("a dtype without a name");
}

/// One environment for the process: ONNX Runtime has its logger in it.
inline Ort::Env& ort_env() {
  static Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "mla");
  return env;
}

inline std::string first_line(const char* message) {
  const std::string all(message);
  return all.substr(0, all.find('\n'));
}

}  // namespace detail

/// A step of one graph; inputs and outputs stay bound while their address and shape stay.
class OrtSession final : public Session {
 public:
  OrtSession(const Manifest& manifest, const Graph& graph, std::shared_ptr<Ort::Session> session)
      : Session(manifest, graph),
        session_(std::move(session)),
        binding_(*session_),
        host_(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)),
        bound_inputs_(graph.inputs.size()),
        bound_outputs_(graph.outputs.size()) {}

 private:
  void run_checked(const Bindings& inputs, const Bindings& outputs, const Sizes&) override {
    try {
      for (std::size_t i = 0; i < inputs.size(); ++i)
        if (differs(bound_inputs_[i], inputs[i])) binding_.BindInput(graph().inputs[i].name.c_str(), value(inputs[i]));
      for (std::size_t i = 0; i < outputs.size(); ++i)
        if (differs(bound_outputs_[i], outputs[i]))
          binding_.BindOutput(graph().outputs[i].name.c_str(), value(outputs[i]));
      session_->Run(options_, binding_);
    } catch (const Ort::Exception& error) {
      throw Error(text(graph().name, ": ONNX Runtime failed: ", detail::first_line(error.what())));
    }
  }
  Ort::Value value(const Tensor& tensor) const {
    return Ort::Value::CreateTensor(host_, tensor.data, tensor.nbytes(), tensor.shape.begin(), tensor.shape.rank,
                                    detail::ort_type(tensor.dtype));
  }
  static bool differs(Tensor& bound, const Tensor& now) {
    const bool same = bound.data == now.data && bound.shape == now.shape;
    bound = now;
    return !same;
  }

  std::shared_ptr<Ort::Session> session_;
  Ort::IoBinding binding_;
  Ort::MemoryInfo host_;
  Ort::RunOptions options_;
  std::vector<Tensor> bound_inputs_, bound_outputs_;
};

/// An export in ONNX Runtime. One opened graph serves both kinds where they are of one formulation: the same
/// mathematics, half the weights in memory.
class OrtRuntime final : public Runtime {
 public:
  OrtRuntime(const Manifest& manifest, const Options& options) : manifest_(&manifest) {
    if (options.threads < 0)
      throw InputError(text("threads is ", options.threads, "; expected 0 (ONNX Runtime chooses) or more"));
    if (manifest.dtype == "bf16")
      throw InputError(text(manifest.folder.string(),
                            ": ONNX Runtime's CPU has no bfloat16 products; export with "
                            "--dtype fp32 or fp16 for it, or use TensorRT on a GPU"));
    const Graph& decode = manifest.graph("decode", options.formulation);
    const Graph& prefill = prefill_of(decode, options);
    prefill_ = {&prefill, open(prefill, options)};
    const bool one = prefill.formulation == decode.formulation;
    decode_ = one ? prefill_ : Opened{&decode, open(decode, options)};
  }

  const Graph& graph(const std::string& kind) const override { return *opened(kind).graph; }
  Limits limits(const std::string&) const override { return {}; }
  std::shared_ptr<Memory> memory() const override { return std::make_shared<HostMemory>(); }
  std::unique_ptr<Session> session(const std::string& kind, const std::shared_ptr<Memory>&) const override {
    return std::make_unique<OrtSession>(*manifest_, *opened(kind).graph, opened(kind).session);
  }

 private:
  struct Opened {
    const Graph* graph = nullptr;
    std::shared_ptr<Ort::Session> session;
  };

  const Opened& opened(const std::string& kind) const { return kind == "prefill" ? prefill_ : decode_; }
  const Graph& prefill_of(const Graph& decode, const Options& options) const {
    if (!options.formulation.empty())
      for (const Graph& graph : manifest_->graphs)
        if (graph.kind == "prefill" && graph.formulation == decode.formulation) return graph;
    return manifest_->graph("prefill");
  }
  std::shared_ptr<Ort::Session> open(const Graph& graph, const Options& options) {
    try {
      Ort::SessionOptions settings;
      settings.SetIntraOpNumThreads(options.threads).SetLogSeverityLevel(3);
      settings.AddConfigEntry("session.intra_op.allow_spinning", options.spin ? "1" : "0");
      if (options.map_weights) settings.AddConfigEntry("session.disable_prepacking", "1");
      if (graph.formulation == "fused") load_operators(settings, operators_of(graph, options));
      hand_over(settings);
      return std::make_shared<Ort::Session>(detail::ort_env(), (manifest_->folder / graph.file).c_str(), settings);
    } catch (const Ort::Exception& error) {
      throw InputError(text("ONNX Runtime cannot open ", graph.file, " (", manifest_->dtype,
                            "): ", detail::first_line(error.what())));
    }
  }
  /// The library of the operator that a graph of `--fused-decode` has. InputError where none is named or there.
  static std::string operators_of(const Graph& graph, const Options& options) {
    const char* named = std::getenv("MLA_OPERATOR");
    const std::string path = !options.operators.empty() ? options.operators : named ? named : "";
    if (path.empty() || !std::filesystem::is_regular_file(path))
      throw InputError(text(graph.file, ": needs the library of the operator mla::LatentAttention, and ",
                            path.empty() ? "none is named" : path + " is no file",
                            "; expected libmla-operator.so (engines/cpp/operator) by MLA_OPERATOR or "
                            "Options::operators; or export without --fused-decode"));
    return std::filesystem::absolute(path).string();  // a bare name would be looked for where the loader looks
  }
  static void load_operators(Ort::SessionOptions& settings, const std::string& path) {
    try {
      settings.RegisterCustomOpsLibrary(path.c_str());
    } catch (const Ort::Exception& error) {
      throw InputError(text(path, ": ONNX Runtime does not take it: ", detail::first_line(error.what()),
                            "; expected libmla-operator.so, compiled here (engines/cpp/operator)"));
    }
  }
  /// Weights that lie where ONNX Runtime will not look (a checkpoint on another disk), mapped.
  void hand_over(Ort::SessionOptions& settings) {
    if (manifest_->handed.empty()) return;
    std::vector<std::string> names;
    std::vector<char*> data;
    std::vector<std::size_t> sizes;
    for (const auto& [name, place] : manifest_->handed) {
      const auto found = std::find_if(files_.begin(), files_.end(), [&](const auto& f) { return f.first == name; });
      const auto& file =
          found != files_.end() ? *found : files_.emplace_back(name, std::make_unique<MappedFile>(place));
      names.push_back(name);
      data.push_back(static_cast<char*>(const_cast<void*>(file.second->data())));  // ONNX Runtime only reads them
      sizes.push_back(file.second->size());
    }
    settings.AddExternalInitializersFromFilesInMemory(names, data, sizes);
  }

  const Manifest* manifest_;
  std::vector<std::pair<std::string, std::unique_ptr<MappedFile>>> files_;  // outlive the sessions
  Opened prefill_, decode_;
};

}  // namespace mla
