"""The element types that cuflash computes with."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class ElementType:
    """An element type and the type that arithmetic on it is done in."""

    name: str
    size: int
    compute: str
    numpy: np.dtype

    @property
    def compute_size(self) -> int:
        """Bytes of one value of the compute type."""
        return 8 if self.compute == "float64" else 4


ELEMENT_TYPES: dict[str, ElementType] = {
    row.name: row
    for row in (
        ElementType("float16", 2, "float32", np.dtype(np.float16)),
        ElementType("bfloat16", 2, "float32", np.dtype(ml_dtypes.bfloat16)),
        ElementType("float32", 4, "float32", np.dtype(np.float32)),
        ElementType("float64", 8, "float64", np.dtype(np.float64)),
    )
}
