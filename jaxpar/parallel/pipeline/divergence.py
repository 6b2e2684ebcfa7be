"""Whether a compiled pipeline can hang: ranks that are in different branches must not wait for each other there."""

from collections.abc import Mapping

from jaxpar.parallel.collectives import parse_collectives

__all__ = ["AXIS", "WouldHangError", "check_branches"]

AXIS = "pipe"
_ENDS = (
    "One rank alone runs the model's embed, and one its head: look tokens up by jaxpar.parallel.embedding.lookup, and "
    "return jaxpar.parallel.loss.FactoredLogits (if the model does so, please report this with the configuration)"
)
_LAYERS = (
    "; for a collective of a layer set an aligned schedule, which has no branches around layers: "
    'pipeline.schedule="1f1b_aligned", "interleaved_aligned" or "gpipe"'
)


class WouldHangError(ValueError):
    """A compiled pipeline in which ranks would wait for each other for ever."""


def check_branches(compiled_text: str, mesh_shape: Mapping[str, int], *, aligned: bool) -> None:
    """Raises WouldHangError if some ranks would wait for others that are in another branch.

    In a branch, reductions and gathers within one rank's devices are safe. A collective-permute is not, even if it
    stays within them: XLA:CPU, for one, waits for every device of the program. Those along `pipe` are the exchange
    between ranks, which all take the same branch there. `aligned` says that layers are in no branch.
    """
    for collective in parse_collectives(compiled_text, mesh_shape):
        if not collective.conditional:
            continue
        permutes, crosses = collective.kind == "collective-permute", AXIS in collective.axes
        if permutes != crosses:
            raise WouldHangError(
                f"the compiled pipeline would hang: a {collective.kind} over {' × '.join(collective.axes)} of "
                f"{collective.payload_bytes} bytes is in a branch that not all pipeline ranks take (from "
                f"{collective.source or 'an operation that the compiler does not name'}). "
                f"{_ENDS}{'' if aligned else _LAYERS}"
            )
