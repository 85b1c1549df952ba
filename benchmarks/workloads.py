"""What is measured: named workloads, with the operations and the bytes that each must cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_HEAD_DIMS = (64, 128, 256)
PAPER_TOKENS = 16384
PAPER_HIDDEN = 2048
GRADIENTS = ("backward", "both")  # the directions whose result is gradients


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
    dropout : float
        Probability with which a softmax weight is dropped.
    bias : bool
        A dense bias of shape (1, q_heads, q_len, kv_len) and of this dtype is added to the scores.
    window : (left, right) or None
        So many keys to the left and to the right of its own are visible to a query.
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
    dropout: float = 0.0
    bias: bool = False
    window: tuple[int, int] | None = None

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

    def visible_keys(self, i: int) -> range:
        """Keys that query i sees."""
        own = i + self.kv_len - self.q_len
        left, right = self.window or (self.kv_len + self.q_len,) * 2
        last = own if self.causal else own + right
        return range(max(0, own - left), min(self.kv_len, last + 1))

    @property
    def visible_share(self) -> float:
        """Share of the scores that are visible; one half if causal, as the papers count."""
        if self.window is None:
            return 0.5 if self.causal else 1.0
        seen = sum(len(self.visible_keys(i)) for i in range(self.q_len))
        return seen / (self.q_len * self.kv_len)

    def visible_tiles(self, block_m: int, block_n: int) -> int:
        """Count the tiles of block_m queries and block_n keys in which a head sees anything."""
        count = 0
        for first in range(0, self.q_len, block_m):
            start = self.visible_keys(first).start
            stop = self.visible_keys(min(first + block_m, self.q_len) - 1).stop
            count += max(0, -(-stop // block_n) - start // block_n)
        return count

    def flops(self, direction: str) -> float:
        """Count the floating-point operations, as the papers do.

        Forward ``4 B H Sq Sk D`` times the visible share; backward 2.5 times that.
        """
        forward = 4.0 * self.score_size * self.head_dim * self.visible_share
        return {"backward": 2.5, "both": 3.5}.get(direction, 1.0) * forward

    def bytes_moved(self, direction: str) -> int:
        """Count the bytes that must move: every input read once, every output written once."""
        if direction == "both":
            return self.bytes_moved("forward") + self.bytes_moved("backward")
        item = ITEM_BYTES[self.dtype]
        bias = self.score_size // self.batch * self.visible_share * item if self.bias else 0
        # Forward: q, out, k, v. Backward: q, out, dout, dq and k, v, dk, dv.
        each = 4 if direction == "backward" else 2
        return each * (self.q_size + self.kv_size) * item + self.lse_bytes + int(bias)

    def allowed_bytes(self, direction: str) -> int:
        """Bytes that may exist beyond q, k, v and dout at any moment.

        Forward: out and lse. Backward, with the results of its forward pass: out, lse, dq, dk, dv
        and one float32 copy of dq.
        """
        item = ITEM_BYTES[self.dtype]
        forward = self.q_size * item + self.lse_bytes
        if direction not in GRADIENTS:
            return forward
        return forward + (self.q_size + 2 * self.kv_size) * item + 4 * self.q_size


def square(
    name: str, batch: int, length: int, heads: int, head_dim: int, dtype: str, causal: bool
) -> Workload:
    """Make a workload with equal lengths and equal heads on both sides."""
    return Workload(name, batch, length, length, heads, heads, head_dim, dtype, causal)


def from_fields(fields: Mapping[str, Any]) -> Workload:
    """Make a workload of its fields as JSON gives them back."""
    window = fields["window"]
    return Workload(**{**fields, "window": window and tuple(window)})


def length_label(length: int) -> str:
    """Write a length as the papers do: 512, 1k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def mask_label(causal: bool) -> str:
    """Name the mask."""
    return "causal" if causal else "full"


def options_label(dropout: float, bias: bool, window: Iterable[int] | None) -> str:
    """Name the options; empty if there are none."""
    names = [f"dropout {dropout:g}"] if dropout else []
    names += ["bias"] if bias else []
    names += [f"window {tuple(window)}"] if window else []
    return ", ".join(names)


def papers(
    dtype: str,
    lengths: Iterable[int] = PAPER_LENGTHS,
    head_dims: Iterable[int] = PAPER_HEAD_DIMS,
    masks: Iterable[bool] = (False, True),
    tokens: int = PAPER_TOKENS,
    prefix: str = "papers",
) -> list[Workload]:
    """Make the papers' grid: 16,384 tokens, hidden size 2048, full and causal."""
    return [
        square(
            f"{prefix}-d{head_dim}-{length_label(length)}-{mask_label(causal)}",
            tokens // length,
            length,
            PAPER_HIDDEN // head_dim,
            head_dim,
            dtype,
            causal,
        )
        for head_dim in head_dims
        for causal in masks
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


def optional(workload: Workload, **options: Any) -> Workload:
    """Add options to a workload, and their names to its name."""
    return replace(workload, name="-".join([workload.name, *options]), **options)


def options() -> list[Workload]:
    """Make causal workloads with and without options, each beside the same without.

    Then grouped heads and a long sequence, as they are common today.
    """
    made = []
    for base in papers("bfloat16", (2048, 8192), (64, 128), (True,), prefix="options"):
        made += [base, optional(base, dropout=0.1), optional(base, bias=True)]
    for base in papers("bfloat16", (16384,), (64, 128), (True,), prefix="options"):
        made += [base, optional(base, window=(256, 0))]
    return [
        *made,
        Workload("options-grouped", 2, 8192, 8192, 32, 8, 128, "bfloat16", True),
        square("options-long", 1, 65536, 16, 128, "bfloat16", True),
    ]


FLOAT32 = papers("float32", lengths=(2048, 8192))
FLOAT64 = papers("float64", lengths=(2048,), head_dims=(64, 128))
CPU = one_sequence("cpu", (1024, 4096, 16384), 8, (False, True))
CALL = [square("call-64", 1, 64, 4, 64, dtype, False) for dtype in ("float16", "float32")]
MEMORY = [
    workload
    for dtype in ("float32", "bfloat16")
    for workload in one_sequence("memory", (1024 << n for n in range(7)), 16, (True,), dtype)
]
PAPERS = papers("bfloat16")
AGAINST_PLAIN = papers("bfloat16", (128, 256, *PAPER_LENGTHS), (64, 128), prefix="plain")
OPTIONS = options()
GPT2 = [
    optional(square("gpt2", 8, 1024, 12, 64, dtype, True), dropout=0.1)
    for dtype in ("float16", "bfloat16")
]
# So many tokens that what may stay in the L2 cache, unseen, is a small part of the output.
TRAFFIC = papers(
    "bfloat16", PAPER_LENGTHS[1:], (64, 128), (False,), tokens=65536, prefix="traffic"
)
_SMOKE = square("smoke-192-causal", 1, 192, 4, 32, "float32", True)
SMOKE = [
    square("smoke-128-full", 2, 128, 4, 64, "float32", False),
    _SMOKE,
    optional(_SMOKE, dropout=0.1),
    optional(_SMOKE, bias=True),
    optional(_SMOKE, window=(48, 0)),
    Workload("smoke-grouped", 1, 64, 160, 4, 2, 64, "float32", False),
]
