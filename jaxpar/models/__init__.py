"""Models, as configurations that make them."""

from jaxpar.models.config import RopeScaling, TransformerConfig
from jaxpar.models.presets import PRESETS

__all__ = ["PRESETS", "RopeScaling", "TransformerConfig"]
