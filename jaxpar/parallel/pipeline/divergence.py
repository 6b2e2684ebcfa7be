"""Whether a compiled pipeline can hang: ranks that are in different branches must not wait for each other there."""

from collections.abc import Mapping

from jaxpar.parallel.collectives import parse_collectives

__all__ = ["AXIS", "check_branches"]

AXIS = "pipe"


def check_branches(compiled_text: str, mesh_shape: Mapping[str, int]) -> None:
    """Raises RuntimeError if some ranks would wait for others that are in another branch.

    In a branch, reductions and gathers within one rank's devices are safe. A collective-permute is not, even if it
    stays within them: XLA:CPU, for one, waits for every device of the program. Those along `pipe` are the exchange
    between ranks, which all take the same branch there.
    """
    for collective in parse_collectives(compiled_text, mesh_shape):
        if not collective.conditional:
            continue
        permutes, crosses = collective.kind == "collective-permute", AXIS in collective.axes
        if permutes != crosses:
            raise RuntimeError(
                f"the compiled pipeline would hang: a {collective.kind} over {' × '.join(collective.axes)} of "
                f"{collective.payload_bytes} bytes is in a branch that not all pipeline ranks take (from "
                f"{collective.source or 'an operation that the compiler does not name'}). Aligned schedules "
                '(pipeline.schedule="1f1b_aligned", "interleaved_aligned", "gpipe") have no branches around layers; '
                "please report this with the configuration"
            )
