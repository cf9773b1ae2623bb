// A CUDA device that is simulated (see __init__.py): real numbers in host memory, CUDA's rules on who may touch what.
//
// PyTorch's CPU build leaves the dispatch key CUDA empty. Here every operator gets its CPU kernel there, called on
// tensors of the same memory that say they are on the CPU.

#include "books.h"

#include <ATen/native/Resize.h>
#include <torch/library.h>

namespace {

// Operators

struct Held {
  c10::Storage storage;
};
void let_go(void* held) { delete static_cast<Held*>(held); }

Tensor on_cpu(const Tensor& tensor) { // the same memory
  const auto& storage = tensor.storage();
  void* data = const_cast<void*>(storage.data());
  auto pointer = c10::DataPtr(data, new Held{storage}, &let_go, c10::Device(c10::kCPU));
  c10::Storage cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetCPUAllocator(), true);
  const c10::DispatchKeySet key(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), key, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Tensor over(c10::Storage storage, const Tensor& like) {
  const c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Tensor view_of(const Tensor& given, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(given.storage()), given.key_set(), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

c10::Storage taken(size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, memory()->allocate(bytes), memory(), true);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  On its(storage->device());
  auto pointer = memory()->allocate(bytes);
  std::memcpy(pointer.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(pointer));
  storage->set_nbytes(bytes);
}

struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs; // given, stands in

  Tensor in(const Tensor& given) {
    if (!given.defined() || !given.is_cuda()) { if (given.defined()) pairs.emplace_back(given, given); return given; }
    for (auto& [original, other] : pairs) if (original.is_same(given)) return other;
    pairs.emplace_back(given, on_cpu(given));
    return pairs.back().second;
  }
  Tensor out(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [given, other] : pairs) if (other.is_same(result)) return given;
    if (result.nbytes() > 0)
      for (auto& [given, other] : pairs) {
        if (!given.is_cuda() || !other.has_storage()) continue;
        auto* begin = static_cast<const char*>(other.storage().data());
        auto* at = static_cast<const char*>(result.storage().data());
        if (at >= begin && at < begin + other.storage().nbytes()) return view_of(given, result);
      }
    auto storage = taken(result.storage().nbytes());
    std::memcpy(storage.mutable_data(), result.storage().data(), result.storage().nbytes());
    return over(std::move(storage), result);
  }
  void settle() { // outputs that were given may have been resized
    for (auto& [given, other] : pairs) {
      if (!given.is_cuda() || given.is_same(other) || given.sizes() == other.sizes()) continue;
      auto* storage = given.storage().unsafeGetStorageImpl();
      if (storage->nbytes() < other.storage().nbytes()) resize_storage(storage, other.storage().nbytes());
      std::memcpy(storage->mutable_data(), other.storage().data(), other.storage().nbytes());
      given.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
    }
  }
};

const std::set<std::string> MIXES = {"aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_",
    "aten::_index_put_impl_", "aten::index_put", "aten::set_", "aten::_to_copy"};

void each_tensor(const c10::IValue& value, const std::function<void(const Tensor&)>& visit) {
  if (value.isTensor()) { if (value.toTensor().defined()) visit(value.toTensor()); }
  else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) { if (t.defined()) visit(t); }
  else if (value.isList()) for (const auto& one : value.toListRef()) each_tensor(one, visit);
}

c10::IValue mapped(const c10::IValue& value, const std::function<Tensor(const Tensor&)>& with) {
  if (value.isTensor()) return with(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(with(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      made.push_back(t.has_value() ? std::optional<Tensor>(with(*t)) : std::nullopt);
    return made;
  }
  return value;
}

int device_of(const std::vector<c10::IValue>& given) { // of a call: that of the first tensor on one, or that asked for
  int found = -1;
  for (const auto& value : given)
    each_tensor(value, [&](const Tensor& t) { if (found < 0 && t.is_cuda()) found = t.device().index(); });
  for (const auto& value : given)
    if (found < 0 && value.isDevice() && value.toDevice().is_cuda()) found = value.toDevice().index();
  return found;
}

void serve(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto count = schema.arguments().size();
  auto given = torch::jit::last(*stack, count).vec();
  bool views = !schema.returns().empty();
  for (const auto& result : schema.returns())
    views &= result.alias_info() != nullptr && !result.alias_info()->isWrite();
  bool fused = name.rfind("aten::_fused_adam", 0) == 0;
  On its(device_of(given));
  int64_t tick = views ? 0 : launch();
  Call call;
  for (size_t i = 0; i < count; i++) {
    bool write = schema.arguments()[i].alias_info() != nullptr && schema.arguments()[i].alias_info()->isWrite();
    each_tensor(given[i], [&](const Tensor& t) {
      bool strays = !t.is_cuda() && (t.dim() > 0 || fused) && MIXES.count(name) == 0;
      strays |= t.is_cuda() && t.device() != here() && MIXES.count(name) == 0;
      TORCH_CHECK(!strays, "Expected all tensors to be on the same device, but ", schema.arguments()[i].name(), " of ",
                  name, " is on ", t.device(), " (simulated)");
      if (!views) touched(t, write, tick, name);
    });
  }
  torch::jit::drop(*stack, count);
  for (size_t i = 0; i < count; i++) {
    auto value = mapped(given[i], [&](const Tensor& t) { return call.in(t); });
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::kCPU);
    if (schema.arguments()[i].name() == "pin_memory" && value.isBool()) value = c10::IValue();
    stack->push_back(value);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  const auto results = schema.returns().size();
  auto got = torch::jit::last(*stack, results).vec();
  torch::jit::drop(*stack, results);
  for (auto& value : got) {
    auto mine = mapped(value, [&](const Tensor& t) { return call.out(t); });
    if (!views) each_tensor(mine, [&](const Tensor& t) {
      bool known = false;
      for (auto& [original, _] : call.pairs) known |= original.is_same(t);
      if (!known) touched(t, true, tick, name);
    });
    stack->push_back(mine);
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> where, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  auto like = at::empty(sizes, at::TensorOptions().dtype(type).device(at::kMeta), format);
  Guard guard(books().lock);
  On its(where.value_or(here()));
  return over(taken(like.storage().nbytes()), like);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  auto like = at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                at::TensorOptions().dtype(type).device(at::kMeta));
  Guard guard(books().lock);
  On its(where.value_or(here()));
  return over(taken(like.storage().nbytes()), like);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto like = at::empty(C10_AS_INTARRAYREF_SLOW(size), self.options().device(at::kMeta));
  Guard guard(books().lock);
  auto* storage = self.storage().unsafeGetStorageImpl();
  size_t needed = like.storage().nbytes() + self.storage_offset() * self.itemsize();
  if (storage->nbytes() < needed) resize_storage(storage, needed);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), self.storage_offset());
  return self;
}

Tensor& set_part(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    auto like = at::empty(sizes, self.options().device(at::kMeta));
    self.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset.expect_int());
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  int64_t numbers = source.nbytes() / self.itemsize();
  self.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef{numbers}, at::IntArrayRef{1}, 0);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

c10::Storage kept(const Tensor& host) { // registered memory is freed without regard to copies
  return within(books().registered, host.const_data_ptr()) ? c10::Storage() : host.storage();
}

thread_local bool launching = false; // a kernel, by an interpreter that fetches what it reads

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  Guard guard(books().lock);
  auto& b = books();
  On its(self.is_cuda() ? self.device() : source.device());
  int64_t tick = launch();
  touched(source, false, tick, "copy_");
  touched(self, true, tick, "copy_");
  Tensor to = self.is_cuda() ? on_cpu(self) : self;
  Tensor from = source.is_cuda() ? on_cpu(source) : source;
  bool crosses = self.is_cuda() != source.is_cuda();
  const Tensor& host = self.is_cuda() ? source : self;
  c10::InferenceMode below;
  if (crosses && !(non_blocking && is_pinned(host.const_data_ptr()))) {
    if (!launching) host_waits(b.clocks[current()]); // pageable memory: the host is held up
    Tensor fresh = self.is_cuda() ? from : from.clone();
    to.copy_(fresh.expand(to.sizes()));
    return self;
  }
  if (!crosses) {
    to.copy_(from);
    return self;
  }
  auto arrives = [&](const Flight& f) { // a copy to the same pinned memory that this one waits for
    return f.to_host && f.data == host.data_ptr() && f.values.size() == host.nbytes() &&
        before(std::make_pair(f.stream, f.tick), b.clocks[current()]);
  };
  if (self.is_cuda()) {
    for (auto& flight : b.flights)
      if (host.is_contiguous() && arrives(flight)) {
        if (from.data_ptr() == host.data_ptr()) from = at::empty_like(host);
        std::memcpy(from.data_ptr(), flight.values.data(), flight.values.size());
      }
    to.copy_(from);
    bool alike = host.scalar_type() == self.scalar_type() && host.sizes() == self.sizes();
    if (alike && host.is_contiguous() && to.is_contiguous())
      b.flights.push_back({current(), tick, kept(host), host.data_ptr(), values_of(from), false});
    return self;
  }
  TORCH_CHECK(to.is_contiguous() && from.sizes() == to.sizes(), "to pinned memory only as it lies (simulated)");
  auto is_read = [&](const Flight& f) {
    return !f.to_host && inside(f, to.data_ptr(), to.nbytes()) &&
        before(std::make_pair(f.stream, f.tick), b.clocks[current()]);
  };
  b.flights.erase(std::remove_if(b.flights.begin(), b.flights.end(), is_read), b.flights.end());
  Tensor arriving = from.to(to.scalar_type()).contiguous().clone();
  std::memset(to.data_ptr(), 0xCB, to.nbytes());
  b.flights.push_back({current(), tick, kept(to), to.data_ptr(), values_of(arriving), true});
  return self;
}

void record_stream(Tensor& self, at::Stream stream) {
  Guard guard(books().lock);
  auto [_, block] = block_of(self.storage().data());
  if (block != nullptr) block->recorded.insert(number(stream));
}

Tensor mm_wide(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&serve>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("mm.dtype", mm_wide);
  m.impl("record_stream", record_stream);
}

// What cuda.py asks

TORCH_LIBRARY(simulated, m) {
  m.def("allocated() -> int", []() { return books().allocated; });
  m.def("peak() -> int", []() { return books().peak; });
  m.def("reset_peak() -> ()", []() { books().peak = books().allocated; });
  m.def("limit(int bytes) -> ()", [](int64_t bytes) { books().limit = bytes; });
  m.def("reserved() -> int", []() { return books().reserved; });
  m.def("empty_cache() -> ()", []() { books().reserved = books().allocated; });
  m.def("host_register(int data, int bytes) -> ()", [](int64_t data, int64_t bytes) {
    TORCH_CHECK(data != 0 && bytes > 0, "CUDA error: invalid argument (simulated)");
    Guard guard(books().lock);
    books().registered[reinterpret_cast<void*>(data)] = bytes;
  });
  m.def("host_unregister(int data) -> ()", host_unregister);
  m.def("pinned() -> int", []() {
    Guard guard(books().lock);
    int64_t bytes = 0;
    for (auto& [_, size] : books().pinned) bytes += size;
    return bytes;
  });
  m.def("device() -> int", []() { return int64_t(device); });
  m.def("set_device(int index) -> ()", [](int64_t index) { books().own = device = index; });
  m.def("launching(bool so) -> ()", [](bool so) { launching = so; });
  m.def("in_host_memory(Tensor of) -> Tensor", [](const Tensor& of) { return on_cpu(of); });
  m.def("touch(Tensor[] read, Tensor[] written, str by) -> ()",
        [](const std::vector<Tensor>& read, const std::vector<Tensor>& written, const std::string& by) {
    Guard guard(books().lock);
    int64_t tick = launch();
    for (auto& t : read) touched(t, false, tick, by);
    for (auto& t : written) touched(t, true, tick, by);
  });
  m.def("resize_storage(Tensor of, int bytes) -> ()", [](const Tensor& of, int64_t bytes) {
    Guard guard(books().lock);
    resize_storage(of.storage().unsafeGetStorageImpl(), bytes);
  });
  m.def("hold() -> ()", []() { // what is captured does not run: memory is put back
    Guard guard(books().lock);
    books().cached = std::min(books().reserved, books().limit) - books().allocated;
    for (auto& [data, block] : books().blocks) books().held[data] = std::string(static_cast<char*>(data), block.bytes);
  });
  m.def("put_back() -> ()", []() {
    Guard guard(books().lock);
    for (auto& [data, bytes] : books().held) {
      auto found = books().blocks.find(data);
      if (found != books().blocks.end() && found->second.bytes == bytes.size())
        std::memcpy(data, bytes.data(), bytes.size());
    }
    books().held.clear();
    books().cached = 0;
  });
  m.def("faults() -> str[]", []() {
    Guard guard(books().lock);
    return std::exchange(books().faults, {});
  });
}

} // namespace

namespace at { REGISTER_CUDA_HOOKS(CUDAHooks) }

__attribute__((constructor)) static void register_allocator() { c10::SetAllocator(c10::kCUDA, memory(), 255); }
