"""What every section of a configuration is made of: its base class, and numbers with bounds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Fraction", "NonNegative", "Positive", "Section"]

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A frozen group of keys in which an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
