// Argument checks shared by all compiled operators: a message states the rule, then the value received.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace doge_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

template <typename... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The message is only put together on failure: checks stay cheap with a thousand blocks.
#define DOGE_CHECK(condition, ...)        \
  do {                                    \
    if (__builtin_expect(!(condition), 0)) \
      ::doge_fast::fail(__VA_ARGS__);     \
  } while (false)

inline const char* name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string shape(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.size(d);
  text << ']';
  return text.str();
}

inline void check_storage(const Tensor& tensor, const char* op, const char* list, size_t i) {
  DOGE_CHECK(tensor.is_cpu(), op, " needs CPU tensors; ", list, "[", i, "] lives on another device. ",
             "Use the operator for its device.");
  const ScalarType dtype = tensor.scalar_type();
  DOGE_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double ||
                 dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
             op, " needs float32, bfloat16, float16 or float64; ", list, "[", i, "] is ",
             name(dtype), ".");
}

inline void check_contiguous(const Tensor& tensor, const char* op, const char* list, size_t i) {
  check_storage(tensor, op, list, i);
  DOGE_CHECK(tensor.is_contiguous(), op, " needs contiguous ", list, "; ", list, "[", i, "] of shape ",
             shape(tensor), " is not. Pass ", list, "[", i, "].contiguous().");
}

// blocks_RN: [R, n_p] each, columns adjacent, rows any distance apart. Returns R.
inline int64_t check_blocks(const TensorList& blocks, const char* op) {
  DOGE_CHECK(!blocks.empty(), op, " needs at least one block: an empty list has no number of rows.");
  int64_t num_rows = -1;
  for (size_t p = 0; p < blocks.size(); ++p) {
    const Tensor& block = blocks[p];
    check_storage(block, op, "blocks", p);
    DOGE_CHECK(block.dim() == 2, op, " needs blocks of shape [R, n]; blocks[", p, "] has shape ",
               shape(block), ".");
    if (num_rows < 0) num_rows = block.size(0);
    DOGE_CHECK(block.size(0) == num_rows, op, " needs the same number of rows in every block; blocks[",
               p, "] has ", block.size(0), ", blocks[0] has ", num_rows, ".");
    DOGE_CHECK(block.size(1) <= 1 || block.stride(1) == 1, op,
               " needs adjacent columns (stride(1) == 1); blocks[", p, "] has stride(1) == ",
               block.stride(1), ". Pass blocks[", p, "].contiguous().");
  }
  return num_rows;
}

// An output per block: contiguous, and as long as a row.
inline void check_outs(const TensorList& blocks, const TensorList& outs, const char* op) {
  DOGE_CHECK(blocks.size() == outs.size(), op, " needs one output per block; received ", outs.size(), " for ",
             blocks.size(), " blocks.");
  for (size_t p = 0; p < blocks.size(); ++p) {
    check_contiguous(outs[p], op, "outs", p);
    DOGE_CHECK(outs[p].numel() == blocks[p].size(1), op, " needs an output as long as its block; outs[", p,
               "] has ", outs[p].numel(), " elements, blocks[", p, "] ", blocks[p].size(1), " columns.");
  }
}

// The values of [num_rows] float64 coefficients.
inline std::vector<double> values_of(const Tensor& coefficients_R, int64_t num_rows, const char* op) {
  DOGE_CHECK(coefficients_R.is_cpu() && coefficients_R.scalar_type() == ScalarType::Double, op,
             " needs float64 coefficients on the CPU; received ", name(coefficients_R.scalar_type()),
             coefficients_R.is_cpu() ? "." : " on another device.");
  DOGE_CHECK(coefficients_R.dim() == 1 && coefficients_R.size(0) == num_rows, op,
             " needs one coefficient per row, shape [", num_rows, "]; received shape ", shape(coefficients_R), ".");
  const double* first = static_cast<const double*>(coefficients_R.const_data_ptr());
  std::vector<double> values;
  for (int64_t row = 0; row < num_rows; ++row) values.push_back(first[row * coefficients_R.stride(0)]);
  return values;
}

}  // namespace doge_fast
