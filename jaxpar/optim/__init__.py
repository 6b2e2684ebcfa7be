"""Optimizers as Optax chains."""

from jaxpar.optim.build import make_optimizer, make_schedule

__all__ = ["make_optimizer", "make_schedule"]
