// A second device for tests, which torch knows as "privateuse1": memory of the host, kept apart from the CPU's.
//
// It computes by torch's kernels for CPUs, on copies, so nothing but a copy takes a tensor of it beside one of the CPU.
// Its collectives are gloo's, on the memory where it lies. Streams and events exist, and nothing is asynchronous.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// -- memory ----------------------------------------------------------------------------------------------------------

std::atomic<int64_t> bytes_now{0}, bytes_most{0};

struct Block {
  void* memory;
  int64_t nbytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_now -= block->nbytes;
  std::free(block->memory);
  delete block;
}

struct Heap final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, DEVICE};
    auto* block = new Block{std::malloc(nbytes), static_cast<int64_t>(nbytes)};
    int64_t now = bytes_now += block->nbytes;
    int64_t most = bytes_most;
    while (now > most && !bytes_most.compare_exchange_weak(most, now)) {
    }
    return {block->memory, block, &free_block, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
Heap heap;
REGISTER_ALLOCATOR(KIND, &heap);

void resize_bytes(const c10::Storage& storage, size_t nbytes) {
  auto memory = heap.allocate(nbytes);
  if (nbytes && storage.nbytes()) std::memcpy(memory.get(), storage.data(), std::min(nbytes, storage.nbytes()));
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(nbytes);
}

// -- what torch asks of a device -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  mutable std::atomic<int64_t> streams{0};
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, DEVICE, ++streams);
  }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_bytes(storage, nbytes);
  }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
};
Hooks hooks;
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// -- operators -------------------------------------------------------------------------------------------------------

// The same memory, which stays as long as what is made here.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &heap, keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &heap, keys(), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->unsafe_storage().nbytes() < needed) resize_bytes(impl->unsafe_storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride.empty() && !size.empty() ? at::detail::defaultStrides(size) : stride.vec());
  impl->set_storage_offset(offset);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

bool is_pinned(const at::Tensor&, std::optional<at::Device>) { return false; }

// As on a GPU, an operator takes a tensor of the CPU only if that is one number, or indices.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  if (name.find("index") == std::string::npos) {
    const auto count = op.schema().arguments().size();
    for (const auto& value : c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count)) {
      if (value.isTensor() && value.toTensor().defined()) {
        TORCH_CHECK(!value.toTensor().is_cpu() || value.toTensor().dim() == 0,
                    "Expected all tensors to be on the same device: ", name, " was given one of the CPU");
      }
    }
  }
  at::native::cpu_fallback(op, stack, true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("is_pinned", &is_pinned);
}

// -- collectives -----------------------------------------------------------------------------------------------------

using Tensors = std::vector<at::Tensor>;
using Wait = c10::intrusive_ptr<c10d::Work>;

at::Tensor on_device(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_cpu(), "a collective of the second device was given a tensor of the CPU");
  return on_cpu(tensor);
}

Tensors on_device(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(on_device(tensor));
  return found;
}

std::vector<Tensors> on_device(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (const auto& list : lists) found.push_back(on_device(list));
  return found;
}

struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "second"; }
  Wait broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto here = on_device(tensors);
    return gloo->broadcast(here, options);
  }
  Wait allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto here = on_device(tensors);
    return gloo->allreduce(here, options);
  }
  Wait allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto outputs = on_device(to);
    auto inputs = on_device(from);
    return gloo->allgather(outputs, inputs, options);
  }
  Wait _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
    auto output = on_device(to), input = on_device(from);
    return gloo->_allgather_base(output, input, options);
  }
  Wait _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    auto output = on_device(to), input = on_device(from);
    return gloo->_reduce_scatter_base(output, input, options);
  }
  Wait alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes,
                     std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    auto output = on_device(to), input = on_device(from);
    return gloo->alltoall_base(output, input, to_sizes, from_sizes, options);
  }
  Wait send(Tensors& tensors, int to, int tag) override {
    auto here = on_device(tensors);
    return gloo->send(here, to, tag);
  }
  Wait recv(Tensors& tensors, int from, int tag) override {
    auto here = on_device(tensors);
    return gloo->recv(here, from, tag);
  }
  Wait barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(gloo));
  });
  m.def("bytes_now", [] { return bytes_now.load(); });
  m.def("take_bytes_most", [] {
    auto most = bytes_most.load();
    bytes_most = bytes_now.load();
    return most;
  });
}
