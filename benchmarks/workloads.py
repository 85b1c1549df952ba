"""What is measured: named workloads, with the operations and the bytes that each must cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_HEAD_DIMS = (64, 128, 256)
PAPER_TOKENS = 16384
PAPER_HIDDEN = 2048


@dataclass(frozen=True)
class Workload:
    """The sizes of one attention problem.

    Attributes
    ----------
    name : str
        Unique among the workloads of one dtype.
    batch, q_len, kv_len, q_heads, kv_heads, head_dim : int
        Sizes; v has the head_dim of q and k.
    dtype : str
        A key of `ITEM_BYTES`.
    causal : bool
        Bottom-right aligned causal mask.
    """

    name: str
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool

    @property
    def q_size(self) -> int:
        """Elements of q, out, dout and dq."""
        return self.batch * self.q_len * self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of k, v, dk and dv."""
        return self.batch * self.kv_len * self.kv_heads * self.head_dim

    @property
    def score_size(self) -> int:
        """Elements of the matrix of scores that plain attention writes down."""
        return self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def lse_bytes(self) -> int:
        """Bytes of lse: float32, or float64 for float64 inputs."""
        return self.batch * self.q_heads * self.q_len * (8 if self.dtype == "float64" else 4)

    def flops(self, direction: str) -> float:
        """Count the floating-point operations, as the papers do.

        Forward ``4 B H Sq Sk D``, half of it if causal; backward 2.5 times that.
        """
        forward = 4.0 * self.score_size * self.head_dim * (0.5 if self.causal else 1.0)
        return 2.5 * forward if direction == "backward" else forward

    def bytes_moved(self, direction: str) -> int:
        """Count the bytes that must move: every input read once, every output written once."""
        item = ITEM_BYTES[self.dtype]
        if direction == "backward":  # q, out, dout, dq and k, v, dk, dv
            return (4 * self.q_size + 4 * self.kv_size) * item + self.lse_bytes
        return (2 * self.q_size + 2 * self.kv_size) * item + self.lse_bytes

    def allowed_bytes(self, direction: str) -> int:
        """Bytes that may exist beyond q, k, v and dout at any moment.

        Forward: out and lse. Backward, with the results of its forward pass: out, lse, dq, dk, dv
        and one float32 copy of dq.
        """
        item = ITEM_BYTES[self.dtype]
        forward = self.q_size * item + self.lse_bytes
        if direction != "backward":
            return forward
        return forward + (self.q_size + 2 * self.kv_size) * item + 4 * self.q_size


def square(
    name: str, batch: int, length: int, heads: int, head_dim: int, dtype: str, causal: bool
) -> Workload:
    """Make a workload with equal lengths and equal heads on both sides."""
    return Workload(name, batch, length, length, heads, heads, head_dim, dtype, causal)


def length_label(length: int) -> str:
    """Write a length as the papers do: 512, 1k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def mask_label(causal: bool) -> str:
    """Name the mask."""
    return "causal" if causal else "full"


def papers(
    dtype: str,
    lengths: Iterable[int] = PAPER_LENGTHS,
    head_dims: Iterable[int] = PAPER_HEAD_DIMS,
) -> list[Workload]:
    """Make the papers' grid: 16,384 tokens, hidden size 2048, full and causal."""
    return [
        square(
            f"papers-d{head_dim}-{length_label(length)}-{mask_label(causal)}",
            PAPER_TOKENS // length,
            length,
            PAPER_HIDDEN // head_dim,
            head_dim,
            dtype,
            causal,
        )
        for head_dim in head_dims
        for causal in (False, True)
        for length in lengths
    ]


def one_sequence(
    prefix: str, lengths: Iterable[int], heads: int, masks: Iterable[bool], dtype: str = "float32"
) -> list[Workload]:
    """Make one sequence of each length, head_dim 64."""
    return [
        square(
            f"{prefix}-{length_label(length)}-{mask_label(causal)}",
            1, length, heads, 64, dtype, causal,
        )
        for causal in masks
        for length in lengths
    ]


FLOAT32 = papers("float32", lengths=(2048, 8192))
FLOAT64 = papers("float64", lengths=(2048,), head_dims=(64, 128))
CPU = one_sequence("cpu", (1024, 4096, 16384), 8, (False, True))
CALL = [square("call-64", 1, 64, 4, 64, dtype, False) for dtype in ("float16", "float32")]
MEMORY = one_sequence("memory", (1024 << n for n in range(7)), 16, (True,))
PAPERS = papers("bfloat16")
SMOKE = [
    square("smoke-128-full", 2, 128, 4, 64, "float32", False),
    square("smoke-192-causal", 1, 192, 4, 32, "float32", True),
    Workload("smoke-grouped", 1, 64, 160, 4, 2, 64, "float32", False),
]
