// Dtypes, shapes and views of memory: what a graph's inputs and outputs are made of. Nothing here allocates per step.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mla/error.hpp"

namespace mla {

/// The dtypes that the contract knows, under its names.
enum class DType { fp32, fp16, bf16, fp8, int8, int64 };

inline constexpr std::array<std::string_view, 6> dtype_names = {"fp32", "fp16", "bf16", "fp8", "int8", "int64"};

inline std::string_view name_of(DType dtype) { return dtype_names[static_cast<std::size_t>(dtype)]; }

/// Bytes of one number.
inline std::size_t item_size(DType dtype) {
  constexpr std::array<std::size_t, 6> sizes = {4, 2, 2, 1, 1, 8};
  return sizes[static_cast<std::size_t>(dtype)];
}

/// Batch, new tokens and rows of past offered: the sizes that a step chooses.
struct Sizes {
  std::int64_t B = 0, T = 0, S = 0;
};

/// Up to four sizes, kept in place.
struct Shape {
  std::array<std::int64_t, 4> dims{};
  std::size_t rank = 0;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes) {
    for (std::int64_t size : sizes) push(size);
  }
  void push(std::int64_t size) {
    if (rank == dims.size()) throw InputError("a shape of more than 4 sizes; expected at most 4");
    dims[rank++] = size;
  }
  std::size_t count() const {
    std::size_t product = 1;
    for (std::size_t i = 0; i < rank; ++i) product *= static_cast<std::size_t>(dims[i]);
    return product;
  }
  const std::int64_t* begin() const { return dims.data(); }
  const std::int64_t* end() const { return dims.data() + rank; }
  std::int64_t operator[](std::size_t i) const { return dims[i]; }
  bool operator==(const Shape& other) const { return rank == other.rank && std::equal(begin(), end(), other.begin()); }
};

/// One size of a graph's tensor: a number, or B, T, S or S+T.
struct Dim {
  std::int64_t fixed = 0;
  bool B = false, T = false, S = false;

  bool symbolic() const { return B || T || S; }
  std::int64_t at(const Sizes& sizes) const {
    return fixed + (B ? sizes.B : 0) + (T ? sizes.T : 0) + (S ? sizes.S : 0);
  }
  std::string name() const { return !symbolic() ? std::to_string(fixed) : S && T ? "S+T" : B ? "B" : T ? "T" : "S"; }
};

/// A graph's input or output: its name, its symbolic shape and its dtype.
struct TensorSpec {
  std::string name;
  std::vector<Dim> dims;
  DType dtype = DType::fp32;

  Shape shape(const Sizes& sizes) const {
    Shape shape;
    for (const Dim& dim : dims) shape.push(dim.at(sizes));
    return shape;
  }
  std::string shape_text() const {
    std::vector<std::string> names;
    for (const Dim& dim : dims) names.push_back(dim.name());
    return listed(names);
  }
};

/// Memory seen as a tensor. It owns nothing; the memory must outlive the step that reads or writes it.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::fp32;
  Shape shape;

  std::size_t nbytes() const { return shape.count() * item_size(dtype); }
};

/// A graph's inputs, or its outputs, each bound to memory: in the graph's order, found by name.
class Bindings {
 public:
  explicit Bindings(const std::vector<TensorSpec>& specs) : specs_(&specs), tensors_(specs.size()) {}

  /// The tensor of a name. InputError lists the names that there are.
  Tensor& at(std::string_view name) {
    for (std::size_t i = 0; i < specs_->size(); ++i)
      if ((*specs_)[i].name == name) return tensors_[i];
    std::vector<std::string_view> names;
    for (const TensorSpec& spec : *specs_) names.push_back(spec.name);
    throw InputError(text(name, ": the graph has no such tensor; expected one of ", listed(names)));
  }
  Tensor& operator[](std::size_t i) { return tensors_[i]; }
  const Tensor& operator[](std::size_t i) const { return tensors_[i]; }
  std::size_t size() const { return tensors_.size(); }
  const std::vector<TensorSpec>& specs() const { return *specs_; }

 private:
  const std::vector<TensorSpec>* specs_;  // the graph's, which outlives its bindings
  std::vector<Tensor> tensors_;
};

}  // namespace mla
