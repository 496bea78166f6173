"""Scores that were made in two ways: how far they lie apart, and how far they may."""

import torch
from torch import Tensor

Verdict = tuple[str | None, bool]  # what is wrong, if anything; whether that is certain
SHARP = 1e-3  # of the scores' spread; below it lie other orders of float32 sums, above it mistakes


def apart(ours: Tensor, alone: Tensor) -> float | None:
    """How far scores lie apart, as a share of their spread; None if they are not numbers."""
    finite = ours.isfinite() & alone.isfinite()  # a model may rule tokens out with -inf
    if bool(alone.isnan().any()) or not bool(finite.any()):
        return None
    return ((ours - alone)[finite].abs().max() / (alone[finite].std() + 1e-9)).item()


def allowed(dtype: torch.dtype) -> float:
    """How far scores in ``dtype`` may lie apart."""
    return max(SHARP, 32 * torch.finfo(dtype).eps)
