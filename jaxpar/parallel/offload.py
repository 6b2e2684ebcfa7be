"""Arrays that live in the host's memory and pass through the device's a layer at a time (ZeRO-Offload, Ren 2021).

Where an array lives is part of its type while a step is traced (`float32<host>[8,64,64]`): the functions here look at
it, so that one code serves what is offloaded and what is not. Host arrays take part in no operation but transfers.

Barriers decide what XLA makes of the loops. One on each fetched slice keeps it from reading host memory in every
kernel that uses the slice; one on each stack and the slice fetched ahead of it orders the read before the write, since
otherwise whole stacks are copied in every turn. The layout is pinned on both sides of a transfer, or the partitioner
moves parts of arrays between devices in host memory, which GPUs cannot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = [
    "Streamed",
    "fetched",
    "gradient_proxies",
    "groups_through_device",
    "host_sharding",
    "in_host_memory",
    "is_on_host",
    "is_streamed",
    "layers_through_device",
    "readable",
    "slice_on_device",
    "update_layers_on_host",
    "update_on_host",
]

_HOST_KIND = "pinned_host"


def host_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """`spec` on the mesh, in the memory of the devices' hosts.

    Devices that are only described (for compiling without them) have no memories, and a mesh of them drops the kind;
    its abstract mesh keeps it.
    """
    described = not any(memory.kind == _HOST_KIND for memory in _memories(mesh.devices.flat[0]))
    return NamedSharding(mesh.abstract_mesh if described else mesh, spec, memory_kind=_HOST_KIND)


def _memories(device: jax.Device) -> list:
    try:
        return device.addressable_memories()
    except (AttributeError, RuntimeError):
        return []


def is_on_host(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays with this sharding are in the host's memory."""
    return sharding.memory_kind == _HOST_KIND


def in_host_memory(x: jax.Array) -> bool:
    """Whether a traced array is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def slice_on_device(stack: jax.Array, index: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`stack[index]`, moved to the device; `spec` is the stack's layout."""
    layer = jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
    return _to_device(layer, PartitionSpec(*spec[1:]))


@partial(jax.tree_util.register_dataclass, data_fields=("host", "proxy"), meta_fields=("dtype", "spec"))
@dataclass(frozen=True)
class Streamed:
    """A stack of layers' weights in the host's memory, in the place of the parameter; `scan_layers` fetches its slices.

    The gradient of a host array would have to be on the host. It is taken by `proxy` instead: zeros on the device, of
    the stack's shape and format, that no operation reads and that therefore never exist. None where no gradient is
    taken. `dtype` is the format after the transfer, `spec` the stack's layout.
    """

    host: Any
    proxy: Any
    dtype: Any
    spec: PartitionSpec

    def astype(self, dtype: Any) -> "Streamed":
        """The stack whose slices are cast once they are on the device."""
        return replace(self, dtype=jnp.dtype(dtype))

    def __getitem__(self, _: Any = None) -> Any:
        raise ValueError(
            f"a parameter {self.host.shape} is stacked over layers and read outside of scan_layers, but with "
            'offload.parameters="host" only scan_layers brings it to the device; set offload.parameters="none", or '
            'give the parameter another first logical axis than "layers"'
        )

    __jax_array__ = __getitem__


def is_streamed(leaf: Any) -> bool:
    """Whether a leaf of a pytree of parameters is `Streamed`."""
    return isinstance(leaf, Streamed)


def gradient_proxies(params: Any) -> Any:
    """What gradients are taken by: the parameters on the device, and zeros there for those on the host."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if in_host_memory(x) else x, params)


def readable(parameter: jax.Array, proxy: jax.Array | None, spec: PartitionSpec, *, stacked: bool) -> Any:
    """A parameter as a model reads it: a stack that is on the host as `Streamed`, anything else on the device.

    `proxy` is what its gradient is taken by, None where none is; `spec` is its layout.
    """
    if not in_host_memory(parameter):
        return parameter if proxy is None else proxy
    if stacked:
        return Streamed(parameter, proxy, parameter.dtype, spec)
    assert proxy is None, "gradients are taken by stacks on the host only"
    return _to_device(parameter, spec)


def fetched(stack: Streamed, index: jax.Array, proxy: jax.Array | None) -> jax.Array:
    """Layer `index` of the stack on the device; its gradient goes to `proxy`, the layer's slice of it."""
    return _fetched((stack.dtype, stack.host.dtype, stack.spec), stack.host, index, proxy)


_Transfer = tuple[Any, Any, PartitionSpec]
"""Format on the device, format on the host, layout."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetched(transfer: _Transfer, host: jax.Array, index: jax.Array, proxy: jax.Array | None) -> jax.Array:
    dtype, _, spec = transfer
    return slice_on_device(host, index, spec).astype(dtype)


def _fetched_forward(
    transfer: _Transfer, host: jax.Array, index: jax.Array, proxy: jax.Array | None
) -> tuple[jax.Array, None]:
    return _fetched(transfer, host, index, proxy), None


def _fetched_backward(transfer: _Transfer, _: None, gradient: jax.Array) -> tuple[None, None, jax.Array]:
    return None, None, gradient.astype(transfer[1])


_fetched.defvjp(_fetched_forward, _fetched_backward)


def _to_device(x: jax.Array, spec: PartitionSpec | None = None) -> jax.Array:
    def pinned(x: jax.Array) -> jax.Array:
        return x if spec is None else jax.lax.with_sharding_constraint(x, spec)

    return jax.lax.optimization_barrier(pinned(jax.device_put(pinned(x), jax.memory.Space.Device)))


def layers_through_device(update: Callable, num_layers: int, read: Any, owned: Any, specs: Any) -> Any:
    """`owned` after `update(layer index, read of the layer, owned of the layer)` of every layer.

    A loop that updates the stacks in place, each in the memory that it is in: the slices of the next layer are on
    their way in, and those of the last on their way out, while a layer is updated. The caller's jit must donate
    `owned`, or host stacks are copied.

    Args:
      read: pytree of stacks on the device, first dim the layer.
      owned: pytree of stacks in either memory; `specs` has the layout of each.
    """
    stacks, tree = jax.tree.flatten(owned)
    layouts = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    on_host = [in_host_memory(stack) for stack in stacks]

    def slices(stacks: list, index: jax.Array) -> list:
        """The slices of what is on the host, on the device."""
        return [
            slice_on_device(stack, index, spec) if host else None
            for stack, spec, host in zip(stacks, layouts, on_host, strict=True)
        ]

    def turn(index: jax.Array, carry: tuple[list, list]) -> tuple[list, list]:
        stacks, layer = carry
        ahead = slices(stacks, jnp.minimum(index + 1, num_layers - 1))
        ordered = [
            jax.lax.optimization_barrier((stack, following)) if host else (stack, None)
            for stack, following, host in zip(stacks, ahead, on_host, strict=True)
        ]
        stacks, ahead = [stack for stack, _ in ordered], [following for _, following in ordered]
        layer = [_layer(stack, index) if part is None else part for stack, part in zip(stacks, layer, strict=True)]
        new = update(index, jax.tree.map(lambda x: _layer(x, index), read), jax.tree.unflatten(tree, layer))
        parts = zip(stacks, jax.tree.leaves(new), layouts, strict=True)
        return [_written(stack, part, index, spec) for stack, part, spec in parts], ahead

    stacks, _ = jax.lax.fori_loop(0, num_layers, turn, (stacks, slices(stacks, jnp.int32(0))))
    return jax.tree.unflatten(tree, stacks)


def _layer(stack: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def _written(stack: jax.Array, layer: jax.Array, index: jax.Array, spec: PartitionSpec) -> jax.Array:
    if in_host_memory(stack):
        layer = jax.lax.with_sharding_constraint(layer, PartitionSpec(*spec[1:]))
        layer = jax.device_put(layer, jax.memory.Space.Host)
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


def groups_through_device(update: Callable, read: Mapping[str, Any], owned: Mapping[str, Any]) -> dict[str, Any]:
    """`owned[name]` after `update(name, read[name], owned[name])`, name by name, each array in the memory that it is
    in.

    A transfer waits for the update before the last, so that no more than two names' arrays are on the device.
    """
    changed: dict[str, Any] = {}
    for name, group in owned.items():
        if len(changed) >= 2:
            before_the_last = jax.tree.leaves(changed[list(changed)[-2]])[0]
            group, _ = jax.lax.optimization_barrier((group, before_the_last))
        on_host = jax.tree.map(in_host_memory, group)
        on_device = jax.tree.map(lambda x, host: _to_device(x) if host else x, group, on_host)
        changed[name] = update(name, read[name], on_device)
    return {
        name: jax.tree.map(
            lambda new, old: jax.device_put(new, jax.memory.Space.Host) if in_host_memory(old) else new,
            changed[name],
            owned[name],
        )
        for name in changed
    }


def update_layers_on_host(update: Callable, shared: Any, layers: jax.Array, *stacked: Any) -> Any:
    """`update(shared, layer, ...)` of all layers, computed by the host; see `update_on_host`."""

    def mapped(shared: Any, layers: jax.Array, *stacked: Any) -> Any:
        return jax.vmap(partial(update, shared))(layers, *stacked)

    return _by_host(mapped, (shared, layers, *stacked), results_like=(stacked[2], stacked[1]))


def update_on_host(update: Callable, shared: Any, gradients: Any, arrays: Any, parameters: Any) -> Any:
    """`update(shared, None, gradients, state, parameters)` computed by the host.

    The results go to the memories that parameters and state came from. `update` must treat each element for itself: a
    sum over a split dim would become communication between hosts in the middle of it.
    """

    def whole(shared: Any, *groups: Any) -> Any:
        return update(shared, None, *groups)

    return _by_host(whole, (shared, gradients, arrays, parameters), results_like=(parameters, arrays))


def _by_host(function: Callable, operands: tuple, results_like: Any) -> Any:
    # Renamed between JAX 0.10 and 0.12.
    decorator: Callable = getattr(compute_on, "compute_on2", compute_on.compute_on)
    run = decorator(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    moved = jax.tree.map(lambda x: x if in_host_memory(x) else jax.device_put(x, jax.memory.Space.Host), operands)
    return jax.tree.map(
        lambda new, old: new if in_host_memory(old) else jax.device_put(new, jax.memory.Space.Device),
        run(*moved),
        results_like,
    )
