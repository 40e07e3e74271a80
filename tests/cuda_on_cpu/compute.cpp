// Operations on CUDA's tensors, by the CPU's kernels in the device's memory, which is the host's.
//
// Takes the place of every kernel of PyTorch's that is registered for CUDA, but for those that make tensors,
// look at them, or copy contiguous bytes. An operation is asked of the current stream, and runs when that gets
// there; what it returns is known from PyTorch's meta kernel. Where there is none, and where chance is drawn,
// it runs at once, after what the stream was asked before. Results are the CPU's to the bit.

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>
#include <string>

extern "C" bool cuda_on_cpu_captures();
extern "C" void cuda_on_cpu_ask(cudaStream_t stream, void (*call)(void*), void* with);
extern "C" void cuda_on_cpu_fault(const char* words);

namespace {

using at::Tensor;
using c10::IValue;
using Values = std::vector<IValue>;

// What this library was loaded under: no transform, no mode.
const auto plain_dispatch = c10::impl::tls_local_dispatch_key_set();

Tensor marked_as(Tensor made, const Tensor& tensor) {
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// The same memory as a tensor of the CPU's; of what is one already, its bytes of now.
Tensor on_host(const Tensor& tensor) {
  const c10::InferenceMode off(false);
  if (!tensor.defined() || tensor.layout() != at::kStrided) return tensor;
  if (!tensor.is_cuda()) return marked_as(tensor.detach().clone(), tensor);
  auto* memory = const_cast<void*>(tensor.unsafeGetTensorImpl()->data());
  return marked_as(
      at::from_blob(memory, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)), tensor);
}

Tensor without_bytes(const Tensor& tensor) {
  const c10::InferenceMode off(false);
  if (!tensor.defined()) return tensor;
  return marked_as(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)), tensor);
}

template <class Change>
IValue with_tensors(const IValue& value, c10::Device device, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      list.push_back(each ? std::make_optional(change(*each)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return device;
  if (value.isGenerator()) return IValue();  // the CPU's own
  return value;
}

template <class Change>
Values all(const Values& values, c10::Device device, const Change& change) {
  Values found;
  for (auto& each : values) found.push_back(with_tensors(each, device, change));
  return found;
}

Values call(const c10::OperatorHandle& operation, Values arguments) {
  const c10::InferenceMode off(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  operation.callBoxed(&arguments);
  return arguments;
}

// An operation that a stream is asked for: where it reads, and where its results go.
struct Asked {
  c10::OperatorHandle operation;
  Values arguments;
  std::vector<Tensor> targets;
};

void run(void* with) {
  auto& asked = *static_cast<Asked*>(with);
  c10::impl::ForceDispatchKeyGuard plain(plain_dispatch);  // whatever the thread that looks is amid
  try {
    auto results = call(asked.operation, asked.arguments);
    for (size_t index = 0; index < asked.targets.size(); ++index) {
      auto& target = asked.targets[index];
      if (!target.defined()) continue;
      auto& result = results[index].toTensor();
      if (result.dtype() != target.dtype() || result.sizes() != target.sizes())
        throw std::runtime_error("a meta kernel foresees other results than the CPU's");
      target.copy_(result);
    }
  } catch (const std::exception& error) {
    cuda_on_cpu_fault((asked.operation.schema().name() + ": " + error.what()).c_str());
  }
}

void ask(Asked* asked) { cuda_on_cpu_ask(c10::cuda::getCurrentCUDAStream().stream(), run, asked); }

void drain(c10::Device device) { c10::cuda::getCurrentCUDAStream(device.index()).synchronize(); }

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

c10::Device device_of(const Values& arguments) {
  std::optional<c10::Device> found;
  for (auto& each : arguments) {
    if (each.isDevice() && each.toDevice().is_cuda() && each.toDevice().has_index()) found = each.toDevice();
    with_tensors(each, at::kCPU, [&](const Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
      return tensor;
    });
  }
  return found.value_or(c10::Device(at::kCUDA, c10::cuda::current_device()));
}

// What the operation returns, without its bytes, where that can be known before it runs.
std::optional<Values> foreseen(const c10::OperatorHandle& operation, const Values& arguments) {
  const auto& schema = operation.schema();
  if (operation.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  if (schema.name().rfind("aten::native_", 0) == 0) return std::nullopt;  // of other types than the CPU's
  for (auto& each : schema.returns())
    if (each.type()->kind() != c10::TypeKind::TensorType) return std::nullopt;
  try {
    return call(operation, all(arguments, at::kMeta, without_bytes));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const bool captures = cuda_on_cpu_captures();
  for (auto& each : schema.arguments())  // perhaps to be resized
    if (each.is_out() && !captures) return at::native::cpu_fallback(operation, stack);
  const Values arguments(stack->end() - schema.arguments().size(), stack->end());
  const auto device = device_of(arguments);
  const c10::DeviceGuard on(device);
  auto there = all(arguments, at::kCPU, on_host);
  auto known = foreseen(operation, arguments);
  if (!known && captures)  // tried on whatever is there now
    known = call(operation, all(there, at::kCPU, [](const Tensor& each) { return each.defined() ? each.clone() : each; }));
  if (!known) drain(device);
  auto results = known ? *known : call(operation, there);
  std::vector<Tensor> targets(results.size());
  for (size_t index = 0; index < results.size(); ++index) {
    auto& returned = schema.returns()[index];
    if (writes(returned)) {
      for (size_t other = 0; other < arguments.size(); ++other) {
        auto* info = schema.arguments()[other].alias_info();
        if (info && *info == *returned.alias_info()) results[index] = arguments[other];
      }
      continue;
    }
    results[index] = with_tensors(results[index], device, [&](const Tensor& result) {
      if (!result.defined()) return result;
      auto target = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
      targets[index] = on_host(target);
      if (!known) {
        drain(device);  // what makes it may fill it
        targets[index].copy_(result);
      }
      return target;
    });
  }
  if (known) ask(new Asked{operation, there, targets});
  C10_CUDA_CHECK(cudaGetLastError());  // as after each launch
  torch::jit::drop(*stack, arguments.size());
  for (auto& each : results) stack->push_back(each);
}

// ----------------------------------------------------------------------------------------------- copies

bool is_plain(const Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

Tensor contiguous(const Tensor& like, c10::Device device) {
  return at::empty(like.sizes(), like.options().device(device).memory_format(at::MemoryFormat::Contiguous));
}

// PyTorch's own between contiguous tensors of one type; what else there is goes by such ones, as PyTorch's do.
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.numel()) return self;
  const auto source = from.expand(self.sizes());
  if (is_plain(self) && is_plain(source) && self.dtype() == source.dtype())
    return at::native::copy_(self, source, non_blocking);
  const auto device = self.is_cuda() ? self.device() : source.device();
  const c10::DeviceGuard on(device);
  at::assert_no_internal_overlap(self);
  if (self.is_cuda() && source.is_cuda()) {
    static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    if (source.device() != device) drain(source.device());
    ask(new Asked{operation, Values{on_host(self), on_host(source), false}, {}});
    return self;
  }
  auto staged = contiguous(self, source.device());
  staged.copy_(source, non_blocking);
  if (is_plain(self)) return at::native::copy_(self, staged, non_blocking);
  auto arrived = contiguous(self, self.device());
  at::native::copy_(arrived, staged, non_blocking && self.is_cuda());
  return self.copy_(arrived, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) const_cast<Tensor&>(target).resize_(source.sizes());
  return const_cast<Tensor&>(target).copy_(source);
}

// The CPU has no such kernel.
std::tuple<Tensor, Tensor> fused_rms_norm_backward(const Tensor& gradient, const Tensor& input, c10::IntArrayRef shape,
                                                   const Tensor& rstd, const std::optional<Tensor>& weight,
                                                   std::array<bool, 2>) {
  std::vector<int64_t> inner, outer;
  for (int64_t index = 0; index < input.dim(); ++index)
    (index < input.dim() - int64_t(shape.size()) ? outer : inner).push_back(index);
  const auto dy = gradient.to(at::kFloat), normal = input.to(at::kFloat) * rstd;
  const auto scaled = weight && weight->defined() ? dy * *weight : dy;
  auto dx = (scaled - normal * (scaled * normal).mean(inner, true)) * rstd;
  return {dx.to(input.dtype()), (dy * normal).sum(outer).to(input.dtype())};
}

// ----------------------------------------------------------------------------------------- registration

std::string full(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_to_be_computed(const c10::OperatorName& name) {
  static const std::set<std::string> theirs{
      "aten::_efficientzerotensor", "aten::_lazy_clone",  "aten::_local_scalar_dense", "aten::_pin_memory",
      "aten::_resize_output_",      "aten::copy_",        "aten::empty.memory_format", "aten::empty_strided",
      "aten::is_pinned",            "aten::is_set_to",    "aten::record_stream",       "aten::resize_",
  };
  if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::set_" || theirs.count(full(name))) return false;
  auto operation = c10::Dispatcher::singleton().findSchema(name);
  if (!operation) return false;
  for (auto& each : operation->schema().returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return false;  // a view
  return true;
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

const bool is_registered = [] {
  Quiet quiet;  // about kernels that there were before
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto names = c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  for (auto& name : names)
    if (is_to_be_computed(name))
      library.impl(full(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&compute>());
  library.impl("copy_", copy_);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_fused_rms_norm_backward", fused_rms_norm_backward);
  auto& context = at::globalContext();  // what asks for kernels of CUDA's own
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  return true;
}();

}  // namespace
