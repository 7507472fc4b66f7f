"""Tensors of the fake device, and the operations on them."""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import PreTrainedModel

from fake_cuda import COUNTS, flash, graphs
from fake_cuda.functions import FUNCTIONS

DEVICE = torch.device("cuda:0")
_NO_KERNEL = frozenset(
    [
        *("view", "_unsafe_view", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "split"),
        *("split_with_sizes", "detach", "alias", "t", "as_strided", "_reshape_alias", "unbind", "chunk", "empty"),
        *("new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "set_", "resize_"),
        *("_local_scalar_dense", "unfold", "diagonal", "is_pinned", "record_stream"),
    ]
)
"""Views and bookkeeping."""
_WAITING = frozenset(
    [
        *("_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero", "masked_select", "_unique2"),
        *("unique_consecutive", "unique_dim"),
    ]
)
"""What returns values to the host, or tensors whose size depends on values."""


class OnGpu(Tensor):
    """A tensor that says it is on ``cuda:0``; what it holds is on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "OnGpu":
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=DEVICE,
        )
        made.held = values
        if graphs.CUDAGraph.current is not None:
            graphs.CUDAGraph.current.made.add(made.untyped_storage()._cdata)
        return made

    def __init__(self, values: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_rest: Any) -> "OnGpu":
        return OnGpu(inner["held"])

    def __deepcopy__(self, _memo: Any) -> Any:
        copy = OnGpu(self.held.detach().clone())
        made = torch.nn.Parameter(copy) if isinstance(self, torch.nn.Parameter) else copy
        return made.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(function, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Operations that name the device, and have no tensor on it."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function.overloadpacket.__name__
    flat, form = tree_flatten((args, kwargs))
    here = [one for one in flat if isinstance(one, OnGpu)]
    others = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, OnGpu)]
    wanted = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if name == "is_pinned" and not here:
        return args[0].untyped_storage().data_ptr() in _PINNED
    if not here and wanted != "cuda":
        if not kwargs.get("pin_memory"):
            return function(*args, **kwargs)
        return _kept(function(*args, **{**kwargs, "pin_memory": False}))
    if name == "is_pinned":
        return False
    _check(function, name, args, here, others)
    graphs.require_generator(name)
    _count(name, function, args, kwargs, here, others, wanted)
    inner_args, inner_kwargs = tree_unflatten([one.held if isinstance(one, OnGpu) else one for one in flat], form)
    if wanted == "cuda":
        inner_kwargs = inner_kwargs | {"device": torch.device("cpu")}
    inner_kwargs.pop("pin_memory", None)
    if (recording := graphs.CUDAGraph.current) is not None:
        recording.note_reads(here)
        for tensor in graphs.written(function, inner_args, inner_kwargs):
            recording.keep(tensor)
    found = _compute(function, name, inner_args, inner_kwargs)
    again = partial(_compute, function, name, inner_args, inner_kwargs)
    graphs.note(again, found, (inner_args, inner_kwargs), function.is_view)
    if wanted == "cpu" or name == "_local_scalar_dense":
        return found.clone() if found is inner_args[0] else found
    if not here and name == "_to_copy" and found is inner_args[0]:
        found = found.clone()
    wrapped = tree_map(lambda one: OnGpu(one.detach()) if isinstance(one, Tensor) else one, found)
    if here and not (name == "copy_" and not isinstance(args[0], OnGpu)):
        return return_and_correct_aliasing(function, args, kwargs, wrapped)
    return args[0] if name == "copy_" else wrapped


def _check(function: Any, name: str, args: Any, here: list[Any], others: list[Any]) -> None:
    """As CUDA's kernels do: one device, but for single numbers and for copies; for indices as well."""
    strange = [one for one in others if one.dim() and name not in ("copy_", "_to_copy")]
    if here and strange:
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and isinstance(args[0], OnGpu):
            COUNTS.waits[f"{name} with an index on the CPU, {_site()}"] += 1
            return
        shapes = [tuple(one.shape) for one in strange]
        raise RuntimeError(f"Expected all tensors to be on the same device: {function}, {shapes} on the CPU, {_site()}")


def _count(
    name: str, function: Any, args: Any, kwargs: dict[str, Any], here: list[Any], others: list[Any], wanted: str | None
) -> None:
    if name == "copy_" and here and others:
        to_gpu, source = isinstance(args[0], OnGpu), args[1]
    elif name == "_to_copy" and wanted is not None and (wanted == "cuda") != bool(here):
        to_gpu, source = wanted == "cuda", args[0]
    else:
        waits = name in _WAITING
        waits = waits or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        indices = args[1] if name.startswith(("index", "_index_put")) and isinstance(args[1], list | tuple) else []
        if waits or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            _wait(f"{name}, {_site()}")
        if name not in _NO_KERNEL and not function.is_view:
            COUNTS.launches[name] += 1
        return
    if not to_gpu:
        _wait(f"copy to the host, {_site()}")
        return
    site = _site()
    COUNTS.copies[site] += 1
    if source.dim() and source.untyped_storage().data_ptr() not in _PINNED:
        _wait(f"copy of memory that is not pinned, {site}")


def _wait(what: str) -> None:
    graphs.forbid(what)
    COUNTS.waits[what] += 1


def _compute(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name in ("_softmax", "_log_softmax") and args[2]:  # from half to float in one go, which only CUDA's kernel does
        return function(args[0].float(), args[1], False)
    if name in ("_softmax_backward_data", "_log_softmax_backward_data") and args[3] != args[0].dtype:
        return function(*args[:3], torch.float32).to(args[3])
    if name == "_flash_attention_forward":
        assert {one.dtype for one in args[:3]} in ({torch.bfloat16}, {torch.float16})
        return flash.forward(*args, **kwargs)
    if name == "_flash_attention_backward":
        COUNTS.launches[name] += 2  # it is three kernels
        return flash.backward(*args, **kwargs)
    return function(*args, **kwargs)


def _site() -> str:
    """The line of the package that asked for it."""
    frame = inspect.currentframe()
    while frame is not None:
        _, is_of_package, file = frame.f_code.co_filename.rpartition("distill_runner/")
        if is_of_package:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


_PINNED: dict[int, Tensor] = {}
"""By address; kept, so that no other tensor comes to lie there. Copies of other memory make the host wait."""


def _kept(tensor: Tensor) -> Tensor:
    graphs.forbid("allocation of pinned memory")
    _PINNED[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


class _Attention(torch.autograd.Function):
    """One kernel forward and two backward, as the memory-efficient one has; a mask of bool costs two more."""

    @staticmethod
    def forward(ctx: Any, q: OnGpu, k: OnGpu, v: OnGpu, mask: OnGpu | None, p: float) -> Tensor:
        is_converted = mask is not None and mask.dtype == torch.bool
        COUNTS.launches["attention"] += 3 if is_converted else 1

        def compute() -> Tensor:
            with torch.enable_grad():
                parts = [one.held.detach().float().requires_grad_() for one in (q, k, v)]
                scores = parts[0] @ parts[1].transpose(-1, -2) * q.shape[-1] ** -0.5
                if mask is not None:
                    scores = scores.masked_fill(~mask.held, -torch.inf) if is_converted else scores + mask.held
                context = dropout(scores.softmax(-1), p) @ parts[2]
            ctx.graph = parts, context
            return context.detach().to(q.dtype, copy=True)

        output = compute()
        graphs.note(compute, output, (), False)
        return OnGpu(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        COUNTS.launches["attention backward"] += 2

        def compute() -> list[Tensor]:
            parts, context = ctx.graph
            found = torch.autograd.grad(context, parts, gradients[0].held.float(), retain_graph=True)
            return [one.to(gradients[0].dtype) for one in found]

        outputs = compute()
        graphs.note(compute, outputs, (), False)
        return *map(OnGpu, outputs), None, None


class _Functions(TorchFunctionMode):
    """Attention, which chooses its kernel in C++."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention and isinstance(args[0], OnGpu):
            q, k, v, mask = (*args, kwargs.get("attn_mask"))[:4]
            assert kwargs.get("scale") in (None, q.shape[-1] ** -0.5)
            assert not kwargs.get("is_causal")
            if torch.is_autocast_enabled("cuda"):
                q, k, v = (one.to(torch.get_autocast_dtype("cuda")) for one in (q, k, v))
            return _Attention.apply(q, k, v, mask, kwargs.get("dropout_p", 0.0))
        return function(*args, **kwargs)


def on_cpu(state: Any) -> Any:
    return tree_map(lambda one: one.held.detach().clone() if isinstance(one, OnGpu) else one, state)


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: Any, map_location: Any = None, **options: Any) -> Any:
        """On the CPU, then moved to `map_location`."""
        found = load(file, map_location="cpu", **options)
        if map_location is None or torch.device(map_location).type == "cpu":
            return found
        return tree_map(lambda one: OnGpu(one) if isinstance(one, Tensor) else one, found)

    return loaded


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    def saved(model: Any, folder: Any, **options: Any) -> Any:
        """From copies on the CPU: files know tensors by their addresses, which the fake device lacks."""
        return save(model, folder, state_dict=on_cpu(model.state_dict()), **options)

    return saved


def _no_grad(mode: bool = True) -> Any:
    """As `torch.no_grad`: there are no views of tensors of the fake device in inference mode."""
    return torch.no_grad()


REPLACED: Mapping[str, Any] = {
    **FUNCTIONS,
    "torch.inference_mode": _no_grad,
    "torch.cuda.CUDAGraph": graphs.CUDAGraph,
    "torch.load": _loading(torch.load),
    "transformers.PreTrainedModel.save_pretrained": _saving(PreTrainedModel.save_pretrained),
}
"""What takes the place of a function, by the function's name."""


def install() -> None:
    """Replace the functions, and intercept operations on tensors of ``cuda:0``."""
    patched: Any = torch
    torch._C._set_only_lift_cpu_tensors(True)
    for name, function in REPLACED.items():
        owner, _, attribute = name.rpartition(".")
        setattr(pkgutil.resolve_name(owner), attribute, function)
    patched.utils._foreach_utils._foreach_supported_types.append(OnGpu)
    _Factories().__enter__()
    _Functions().__enter__()
