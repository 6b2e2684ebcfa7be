"""A function's gradient in separate pieces, which run at different ticks of a pipeline.

`CutVjp` separates the forward pass from the backward pass: what travels between them is a list of arrays, without those
that the backward pass gets anyway (parameters, context). `SplitBackward` cuts a backward pass in two again: the input's
gradient, for which the rank before waits, and the parameters' gradients, for which nobody does (Qi 2023, zero bubble).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

__all__ = ["CutVjp", "SplitBackward", "passes_through", "reads"]

Function = Callable[[Any, Any, Any], Any]
"""`(parameters, x, context) -> outputs`; nothing in the context is differentiated."""
Backward = Callable[[Any, Any, Sequence[jax.Array], Any], tuple[Any, Any]]
"""`(parameters, context, residuals, cotangents of the outputs) -> (gradients of the parameters, gradient of x)`."""

_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
"""Primitives that only group others, by the names that versions of JAX give them."""


class CutVjp:
    """Forward and backward pass of `function`, to be traced in this order.

    Residuals that do not depend on x (weights, slices of them, masks, angles) are not kept: the backward pass makes
    them again of parameters and context.

    >>> import jax.numpy as jnp
    >>> cut = CutVjp(lambda w, x, context: jnp.sin(w * x))
    >>> y, residuals = cut.forward(2.0, 3.0, None)
    >>> dw, dx = cut.backward(2.0, None, residuals, jnp.ones(()))
    >>> bool(jnp.allclose(dx, 2.0 * jnp.cos(6.0)))
    True
    """

    def __init__(self, function: Function) -> None:
        self._function = function

    def forward(self, params: Any, x: Any, context: Any) -> tuple[Any, list[jax.Array]]:
        """The outputs, and the residuals that `backward` needs beside parameters and context."""
        given, given_tree = jax.tree.flatten((params, context))
        inputs, x_tree = jax.tree.flatten(x)

        def traced(*leaves: Any) -> tuple[Any, list[jax.Array]]:
            params, context = jax.tree.unflatten(given_tree, leaves[: len(given)])
            x = jax.tree.unflatten(x_tree, leaves[len(given) :])
            outputs, pullback = jax.vjp(lambda params, x: self._function(params, x, context), params, x)
            residuals, self._tree = jax.tree.flatten(pullback)
            return outputs, residuals

        closed, (shapes, _) = jax.make_jaxpr(traced, return_shape=True)(*given, *inputs)
        jaxpr, self._consts, traced_consts = _opened(_inlined(closed))
        num_given = len(self._consts) + len(given)
        outputs, outputs_tree = jax.tree.flatten(shapes)
        results, residuals = jaxpr.outvars[: len(outputs)], jaxpr.outvars[len(outputs) :]
        moving = _dependants(jaxpr, jaxpr.invars[num_given:])
        self._is_kept = [not isinstance(atom, core.Literal) and atom in moving for atom in residuals]
        kept = [atom for atom, is_kept in zip(residuals, self._is_kept, strict=True) if is_kept]
        again = [atom for atom, is_kept in zip(residuals, self._is_kept, strict=True) if not is_kept]
        self._again = _part(jaxpr, _ancestors(jaxpr.eqns, again)[1], jaxpr.invars[:num_given], again)
        program = _part(jaxpr, _ancestors(jaxpr.eqns, [*results, *kept])[1], jaxpr.invars, [*results, *kept])
        values = _run(program, [*self._consts, *given, *inputs, *traced_consts])
        return jax.tree.unflatten(outputs_tree, values[: len(outputs)]), values[len(outputs) :]

    def backward(self, params: Any, context: Any, residuals: Sequence[jax.Array], cotangents: Any) -> tuple[Any, Any]:
        """The gradients of the parameters and of x."""
        again = iter(_run(self._again, [*self._consts, *jax.tree.leaves((params, context))]))
        kept = iter(residuals)
        leaves = [next(kept) if is_kept else next(again) for is_kept in self._is_kept]
        return jax.tree.unflatten(self._tree, leaves)(cotangents)


class SplitBackward:
    """`backward` as two functions, `inputs` and `weights`, to be traced in this order.

    The operations that the gradient of x depends on are those of `inputs`, the rest are those of `weights`; values that
    the rest needs of the first travel between them. A loop is one operation: `layer_loop` writes that over the layers
    as two.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def inputs(
        self, params: Any, context: Any, residuals: Sequence[jax.Array], cotangents: Any
    ) -> tuple[Any, list[jax.Array]]:
        """The gradient of x, and what `weights` needs of it beside parameters and context."""
        flat, tree = jax.tree.flatten((params, context, list(residuals), cotangents))
        closed, shapes = jax.make_jaxpr(lambda *leaves: self._traced(tree, leaves), return_shape=True)(*flat)
        self._params_tree, x_tree = (jax.tree.structure(part) for part in shapes)
        num_params, num_x = (len(jax.tree.leaves(part)) for part in shapes)
        jaxpr, self._consts, traced_consts = _opened(_inlined(closed))
        num_given = len(self._consts) + len(jax.tree.leaves((params, context)))
        first, self._second = _cut(jaxpr, num_given, num_params)
        results = _run(first, [*self._consts, *flat, *traced_consts])
        return jax.tree.unflatten(x_tree, results[:num_x]), results[num_x:]

    def weights(self, params: Any, context: Any, crossing: Sequence[jax.Array]) -> Any:
        """The gradients of the parameters."""
        results = _run(self._second, [*self._consts, *jax.tree.leaves((params, context)), *crossing])
        return jax.tree.unflatten(self._params_tree, results)

    def _traced(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any, Any]:
        return self._backward(*jax.tree.unflatten(tree, leaves))


def reads(function: Callable, tree: Any, *others: Any) -> list[bool]:
    """Of each leaf of `tree` whether `function(tree, *others)` depends on it; nothing is computed."""
    leaves, structure = jax.tree.flatten(tree)
    traced = jax.make_jaxpr(lambda leaves, *others: function(jax.tree.unflatten(structure, leaves), *others))(
        leaves, *others
    )
    found = {id(atom) for equation in traced.jaxpr.eqns for atom in equation.invars}
    found |= {id(atom) for atom in traced.jaxpr.outvars}
    return [id(variable) in found for variable in traced.jaxpr.invars[: len(leaves)]]


def passes_through(function: Callable, params: Any, x: Any, context: Any) -> tuple[bool, bool]:
    """Of `function(params, x, context) -> (result, others)` whether the result is x itself, and whether the others
    depend on the context alone; nothing is computed."""
    flat_params, tree = jax.tree.flatten(params)

    def flat(x: jax.Array, params: list, context: Any) -> tuple[Any, list[Any]]:
        result, others = function(jax.tree.unflatten(tree, params), x, context)
        return result, jax.tree.leaves(others)

    jaxpr = _inlined(jax.make_jaxpr(flat)(x, flat_params, context)).jaxpr
    given, (result, *others) = jaxpr.invars[0], jaxpr.outvars
    moving = _dependants(jaxpr, jaxpr.invars[: 1 + len(flat_params)])
    return result is given, not any(not isinstance(atom, core.Literal) and atom in moving for atom in others)


def _inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same operations without grouping, so that they can be told apart."""

    def flat(*arguments: Any) -> list[Any]:
        return _evaluated(closed.jaxpr, closed.consts, arguments)

    return jax.make_jaxpr(flat)(*closed.in_avals)


def _opened(closed: core.ClosedJaxpr) -> tuple[core.Jaxpr, list[Any], list[Any]]:
    """The program with what it closes over as arguments: constants first, and last values that are being traced, which
    the backward pass, traced in another branch, must not close over. Returns both kinds."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    fixed = [pair for pair in pairs if not isinstance(pair[1], jax.core.Tracer)]
    traced = [pair for pair in pairs if isinstance(pair[1], jax.core.Tracer)]
    arguments = [*(variable for variable, _ in fixed), *closed.jaxpr.invars, *(variable for variable, _ in traced)]
    opened = _part(closed.jaxpr, closed.jaxpr.eqns, arguments, closed.jaxpr.outvars)
    return opened, [value for _, value in fixed], [value for _, value in traced]


def _evaluated(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name in _CALLS and inner is not None:
            inner_jaxpr, inner_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            results = _evaluated(inner_jaxpr, inner_consts, [read(atom) for atom in equation.invars])
        else:
            taken = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, core.Literal)))
            alone = _part(jaxpr, [equation], taken, equation.outvars)
            results = _run(alone, [read(atom) for atom in taken])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _cut(jaxpr: core.Jaxpr, num_given: int, num_params: int) -> tuple[core.Jaxpr, core.Jaxpr]:
    """(all arguments) → (later results, crossing values), and (the first `num_given` arguments, crossing values) → (the
    first `num_params` results)."""
    _, first = _ancestors(jaxpr.eqns, jaxpr.outvars[num_params:])
    done = {id(equation) for equation in first}
    rest = [equation for equation in jaxpr.eqns if id(equation) not in done]
    needed, second = _ancestors(rest, jaxpr.outvars[:num_params])
    made = {variable for equation in second for variable in equation.outvars}
    given = jaxpr.invars[:num_given]
    moving = _dependants(jaxpr, jaxpr.invars[num_given:])
    # In the order of the program, so that tracing it twice gives the same.
    candidates = [*jaxpr.invars, *(variable for equation in first for variable in equation.outvars)]
    between = [variable for variable in candidates if variable in needed - made - set(given)]
    crossing = [variable for variable in between if variable in moving]
    # What follows from the given alone is made again instead of kept.
    again = _ancestors(first, [variable for variable in between if variable not in moving])[1]
    later = [*jaxpr.outvars[num_params:], *crossing]
    inputs = _part(jaxpr, first, jaxpr.invars, later)
    weights = _part(jaxpr, [*again, *second], [*given, *crossing], jaxpr.outvars[:num_params])
    return inputs, weights


def _run(jaxpr: core.Jaxpr, arguments: Sequence[Any]) -> list[Any]:
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*arguments)


def _dependants(jaxpr: core.Jaxpr, inputs: Sequence[Any]) -> set[Any]:
    """The inputs, and what is computed of them."""
    found = set(inputs)
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, core.Literal) and atom in found for atom in equation.invars):
            found |= set(equation.outvars)
    return found


def _ancestors(equations: Sequence[Any], results: Sequence[Any]) -> tuple[set[Any], list[Any]]:
    """The variables and, in their order, the operations that `results` depend on."""
    needed = {atom for atom in results if not isinstance(atom, core.Literal)}
    used = []
    for equation in reversed(equations):
        if any(variable in needed for variable in equation.outvars):
            used.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, core.Literal)}
    return needed, used[::-1]


def _part(jaxpr: core.Jaxpr, equations: Sequence[Any], arguments: Sequence[Any], results: Sequence[Any]) -> core.Jaxpr:
    names = core.DebugInfo(jaxpr.debug_info.traced_for, jaxpr.debug_info.func_src_info, None, None)
    return jaxpr.replace(
        eqns=list(equations), constvars=[], invars=list(arguments), outvars=list(results), debug_info=names
    )
