// CUDA's runtime without a GPU: memory, streams, events and graphs, and not one kernel.
//
// Preloaded before libcudart it lets PyTorch's CUDA build run: its caching allocators, its streams and events,
// its guards and checks are the real ones. The device's memory is the host's. What streams are asked to do
// waits in queues, and runs when the host waits for it, when an event makes another stream wait for it, or by
// chance when somebody looks: a copy is as late as it may be. `compute.cpp` stands in for kernels.
//
// What a program must not do ends the process: a kernel that is launched all the same, a copy that finds its
// memory gone, a question that would break a capture. Functions that are not here are libcudart's own, which
// finds no driver and says so. CUDA's reference manual of the runtime says what each has to do.
//
//   CUDA_ON_CPU_CHANCE    of something running at each look (0.1); 0: only when somebody waits
//   CUDA_ON_CPU_SEED      of that chance (0)
//   CUDA_ON_CPU_DEVICES   how many there are (1)
//   CUDA_ON_CPU_BYTES     memory of each (8 GiB)
//   CUDA_ON_CPU_PINNED    bytes of the host that may be pinned (no limit)

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using Work = std::function<void()>;

struct Graph {
  std::vector<Work> work;
};

struct Queue {
  std::deque<Work> work;
  uint64_t asked = 0, done = 0;
  Graph* graph = nullptr;  // that records what is asked
};

struct Event {
  Queue* queue = nullptr;  // it has ended when so much of its queue is done
  uint64_t at = 0;
  Graph* graph = nullptr;
  std::chrono::steady_clock::time_point when;

  bool has_ended() const { return !queue || queue->done >= at; }
};

struct Range {
  size_t size;
  cudaMemoryType type;
  int device;
};

double number(const char* name, double otherwise) {
  auto* words = std::getenv(name);
  return words && *words ? std::atof(words) : otherwise;
}

// All that there is, guarded by one lock, never destroyed: threads may use it to the last moment.
struct World {
  const int devices = int(number("CUDA_ON_CPU_DEVICES", 1));
  const double chance = number("CUDA_ON_CPU_CHANCE", 0.1);
  const double limit = number("CUDA_ON_CPU_BYTES", 8.0 * (1 << 30));
  const double may_pin = number("CUDA_ON_CPU_PINNED", 1e18);
  std::recursive_mutex lock;
  std::mt19937_64 random{uint64_t(number("CUDA_ON_CPU_SEED", 0))};
  std::map<const char*, Range> ranges;          // what the device can reach, by where it begins
  std::vector<std::unique_ptr<Queue>> queues;   // the first of them are the devices' default streams
  std::vector<size_t> used = std::vector<size_t>(devices);
  size_t pinned = 0;
  unsigned long long captures = 0;

  World() {
    for (int index = 0; index < devices; ++index) queues.push_back(std::make_unique<Queue>());
  }
};

World& world() {
  static World* only = new World;
  return *only;
}

#define LOCKED std::lock_guard<std::recursive_mutex> locked(world().lock)

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t answer(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

void fault(const char* words) {
  std::fprintf(stderr, "cuda on cpu: %s\n", words);
  std::abort();
}

// ---------------------------------------------------------------------------------------------- streams

Queue* queue_of(cudaStream_t stream) {
  if (!stream || stream == cudaStreamLegacy) return world().queues[current_device].get();
  return reinterpret_cast<Queue*>(stream);
}

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

void run_one(Queue* queue) {
  auto work = std::move(queue->work.front());
  queue->work.pop_front();
  work();
  ++queue->done;
}

void run_up_to(Queue* queue, uint64_t at) {
  while (queue->done < at && !queue->work.empty()) run_one(queue);
}

void run_all() {
  for (auto& each : world().queues) run_up_to(each.get(), each->asked);
}

// Lets streams get ahead of one another, by a little or by very much.
void by_chance() {
  std::uniform_real_distribution<> draw;
  while (draw(world().random) < world().chance) {
    std::vector<Queue*> busy;
    for (auto& each : world().queues)
      if (!each->work.empty()) busy.push_back(each.get());
    if (busy.empty()) return;
    auto* queue = busy[world().random() % busy.size()];
    for (auto left = size_t(1) << world().random() % 8; left && !queue->work.empty(); --left) run_one(queue);
  }
}

void ask(Queue* queue, Work work) {
  if (queue->graph) return queue->graph->work.push_back(std::move(work));
  queue->work.push_back(std::move(work));
  ++queue->asked;
}

bool is_capturing() {
  for (auto& each : world().queues)
    if (each->graph) return true;
  return false;
}

// What the host may not ask while a graph is captured.
bool breaks_a_capture() { return capture_mode != cudaStreamCaptureModeRelaxed && is_capturing(); }

// ----------------------------------------------------------------------------------------------- memory

const Range* range_of(const void* at) {
  auto found = world().ranges.upper_bound(static_cast<const char*>(at));
  if (found == world().ranges.begin()) return nullptr;
  --found;
  return static_cast<const char*>(at) < found->first + found->second.size ? &found->second : nullptr;
}

void* take(size_t size, cudaMemoryType type) {
  auto* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  std::memset(memory, 0xFF, size);  // not a number, whatever it is taken for
  world().ranges[static_cast<const char*>(memory)] = {size, type, current_device};
  return memory;
}

bool give(void* memory, bool waits = true) {
  auto found = world().ranges.find(static_cast<const char*>(memory));
  if (found == world().ranges.end()) return false;
  if (waits) run_all();
  munmap(memory, found->second.size);
  (found->second.type == cudaMemoryTypeDevice ? world().used[found->second.device] : world().pinned) -=
      found->second.size;
  world().ranges.erase(found);
  return true;
}

// What is not pinned is read before the call returns, and written.
cudaError_t copy(void* to, const void* from, size_t count, Queue* queue, bool waits) {
  by_chance();
  const bool reads_late = range_of(from), writes_late = range_of(to);
  waits = waits || !writes_late;
  if (queue->graph && (waits || !reads_late)) return answer(cudaErrorStreamCaptureUnsupported);
  auto staged = std::make_shared<std::string>();
  if (!reads_late) staged->assign(static_cast<const char*>(from), count);
  ask(queue, [=] {
    if (reads_late && !range_of(from)) fault("a copy reads memory that was freed");
    if (writes_late && !range_of(to)) fault("a copy writes memory that was freed");
    std::memcpy(to, reads_late ? from : staged->data(), count);
  });
  if (waits) run_up_to(queue, queue->asked);
  return answer(cudaSuccess);
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int* count) { return *count = world().devices, answer(cudaSuccess); }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, answer(cudaSuccess); }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= world().devices) return answer(cudaErrorInvalidDevice);
  return current_device = device, answer(cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13990, answer(cudaSuccess); }  // of any 13
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* facts, int) {
  std::memset(facts, 0, sizeof *facts);
  std::snprintf(facts->name, sizeof facts->name, "no GPU: CUDA on a CPU");
  facts->totalGlobalMem = size_t(world().limit);
  facts->major = 9;
  facts->warpSize = 32;
  facts->multiProcessorCount = 1;
  facts->maxThreadsPerBlock = 1024;
  facts->maxThreadsPerMultiProcessor = 2048;
  facts->sharedMemPerBlock = 48 << 10;
  facts->unifiedAddressing = 1;
  return answer(cudaSuccess);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 0, answer(cudaSuccess); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = *greatest = 0, answer(cudaSuccess);
}
cudaError_t cudaDeviceGetPCIBusId(char* words, int size, int device) {
  return std::snprintf(words, size, "0000:%02x:00.0", device), answer(cudaSuccess);
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, answer(cudaSuccess); }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return answer(cudaSuccess); }
cudaError_t cudaDeviceSynchronize() {
  LOCKED;
  if (is_capturing()) return answer(cudaErrorStreamCaptureUnsupported);
  return run_all(), answer(cudaSuccess);
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

// The driver's, which PyTorch looks up in libcuda.so.1, and here.
static CUresult not_here() { return CUDA_ERROR_NOT_SUPPORTED; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(not_here);
  if (found) *found = cudaDriverEntryPointSuccess;
  return answer(cudaSuccess);
}
// NVML's, which it looks up in libnvidia-ml.so.1: from torch 2.15 on it cannot do without.
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = nullptr, 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13990, 0; }
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** words) { return *words = "an error of CUDA on a CPU", CUDA_SUCCESS; }

// ----------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** memory, size_t size) {
  LOCKED;
  auto& used = world().used[current_device];
  if (used + size > world().limit) return answer(cudaErrorMemoryAllocation);
  *memory = take(size, cudaMemoryTypeDevice);
  if (!*memory) return answer(cudaErrorMemoryAllocation);
  return used += size, answer(cudaSuccess);
}
cudaError_t cudaFree(void* memory) {
  LOCKED;
  if (breaks_a_capture()) fault("memory of the device is freed while a graph is captured");
  return answer(!memory || give(memory) ? cudaSuccess : cudaErrorInvalidValue);
}

// PyTorch's expandable segments: addresses, and memory that is put there piece by piece.
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *size = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* at, size_t size, size_t, CUdeviceptr, unsigned long long) {
  auto* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *at = reinterpret_cast<CUdeviceptr>(found);
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  return munmap(reinterpret_cast<void*>(at), size), CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* piece, size_t size, const CUmemAllocationProp* what,
                     unsigned long long) {
  LOCKED;
  auto& used = world().used[what->location.id];
  if (used + size > world().limit) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  *piece = reinterpret_cast<CUmemGenericAllocationHandle>(
      new Range{size, cudaMemoryTypeDevice, what->location.id});
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle piece) {
  LOCKED;
  auto* range = reinterpret_cast<Range*>(piece);
  world().used[range->device] -= range->size;
  return delete range, CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle piece, unsigned long long) {
  LOCKED;
  auto* memory = reinterpret_cast<char*>(at);
  mprotect(memory, size, PROT_READ | PROT_WRITE);
  std::memset(memory, 0xFF, size);
  world().ranges[memory] = *reinterpret_cast<Range*>(piece);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  LOCKED;
  auto* memory = reinterpret_cast<char*>(at);
  // PyTorch waits for the stream that owns the memory. Another one that still has work may not read this:
  // what it would find is no longer what it was.
  bool idle = true;
  for (auto& each : world().queues) idle = idle && each->work.empty();
  if (idle) {
    madvise(memory, size, MADV_DONTNEED);
    mprotect(memory, size, PROT_NONE);
  } else {
    std::memset(memory, 0xFF, size);
  }
  world().ranges.erase(world().ranges.lower_bound(memory), world().ranges.lower_bound(memory + size));
  return CUDA_SUCCESS;
}

// PyTorch's backend:cudaMallocAsync: memory that comes and goes in the order of a stream.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return *pool = reinterpret_cast<cudaMemPool_t>(size_t(device) + 1), answer(cudaSuccess);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return answer(cudaSuccess); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  LOCKED;
  *static_cast<uint64_t*>(value) = world().used[reinterpret_cast<size_t>(pool) - 1];
  return answer(cudaSuccess);
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return answer(cudaSuccess); }
cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  return *static_cast<size_t*>(value) = 0, answer(cudaSuccess);
}
cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return answer(cudaSuccess); }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return answer(cudaSuccess); }
cudaError_t cudaMallocAsync(void** memory, size_t size, cudaStream_t) { return cudaMalloc(memory, size); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  LOCKED;
  ask(queue_of(stream), [=] { give(memory, false); });
  return answer(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  LOCKED;
  *total = size_t(world().limit);
  *free = *total - world().used[current_device];
  return answer(cudaSuccess);
}
cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) {
  LOCKED;
  if (world().pinned + size > world().may_pin) return answer(cudaErrorMemoryAllocation);
  *memory = take(size, cudaMemoryTypeHost);
  if (!*memory) return answer(cudaErrorMemoryAllocation);
  return world().pinned += size, answer(cudaSuccess);
}
cudaError_t cudaFreeHost(void* memory) {
  LOCKED;
  return answer(give(memory) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* memory, size_t size, unsigned) {
  LOCKED;
  auto* begin = static_cast<const char*>(memory);
  if (range_of(begin) || range_of(begin + size - 1)) return answer(cudaErrorHostMemoryAlreadyRegistered);
  if (world().pinned + size > world().may_pin) return answer(cudaErrorMemoryAllocation);
  world().ranges[begin] = {size, cudaMemoryTypeHost, current_device};
  return world().pinned += size, answer(cudaSuccess);
}
cudaError_t cudaHostUnregister(void* memory) {
  LOCKED;
  auto found = world().ranges.find(static_cast<const char*>(memory));
  if (found == world().ranges.end()) return answer(cudaErrorHostMemoryNotRegistered);
  world().pinned -= found->second.size;
  world().ranges.erase(found);
  return answer(cudaSuccess);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* facts, const void* at) {
  LOCKED;
  std::memset(facts, 0, sizeof *facts);
  auto* range = range_of(at);
  facts->type = range ? range->type : cudaMemoryTypeUnregistered;
  facts->device = range ? range->device : -2;
  facts->devicePointer = range ? const_cast<void*>(at) : nullptr;
  facts->hostPointer = facts->type == cudaMemoryTypeDevice ? nullptr : const_cast<void*>(at);
  return answer(cudaSuccess);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t count, cudaMemcpyKind, cudaStream_t stream) {
  LOCKED;
  return copy(to, from, count, queue_of(stream), false);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t count, cudaMemcpyKind) {
  LOCKED;
  return copy(to, from, count, queue_of(nullptr), true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t count, cudaStream_t stream) {
  LOCKED;
  return copy(to, from, count, queue_of(stream), false);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t count, cudaStream_t stream) {
  LOCKED;
  by_chance();
  return ask(queue_of(stream), [=] { std::memset(memory, value, count); }), answer(cudaSuccess);
}

// ----------------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  LOCKED;
  world().queues.push_back(std::make_unique<Queue>());
  *stream = reinterpret_cast<cudaStream_t>(world().queues.back().get());
  return answer(cudaSuccess);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  LOCKED;
  auto* queue = queue_of(stream);
  if (queue->graph) return answer(cudaErrorStreamCaptureUnsupported);
  by_chance();
  return answer(queue->work.empty() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LOCKED;
  auto* queue = queue_of(stream);
  if (queue->graph) return answer(cudaErrorStreamCaptureUnsupported);
  return run_up_to(queue, queue->asked), answer(cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  LOCKED;
  by_chance();
  auto* queue = queue_of(stream);
  auto seen = *event_of(event);
  if (seen.graph)
    queue->graph = seen.graph;  // the stream joins the capture
  else if (queue->graph && seen.queue)
    return answer(cudaErrorStreamCaptureIsolation);
  else if (seen.queue != queue && !seen.has_ended())
    ask(queue, [seen] { run_up_to(seen.queue, seen.at); });
  return answer(cudaSuccess);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new Event), answer(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event_of(event), answer(cudaSuccess); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  LOCKED;
  auto* queue = queue_of(stream);
  *event_of(event) = {queue, queue->asked, queue->graph, std::chrono::steady_clock::now()};
  return answer(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  LOCKED;
  if (breaks_a_capture()) fault("an event is asked while a graph is captured");
  by_chance();
  return answer(event_of(event)->has_ended() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  LOCKED;
  auto* seen = event_of(event);
  if (seen->graph) return answer(cudaErrorStreamCaptureUnsupported);
  if (seen->queue) run_up_to(seen->queue, seen->at);
  return answer(cudaSuccess);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = std::chrono::duration<float, std::milli>(event_of(to)->when - event_of(from)->when).count();
  return answer(cudaSuccess);
}

// ----------------------------------------------------------------------------------------------- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  LOCKED;
  auto* queue = queue_of(stream);
  if (queue->graph) return answer(cudaErrorIllegalState);
  queue->graph = new Graph;
  return ++world().captures, answer(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  LOCKED;
  auto* ended = queue_of(stream)->graph;
  for (auto& each : world().queues)
    if (each->graph == ended) each->graph = nullptr;
  *graph = reinterpret_cast<cudaGraph_t>(ended);
  return answer(ended ? cudaSuccess : cudaErrorIllegalState);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  LOCKED;
  *status = queue_of(stream)->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return answer(cudaSuccess);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t*) {
  LOCKED;
  if (id) *id = world().captures;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(queue_of(stream)->graph);
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), answer(cudaSuccess);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  return *ready = reinterpret_cast<cudaGraphExec_t>(graph), answer(cudaSuccess);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
  LOCKED;
  for (auto& each : reinterpret_cast<Graph*>(ready)->work) ask(queue_of(stream), each);
  return answer(cudaSuccess);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = reinterpret_cast<Graph*>(graph)->work.size(), answer(cudaSuccess);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return answer(cudaSuccess); }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return answer(cudaSuccess); }

// ---------------------------------------------------------------------------------------------- kernels

static cudaError_t refused() {
  fault("a kernel is launched: compute.cpp does not stand in for its operation");
  return cudaErrorInvalidDeviceFunction;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return refused(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return refused(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return refused(); }

// What compute.cpp needs.
bool cuda_on_cpu_captures() {
  LOCKED;
  return is_capturing();
}
void cuda_on_cpu_ask(cudaStream_t stream, void (*call)(void*), void* with) {
  LOCKED;
  by_chance();
  ask(queue_of(stream), [=] { call(with); });
}
void cuda_on_cpu_fault(const char* words) { fault(words); }

}  // extern "C"
