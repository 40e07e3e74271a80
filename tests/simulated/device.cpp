// An accelerator for tests, with memory, streams and events of its own, on a CPU: as late as it may be.
//
// Every byte of the device exists twice. In the *early* memory, the one that tensors point to, whatever is
// asked for happens at once, in the order in which it was asked for. In the *late* memory it happens when its
// stream gets there: when the host waits, when an event makes another stream wait for it, or by chance.
// Whatever a stream reads late must be what was read early. Where they differ two streams race, and the
// difference is kept as a fault: a program that is ordered by its events reads the same in every order that
// they allow. Memory is handed out again at once on the stream that asked for it, as PyTorch's caching
// allocators do, and elsewhere never; `record_stream` delays it.
//
// A copy between the host and the device that does not block reads or writes the host's memory late, too. The
// host's memory holds garbage from the moment it was asked until then. What the host reads is late.
//
// Time is played, too: each stream has a clock, which what it is asked for moves on by its bytes over a rate, and
// which an event that it waits for moves on to its own. So what a step takes on the device does not depend on the
// machine: the same program takes the same time, and copies that run during computing hide behind it.
//
// Operations are the CPU's own, by PyTorch's fallback: their results are the CPU's to the bit. PyTorch's
// documents on PrivateUse1 and its example openreg say what a device has to register; openreg computes and
// copies at once, so that it cannot show a race.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kSimulated = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kSpan = size_t(1) << 36;  // addresses of each device; untouched ones cost nothing
constexpr size_t kRound = 512;
constexpr int kGarbage = 0xDD;

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t asked = 0, done = 0;
  double clock = 0;  // seconds, when it will have done all that it was asked for
};

struct Event {
  Queue* queue;
  uint64_t at;  // it has ended when so much of its queue is done
  double clock = 0;  // of its queue
};

struct Block {
  size_t size;
  Queue* owner;
  DeviceIndex device;
  std::vector<Queue*> recorded;
  size_t wanted = 0;  // of its size
};

struct Freed {  // waits for the streams that it was recorded on
  char* memory;
  Block block;
  std::vector<Event> uses;
};

struct HostWrite {  // a copy down that has not run
  char* begin;
  Tensor bytes;
};

struct OneDevice {
  char* early = nullptr;  // late memory is at early + kSpan
  size_t top = 0;
  size_t limit = size_t(1) << 34;
  std::vector<std::unique_ptr<Queue>> streams;  // by id; 0 is the default one
  std::map<Queue*, std::multimap<size_t, char*>> pools;
  std::unordered_map<char*, Block> blocks;
  std::list<Freed> freed;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

// All that there is, guarded by one lock, never destroyed: threads may use it to the last moment.
struct World {
  std::recursive_mutex lock;
  OneDevice devices[kDevices];
  std::list<HostWrite> host_writes;
  std::vector<std::string> faults;
  std::mt19937_64 random{0};
  double chance = 0.1;
  int64_t reads = 0;
  bool pinnable = true;  // more of the host's memory
  double compute_rate = 10e9, down_rate = 5e9, up_rate = 5e9;  // bytes per second, of the played time

  World() {
    for (auto& device : devices) {
      auto mapped = mmap(nullptr, 2 * kSpan, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "no addresses for a simulated device");
      device.early = static_cast<char*>(mapped);
      device.streams.push_back(std::make_unique<Queue>());
    }
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

// A thread that waits for the lock releases Python meanwhile: what is freed within it may need Python to end.
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

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};
thread_local std::string computing;  // the operation of the CPU's that stands in for the device's, if any

Queue* queue_of(const Stream& stream) {
  return world().devices[stream.device_index()].streams.at(stream.id()).get();
}

Queue* current_queue(DeviceIndex device) {
  return world().devices[device].streams.at(current_stream[device]).get();
}

void fault(const std::string& words) {
  if (world().faults.size() < 100) world().faults.push_back(words);
}

// ---------------------------------------------------------------------------------------------- streams

// What this library was loaded under: no transform, no mode.
const auto plain_dispatch = c10::impl::tls_local_dispatch_key_set();

void run_one(Queue* queue) {
  c10::impl::ForceDispatchKeyGuard plain(plain_dispatch);  // whatever the thread that looks is amid
  at::AutoDispatchBelowADInplaceOrView below;
  auto work = std::move(queue->work.front());
  queue->work.pop_front();
  work();
  ++queue->done;
}

void run_up_to(Queue* queue, uint64_t at) {
  while (queue->done < at) run_one(queue);
}

// Lets one stream, any that has something to do, get ahead of the others: by a little or by very much.
bool run_some(DeviceIndex first, DeviceIndex last) {
  std::vector<Queue*> busy;
  for (auto index = first; index < last; ++index)
    for (auto& queue : world().devices[index].streams)
      if (!queue->work.empty()) busy.push_back(queue.get());
  if (busy.empty()) return false;
  auto* queue = busy[world().random() % busy.size()];
  for (auto left = size_t(1) << world().random() % 12; left && !queue->work.empty(); --left) run_one(queue);
  return true;
}

void run_all(DeviceIndex device) {
  while (run_some(device, device + 1)) {
  }
}

// Some of what waits may have run meanwhile.
void by_chance() {
  std::uniform_real_distribution<> draw;
  while (draw(world().random) < world().chance && run_some(0, kDevices)) {
  }
}

void ask(Queue* queue, std::function<void()> work, double seconds = 0) {
  queue->work.push_back(std::move(work));
  ++queue->asked;
  queue->clock += seconds;
}

// ----------------------------------------------------------------------------------------------- memory

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Locked locked(world().lock);
    by_chance();
    const auto index = current_device;
    void* memory = nbytes ? take(index, nbytes) : nullptr;
    return {memory, memory, &give, Device(kSimulated, index)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give; }

  void copy_data(void* target, const void* source, size_t count) const override {
    TORCH_CHECK(false, "a simulated device does not clone storages");
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    Locked locked(world().lock);
    for (DeviceIndex index = 0; index < kDevices; ++index) release(index);
  }

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    Locked locked(world().lock);
    auto& blocks = world().devices[stream.device_index()].blocks;
    auto found = blocks.find(static_cast<char*>(pointer.get()));
    if (found == blocks.end()) return;
    auto* queue = queue_of(stream);
    if (queue != found->second.owner) found->second.recorded.push_back(queue);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Locked locked(world().lock);
    return world().devices[index].stats;
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    Locked locked(world().lock);
    auto& stats = world().devices[index].stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes})
      each->at(0).reset_accumulated();
  }

  void resetPeakStats(DeviceIndex index) override {
    Locked locked(world().lock);
    auto& stats = world().devices[index].stats;
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes})
      each->at(0).reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    Locked locked(world().lock);
    auto& device = world().devices[index];
    const size_t reserved = device.stats.reserved_bytes[0].current;
    return {device.limit - std::min(device.limit, reserved), device.limit};
  }

 private:
  // The memory that was freed last of the smallest that is large enough.
  static char* from(std::multimap<size_t, char*>& pool, size_t size, size_t* found) {
    auto at = pool.lower_bound(size);
    if (at == pool.end() || at->first > 2 * size) return nullptr;
    at = std::prev(pool.upper_bound(at->first));
    auto* memory = at->second;
    *found = at->first;
    pool.erase(at);
    return memory;
  }

  static char* take(DeviceIndex index, size_t nbytes) {
    auto& device = world().devices[index];
    release_freed(index, false);
    const size_t wanted = (nbytes + kRound - 1) / kRound * kRound;
    auto* owner = current_queue(index);
    size_t size = wanted;
    auto* memory = from(device.pools[owner], wanted, &size);
    if (!memory) {
      memory = fresh(index, wanted, &size);
      if (!memory) {
        release(index);
        memory = fresh(index, wanted, &size);
      }
      if (!memory) ++device.stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, memory, "simulated:", int(index), " is out of memory: ", wanted,
                       " bytes asked, ", device.stats.reserved_bytes[0].current, " of ", device.limit, " taken");
      device.stats.reserved_bytes[0].increase(size);
    }
    device.stats.allocation[0].increase(1);
    device.stats.allocated_bytes[0].increase(wanted);
    device.stats.active_bytes[0].increase(size);
    device.blocks[memory] = {size, owner, index, {}, wanted};
    return memory;
  }

  static char* fresh(DeviceIndex index, size_t wanted, size_t* size) {
    auto& device = world().devices[index];
    if (device.stats.reserved_bytes[0].current + wanted > device.limit) return nullptr;
    *size = wanted;
    TORCH_CHECK(device.top + wanted <= kSpan, "a simulated device has no more addresses");
    auto* memory = device.early + device.top;
    device.top += wanted;
    std::memset(memory, 0xFF, wanted);  // not a number, whatever it is taken for
    std::memset(memory + kSpan, 0xFF, wanted);
    return memory;
  }

  static void give(void* pointer) {
    if (!pointer) return;
    Locked locked(world().lock);
    auto* memory = static_cast<char*>(pointer);
    for (DeviceIndex index = 0; index < kDevices; ++index) {
      auto& device = world().devices[index];
      auto found = device.blocks.find(memory);
      if (found == device.blocks.end()) continue;
      auto block = found->second;
      device.blocks.erase(found);
      device.stats.allocation[0].decrease(1);
      device.stats.allocated_bytes[0].decrease(block.wanted);
      std::vector<Event> uses;
      for (auto* queue : block.recorded) uses.push_back({queue, queue->asked});
      device.freed.push_back({memory, block, uses});
      if (uses.empty()) release_freed(index, false);
      return;
    }
  }

  static void release_freed(DeviceIndex index, bool wait) {
    auto& device = world().devices[index];
    for (auto at = device.freed.begin(); at != device.freed.end();) {
      bool over = true;
      for (auto& use : at->uses) {
        if (wait) run_up_to(use.queue, use.at);
        over = over && use.queue->done >= use.at;
      }
      if (!over) {
        ++at;
        continue;
      }
      device.stats.active_bytes[0].decrease(at->block.size);
      device.pools[at->block.owner].emplace(at->block.size, at->memory);
      at = device.freed.erase(at);
    }
  }

  // The pages that lie whole in it; its addresses are not used again.
  static void give_pages_back(char* memory, size_t size) {
    constexpr uintptr_t page = 4096;
    const auto from = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const auto to = (reinterpret_cast<uintptr_t>(memory) + size) / page * page;
    if (from >= to) return;
    for (auto offset : {size_t(0), kSpan}) madvise(reinterpret_cast<void*>(from + offset), to - from, MADV_DONTNEED);
  }

  // Gives what no tensor has back, for every stream: the device waits for all that it has been asked.
  static void release(DeviceIndex index) {
    auto& device = world().devices[index];
    run_all(index);
    release_freed(index, true);
    for (auto& [owner, pool] : device.pools) {
      for (auto& [size, memory] : pool) {
        give_pages_back(memory, size);
        device.stats.reserved_bytes[0].decrease(size);
      }
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

  c10::DeviceType type() const override { return kSimulated; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kSimulated, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", int(kDevices), " simulated devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }

  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::UNSAFE, with_index(device), current_stream[with_index(device).index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, with_index(device), 0);
  }
  Stream getNewStream(Device device, int) const override {
    Locked locked(world().lock);
    auto& streams = world().devices[with_index(device).index()].streams;
    streams.push_back(std::make_unique<Queue>());
    return Stream(Stream::UNSAFE, with_index(device), int64_t(streams.size()) - 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked locked(world().lock);
    if (!*event) *event = new Event;
    auto* queue = queue_of(stream);
    *static_cast<Event*>(*event) = {queue, queue->asked, queue->clock};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Locked locked(world().lock);
    const auto before = *static_cast<Event*>(event);
    queue_of(stream)->clock = std::max(queue_of(stream)->clock, before.clock);
    if (before.queue->done < before.at)
      ask(queue_of(stream), [before] { run_up_to(before.queue, before.at); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Locked locked(world().lock);
    by_chance();
    const auto* asked = static_cast<Event*>(event);
    return asked->queue->done >= asked->at;
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    Locked locked(world().lock);
    return 1e3 * (static_cast<Event*>(to)->clock - static_cast<Event*>(from)->clock);
  }
  bool queryStream(const Stream& stream) const override {
    Locked locked(world().lock);
    by_chance();
    return queue_of(stream)->work.empty();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Locked locked(world().lock);
    const auto* asked = static_cast<Event*>(event);
    run_up_to(asked->queue, asked->at);
  }
  void synchronizeStream(const Stream& stream) const override {
    Locked locked(world().lock);
    auto* queue = queue_of(stream);
    run_up_to(queue, queue->asked);
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    Locked locked(world().lock);
    run_all(index < 0 ? current_device : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator()->recordStream(pointer, stream);
  }

 private:
  static Device with_index(Device device) {
    return device.has_index() ? device : Device(kSimulated, current_device);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ------------------------------------------------------------------------------ pinned memory of the host

// PyTorch's caching allocator of pinned memory, as each of its accelerators has one. What it keeps is pinned.
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
    TORCH_CHECK(world().pinnable, "no more memory can be pinned\nand a line that nobody reads");
    *pointer = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    ranges[static_cast<const char*>(*pointer)] = nbytes;
  }
  void free_block(at::HostBlock<Stream>* block) override {
    Locked locked(world().lock);
    ranges.erase(static_cast<const char*>(block->ptr_));
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<c10::Event>>& events, Stream stream) override {
    events->emplace_back(kSimulated);
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

// A copy that runs late keeps pinned memory from being handed out again, as each backend's copies do.
void in_use(const Tensor& on_host) {
  if (!pinned().impl_->has(on_host.data_ptr())) return;
  const auto& pointer = on_host.storage().data_ptr();
  pinned().record_event(on_host.data_ptr(), pointer.get_context(), Guard().getStream(Device(kSimulated, current_device)));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kSimulated, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kSimulated, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 || index >= kDevices ? current_device : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    Locked locked(world().lock);
    return pinned().impl_->has(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override;
};

// ----------------------------------------------------------------------------------------------- copies

Tensor on_host(const Tensor& tensor, size_t offset) {
  auto memory = at::from_blob(static_cast<char*>(tensor.data_ptr()) + offset, tensor.sizes(), tensor.strides(),
                              tensor.options().device(at::kCPU).requires_grad(false));
  memory._set_conj(tensor.is_conj());
  memory._set_neg(tensor.is_neg());
  return memory;
}
Tensor early(const Tensor& tensor) { return on_host(tensor, 0); }
Tensor late(const Tensor& tensor) { return on_host(tensor, kSpan); }

Tensor snapshot(const Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

// The late read of `source`, which must find what the early one found.
std::function<void()> read_of(const Tensor& source, const Tensor& found, const std::string& by) {
  return [there = late(source), found, by = by + " on stream " + std::to_string(current_stream[source.get_device()])] {
    ++world().reads;
    const auto now = snapshot(there);
    if (std::memcmp(now.data_ptr(), found.data_ptr(), found.nbytes()))
      fault(by + " read other bytes than were written for it");
  };
}

bool is_plain(const Tensor& source, const Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.is_contiguous() && target.is_contiguous() &&
         source.sizes() == target.sizes() && !source.is_conj() && !target.is_conj() && !source.is_neg() &&
         !target.is_neg();
}

bool overlap(const char* one, size_t nbytes, const char* other, size_t other_nbytes) {
  return one < other + other_nbytes && other < one + nbytes;
}

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
WeakStorage weak(const Tensor& tensor) {
  return WeakStorage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

// Device to host.
void down(const Tensor& source, const Tensor& target, bool blocking) {
  const auto found = snapshot(early(source));
  auto* queue = current_queue(source.get_device());
  if (!computing.empty()) {
    ask(queue, read_of(source, found, computing), double(source.nbytes()) / world().compute_rate);
    target.copy_(early(source));
    return;
  }
  ask(queue, read_of(source, found, "a copy to the host"), double(source.nbytes()) / world().down_rate);
  if (blocking || !is_plain(source, target)) {
    run_up_to(queue, queue->asked);
    target.copy_(late(source));
    return;
  }
  auto* begin = static_cast<char*>(target.data_ptr());
  const auto nbytes = target.nbytes();
  auto& writes = world().host_writes;
  writes.push_back({begin, found});
  auto written = std::prev(writes.end());
  std::memset(begin, kGarbage, nbytes);
  ask(queue, [there = late(source), begin, nbytes, written, owner = weak(target)] {
    if (owner.lock())
      std::memcpy(begin, there.data_ptr(), nbytes);
    else
      fault("the host's memory was freed before a copy to it had run");
    world().host_writes.erase(written);
  });
  in_use(target);
}

// What will be in the host's memory when all copies to it have run.
Tensor host_bytes(const Tensor& source) {
  auto bytes = snapshot(source);
  auto* begin = static_cast<char*>(source.data_ptr());
  for (auto& each : world().host_writes) {
    if (!overlap(begin, source.nbytes(), each.begin, each.bytes.nbytes())) continue;
    const auto from = std::max(begin, each.begin);
    const auto to = std::min(begin + source.nbytes(), each.begin + each.bytes.nbytes());
    std::memcpy(static_cast<char*>(bytes.data_ptr()) + (from - begin),
                static_cast<char*>(each.bytes.data_ptr()) + (from - each.begin), to - from);
  }
  return bytes;
}

// Host to device.
void up(const Tensor& source, const Tensor& target, bool blocking) {
  auto* queue = current_queue(target.get_device());
  const bool is_late = computing.empty() && !blocking && is_plain(source, target);
  const auto bytes = is_late ? host_bytes(source) : snapshot(source);
  early(target).copy_(bytes);
  if (!is_late) {
    const auto rate = computing.empty() ? world().up_rate : world().compute_rate;
    ask(queue, [there = late(target), bytes] { there.copy_(bytes); }, double(bytes.nbytes()) / rate);
    if (computing.empty() && blocking) run_up_to(queue, queue->asked);
    return;
  }
  ask(queue, [there = late(target), bytes, begin = source.data_ptr(), owner = weak(source)] {
    ++world().reads;
    if (!owner.lock()) {
      fault("the host's memory was freed before a copy from it had run");
      return;
    }
    if (std::memcmp(begin, bytes.data_ptr(), bytes.nbytes()))
      fault("a copy to the device read other bytes of the host than were written for it");
    std::memcpy(there.data_ptr(), begin, bytes.nbytes());
  }, double(bytes.nbytes()) / world().up_rate);
  in_use(source);
}

// On one device, or between two, which then wait for each other.
void across(const Tensor& source, const Tensor& target) {
  auto* queue = current_queue(source.get_device());
  auto* other = current_queue(target.get_device());
  const auto found = snapshot(early(source));
  early(target).copy_(found);
  if (other != queue) ask(queue, [other, at = other->asked] { run_up_to(other, at); });
  if (other != queue) queue->clock = std::max(queue->clock, other->clock);
  ask(queue, read_of(source, found, "a copy on the device"), double(found.nbytes()) / world().compute_rate);
  ask(queue, [from = late(source), to = late(target)] { to.copy_(from); });
  if (other != queue) {
    ask(other, [queue, at = queue->asked] { run_up_to(queue, at); });
    other->clock = std::max(other->clock, queue->clock);
  }
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!source.numel()) return target;
  Locked locked(world().lock);
  at::AutoDispatchBelowADInplaceOrView below;
  by_chance();
  const auto from = source.expand(target.sizes());
  if (from.is_cpu())
    up(from, target, !non_blocking);
  else if (target.is_cpu())
    down(from, target, !non_blocking);
  else
    across(from, target);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) const_cast<Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const {
  const auto device = storage.device();
  c10::DeviceGuard guard(device);
  auto bytes = at::TensorOptions().dtype(at::kByte).device(device);
  auto memory = allocator()->allocate(nbytes);
  const auto kept = int64_t(std::min(nbytes, storage.nbytes()));
  if (kept) {
    Locked locked(world().lock);
    at::AutoDispatchBelowADInplaceOrView below;
    auto whole = [&](void* at) {
      return at::detail::make_tensor<at::TensorImpl>(
          c10::Storage(c10::Storage::use_byte_size_t(), kept,
                       c10::DataPtr(at, nullptr, [](void*) {}, device), nullptr, false),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), bytes.dtype());
    };
    auto from = whole(storage.mutable_data()), to = whole(memory.get());
    from.unsafeGetTensorImpl()->set_sizes_contiguous({kept});
    to.unsafeGetTensorImpl()->set_sizes_contiguous({kept});
    across(from, to);
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

// ------------------------------------------------------------------------------------------- operations

struct Computing {
  explicit Computing(const std::string& name) { computing = name; }
  ~Computing() { computing.clear(); }
};

void compute_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  Computing now(operation.schema().name());
  at::native::cpu_fallback(operation, stack);
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                           std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>,
                           std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// As the CPU's, but that what is there goes along on the late side, too.
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const auto needed = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto count = int64_t(source.nbytes() / self.itemsize());
  return self.set_(source, 0, {count}, {1});
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

c10::Scalar local_scalar_dense(const Tensor& self) { return self.cpu().item(); }

void record_stream(Tensor& self, Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

template <class Compute>
auto on_cpu(const Compute& compute) {
  Computing now("convolution");
  return compute();
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  return on_cpu([&] {
    auto on_host_bias = bias && bias->defined() ? std::optional<Tensor>(bias->cpu()) : std::nullopt;
    return at::convolution(input.cpu(), weight.cpu(), on_host_bias, stride, padding, dilation, transposed,
                           output_padding, groups)
        .to(input.device());
  });
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  return on_cpu([&] {
    auto back = [&](const Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
    std::vector<int64_t> bias_sizes{gradient.size(1)};
    auto [one, two, three] =
        at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), bias_sizes, stride, padding, dilation,
                                 transposed, output_padding, groups, mask);
    return std::make_tuple(back(one), back(two), back(three));
  });
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
}

// Copies see conjugate and negative views as they are, or PyTorch would make them real by another copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}
}  // namespace at::autocast

// What a test asks of it.
TORCH_LIBRARY(simulated, m) {
  m.def("begin(float chance, int seed) -> ()", [](double chance, int64_t seed) {
    Locked locked(world().lock);
    world().chance = chance;
    world().random.seed(seed);
  });
  m.def("faults() -> str[]", [] {
    Locked locked(world().lock);
    for (DeviceIndex index = 0; index < kDevices; ++index) run_all(index);
    return std::exchange(world().faults, {});
  });
  m.def("reads() -> int", [] { return world().reads; });
  m.def("limit(int device, int nbytes) -> ()", [](int64_t device, int64_t nbytes) {
    Locked locked(world().lock);
    world().devices[device].limit = nbytes;
  });
  m.def("rates(float compute, float down, float up) -> ()", [](double compute, double down, double up) {
    Locked locked(world().lock);
    world().compute_rate = compute, world().down_rate = down, world().up_rate = up;
  });
  m.def("pinnable(bool may) -> ()", [](bool may) { world().pinnable = may; });
  m.def("pinned_bytes() -> int", [] {
    Locked locked(world().lock);
    int64_t sum = 0;
    for (const auto& each : pinned().impl_->ranges) sum += each.second;
    return sum;
  });
}

namespace {
const bool registered = [] {
  c10::SetAllocator(kSimulated, allocator());
  at::setHostAllocator(kSimulated, &pinned());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}
