// mla::LatentAttention, version 1, for ONNX Runtime's CPU: a library for RegisterCustomOpsLibrary.
//
//   inputs     queries [B, T*H, R], past [B, S, R], past_lengths [B] int64, new [B, T, R]; floats are float32
//   output     mixed [B, T*H, d_c]
//   attribute  latent: d_c, the numbers of a row that are mixed
//
// Query t*H + h sees the first past_lengths[b] rows of the past (all of them where that is more than S, as in a graph
// that compares row numbers), and the new rows 0 to t. The queries hold W_UK and the softmax scale: `exporter export
// --fused-decode`, docs/operator.md.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <algorithm>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "mla/latent_attention.hpp"

namespace {

std::string shown(const std::vector<std::int64_t>& shape) {
  std::ostringstream out;
  for (std::size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "[") << shape[i];
  out << "]";
  return out.str();
}

OrtStatusPtr refuse(const std::string& problem) {
  return Ort::Status(("mla::LatentAttention: " + problem).c_str(), ORT_INVALID_ARGUMENT).release();
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo* info)
      : latent_(Ort::ConstKernelInfo(info).GetAttribute<std::int64_t>("latent")) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {  // no exception may leave it: its caller is C
    try {
      Ort::KernelContext context(raw);
      return compute(context);
    } catch (const Ort::Exception& error) {
      return Ort::Status(error.what(), error.GetOrtErrorCode()).release();
    } catch (const std::exception& error) {
      return Ort::Status(error.what(), ORT_FAIL).release();
    }
  }

 private:
  OrtStatusPtr compute(Ort::KernelContext& context) const {
    const auto queries = context.GetInput(0), past = context.GetInput(1), lengths = context.GetInput(2),
               fresh = context.GetInput(3);
    const auto q = shape(queries), p = shape(past), l = shape(lengths), f = shape(fresh);
    const bool fits = q.size() == 3 && p.size() == 3 && l.size() == 1 && f.size() == 3 &&              // ranks
                      p[0] == q[0] && l[0] == q[0] && f[0] == q[0] && p[2] == q[2] && f[2] == q[2] &&  // B, R
                      f[1] > 0 && q[1] > 0 && q[1] % f[1] == 0 && latent_ > 0 && latent_ <= q[2];
    if (!fits)
      return refuse("queries " + shown(q) + ", past " + shown(p) + ", past_lengths " + shown(l) + ", new " + shown(f) +
                    ", latent " + std::to_string(latent_) +
                    "; expected [B, T*H, R], [B, S, R], [B], [B, T, R] and latent up to R");
    const auto* given = lengths.GetTensorData<std::int64_t>();
    std::vector<std::int64_t> counts(given, given + l[0]);
    for (std::int64_t& count : counts) count = std::clamp(count, std::int64_t{0}, p[1]);
    const std::vector<std::int64_t> mixed{q[0], q[1], latent_};
    const mla::LatentAttention call{queries.GetTensorData<float>(),
                                    past.GetTensorData<float>(),
                                    counts.data(),
                                    fresh.GetTensorData<float>(),
                                    context.GetOutput(0, mixed).GetTensorMutableData<float>(),
                                    q[0],
                                    f[1],
                                    q[1] / f[1],
                                    p[1],
                                    q[2],
                                    latent_};
    run(context, call);
    return nullptr;
  }

  static std::vector<std::int64_t> shape(const Ort::ConstValue& value) {
    return value.GetTensorTypeAndShapeInfo().GetShape();
  }

  /// On the session's own threads, with scratch of the session's own arena.
  static void run(Ort::KernelContext& context, const mla::LatentAttention& call) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const std::unique_ptr<OrtAllocator, void (*)(OrtAllocator*)> arena(context.GetAllocator(*memory),
                                                                       Ort::GetApi().ReleaseAllocator);
    const auto give_back = [&](void* floats) { arena->Free(arena.get(), floats); };
    std::unique_ptr<void, decltype(give_back)> scratch(nullptr, give_back);
    mla::latent_attention(
        call,
        [&](std::ptrdiff_t count, auto&& work) {
          using Work = std::remove_reference_t<decltype(work)>;
          const auto one = [](void* self, std::size_t index) {
            (*static_cast<Work*>(self))(static_cast<std::ptrdiff_t>(index));
          };
          context.ParallelFor(one, static_cast<std::size_t>(count), 0, &work);
        },
        [&](std::size_t floats) {
          scratch.reset(arena->Alloc(arena.get(), floats * sizeof(float)));
          return static_cast<float*>(scratch.get());
        });
  }

  std::int64_t latent_;
};

struct Operator : Ort::CustomOpBase<Operator, Kernel, true> {
  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      *kernel = new Kernel(info);
    } catch (const Ort::Exception& error) {
      return Ort::Status(error.what(), error.GetOrtErrorCode()).release();
    }
    return nullptr;
  }
  const char* GetName() const { return "LatentAttention"; }
  const char* GetExecutionProviderType() const { return "CPUExecutionProvider"; }
  std::size_t GetInputTypeCount() const { return 4; }
  ONNXTensorElementDataType GetInputType(std::size_t index) const {
    return index == 2 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  std::size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetOutputType(std::size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
};

/// What this library was compiled for and this processor lacks, or nothing.
const char* lacking() {
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f")) return "AVX-512";
#elif defined(__FMA__)
  if (!__builtin_cpu_supports("fma")) return "FMA";
#elif defined(__AVX__)
  if (!__builtin_cpu_supports("avx")) return "AVX";
#endif
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr)
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "mla::LatentAttention: this ONNX Runtime is older than the headers "
                                                   "that the library was compiled with; compile it with its own");
  Ort::InitApi(api);
  if (const char* what = lacking())
    return refuse(std::string("this library was compiled for a processor with ") + what +
                  ", which this one lacks; compile it here");
  try {
    static const Operator latent_attention;
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain made("mla");
      made.Add(&latent_attention);
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
  } catch (const Ort::Exception& error) {
    return Ort::Status(error.what(), error.GetOrtErrorCode()).release();
  }
  return nullptr;
}
