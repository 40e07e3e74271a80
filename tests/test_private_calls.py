"""Private names of PyTorch's are used in ``_torch/`` and nowhere else; which ones stand there is listed here.

A name is private if it begins with one underscore. A use of one is

- an attribute ``x._name``, where ``x`` is not ``self`` or ``cls``,
- a string ``"_name"`` or ``"torch._some._name"``, by which ``getattr`` may look it up,
- an import of it, or from below it,

and it is PyTorch's if PyTorch has the name, or backstash nowhere defines it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import backstash
from backstash._torch import engine, lookup, tensors
from backstash.errors import UsageError

PACKAGE = Path(backstash.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# Names that are allowed everywhere, and why.
ALLOWED = {
    "_version": "PyTorch's notes on autograd: how often a tensor was changed in place",
    "_base": "PyTorch's notes on autograd: what a tensor is a view of",
    "_getframe": "Python's: sys._getframe",
    "_is_gil_enabled": "Python's: sys._is_gil_enabled, from 3.13 on",
    "_CFuncPtr": "Python's: of ctypes",
    "_gradient_checkpointing_func": "transformers': what a layer calls to checkpoint",
    "_bytes": "no attribute: how the names of fields with bytes end",
}

# What `_torch/` uses. Before a name is written down here, its file says which versions of PyTorch have it
# and what is done where it is missing.
USED = {
    "autocast.py": {
        "_overloadpacket",
        "torch._C.DispatchKey",
        "torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough",
        "torch._C._get_privateuse1_backend_name",
        "torch._C._profiler.gather_traceback",
        "torch._C._profiler.symbolize_tracebacks",
    },
    "checkpoints.py": {"_CachingTorchDispatchMode", "_checkpoint_without_reentrant_generator"},
    "clipping.py": {"_clip_grads_with_norm_"},
    "device_memory.py": {
        "torch._C._accelerator_getDeviceStats",
        "torch._C._accelerator_isAllocatorInitialized",
    },
    "dispatch.py": {
        "_current_level",
        "_schema",
        "torch._C.DisableTorchFunction",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C.DispatchKey",
        "torch._C.DispatchKeySet",
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._DisableAutocast",
        "torch._C._DisableTorchDispatch",
        "torch._C._ForceDispatchKeyGuard",
        "torch._C._dispatch_has_kernel",
        "torch._C._dispatch_tls_local_exclude_set",
        "torch._C._dispatch_tls_local_include_set",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._len_torch_function_stack",
        "torch._C._pop_torch_dispatch_stack",
        "torch._C._push_on_torch_dispatch_stack",
        "torch._C._set_grad_enabled",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._python_dispatch._pop_mode",
        "torch.utils._python_dispatch._push_mode",
    },
    "dynamo.py": {
        "_FrameAction",
        "_FrameExecStrategy",
        "_torchdynamo_disable",
        "_torchdynamo_disable_msg",
        "torch._C._dynamo.eval_frame",
        "torch._disable_dynamo",
    },
    "engine.py": {
        "_input_metadata",
        "_sequence_nr",
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._current_autograd_node",
        "torch._C._current_graph_task_id",
        "torch._C._will_engine_execute_node",
        "torch.autograd.Variable._execution_engine.queue_callback",
        "torch.autograd._get_sequence_nr",
    },
    "fake.py": {
        "torch._compile",
        "torch._dynamo",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._tensor",
        "torch.ops.aten._local_scalar_dense.default",
        "torch.utils._python_dispatch",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree.tree_leaves",
    },
    "func_transforms.py": {
        "_saved_tensors_hooks_disable",
        "_saved_tensors_hooks_enable",
        "torch._C._autograd",
        "torch._C._autograd._saved_tensors_hooks_disable",
        "torch._C._autograd._saved_tensors_hooks_enable",
        "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
        "torch._C._autograd._top_saved_tensors_default_hooks",
    },
    "hook_dicts.py": {
        "_WrappedHook",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_buffer_registration_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_post_accumulate_grad_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    },
    "hook_stack.py": {
        "_pop_saved_tensors_default_hooks",
        "_push_saved_tensors_default_hooks",
        "_top_saved_tensors_default_hooks",
        "torch._C._autograd",
    },
    "host_memory.py": {"_host_emptyCache", "torch._C"},
    "mode_bits.py": {
        "_autograd_grad",
        "_batch_norm_with_update",
        "_jvp_with_argnums",
        "_native_batch_norm_legit",
        "torch._functorch",
        "torch.ops.aten._linalg_eigvals.default",
    },
    "module_parts.py": {
        "_buffers",
        "_checkpoint_wrapped_module",
        "_compiled_call_impl",
        "_fsdp_wrapped_module",
        "_modules",
        "_orig_mod",
        "_parameters",
    },
    "modules.py": {
        "_buffers",
        "_is_param",
        "_modules",
        "_parameters",
        "_orig_mod",
        "torch._dynamo.convert_frame",
        "torch.nn.Module._call_impl.__code__",
        "torch.nn.Module._wrapped_call_impl.__code__",
    },
    "nested_backward.py": {"torch.autograd.graph._engine_run_backward"},
    "node_saves.py": {"_raw_saved_", "_saved_"},
    "precision.py": {
        "torch._C._get_cublas_allow_bf16_reduced_precision_reduction",
        "torch._C._get_cublas_allow_fp16_reduced_precision_reduction",
        "torch._C._get_cudnn_benchmark",
        "torch._C._get_cudnn_deterministic",
        "torch._C._get_cudnn_enabled",
        "torch._C._get_deterministic_algorithms",
        "torch._C._get_deterministic_algorithms_warn_only",
        "torch._C._get_fp32_precision_getter",
        "torch._C._get_mkldnn_enabled",
        "torch._C._set_fp32_precision_setter",
    },
    "profiling.py": {"_is_profiler_enabled"},
    "pushed_pairs.py": {
        "torch._C._autograd",
        "torch._C._autograd._push_saved_tensors_default_hooks",
    },
    "schemas.py": {  # operations, by name; what a custom operator is made of
        "_opoverload",
        "torch._library.autograd",
        "torch._ops.OpOverload",
        "torch._ops.OpOverloadPacket",
        "_batch_norm_impl_index",
        "_cdist_forward",
        "_convolution",
        "_ctc_loss",
        "_cudnn_attention_",
        "_cudnn_ctc_loss",
        "_cudnn_rnn",
        "_efficient_attention_",
        "_embedding_bag",
        "_empty_affine_quantized",
        "_fft_",
        "_flash_attention_",
        "_index_put_impl_",
        "_linalg_",
        "_resize_output_",
        "_scaled_dot_product_",
        "_slow_conv2d_forward",
        "_thnn_fused_",
        "_trilinear",
        "torch._C.DispatchKey",
        "torch._C.DispatchKey.ADInplaceOrView",
    },
    "sharded.py": {
        "_fsdp_param_group",
        "_fsdp_param_groups",
        "_get_fsdp_state",
        "_unsharded_param",
    },
    "selective.py": {
        "torch._C.DispatchKey.ADInplaceOrView",
        "torch._C._SetExcludeDispatchKeyGuard",
        "torch.utils.checkpoint._CachingTorchDispatchMode",
    },
    "storages.py": {
        "_cdata",
        "torch.UntypedStorage._cdata",
        "torch.UntypedStorage._free_weak_ref",
        "torch.UntypedStorage._weak_ref",
        "torch._C._storage_Use_Count",
    },
    "streams.py": {
        "torch._C._accelerator_getStream",
        "torch._C._cuda_isCurrentStreamCapturing",
    },
    "tensors.py": {
        "_fix_weakref",
        "_indices",
        "_values",
        "torch.Tensor._is_zerotensor",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._neg_view",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    },
    "trees.py": {
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
        "torch.utils._pytree.tree_unflatten",
    },
    "versions.py": {
        "_current_autograd_node",
        "_unsafe_set_version_counter",
        "torch._C",
        "torch._C._autograd",
    },
}


class Custom(torch.autograd.Function):
    """For the names that a node of a custom function has."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def names_of_torch() -> set[str]:
    """The private names of the kinds of PyTorch's objects that backstash handles.

    Of those alone, backstash may have a name too: of modules, a use is known by what it is used on.
    """
    x = torch.ones(1, requires_grad=True)
    custom = Custom.apply(x)
    holders = [
        *(torch.Tensor, torch.UntypedStorage, nn.Module(), torch.optim.SGD([x])),
        *((x * x).grad_fn, custom.grad_fn, torch.ops.aten.add.Tensor),
    ]
    return {name for holder in holders for name in dir(holder) if is_private(name)}


PYTHON_S = {
    "_is_owned",  # of threading.RLock, as threading.Condition asks it
    "_Py_HashBytes",  # of the interpreter, public from Python 3.14 as Py_HashBuffer
}


def is_private(name: str) -> bool:
    return name.isidentifier() and re.match("_[^_]", name) is not None


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines, as what they are called or as an attribute of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_self(node.value):
                yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
OURS = {name for tree in TREES.values() for name in defined(tree)}
OURS |= {part for name in FILES for part in name.removesuffix(".py").split("/")}
THEIRS = names_of_torch()


def is_theirs(name: str) -> bool:
    return is_private(name) and (name in THEIRS or name not in OURS) and name not in ALLOWED


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each use: from ``torch`` on, where the file says it in one go."""
    inside = set()  # what has been seen as part of a longer name
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            inside |= set(ast.walk(node))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            origin = getattr(node, "module", None) or ""
            if getattr(node, "level", 0) == 0:
                for alias in node.names:
                    name = f"{origin}.{alias.name}".lstrip(".")
                    if of_torch(name):
                        yield node.lineno, name
        elif node in inside:
            continue
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if of_torch(name):
                inside |= set(ast.walk(node))
                yield node.lineno, name
            elif is_theirs(node.attr) and not is_self(node.value):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if of_torch(node.value) or is_theirs(node.value):
                yield node.lineno, node.value


def of_torch(name: str) -> bool:
    """Whether it is ``torch.some._name``."""
    first, *rest = name.split(".")
    return first == "torch" and all(map(str.isidentifier, rest)) and any(map(is_private, rest))


@pytest.mark.parametrize(
    "source, found",
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.autograd import _get_sequence_nr", "torch.autograd._get_sequence_nr"),
        ("torch._C._autograd.DeviceType.CPU", "torch._C._autograd.DeviceType.CPU"),
        ("autograd._get_sequence_nr()", "_get_sequence_nr"),
        ("tensor.untyped_storage()._cdata", "_cdata"),
        ("module._parameters", "_parameters"),  # ours have one too
        ("self.module._parameters", "_parameters"),
        ("getattr(storage, '_weak_ref')", "_weak_ref"),
        ("optional('torch._C._autograd._name', None)", "torch._C._autograd._name"),
        ("self._parameters", None),
        ("__slots__ = ('_parameters',)", None),
        ("evictor._segments", None),  # ours alone
        ("tensor._version", None),
        ("from .._torch.engine import _name", None),
        ("torch.autograd.graph.Node.__init__", None),
        ("'a text of torch._C'", None),
    ],
)
def test_what_counts_as_a_use(source, found):
    assert [name for _, name in uses(ast.parse(source))] == ([found] if found else [])


def test_private_names_are_used_in_one_package():
    wrong = [
        f"{file}:{line}: {name}"
        for file, tree in TREES.items()
        if not file.startswith("_torch/")
        for line, name in uses(tree)
        if name not in PYTHON_S
    ]
    assert wrong == [], "private names of PyTorch's belong in src/backstash/_torch/"


def test_these_are_the_ones_in_use():
    found = {
        file.removeprefix("_torch/"): {name for _, name in uses(tree)}
        for file, tree in TREES.items()
        if file.startswith("_torch/")
    }
    assert {file: names for file, names in found.items() if names} == USED


def test_this_torch_has_what_is_looked_up_by_its_full_name():
    paths = {name for names in USED.values() for name in names if name.startswith("torch.")}
    assert {path for path in paths if lookup.optional(path, None) is None} == set()


def test_every_exception_is_in_use():
    found = {
        name
        for tree in TREES.values()
        for node in ast.walk(tree)
        for name in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(name, str)
    }
    assert ALLOWED.keys() <= found


def test_what_is_missing_and_required_says_so_when_it_is_called():
    found = lookup.required("torch._C._no_such_call", "does a thing")
    with pytest.raises(
        UsageError,
        match=rf"torch {re.escape(torch.__version__)} has no torch._C._no_such_call, by which backstash "
        r"does a thing; use torch 2\.11 to 2\.15",
    ):
        found(1, two=2)
    assert lookup.required("torch.autograd._get_sequence_nr", "") is torch.autograd._get_sequence_nr


@pytest.mark.parametrize("path", ["torch.no._name", "torch._no.name", "torch.Tensor._no.name"])
def test_what_is_missing_and_optional_has_another_in_its_place(path):
    assert lookup.optional(path, len) is len


def test_a_module_is_found_by_its_name():
    assert lookup.optional("torch.utils._pytree", None) is torch.utils._pytree


def test_defaults_are_used_where_torch_gives_no_answer():
    assert engine.number_of(object()) == 0
    assert engine.output_metadata(object()) == ()
    for tensor in (torch.ones(1), torch._efficientzerotensor((1,))):
        assert tensors._has_no_address(tensor) is tensors.is_zero_tensor(tensor)
        assert tensors._can_flatten(tensor) is tensors.is_wrapper_subclass(tensor) is False


def test_which_backward_runs_is_asked_in_one():
    with pytest.raises(AssertionError, match="inside a backward call"):
        engine.running_task()
    x = torch.ones(1, requires_grad=True)
    tasks = []
    x.register_hook(lambda _: tasks.append((engine.in_backward(), engine.running_task() >= 0)))
    x.sum().backward()
    assert tasks == [(True, True)] and not engine.in_backward()
