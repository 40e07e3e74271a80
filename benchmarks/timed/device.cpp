// An accelerator without data, whose time is played: what a program costs on a device that is not here.
//
// Its memory is addresses that nobody reads. An operation finds the shape of its result by PyTorch's meta
// kernels, and moves two kinds of clocks:
//
// - Each stream has one. Work begins at the later of the stream's clock and the host's. It takes its bytes over
//   the memory's rate or its floating-point operations over their rate, whichever is longer; a copy between
//   host and device takes its bytes over the link's rate.
// - The host has one. Each operation, event and wait that it begins moves it on, and so does whatever Python
//   reports by `host`. A synchronization sets it to the stream's clock.
//
// An event has passed if its clock is not later than the host's, so a host that runs ahead sees unfinished
// events, as on a real device. Memory that is freed is used again at once on the stream that asked for it, and
// elsewhere never; `record_stream` delays that, as in PyTorch's caching allocators.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;

constexpr auto kTimed = c10::DeviceType::PrivateUse1;
constexpr size_t kSpan = size_t(1) << 42;  // addresses
constexpr size_t kRound = 512;

struct Queue {
  double clock = 0;  // seconds, when it will have done all that it was asked for
  double busy = 0;   // seconds of work
};

struct Event {
  double clock;
};

struct Block {
  size_t size, wanted;
  Queue* owner;
  std::vector<Queue*> recorded;
};

struct Freed {  // waits for the streams that it was recorded on
  char* memory;
  Block block;
  double until;
};

struct World {
  std::recursive_mutex lock;
  char* memory = nullptr;
  size_t top = 0, limit = size_t(80) << 30;
  std::vector<std::unique_ptr<Queue>> streams;  // by id; 0 is the default one
  std::map<Queue*, std::multimap<size_t, char*>> pools;
  std::unordered_map<char*, Block> blocks;
  std::list<Freed> freed;
  c10::CachingDeviceAllocator::DeviceStats stats;
  double host = 0;
  int64_t operations = 0, calls = 0;
  int64_t highest = 0;  // allocated bytes since the last call of highest(), which resets no statistic of PyTorch's
  // Functions of files whose paths have one of these take the host's time.
  std::vector<std::string> counted = {"/backstash/", "/torch/utils/checkpoint.py", "/torch/autograd/graph.py"};
  // Seconds of the host, and rates of the device: set by `rates`.
  double dispatch = 6e-6, call = 1e-6, python = 1.8e-6, least = 2e-6;
  double memory_rate = 2.6e12, product_rate = 680e12, attention_rate = 350e12, convolution_rate = 330e12;
  double link_rate = 55e9, link_delay = 8e-6;

  World() {
    auto mapped = mmap(nullptr, kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "no addresses for a device");
    memory = static_cast<char*>(mapped);
    streams.push_back(std::make_unique<Queue>());
  }
};

World& world() {
  static World* only = new World;
  return *only;
}

extern "C" {  // of Python.h, which a machine that only runs Python may lack
int Py_IsInitialized();
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

// A thread that waits for the lock releases Python's meanwhile: to copy a tensor's reference may need that.
struct Locked {
  explicit Locked(std::recursive_mutex& lock) : lock(lock) {
    if (lock.try_lock()) return;
    auto* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock.lock();
    if (state) PyEval_RestoreThread(state);
  }
  ~Locked() { lock.unlock(); }
  Locked(const Locked&) = delete;

  std::recursive_mutex& lock;
};

thread_local c10::StreamId current_stream = 0;

Queue* queue_of(const Stream& stream) { return world().streams.at(stream.id()).get(); }
Queue* current_queue() { return world().streams.at(current_stream).get(); }

// The host asks `queue` for work, which takes so many seconds.
void ask(Queue* queue, double seconds, double of_host) {
  world().host += of_host;
  queue->clock = std::max(queue->clock, world().host) + seconds;
  queue->busy += seconds;
}

// ----------------------------------------------------------------------------------------------- memory

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Locked locked(world().lock);
    void* memory = nbytes ? take(nbytes) : nullptr;
    return {memory, memory, &give, Device(kTimed, 0)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "this device has no data"); }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    Locked locked(world().lock);
    release();
  }

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    Locked locked(world().lock);
    world().host += world().call;
    auto found = world().blocks.find(static_cast<char*>(pointer.get()));
    if (found == world().blocks.end()) return;
    auto* queue = queue_of(stream);
    if (queue != found->second.owner) found->second.recorded.push_back(queue);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    Locked locked(world().lock);
    return world().stats;
  }

  void resetAccumulatedStats(DeviceIndex) override {
    Locked locked(world().lock);
    auto& stats = world().stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes})
      each->at(0).reset_accumulated();
  }

  void resetPeakStats(DeviceIndex) override {
    Locked locked(world().lock);
    auto& stats = world().stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) each->at(0).reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    Locked locked(world().lock);
    const size_t reserved = world().stats.reserved_bytes[0].current;
    return {world().limit - std::min(world().limit, reserved), world().limit};
  }

 private:
  static char* take(size_t nbytes) {
    release_freed(false);
    const size_t wanted = (nbytes + kRound - 1) / kRound * kRound;
    auto* owner = current_queue();
    auto& pool = world().pools[owner];
    auto at = pool.lower_bound(wanted);
    char* memory = nullptr;
    size_t size = wanted;
    if (at != pool.end() && at->first <= wanted + wanted / 4) {
      size = at->first, memory = at->second;
      pool.erase(at);
    } else {
      if (world().stats.reserved_bytes[0].current + wanted > world().limit) release();
      if (world().stats.reserved_bytes[0].current + wanted > world().limit) {
        ++world().stats.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "the timed device is out of memory: ", wanted, " bytes asked");
      }
      TORCH_CHECK(world().top + wanted <= kSpan, "the timed device has no more addresses");
      memory = world().memory + world().top;
      world().top += wanted;
      world().stats.reserved_bytes[0].increase(wanted);
    }
    world().stats.allocation[0].increase(1);
    world().stats.allocated_bytes[0].increase(wanted);
    world().highest = std::max(world().highest, world().stats.allocated_bytes[0].current);
    world().stats.active_bytes[0].increase(size);
    world().blocks[memory] = {size, wanted, owner, {}};
    return memory;
  }

  static void give(void* pointer) {
    if (!pointer) return;
    Locked locked(world().lock);
    auto found = world().blocks.find(static_cast<char*>(pointer));
    if (found == world().blocks.end()) return;
    auto block = found->second;
    world().blocks.erase(found);
    world().stats.allocation[0].decrease(1);
    world().stats.allocated_bytes[0].decrease(block.wanted);
    double until = 0;
    for (auto* queue : block.recorded) until = std::max(until, queue->clock);
    world().freed.push_back({static_cast<char*>(pointer), block, until});
    release_freed(false);
  }

  static void release_freed(bool wait) {
    auto& freed = world().freed;
    for (auto at = freed.begin(); at != freed.end();) {
      if (wait) world().host = std::max(world().host, at->until);
      if (at->until > world().host) {
        ++at;
        continue;
      }
      world().stats.active_bytes[0].decrease(at->block.size);
      world().pools[at->block.owner].emplace(at->block.size, at->memory);
      at = freed.erase(at);
    }
  }

  // Gives what no tensor has back: the host waits for all that the device has been asked.
  static void release() {
    for (auto& queue : world().streams) world().host = std::max(world().host, queue->clock);
    release_freed(true);
    for (auto& [owner, pool] : world().pools) {
      for (auto& [size, memory] : pool) world().stats.reserved_bytes[0].decrease(size);
      pool.clear();
    }
  }
};

Allocator* allocator() {
  static auto* only = new Allocator;
  return only;
}

// ----------------------------------------------------------------------------------------------- device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kTimed; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(kTimed, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const noexcept override { return Stream(Stream::UNSAFE, getDevice(), current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, getDevice(), 0); }
  Stream getNewStream(Device, int) const override {
    Locked locked(world().lock);
    world().streams.push_back(std::make_unique<Queue>());
    return Stream(Stream::UNSAFE, getDevice(), int64_t(world().streams.size()) - 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    const auto before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(world().lock);
    if (!*event) *event = new Event;
    world().host += world().call;
    *static_cast<Event*>(*event) = {std::max(queue_of(stream)->clock, world().host)};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Locked locked(world().lock);
    world().host += world().call;
    auto* queue = queue_of(stream);
    queue->clock = std::max(queue->clock, static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override { return !event || has_passed(static_cast<Event*>(event)->clock); }
  bool queryStream(const Stream& stream) const override { return has_passed(queue_of(stream)->clock); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return 1e3 * (static_cast<Event*>(to)->clock - static_cast<Event*>(from)->clock);
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->clock);
  }
  void synchronizeStream(const Stream& stream) const override { wait_for(queue_of(stream)->clock); }
  void synchronizeDevice(const DeviceIndex) const override {
    Locked locked(world().lock);
    for (auto& queue : world().streams) wait_for(queue->clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator()->recordStream(pointer, stream);
  }

  static void wait_for(double clock) {
    Locked locked(world().lock);
    world().host = std::max(world().host, clock) + world().call;
  }

 private:
  static bool has_passed(double clock) {
    Locked locked(world().lock);
    world().host += world().call;
    return clock <= world().host;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// PyTorch's caching allocator of pinned memory; none of its pages is ever touched.
struct Pinned final : at::CachingHostAllocatorImpl<Stream, c10::Event> {
  std::map<const char*, size_t> ranges;

  bool has(const void* pointer) const {
    auto after = ranges.upper_bound(static_cast<const char*>(pointer));
    if (after == ranges.begin()) return false;
    const auto& [begin, nbytes] = *std::prev(after);
    return static_cast<const char*>(pointer) < begin + nbytes;
  }

 private:
  void allocate_host_memory(size_t nbytes, void** pointer) override {
    Locked locked(world().lock);
    *pointer = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(*pointer != MAP_FAILED, "no addresses for pinned memory");
    ranges[static_cast<const char*>(*pointer)] = nbytes;
  }
  void free_block(at::HostBlock<Stream>* block) override {
    Locked locked(world().lock);
    auto found = ranges.find(static_cast<const char*>(block->ptr_));
    munmap(block->ptr_, found->second);
    ranges.erase(found);
  }
  void record_stream(std::optional<std::vector<c10::Event>>& events, Stream stream) override {
    events->emplace_back(kTimed);
    events->back().record(stream);
  }
  bool query_event(c10::Event& event) override { return event.query(); }
};

void give_back(void* block);
using PinnedAllocator = at::CachingHostAllocatorInterface<Pinned, give_back>;
PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator;
  return *one;
}
void give_back(void* block) { pinned().free(block); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override {
    Locked locked(world().lock);
    return pinned().impl_->has(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    storage.set_data_ptr_noswap(allocator()->allocate(nbytes));
    storage.set_nbytes(nbytes);
  }
};

// ------------------------------------------------------------------------------------------- operations

// Bytes that an operation reads of a tensor or writes to it: what was expanded is read once.
double touched(const Tensor& tensor) {
  double count = double(tensor.itemsize());
  for (int64_t at = 0; at < tensor.dim(); ++at) count *= tensor.stride(at) ? double(tensor.size(at)) : 1.0;
  return count;
}

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kTimed; }

template <class Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& each : value.toTensorList()) visit(each);
  } else if (value.isList()) {
    for (const IValue& each : value.toListRef())
      if (each.isTensor()) visit(each.toTensor());
  }
}

Tensor on_meta(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

Tensor from_meta(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(Device(kTimed, 0)));
}

template <class Map>
IValue mapped(const IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (const Tensor& each : value.toTensorList()) made.push_back(map(each));
    return made;
  }
  if (value.isList()) {  // of tensors that may be missing
    c10::List<std::optional<Tensor>> made;
    const auto list = value.toListRef();
    if (std::none_of(list.begin(), list.end(), [](const IValue& each) { return each.isTensor(); })) return value;
    for (const IValue& each : list)
      made.push_back(each.isTensor() ? std::optional<Tensor>(map(each.toTensor())) : std::nullopt);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kTimed) return Device(at::kMeta);
  return value;
}

// Floating-point operations of a matrix product.
double products(const std::string& name, const std::vector<IValue>& given) {
  const auto first = name == "aten::mm" || name == "aten::bmm" ? 0 : name == "aten::addmm" || name == "aten::baddbmm" ? 1 : -1;
  if (first < 0) return 0;
  const auto& one = given[first].toTensor();
  const auto& other = given[first + 1].toTensor();
  return 2.0 * double(one.numel()) * double(other.size(-1));
}

double seconds_of(double bytes, double flops, double rate) {
  return std::max({bytes / world().memory_rate, flops / rate, world().least});
}

Tensor like(const IValue& value) { return at::empty_like(value.toTensor()); }

// Puts the results of an operation on the stack in place of its arguments, where they are known without PyTorch's
// meta kernels, many of which are written in Python: what writes to its arguments returns them, and some others
// return tensors like their arguments.
bool known_result(const c10::FunctionSchema& schema, const std::vector<IValue>& given, torch::jit::Stack* stack) {
  const auto& name = schema.name();
  const auto& returns = schema.returns();
  std::vector<IValue> results;
  const bool writes = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& each) {
    return each.alias_info() && each.alias_info()->isWrite();
  });
  if (name.rfind("aten::_foreach_", 0) == 0) {
    if (!returns.empty()) {
      std::vector<Tensor> made;
      for (const Tensor& each : given[0].toTensorList()) made.push_back(at::empty_like(each));
      results.push_back(made);
    }
  } else if (writes) {
    for (size_t at = 0; at < given.size(); ++at)
      if (schema.arguments()[at].is_out() && given[at].isTensor() && !given[at].toTensor().numel()) return false;
    results.resize(returns.size());
  } else if (name == "aten::native_dropout") {
    const auto& input = given[0].toTensor();
    results = {like(given[0]), at::empty_like(input, input.options().dtype(at::kBool))};
  } else if (name == "aten::native_dropout_backward" || name == "aten::silu_backward") {
    results = {like(given[0])};
  } else if (name == "aten::native_layer_norm") {
    const auto& input = given[0].toTensor();
    auto sizes = input.sizes().vec();
    for (size_t at = sizes.size() - given[1].toIntVector().size(); at < sizes.size(); ++at) sizes[at] = 1;
    auto sums = [&] { return at::empty(sizes, input.options().dtype(at::kFloat)); };
    results = {like(given[0]), sums(), sums()};
  } else if (name == "aten::native_layer_norm_backward") {
    results = {like(given[1]), like(given[5]), like(given[6])};
  } else {
    return false;
  }
  stack->erase(stack->end() - int64_t(given.size()), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}

// The same as what is computed by PyTorch's kernels on a device, without data.
void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& arguments = schema.arguments();
  std::vector<IValue> given(stack->end() - int64_t(arguments.size()), stack->end());
  double bytes = 0;
  for (size_t at = 0; at < given.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    const bool is_written = alias && alias->isWrite();
    const bool is_filled = is_written && (arguments[at].is_out() || given.size() == 1 || schema.name() == "aten::fill_" ||
                                          schema.name() == "aten::uniform_" || schema.name() == "aten::normal_" ||
                                          schema.name() == "aten::random_" || schema.name() == "aten::bernoulli_");
    each_tensor(given[at], [&](const Tensor& tensor) {
      if (is_here(tensor)) bytes += touched(tensor) * (is_written && !is_filled ? 2 : 1);
    });
  }
  if (!known_result(schema, given, stack)) {
    for (size_t at = 0; at < given.size(); ++at)
      (*stack)[stack->size() - given.size() + at] = mapped(given[at], on_meta);
    std::vector<IValue> shapes(stack->end() - int64_t(given.size()), stack->end());
    {
      at::AutoDispatchBelowADInplaceOrView below;
      operation.callBoxed(stack);
    }
    for (size_t at = 0; at < given.size(); ++at) {  // what an operation resizes
      if (!given[at].isTensor() || !is_here(given[at].toTensor())) continue;
      const auto& before = given[at].toTensor();
      const auto& after = shapes[at].toTensor();
      if (before.sizes() != after.sizes()) before.resize_(after.sizes());
    }
  }
  const auto& returns = schema.returns();
  for (size_t at = 0; at < returns.size(); ++at) {
    auto& found = (*stack)[stack->size() - returns.size() + at];
    const auto* alias = returns[at].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t other = 0; other < given.size(); ++other) {
        const auto* its = arguments[other].alias_info();
        if (its && its->isWrite() && its->beforeSets() == alias->beforeSets()) found = given[other];
      }
      continue;
    }
    found = mapped(found, from_meta);
    each_tensor(found, [&](const Tensor& tensor) {
      if (is_here(tensor)) bytes += touched(tensor);
    });
  }
  Locked locked(world().lock);
  ++world().operations;
  const auto flops = products(schema.name(), given);
  ask(current_queue(), seconds_of(bytes, flops, world().product_rate), world().dispatch);
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                           std::optional<Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const auto needed =
      at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  return self.set_(source, 0, {int64_t(source.nbytes() / self.itemsize())}, {1});
}

Tensor& set_storage_offset(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return self.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!source.numel()) return target;
  Locked locked(world().lock);
  ++world().operations;
  auto* queue = current_queue();
  if (is_here(source) && is_here(target)) {
    ask(queue, seconds_of(touched(source) + touched(target), 0, 1), world().dispatch);
    return target;
  }
  ask(queue, world().link_delay + double(target.nbytes()) / world().link_rate, world().dispatch);
  const auto& other = is_here(source) ? target : source;
  if (target.is_cpu() && target.nbytes() <= 4096) std::memset(target.data_ptr(), 0, target.nbytes());
  if (!non_blocking || !pinned().impl_->has(other.data_ptr())) {
    Guard::wait_for(queue->clock);
  } else {
    const auto& pointer = other.storage().data_ptr();
    pinned().record_event(other.data_ptr(), pointer.get_context(), Guard().getStream(Device(kTimed, 0)));
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) const_cast<Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}

// What the host reads of the device is zero.
c10::Scalar local_scalar_dense(const Tensor& self) {
  Guard::wait_for(current_queue()->clock);
  return at::zeros({}, self.options().device(at::kCPU)).item();
}

bool equal(const Tensor& one, const Tensor& other) {
  Guard::wait_for(current_queue()->clock);
  return one.sizes() == other.sizes();
}

void record_stream(Tensor& self, Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }

// Dropout saves a mask of bytes, as on CUDA.
Tensor dropout(const Tensor& input, double p, bool train) {
  if (p == 0 || !train || !input.numel()) return input;
  return std::get<0>(at::native_dropout(input, p, train));
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::overrideable);
}

double attention_flops(const Tensor& query, const Tensor& key, bool is_causal) {
  return 4.0 * double(query.numel()) * double(key.size(2)) * (is_causal ? 0.5 : 1.0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>&, double, bool is_causal,
    bool, std::optional<double>) {
  auto out = at::empty_like(query.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2);
  auto sums = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  auto seed = at::empty({}, at::dtype(at::kLong)), offset = at::empty({}, at::dtype(at::kLong));
  Locked locked(world().lock);
  ++world().operations;
  const auto bytes = touched(query) + touched(key) + touched(value) + touched(out);
  ask(current_queue(), seconds_of(bytes, attention_flops(query, key, is_causal), world().attention_rate),
      world().dispatch);
  return {out, sums, Tensor(), Tensor(), query.size(2), key.size(2), seed, offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
    std::array<bool, 4>, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double,
    bool is_causal, const Tensor&, const Tensor&, std::optional<double>) {
  auto made = std::make_tuple(at::empty_like(query), at::empty_like(key), at::empty_like(value), Tensor());
  Locked locked(world().lock);
  ++world().operations;
  const auto bytes = 2 * (touched(query) + touched(key) + touched(value)) + touched(gradient);
  ask(current_queue(), seconds_of(bytes, 2.5 * attention_flops(query, key, is_causal), world().attention_rate),
      world().dispatch);
  return made;
}

double convolution_flops(const Tensor& out, const Tensor& weight) {
  return 2.0 * double(out.numel()) * double(weight.numel()) / double(weight.size(0));
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, int64_t groups) {
  auto shape = at::convolution(on_meta(input), on_meta(weight), {}, stride, padding, dilation, transposed,
                               output_padding, groups);
  auto out = at::empty(shape.sizes(), input.options(), input.suggest_memory_format());
  Locked locked(world().lock);
  ++world().operations;
  ask(current_queue(),
      seconds_of(touched(input) + touched(weight) + touched(out), convolution_flops(out, weight),
                 world().convolution_rate),
      world().dispatch);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, c10::IntArrayRef, c10::IntArrayRef,
                                                        c10::IntArrayRef, bool, c10::IntArrayRef, int64_t,
                                                        std::array<bool, 3> mask) {
  auto one = mask[0] ? at::empty_like(input) : Tensor();
  auto two = mask[1] ? at::empty_like(weight) : Tensor();
  auto three = mask[2] ? at::empty({gradient.size(1)}, gradient.options()) : Tensor();
  Locked locked(world().lock);
  for (bool each : {mask[0], mask[1]}) {
    if (!each) continue;
    ++world().operations;
    ask(current_queue(),
        seconds_of(touched(input) + touched(weight) + touched(gradient), convolution_flops(gradient, weight),
                   world().convolution_rate),
        world().dispatch);
  }
  return {one, two, three};
}

const char* const kComposed[] = {  // by PyTorch of smaller operations, where CUDA has a kernel
    "native_layer_norm", "native_layer_norm_backward", "native_dropout", "native_dropout_backward",
    "native_batch_norm", "native_batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "silu_backward", "zero_",
    "_foreach_add_.Scalar", "_foreach_add_.List", "_foreach_add.List", "_foreach_mul_.Scalar", "_foreach_mul_.Tensor",
    "_foreach_lerp_.Scalar", "_foreach_addcmul_.Scalar", "_foreach_addcdiv_.Scalar", "_foreach_addcdiv_.ScalarList",
    "_foreach_sqrt", "_foreach_div_.Scalar", "_foreach_div_.ScalarList", "_foreach_div_.List"};

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fused_sdp_choice)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("equal", equal);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  for (const auto* name : kComposed) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY(timed, m) {
  m.def("operations() -> int", [] { return world().operations; });
  m.def("calls() -> int", [] { return world().calls; });
  m.def("highest() -> int", [] {
    Locked locked(world().lock);
    return std::exchange(world().highest, int64_t(world().stats.allocated_bytes[0].current));
  });
  m.def("busy() -> float[]", [] {
    Locked locked(world().lock);
    std::vector<double> found;
    for (auto& queue : world().streams) found.push_back(queue->busy);
    return found;
  });
}

// Counts the Python calls of a thread that has called timed_profile; of Python.h, which a machine that only runs
// Python may lack.
extern "C" {
void* PyFrame_GetCode(void*);
void* PyObject_GetAttrString(void*, const char*);
const char* PyUnicode_AsUTF8(void*);
void Py_DecRef(void*);
void PyEval_SetProfile(int (*)(void*, void*, int, void*), void*);

double timed_now() { return world().host; }

int timed_on_call(void*, void* frame, int what, void*) {
  static std::unordered_map<void*, bool> is_counted;
  if (what != 0) return 0;  // PyTrace_CALL
  auto* code = PyFrame_GetCode(frame);
  auto found = is_counted.find(code);
  if (found == is_counted.end()) {
    auto* file = PyObject_GetAttrString(code, "co_filename");
    const std::string path = PyUnicode_AsUTF8(file);
    Py_DecRef(file);
    bool is_ours = false;
    for (const auto& each : world().counted) is_ours = is_ours || path.find(each) != std::string::npos;
    found = is_counted.emplace(code, is_ours).first;  // the code stays alive: its module does
  } else {
    Py_DecRef(code);
  }
  if (found->second) {
    world().host += world().python;
    ++world().calls;
  }
  return 0;
}

void timed_profile() { PyEval_SetProfile(&timed_on_call, nullptr); }
}

namespace {
const bool registered = [] {
  c10::SetAllocator(kTimed, allocator());
  at::setHostAllocator(kTimed, &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}
