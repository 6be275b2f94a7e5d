// A second device for tests, which torch knows as "privateuse1": memory of the host, kept apart from the CPU's.
//
// Operators run torch's CPU kernels on copies and refuse CPU tensors next to tensors of this device. Collectives are
// gloo's, on the device's memory. Streams, events, the caching allocator and pinned memory follow CUDA's rules, but
// every operator computes at once: a listener (order.py) hears of each launch, event and wait and checks their order.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

namespace {

namespace py = pybind11;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// -- the listener ----------------------------------------------------------------------------------------------------

// The Python object that hears of launches, events and waits; null if nobody listens. Never freed, only replaced.
std::atomic<PyObject*> listener{nullptr};
thread_local int64_t current_stream = 0;
thread_local int inside_kernel = 0;  // operators and copies inside a kernel are part of that kernel

struct InsideKernel {
  InsideKernel() { ++inside_kernel; }
  ~InsideKernel() { --inside_kernel; }
};

template <class... Arguments>
void tell(const char* what, Arguments&&... arguments) {
  if (listener.load() == nullptr) return;
  py::gil_scoped_acquire gil;
  PyObject* to = listener.load();
  if (to != nullptr) py::handle(to).attr(what)(std::forward<Arguments>(arguments)...);
}

template <class... Arguments>
void tell_quietly(const char* what, Arguments&&... arguments) noexcept {
  try {
    tell(what, std::forward<Arguments>(arguments)...);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the listener failed in %s: %s\n", what, error.what());
  }
}

// -- memory ----------------------------------------------------------------------------------------------------------

constexpr int POISON = 0xff;  // every float is NaN, every signed integer -1
std::atomic<int64_t> bytes_now{0}, bytes_most{0};

struct Block {
  void* memory;
  int64_t nbytes;
  size_t room;
  int64_t stream;                 // that it was allocated on
  std::set<int64_t> recorded;     // other streams that record_stream has named
};

// Freed memory by (stream, room). As in CUDA's allocator, the stream that it was allocated on gets it again at once,
// last freed first; a size is rounded up to a power of two, so that memory comes back as often as possible.
std::mutex pool_lock;
std::map<std::pair<int64_t, size_t>, std::vector<void*>> pool;

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_now -= block->nbytes;
  std::memset(block->memory, POISON, block->nbytes);
  if (!block->recorded.empty()) {
    std::vector<int64_t> streams(block->recorded.begin(), block->recorded.end());
    tell_quietly("freed", reinterpret_cast<int64_t>(block->memory), static_cast<int64_t>(block->room), streams);
  }
  {
    std::lock_guard guard(pool_lock);
    pool[{block->stream, block->room}].push_back(block->memory);
  }
  delete block;
}

struct Heap final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, DEVICE};
    size_t room = 512;
    while (room < nbytes) room *= 2;
    void* memory = nullptr;
    {
      std::lock_guard guard(pool_lock);
      auto& free = pool[{current_stream, room}];
      if (!free.empty()) {
        memory = free.back();
        free.pop_back();
      }
    }
    if (memory == nullptr) {
      memory = std::malloc(room);
      tell_quietly("grown", reinterpret_cast<int64_t>(memory), static_cast<int64_t>(room));
    }
    std::memset(memory, POISON, room);
    auto* block = new Block{memory, static_cast<int64_t>(nbytes), room, current_stream, {}};
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

// Pinned memory of the host, by its first byte.
std::mutex pinned_lock;
std::map<int64_t, int64_t> pinned;

bool is_pinned_at(const void* memory) {
  auto place = reinterpret_cast<int64_t>(memory);
  std::lock_guard guard(pinned_lock);
  auto next = pinned.upper_bound(place);
  return next != pinned.begin() && place < std::prev(next)->first + std::prev(next)->second;
}

void free_pinned(void* memory) {
  auto place = reinterpret_cast<int64_t>(memory);
  int64_t nbytes = 0;
  {
    std::lock_guard guard(pinned_lock);
    nbytes = pinned[place];
    pinned.erase(place);
  }
  std::memset(memory, POISON, nbytes);
  tell_quietly("grown", place, nbytes);  // torch's pinned allocator waits for copies before it lends memory again
  std::free(memory);
}

struct PinnedHeap final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(at::kCPU)};
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, nbytes) == 0, "no pinned memory");
    std::memset(memory, POISON, nbytes);
    {
      std::lock_guard guard(pinned_lock);
      pinned[reinterpret_cast<int64_t>(memory)] = nbytes;
    }
    return {memory, memory, &free_pinned, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
PinnedHeap pinned_heap;

// -- streams and events ----------------------------------------------------------------------------------------------

std::atomic<int64_t> streams{0}, events{0};

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

struct Event {
  int64_t id;
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(++streams); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(++streams); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto from = stream_of(current_stream);
    current_stream = to.id();
    return from;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event{++events};
    auto* recorded = static_cast<Event*>(*event);
    recorded->at = std::chrono::steady_clock::now();
    tell("recorded", recorded->id, stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) tell("waited", static_cast<Event*>(event)->id, stream.id());
  }
  // Unless the host knows better, an event is not done when it is first asked, as on a device that is late.
  bool queryEvent(void* event) const override {
    if (event == nullptr || listener.load() == nullptr) return true;
    py::gil_scoped_acquire gil;
    PyObject* to = listener.load();
    return to == nullptr || py::handle(to).attr("queried")(static_cast<Event*>(event)->id).cast<bool>();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    tell("host_waited_stream", stream.id(), false);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { tell("host_waited_stream", stream.id(), true); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) tell("host_waited_event", static_cast<Event*>(event)->id);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> passed = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
    return passed.count();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell("host_waited_device"); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    auto* block = static_cast<Block*>(memory.get_context());
    if (block != nullptr && stream.id() != block->stream) block->recorded.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_heap; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned_at(memory); }
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

// One access of a kernel: [first byte, last byte + 1), whether it writes, and the argument's name.
using Access = std::tuple<int64_t, int64_t, bool, std::string>;
using Accesses = std::vector<Access>;
constexpr int64_t MOST_RUNS = 256;  // a tensor of more contiguous runs counts as all that lies between its ends

void add_access(Accesses& accesses, const at::Tensor& tensor, bool writes, const std::string& name) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return;
  auto first = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  if (first == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size) in bytes, without those of stride 0 or size 1
  int64_t item = tensor.itemsize();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0) dims.emplace_back(tensor.stride(dim) * item, tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = item;  // bytes of one contiguous run
  size_t next = 0;
  while (next < dims.size() && dims[next].first == run) run *= dims[next++].second;
  int64_t runs = 1, span = run;
  for (size_t dim = next; dim < dims.size(); ++dim) {
    runs *= dims[dim].second;
    span += dims[dim].first * (dims[dim].second - 1);
  }
  if (runs > MOST_RUNS) {
    accesses.emplace_back(first, first + span, writes, name);
    return;
  }
  for (int64_t index = 0; index < runs; ++index) {
    int64_t at = first, rest = index;
    for (size_t dim = next; dim < dims.size(); ++dim) {
      at += dims[dim].first * (rest % dims[dim].second);
      rest /= dims[dim].second;
    }
    accesses.emplace_back(at, at + run, writes, name);
  }
}

void add_value(Accesses& accesses, const c10::IValue& value, bool writes, const std::string& name) {
  if (value.isTensor()) {
    if (value.toTensor().defined() && !value.toTensor().is_cpu()) add_access(accesses, value.toTensor(), writes, name);
  } else if (value.isList()) {
    for (const auto& each : value.toListRef()) add_value(accesses, each, writes, name);
  }
}

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

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (inside_kernel == 0 && listener.load() != nullptr) {
    Accesses accesses;
    for (const auto* tensor : {&self, &to}) {
      if (!tensor->is_cpu() || is_pinned_at(tensor->const_data_ptr())) {
        add_access(accesses, *tensor, tensor == &to, tensor == &to ? "self" : "src");
      }
    }
    bool host = self.is_cpu() || to.is_cpu();
    bool pageable = host && !is_pinned_at((self.is_cpu() ? self : to).const_data_ptr());
    // From pageable memory the driver copies to memory of its own before it returns.
    bool waits = host && (!non_blocking || (pageable && to.is_cpu()));
    tell("launched", "copy_", current_stream, accesses, waits);
  }
  InsideKernel inside;
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

bool is_pinned(const at::Tensor&, std::optional<at::Device>) { return false; }

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// Operators whose result the host reads, so that it waits for the stream.
bool waits_for_host(const c10::FunctionSchema& schema, const Accesses& inputs) {
  static const std::set<std::string> names{"aten::nonzero",    "aten::masked_select",      "aten::_unique2",
                                           "aten::unique_dim", "aten::unique_consecutive", "aten::equal"};
  if (inputs.empty()) return false;
  if (names.count(schema.name())) return true;
  for (const auto& each : schema.returns()) {
    auto kind = each.type()->kind();
    if (kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType) return true;
  }
  return false;
}

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
  if (inside_kernel > 0 || listener.load() == nullptr) {
    at::native::cpu_fallback(op, stack, true);
    return;
  }
  const auto& schema = op.schema();
  Accesses accesses;
  const auto begin = stack->size() - schema.arguments().size();
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const auto& argument = schema.arguments()[index];
    bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    add_value(accesses, (*stack)[begin + index], writes, argument.name());
  }
  bool waits = waits_for_host(schema, accesses);
  {
    InsideKernel inside;
    at::native::cpu_fallback(op, stack, true);
  }
  const auto results = stack->size() - schema.returns().size();
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    if (schema.returns()[index].alias_info() == nullptr) add_value(accesses, (*stack)[results + index], true, "result");
  }
  tell("launched", name, current_stream, accesses, waits);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("is_pinned", &is_pinned);
  m.impl("record_stream", &record_stream);
}

// -- collectives -----------------------------------------------------------------------------------------------------

using Tensors = std::vector<at::Tensor>;
using Wait = c10::intrusive_ptr<c10d::Work>;
constexpr const char* BY_NCCL = "NCCL would refuse this collective: ";

// What NCCL takes of a tensor, with its reasons.
at::Tensor on_device(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_cpu(), BY_NCCL, "Tensors must be CUDA and dense. It was given a tensor of the CPU");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), BY_NCCL, "Tensors must be contiguous. This one has ",
              "the shape ", tensor.sizes(), " and the strides ", tensor.strides());
  static const std::set<at::ScalarType> taken{at::kByte, at::kChar,   at::kInt,      at::kLong, at::kHalf,
                                              at::kFloat, at::kDouble, at::kBFloat16, at::kBool,
                                              at::kFloat8_e4m3fn, at::kFloat8_e5m2};
  TORCH_CHECK(taken.count(tensor.scalar_type()) != 0, BY_NCCL,
              "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
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

std::string reduced_by(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  static const std::map<c10d::ReduceOp::RedOpType, std::string> names{
      {c10d::ReduceOp::SUM, "SUM"}, {c10d::ReduceOp::AVG, "AVG"},   {c10d::ReduceOp::PRODUCT, "PRODUCT"},
      {c10d::ReduceOp::MIN, "MIN"}, {c10d::ReduceOp::MAX, "MAX"},   {c10d::ReduceOp::PREMUL_SUM, "PREMUL_SUM"}};
  auto name = names.find(op);
  TORCH_CHECK(name != names.end(), BY_NCCL, "Cannot use bitwise reductions with NCCL");
  TORCH_CHECK(!at::isFloat8Type(tensor.scalar_type()), BY_NCCL, "Float8 dtypes are not supported for NCCL reductions");
  return name->second;
}

// What ranks compare of a call: for messages (`peer` is a rank) also the direction and the tag.
using Part = std::tuple<std::string, std::string, std::string, int>;  // name, tensors, the rest, peer or -1

std::string tensors_of(const Tensors& tensors) {
  std::ostringstream words;
  for (const auto& tensor : tensors) {
    words << (words.tellp() > 0 ? ", " : "") << tensor.numel() << " x " << c10::toString(tensor.scalar_type());
  }
  return words.str();
}

// A call in flight. `wait` makes the current stream wait for it, and memory is kept until then. gloo's part is
// waited for by the host, which no program can notice.
struct Later final : c10d::Work {
  std::vector<Wait> inner;
  std::vector<at::Tensor> held;
  Tensors outputs;
  int64_t number, stream;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  Later(std::vector<Wait> works, std::vector<at::Tensor> tensors, Tensors writes, int64_t token, int64_t on)
      : inner(std::move(works)), held(std::move(tensors)), outputs(std::move(writes)), number(token), stream(on) {}
  ~Later() override {
    try {
      for (auto& each : inner) {
        if (!held.empty() && !each->isCompleted()) each->wait(kNoTimeout);
      }
    } catch (...) {
    }
  }
  bool isCompleted() override {
    for (auto& each : inner) {
      if (!each->isCompleted()) return false;
    }
    if (number < 0 || listener.load() == nullptr) return true;
    py::gil_scoped_acquire gil;
    PyObject* to = listener.load();
    return to == nullptr || py::handle(to).attr("queried")(number).cast<bool>();
  }
  bool isSuccess() const override {
    return std::all_of(inner.begin(), inner.end(), [](const Wait& each) { return each->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& each : inner) {
      if (each->exception()) return each->exception();
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = true;
    for (auto& each : inner) done = each->wait(timeout) && done;
    if (number >= 0) tell("waited", number, current_stream);
    held.clear();
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override {
    for (auto& each : inner) each->abort();
  }
  // Its wait makes the current stream wait, as `wait` does.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future) return future;
    TORCH_CHECK(inner.size() == 1, "a batch has no future");
    auto type = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{DEVICE});
    inner.front()->getFuture()->addCallback([made = future, on = stream, results = outputs](c10::ivalue::Future& done) {
      if (done.hasError()) {
        made->setError(done.exception_ptr());
        return;
      }
      auto before = std::exchange(current_stream, on);
      made->markCompleted(c10::IValue(results));
      current_stream = before;
    });
    return future;
  }
  std::vector<at::Tensor> result() override { return outputs; }
};

// Calls that are one: everything between startCoalescing and endCoalescing, or one call alone.
struct Batch {
  std::vector<Part> parts;
  Tensors reads, writes;
  std::vector<std::function<Wait()>> starts;
  bool is_async = true;
};

struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  PyObject* log;                      // a Communicators of manners.py, never freed
  int64_t stream = ++streams;         // of this communicator
  std::map<int, int64_t> of_peers;  // streams of the communicators between two ranks
  std::optional<Batch> batch;
  std::deque<at::Tensor> sent, wanted;  // messages of this rank to itself
  Collectives(c10::intrusive_ptr<c10d::Backend> inner, PyObject* to)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)), log(to) {}
  const std::string getBackendName() const override { return "second"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch.emplace(); }
  Wait endCoalescing() override {
    Batch calls = std::move(*batch);
    batch.reset();
    return launch(calls, true);
  }

  // As NCCL: a collective and a batch run on the communicator's stream, a message alone on one of the two ranks, if
  // asynchronous. That stream waits for the current one first.
  Wait launch(Batch& calls, bool is_batch) {
    int peer = std::get<3>(calls.parts.at(0));
    bool of_two = !is_batch && peer >= 0;
    int64_t on = of_two ? stream_of_pair(peer) : (calls.is_async ? stream : current_stream);
    std::string wrong;
    {
      py::gil_scoped_acquire gil;
      wrong = py::handle(log).attr("called")(calls.parts, of_two).cast<std::string>();
    }
    TORCH_CHECK(wrong.empty(), wrong);
    int64_t number = -1;
    if (listener.load() != nullptr) {
      Accesses accesses;
      for (const auto& each : calls.reads) add_access(accesses, each, false, "input");
      for (const auto& each : calls.writes) add_access(accesses, each, true, "output");
      number = ++events;
      auto name = "c10d::" + (is_batch ? "batch of " + std::get<0>(calls.parts[0]) : std::get<0>(calls.parts[0]));
      tell("collective", name, current_stream, on, accesses, number);
    }
    Tensors held(calls.reads);
    held.insert(held.end(), calls.writes.begin(), calls.writes.end());
    InsideKernel inside;
    std::vector<Wait> works;
    for (auto& start : calls.starts) works.push_back(start());
    return c10::make_intrusive<Later>(std::move(works), std::move(held), calls.writes, number, on);
  }
  Wait call(Part part, Tensors reads, Tensors writes, bool is_async, std::function<Wait()> start) {
    Batch alone;
    Batch& calls = batch ? *batch : alone;
    calls.parts.push_back(std::move(part));
    calls.reads.insert(calls.reads.end(), reads.begin(), reads.end());
    calls.writes.insert(calls.writes.end(), writes.begin(), writes.end());
    calls.starts.push_back(std::move(start));
    calls.is_async = is_async;
    if (!batch) return launch(calls, false);
    return c10::make_intrusive<Later>(std::vector<Wait>{}, Tensors{}, Tensors{}, -1, stream);
  }
  int64_t stream_of_pair(int peer) {
    auto& found = of_peers[peer];
    return found != 0 ? found : found = ++streams;
  }

  Wait broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto here = on_device(tensors);
    bool sends = getRank() == options.rootRank;
    return call({"broadcast", tensors_of(tensors), "from " + std::to_string(options.rootRank), -1},
                sends ? tensors : Tensors{}, sends ? Tensors{} : tensors, options.asyncOp,
                [=, this]() mutable { return gloo->broadcast(here, options); });
  }
  Wait allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto here = on_device(tensors);
    return call({"all_reduce", tensors_of(tensors), reduced_by(options.reduceOp, tensors.at(0)), -1}, {}, tensors,
                options.asyncOp, [=, this]() mutable { return gloo->allreduce(here, options); });
  }
  Wait reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto here = on_device(tensors);
    bool keeps = getRank() == options.rootRank;
    auto rest = reduced_by(options.reduceOp, tensors.at(0)) + " to " + std::to_string(options.rootRank);
    return call({"reduce", tensors_of(tensors), rest, -1}, keeps ? Tensors{} : tensors, keeps ? tensors : Tensors{},
                options.asyncOp, [=, this]() mutable { return gloo->reduce(here, options); });
  }
  Wait allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto outputs = on_device(to);
    auto inputs = on_device(from);
    Tensors writes;
    for (const auto& list : to) writes.insert(writes.end(), list.begin(), list.end());
    return call({"all_gather", tensors_of(writes), "", -1}, from, writes, options.asyncOp,
                [=, this]() mutable { return gloo->allgather(outputs, inputs, options); });
  }
  Wait _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
    auto output = on_device(to), input = on_device(from);
    return call({"all_gather", tensors_of({from}), "", -1}, {from}, {to}, options.asyncOp,
                [=, this]() mutable { return gloo->_allgather_base(output, input, options); });
  }
  Wait _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    auto output = on_device(to), input = on_device(from);
    return call({"reduce_scatter", tensors_of({to}), reduced_by(options.reduceOp, from), -1}, {from}, {to},
                options.asyncOp, [=, this]() mutable { return gloo->_reduce_scatter_base(output, input, options); });
  }
  Wait alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes,
                     std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    auto output = on_device(to), input = on_device(from);
    return call({"all_to_all", c10::toString(from.scalar_type()), "", -1}, {from}, {to}, options.asyncOp,
                [=, this]() mutable { return gloo->alltoall_base(output, input, to_sizes, from_sizes, options); });
  }
  template <class Each>
  Wait together(size_t count, Each each) {
    startCoalescing();
    for (size_t index = 0; index < count; ++index) each(index);
    return endCoalescing();
  }
  Wait allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return together(tensors.size(), [&](size_t index) {
      Tensors one{tensors[index]};
      allreduce(one, options);
    });
  }
  Wait allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    return together(to.size(), [&](size_t index) { _allgather_base(to[index], from[index], options); });
  }
  Wait reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from,
                                       const c10d::ReduceScatterOptions& options) override {
    return together(to.size(), [&](size_t index) { _reduce_scatter_base(to[index], from[index], options); });
  }
  // gloo sends nothing to the rank itself.
  Wait to_itself(const at::Tensor& tensor, bool sends) {
    auto& mine = sends ? sent : wanted;
    auto& others = sends ? wanted : sent;
    if (others.empty()) {
      mine.push_back(tensor);
    } else {
      (sends ? others.front() : tensor).copy_(sends ? tensor : others.front());
      others.pop_front();
    }
    return c10::make_intrusive<Later>(std::vector<Wait>{}, Tensors{}, Tensors{}, -1, stream);
  }
  // NCCL knows no tags: messages are paired by their order.
  Wait send(Tensors& tensors, int to, int tag) override {
    auto here = on_device(tensors);
    return call({"send", tensors_of(tensors), "tag " + std::to_string(tag), to}, tensors, {}, true,
                [=, this]() mutable { return to == getRank() ? to_itself(here[0], true) : gloo->send(here, to, 0); });
  }
  Wait recv(Tensors& tensors, int from, int tag) override {
    auto here = on_device(tensors);
    return call({"recv", tensors_of(tensors), "tag " + std::to_string(tag), from}, {}, tensors, true,
                [=, this]() mutable { return from == getRank() ? to_itself(here[0], false) : gloo->recv(here, from, 0); });
  }
  Wait barrier(const c10d::BarrierOptions& options) override {
    tell("host_waited_stream", current_stream, true);
    return call({"barrier", "", "", -1}, {}, {}, options.asyncOp,
                [=, this]() mutable { return gloo->barrier(options); });
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, py::object log) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(std::move(gloo), log.inc_ref().ptr()));
  });
  m.def("listen", [](py::object to) { listener = to.is_none() ? nullptr : to.inc_ref().ptr(); });
  m.def("is_pinned", [](int64_t place) { return is_pinned_at(reinterpret_cast<void*>(place)); });
  m.def("synchronize", [] { tell("host_waited_device"); });
  m.def("bytes_now", [] { return bytes_now.load(); });
  m.def("take_bytes_most", [] {
    auto most = bytes_most.load();
    bytes_most = bytes_now.load();
    return most;
  });
}
