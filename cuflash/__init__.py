"""FlashAttention for NumPy, CuPy and any DLPack array: exact attention without a framework.

>>> import numpy as np, cuflash
>>> q = k = v = np.ones((1, 128, 4, 64), np.float32)  # (batch, seq, heads, head_dim)
>>> cuflash.attention(q, k, v, causal=True).shape
(1, 128, 4, 64)
"""

from cuflash._attention import attention, attention_backward, dropout_mask, explain, merge_states
from cuflash._blockmask import BlockMask
from cuflash._dropout import new_seed
from cuflash._execute import Gradients
from cuflash._version import __version__

__all__ = [
    "BlockMask",
    "Gradients",
    "__version__",
    "attention",
    "attention_backward",
    "dropout_mask",
    "explain",
    "merge_states",
    "new_seed",
]
