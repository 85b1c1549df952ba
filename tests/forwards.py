"""The two tensor-core kernels of the forward pass, and how to choose between them."""

import contextlib
from unittest import mock

from cuflash import _plan, _plan_tensor

HOPPER, PORTABLE = FORWARDS = ("attention_forward_sm90", "attention_forward")


@contextlib.contextmanager
def portable():
    """Keep the Hopper kernel from being planned."""
    with mock.patch.object(_plan_tensor, "hopper", lambda *_: None):
        _plan.forward.cache_clear()
        try:
            yield
        finally:
            _plan.forward.cache_clear()


def forward_by(kernel):
    """Let this kernel make the outputs that both could make."""
    return portable() if kernel == PORTABLE else contextlib.nullcontext()
