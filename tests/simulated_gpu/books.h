// The books of the simulated devices: how far each stream knows of the others (vector clocks), who touched which memory,
// which copies are under way. Memory, streams and events as PyTorch asks for them.
//
// A stream has one number in the books: its own, or minus its device's where it is the device's default stream.

#pragma once

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" { // of Python, which is there already
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

using at::Tensor;
using Clock = std::map<int64_t, int64_t>; // stream -> how many of its launches are known to be before

constexpr int MOST = 8; // devices

int devices() {
  static const int count = std::getenv("SIMULATED_GPUS") ? std::atoi(std::getenv("SIMULATED_GPUS")) : 1;
  return count;
}

struct Block { // memory of the device
  size_t bytes = 0;
  int64_t stream = 0; // that it was taken on
  int device = 0;
  std::pair<int64_t, int64_t> written{0, 0}; // stream, tick
  Clock read;
  std::set<int64_t> recorded; // record_stream
  std::string writer;
};

struct Flight { // a copy that the host does not wait for
  int64_t stream, tick;
  c10::Storage host; // no tensor: letting go of one may want Python's lock, which whoever waits for ours may have
  void* data; // in pinned memory
  std::string values; // what goes over
  bool to_host;
};

struct Freed { // memory that another stream may still use: its own stream gets it again before that stream is done
  int64_t stream;
  Clock users;
  std::string what;
};

struct Books {
  std::recursive_mutex lock;
  std::map<void*, Block> blocks;
  std::map<void*, size_t> pinned; // by PyTorch's allocator, which waits for copies before it uses memory again
  std::map<void*, size_t> registered; // by cudaHostRegister
  std::map<int64_t, Clock> clocks; // of each stream
  std::map<int64_t, Clock> events;
  Clock host; // what the host waited for
  std::vector<Flight> flights;
  std::vector<Freed> freed;
  std::vector<std::string> faults;
  std::map<void*, std::string> held; // memory as a capture found it
  int64_t streams = 0, next_event = 0, allocated = 0, peak = 0, limit = int64_t(1) << 40;
  int64_t reserved = 0; // with the freed memory that the allocator has not returned to the device (empty_cache)
  int64_t cached = 0; // the freed part of it, while a capture runs: a capture cannot return it, nor use it
  int own = -1; // the device that this process chose; -1 before it did
};

Books& books() {
  static Books* it = new Books;
  return *it;
}

thread_local int device = 0; // as in CUDA, a new thread is on device 0, whatever others are on
thread_local int64_t chosen[MOST] = {0, -1, -2, -3, -4, -5, -6, -7}; // each device's current stream

int64_t current() { return chosen[device]; }
c10::Device here() { return c10::Device(c10::DeviceType::CUDA, device); }

struct On { // a device, for as long as this lives
  int before = device;
  explicit On(int index) { if (index >= 0) device = index; }
  explicit On(const c10::Device& other) : On(other.is_cuda() ? other.index() : -1) {}
  ~On() { device = before; }
};

struct Guard { // of the books. Who has them may want Python's lock, to copy a tensor: who waits for them lets go of it
  std::recursive_mutex& lock;
  explicit Guard(std::recursive_mutex& its) : lock(its) {
    if (lock.try_lock()) return;
    void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock.lock();
    if (thread != nullptr) PyEval_RestoreThread(thread);
  }
  ~Guard() { lock.unlock(); }
  Guard(const Guard&) = delete;
};

void fault(const std::string& what) {
  auto& found = books().faults;
  if (found.size() < 50 && std::find(found.begin(), found.end(), what) == found.end()) found.push_back(what);
}

void merge(Clock& into, const Clock& from) {
  for (auto& [stream, tick] : from) into[stream] = std::max(into[stream], tick);
}

bool before(std::pair<int64_t, int64_t> launch, const Clock& known) {
  auto at = known.find(launch.first);
  return launch.second == 0 || (at != known.end() && at->second >= launch.second);
}

bool before(const Clock& launches, const Clock& known) {
  return std::all_of(launches.begin(), launches.end(), [&](auto& one) { return before(one, known); });
}

std::pair<const void*, Block*> block_of(const void* data) {
  auto& all = books().blocks;
  auto at = all.upper_bound(const_cast<void*>(data));
  if (at == all.begin()) return {nullptr, nullptr};
  --at;
  if (data < static_cast<char*>(at->first) + std::max<size_t>(at->second.bytes, 1)) return {at->first, &at->second};
  return {nullptr, nullptr};
}

// Memory

void release(void* data) {
  Guard guard(books().lock);
  auto& b = books();
  auto found = b.blocks.find(data);
  if (found != b.blocks.end()) {
    auto& block = found->second;
    Clock known = b.clocks[block.stream], users = block.read;
    merge(known, b.host);
    users[block.written.first] = std::max(users[block.written.first], block.written.second);
    users.erase(block.stream);
    for (auto stream : block.recorded) // the allocator waits for it, and so for what it has waited for
      for (auto user = users.begin(); user != users.end();)
        user = before(*user, b.clocks[stream]) ? users.erase(user) : std::next(user);
    if (!before(users, known))
      b.freed.push_back({block.stream, users, std::to_string(block.bytes) + " bytes, last written by " + block.writer});
    b.allocated -= block.bytes;
    std::memset(data, 0xCB, block.bytes);
    b.blocks.erase(found);
  }
  std::free(data);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Guard guard(books().lock);
    auto& b = books();
    if (b.allocated + b.cached + int64_t(bytes) > b.limit)
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__},
          "CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes (simulated)");
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, std::max<size_t>(bytes, 512)) == 0, "no host memory");
    std::memset(data, 0xCB, bytes);
    b.blocks[data] = Block{bytes, current(), device};
    if (b.own >= 0 && device != b.own)
      fault("memory of device " + std::to_string(device) + " is taken by a process of device " + std::to_string(b.own));
    b.allocated += bytes;
    b.peak = std::max(b.peak, b.allocated);
    b.reserved = std::max(b.reserved, b.allocated);
    return {data, data, &release, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

void unpin(void* data) {
  Guard guard(books().lock);
  books().pinned.erase(data);
  std::free(data);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, std::max<size_t>(bytes, 512)) == 0, "no host memory");
    std::memset(data, 0xCB, bytes);
    Guard guard(books().lock);
    books().pinned[data] = bytes;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

Memory* memory() { static auto* it = new Memory; return it; }
Pinned* pinned() { static auto* it = new Pinned; return it; }

bool within(const std::map<void*, size_t>& all, const void* data) {
  auto at = all.upper_bound(const_cast<void*>(data));
  if (at == all.begin()) return false;
  --at;
  return data < static_cast<char*>(at->first) + std::max<size_t>(at->second, 1);
}

bool is_pinned(const void* data) {
  Guard guard(books().lock);
  return within(books().pinned, data) || within(books().registered, data);
}

bool inside(const Flight& flight, const void* data, size_t bytes) {
  return flight.data >= data && flight.data < static_cast<const char*>(data) + bytes;
}

void host_unregister(int64_t address) {
  Guard guard(books().lock);
  auto& b = books();
  auto found = b.registered.find(reinterpret_cast<void*>(address));
  if (found == b.registered.end()) return;
  auto in_it = [&](const Flight& f) { return inside(f, found->first, found->second); };
  if (std::any_of(b.flights.begin(), b.flights.end(), in_it)) fault("host memory was freed while its copy was under way");
  b.flights.erase(std::remove_if(b.flights.begin(), b.flights.end(), in_it), b.flights.end());
  b.registered.erase(found);
}

// Streams and events

std::string values_of(const Tensor& tensor) { // a contiguous one in host memory
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
}

void land(const std::function<bool(const Flight&)>& done) {
  auto& b = books();
  std::vector<Flight> left;
  for (auto& flight : b.flights) {
    if (!done(flight)) { left.push_back(flight); continue; }
    const auto& values = flight.values;
    if (flight.to_host)
      std::memcpy(flight.data, values.data(), values.size());
    else if (std::memcmp(flight.data, values.data(), values.size()) != 0)
      fault("pinned memory (" + std::to_string(values.size()) +
            " bytes) was written to while its copy to the device was under way");
  }
  b.flights.swap(left);
}

void host_waits(const Clock& clock) {
  Guard guard(books().lock);
  merge(books().host, clock);
  land([](const Flight& f) { return before(std::make_pair(f.stream, f.tick), books().host); });
}

int64_t launch() { // the next tick of the current stream, which knows what the host knows
  Guard guard(books().lock);
  auto& b = books();
  auto& clock = b.clocks[current()];
  merge(clock, b.host);
  return ++clock[current()];
}

void touched(const Tensor& tensor, bool write, int64_t tick, const std::string& name) {
  Guard guard(books().lock);
  auto& b = books();
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage() || tensor.numel() == 0) return;
  auto [_, block] = block_of(tensor.storage().data());
  if (block == nullptr) return;
  const auto& clock = b.clocks[current()];
  if (!before(block->written, clock))
    fault(name + " on stream " + std::to_string(current()) + (write ? " writes" : " reads") + " what " + block->writer +
          " wrote on stream " + std::to_string(block->written.first) + " and was not waited for");
  if (write && !before(block->read, clock))
    fault(name + " on stream " + std::to_string(current()) + " overwrites what another stream may still read (" +
          block->writer + " wrote it)");
  if (write && block->written.second == 0) {
    std::vector<Freed> left;
    for (auto& one : b.freed) {
      if (one.stream == block->stream && !before(one.users, clock))
        fault(name + " gets memory of stream " + std::to_string(one.stream) + " (" + one.what +
              ") that was freed while another stream may use it");
      else if (one.stream != block->stream)
        left.push_back(one);
    }
    b.freed.swap(left);
  }
  if (write) { block->written = {current(), tick}; block->writer = name; block->read.clear(); }
  else block->read[current()] = tick;
}

int64_t number(const c10::Stream& stream) { return stream.id() == 0 ? -stream.device_index() : stream.id(); }

struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream of(int index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, index), std::max<int64_t>(id, 0));
  }
  static int index_of(c10::Device asked) { return asked.has_index() ? asked.index() : device; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = here();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < devices(), "CUDA error: invalid device ordinal (simulated)");
    if (to.has_index()) device = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { if (to.has_index()) device = to.index(); }
  c10::Stream getStream(c10::Device on) const noexcept override { return of(index_of(on), chosen[index_of(on)]); }
  c10::Stream getDefaultStream(c10::Device on) const override { return of(index_of(on), 0); }
  c10::Stream getNewStream(c10::Device on, int) const override {
    Guard guard(books().lock);
    return of(index_of(on), ++books().streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override { return getNewStream(on, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    int index = stream.device_index();
    return of(index, std::exchange(chosen[index], number(stream)));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Guard guard(books().lock);
    if (*event == nullptr) *event = reinterpret_cast<void*>(++books().next_event);
    auto clock = books().clocks[number(stream)];
    merge(clock, books().host);
    books().events[reinterpret_cast<int64_t>(*event)] = clock;
  }
  void block(void* event, const c10::Stream& stream) const override {
    Guard guard(books().lock);
    merge(books().clocks[number(stream)], books().events[reinterpret_cast<int64_t>(event)]);
  }
  bool queryEvent(void* event) const override { synchronizeEvent(event); return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    Guard guard(books().lock);
    books().events.erase(reinterpret_cast<int64_t>(event));
  }
  void synchronizeEvent(void* event) const override {
    Guard guard(books().lock);
    host_waits(books().events[reinterpret_cast<int64_t>(event)]);
  }
  bool queryStream(const c10::Stream& stream) const override { synchronizeStream(stream); return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    Guard guard(books().lock);
    host_waits(books().clocks[number(stream)]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Guard guard(books().lock);
    for (auto& [_, clock] : books().clocks) host_waits(Clock(clock));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return devices(); }
  at::DeviceIndex getCurrentDevice() const override { return device; }
  at::DeviceIndex current_device() const override { return device; }
  void setCurrentDevice(at::DeviceIndex index) const override { device = index; }
  int getNumGPUs() const override { return devices(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned(); }
  at::Device getDeviceFromPtr(void* data) const override {
    Guard guard(books().lock);
    auto [_, block] = block_of(data);
    return block == nullptr ? here() : c10::Device(c10::DeviceType::CUDA, block->device);
  }
};

} // namespace
