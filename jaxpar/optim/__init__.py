"""Optimizers: one rule for one parameter of one layer each, mapped over parameters and layers."""

from jaxpar.optim.build import check_optimizer, learning_rates, make_optimizer
from jaxpar.optim.layout import role_axes, state_axes
from jaxpar.optim.per_layer import AT_ONCE, MapUpdates, Optimizer
from jaxpar.optim.properties import PROPERTIES, Properties, state_bytes
from jaxpar.optim.schedules import make_schedule

__all__ = [
    "AT_ONCE",
    "PROPERTIES",
    "MapUpdates",
    "Optimizer",
    "Properties",
    "check_optimizer",
    "learning_rates",
    "make_optimizer",
    "make_schedule",
    "role_axes",
    "state_axes",
    "state_bytes",
]
