// A CUDA device over host memory: torch's own dispatch key, device guards and autograd queues, while
// each operator runs on the CPU. New memory is NaN, each wait of the host is noted, and what is
// captured can be replayed. Its memory is as large as one says. It knows nothing of races, of real
// kernels and of time.
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>

using at::Device, at::IntArrayRef, at::kCUDA, at::Tensor, c10::IValue, c10::SymIntArrayRef;
using Guard = c10::impl::FakeGuardImpl<kCUDA>;
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, ::Guard) }

// Loaded ahead of torch these stand before its own, by which a build for CPUs knows of no GPU.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
};
namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
}  // namespace at::detail
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return kCUDA; }
}  // namespace at::accelerator

namespace {
std::recursive_mutex mutex;
std::vector<std::string> waits;
bool strict = false, paused = false, capturing = false;
std::map<void*, std::string> live;  // What memory held when the capture began.
size_t total = size_t(1) << 40, used = 0, peak = 0;  // Bytes of the device, as it says.
std::set<const void*> pinned;
std::vector<std::vector<std::function<void()>>> graphs;

void wait(const std::string& what) {
  std::lock_guard lock(mutex);
  waits.push_back(what);
  TORCH_CHECK(!strict && !capturing, "called a synchronizing CUDA operation: ", what);
}

struct Memory final : c10::Allocator {
  static void release(void* pointer) {
    std::lock_guard lock(mutex);
    used -= live.at(pointer).size();
    live.erase(pointer);
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= total - used,
        "CUDA out of memory. Tried to allocate ", bytes, " bytes; free are ", total - used, ".");
    void* pointer = bytes ? std::aligned_alloc(512, (bytes + 511) / 512 * 512) : nullptr;
    if (pointer) {
      std::memset(pointer, 0xFF, bytes);
      live[pointer] = std::string(bytes, '\xFF');
      used += bytes;
      peak = std::max(peak, used);
    }
    return {pointer, pointer, &release, Device(kCUDA, Guard::getDeviceIndex())};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} memory;

Device placed(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kCUDA, Guard::getDeviceIndex());
}

// The same memory, for operators of the CPU.
Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = at::dtype(tensor.scalar_type()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void record(std::function<void()> call) {
  if (capturing && !paused) graphs.back().push_back(std::move(call));
}

const std::set<std::string> WAITING = {"aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_consecutive", "aten::bincount"};

// Any operator: the CPU's on the same memory.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  if (WAITING.count(name)) wait(name);
  std::optional<Device> device;
  std::map<c10::TensorImpl*, Tensor> given;
  std::vector<Tensor> aliases;
  bool has_host = false;
  auto lower = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      has_host |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), name, ": all tensors on one device, found ",
        *device, " and ", tensor.device());
    device = tensor.device();
    aliases.push_back(host(tensor));
    given[aliases.back().unsafeGetTensorImpl()] = tensor;
    return aliases.back();
  };
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = lower(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(lower(each));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional(lower(*each)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = placed(value.toDevice());
      value = Device(at::kCPU);
    }
  }
  // A scalar of the host is an argument of a kernel; an index is uploaded.
  if (has_host && device) {
    TORCH_CHECK(name.find("index") != std::string::npos, name, ": tensors on cpu and ", *device);
    wait("upload of " + name);
  }
  const torch::jit::Stack lowered(stack->begin() + first, stack->end());
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  op.callBoxed(stack);
  std::vector<std::pair<size_t, Tensor>> made;
  size_t count = 0;
  auto raise = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    const auto found = given.find(tensor.unsafeGetTensorImpl());
    if (found != given.end()) return found->second;
    const auto options = tensor.options().device(placed(device));
    Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    host(result).copy_(tensor);
    made.emplace_back(count, result);
    return result;
  };
  auto each_result = [](torch::jit::Stack& results, size_t from, auto visit) {
    for (size_t i = from; i < results.size(); ++i) {
      if (results[i].isTensor()) results[i] = visit(results[i].toTensor());
      else if (results[i].isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : results[i].toTensorVector()) list.push_back(visit(each));
        results[i] = list;
      }
    }
  };
  each_result(*stack, first, [&](const Tensor& t) { Tensor r = raise(t); ++count; return r; });
  std::vector<std::pair<Tensor, Tensor>> grown;  // Empty tensors that an operator has given a size.
  for (const Tensor& alias : aliases) {
    Tensor& tensor = given.at(alias.unsafeGetTensorImpl());
    if (alias.sizes() == tensor.sizes()) continue;
    tensor.resize_(alias.sizes());
    host(tensor).copy_(alias);
    grown.emplace_back(alias, tensor);
  }
  record([op, lowered, given, made, grown, each_result] {
    torch::jit::Stack again = lowered;
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
    op.callBoxed(&again);
    size_t index = 0;
    auto next = made.begin();
    each_result(again, 0, [&](const Tensor& tensor) {
      if (next != made.end() && next->first == index) host((next++)->second).copy_(tensor);
      ++index;
      return tensor;
    });
    for (const auto& [alias, tensor] : grown) host(tensor).copy_(alias);
  });
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type), format);
}
Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(type));
}
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool is_pageable = source.is_cpu() && !pinned.count(source.storage().data());
  if (self.is_cpu() && !non_blocking) wait("copy to the host");
  if (source.is_cpu() && (is_pageable || !non_blocking)) wait("copy from the host");
  record([self, source] { host(self).copy_(host(source)); });
  host(self).copy_(host(source));
  return self;
}
Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, bool non_blocking,
    std::optional<at::MemoryFormat> format) {
  const Device to = !device ? self.device() : device->is_cuda() ? placed(device) : *device;
  const auto options = self.options().dtype(type.value_or(self.scalar_type())).device(to);
  const auto layout = format.value_or(at::MemoryFormat::Preserve);
  Tensor result = at::empty_like(self, options.pinned_memory(std::nullopt), layout);
  return result.copy_(self, non_blocking);
}
at::Scalar item(const Tensor& self) {
  wait("item");
  return host(self).item();
}
Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
Tensor alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::cpu::as_strided_symint(self, size, stride, self.sym_storage_offset());
}
Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
const Tensor& resize_(const Tensor& self, SymIntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

void begin_capture() {
  for (auto& [pointer, bytes] : live) std::memcpy(bytes.data(), pointer, bytes.size());
  graphs.emplace_back();
  capturing = true;
}
// What a capture has done it has not done: only a replay does it.
int64_t end_capture() {
  capturing = false;
  for (auto& [pointer, bytes] : live) std::memcpy(pointer, bytes.data(), bytes.size());
  return graphs.size() - 1;
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_to_copy", to_copy);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", alias);
  m.impl("view", view);
  m.impl("resize_", resize_);
}
TORCH_LIBRARY(fake_cuda, m) {
  c10::SetAllocator(c10::DeviceType::CUDA, &memory);
  m.def("host", [](const Tensor& tensor) { return host(tensor); });
  m.def("pin", [](const Tensor& tensor) { pinned.insert(tensor.storage().data()); });
  m.def("wait", [](std::string what) { wait(what); });
  m.def("take_waits", [] { return std::exchange(waits, {}); });
  m.def("set_strict", [](bool is_on) { strict = is_on; });
  m.def("set_paused", [](bool is_on) { paused = is_on; });
  m.def("is_capturing", [] { return capturing; });
  m.def("begin_capture", begin_capture);
  m.def("end_capture", end_capture);
  m.def("replay", [](int64_t graph) { for (const auto& call : graphs.at(graph)) call(); });
  m.def("memory", [] { return std::vector<int64_t>{int64_t(total), int64_t(used), int64_t(peak)}; });
  m.def("set_memory", [](int64_t bytes) { total = bytes; });
  m.def("reset_peak", [] { peak = used; });
  m.def("set_device", [](int64_t index) { Guard::setDeviceIndex(index); });
  m.def("current_device", [] { return int64_t(Guard::getDeviceIndex()); });
}
