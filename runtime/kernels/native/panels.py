"""Matrices in panels, as panels.h describes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native.pages import empty

PANEL = 32  # outputs of a panel, as in the source


def to_panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> in float32 [panels, inputs, 32]; in bfloat16 [panels, inputs, 16, 2]; of integers
    of 8 bits, the inputs of an even number, [panels, inputs / 2, 32, 2]."""
    outputs, inputs = weight.shape
    if missing := -outputs % PANEL:
        weight = F.pad(weight, (0, 0, 0, missing))
    if weight.dtype == torch.int8:
        parts = weight.view(-1, PANEL, inputs // 2, 2).permute(0, 2, 1, 3)
    elif weight.dtype == torch.bfloat16:
        parts = weight.view(-1, 2, PANEL // 2, inputs).permute(0, 3, 2, 1)
    else:
        parts = weight.view(-1, PANEL, inputs).permute(0, 2, 1)
    return empty(parts.shape, parts.dtype).copy_(parts)


def from_panels(panels: Tensor, outputs: Tensor) -> Tensor:
    """Rows `outputs` (int64) of the matrix [len(outputs), inputs]."""
    panel, place = outputs // PANEL, outputs % PANEL
    if panels.dtype == torch.int8:
        return panels[panel, :, place].flatten(1)
    if panels.dtype == torch.bfloat16:
        return panels[panel, :, place % (PANEL // 2), place // (PANEL // 2)]
    return panels[panel, :, place]
