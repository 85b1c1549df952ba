"""What is measured: named workloads, with the operations and the bytes that each must cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import patterns
from patterns import BigBird, Butterfly, HeadWindows, Longformer, Pattern, Random

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_HEAD_DIMS = (64, 128, 256)
PAPER_TOKENS = 16384
PAPER_HIDDEN = 2048
GRADIENTS = ("backward", "both")  # the directions whose result is gradients
PASSES = ("forward", *GRADIENTS)  # the directions that compute attention


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
    mask : Pattern or None
        A block mask, of equal lengths, and without causal and window.
    outliers : float
        Share of the inputs' elements that have variance 101, in place of 1.
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
    mask: Pattern | None = None
    outliers: float = 0.0

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
        """Keys that query i sees by causal and window."""
        own = i + self.kv_len - self.q_len
        left, right = self.window or (self.kv_len + self.q_len,) * 2
        last = own if self.causal else own + right
        return range(max(0, own - left), min(self.kv_len, last + 1))

    @property
    def visible_share(self) -> float:
        """Share of the scores that are visible; one half if causal, as the papers count."""
        if self.mask is not None:
            return self.mask.share(self.q_len)
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
    window, mask = fields["window"], patterns.from_fields(fields["mask"])
    return Workload(**{**fields, "window": window and tuple(window), "mask": mask})


def length_label(length: int) -> str:
    """Write a length as the papers do: 512, 1k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def mask_label(causal: bool) -> str:
    """Name the mask."""
    return "causal" if causal else "full"


def inputs_label(w: Workload) -> str:
    """Name the distribution of the inputs."""
    return f"normal, {w.outliers:.1%} outliers" if w.outliers else "normal"


def options_label(w: Workload) -> str:
    """Name the options; empty if there are none."""
    names = [f"dropout {w.dropout:g}"] if w.dropout else []
    names += ["bias"] if w.bias else []
    names += [f"window {w.window}"] if w.window else []
    names += [f"{w.mask.label}, blocks of {w.mask.block_size}"] if w.mask else []
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

    Then grouped heads and a long sequence, as they are common today, and a window in the latter.
    """
    made = []
    for base in papers("bfloat16", (2048, 8192), (64, 128), (True,), prefix="options"):
        made += [base, optional(base, dropout=0.1), optional(base, bias=True)]
    for base in papers("bfloat16", (16384,), (64, 128), (True,), prefix="options"):
        made += [base, optional(base, window=(256, 0))]
    return [*made, GROUPED, LONG, optional(LONG, window=(4096, 0))]


def densities() -> list[Workload]:
    """Make dense workloads, each beside the same with fewer and fewer blocks."""
    made = []
    for length, hidden, sizes in ((4096, 2048, (128,)), (16384, 2048, (128, 64)),
                                  (65536, 512, (128, 64))):  # fmt: skip
        for head_dim in (64, 128):
            name = f"density-d{head_dim}-{length_label(length)}"
            base = square(name, 1, length, hidden // head_dim, head_dim, "bfloat16", False)
            made.append(base)
            made += [
                replace(base, name=f"{name}-b{size}-{Fraction(1, 2**n)}",
                        mask=Random(density=2.0**-n, block_size=size))
                for size in sizes for n in range(7)
            ]
    return made


def sparse() -> list[Workload]:
    """Make patterns of one sequence of 16k tokens; those with global tokens in one size only."""
    common: list[Pattern] = [
        patterns.SlidingWindow(window=(1024, 0)), patterns.Documents(count=16), Butterfly(),
    ]  # fmt: skip
    rows: list[Pattern] = [Longformer(window=(256, 256), global_tokens=64), BigBird()]
    return [
        masked(square(f"sparse-d{head_dim}", 1, 16384, 2048 // head_dim, head_dim, "bfloat16",
                      False), mask)
        for head_dim, chosen in ((64, common + rows), (128, common))
        for mask in chosen
    ]


def masked(workload: Workload, mask: Pattern) -> Workload:
    """Add a block mask to a workload, and the name of its pattern to its name."""
    return replace(workload, name=f"{workload.name}-{mask.name}", mask=mask)


def errors() -> list[Workload]:
    """Make few heads with normal inputs, and with outliers as Shah et al. (2024) draw them."""
    bases = [
        square(f"errors-d{head_dim}-{mask_label(causal)}", 1, 2048, 8, head_dim, "bfloat16", causal)
        for head_dim in PAPER_HEAD_DIMS for causal in (False, True)
    ]
    return [each for base in bases for each in (base, optional(base, outliers=0.001))]


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
GROUPED = Workload("options-grouped", 2, 8192, 8192, 32, 8, 128, "bfloat16", True)
LONG = square("options-long", 1, 65536, 16, 128, "bfloat16", True)
OPTIONS = options()
HOPPER = [*PAPERS, GROUPED, LONG]
# Neighbours in time, since a GPU's clock drifts.
HOPPER_FLOAT16 = [replace(w, dtype=dtype) for w in PAPERS for dtype in ("float16", "bfloat16")]
HOPPER_ERRORS = errors()
COMPILE = papers("bfloat16", (2048,), prefix="compile")
GPT2 = [
    optional(square("gpt2", 8, 1024, 12, 64, dtype, True), dropout=0.1)
    for dtype in ("float16", "bfloat16")
]
# So many tokens that what may stay in the L2 cache, unseen, is a small part of the output.
TRAFFIC = papers(
    "bfloat16", PAPER_LENGTHS[1:], (64, 128), (False,), tokens=65536, prefix="traffic"
)
DENSITY = densities()
SPARSE = sparse()
_LONG_STEP = square("long-step", 1, 65536, 8, 64, "bfloat16", False)
LONG_STEP = [_LONG_STEP, masked(_LONG_STEP, Butterfly())]
BLOCK_LISTS = [
    masked(square("lists-64k", 1, 65536, 16, 64, "bfloat16", False), mask)
    for mask in (BigBird(heads=16), HeadWindows(heads=16, step=128))
]
_SMOKE = square("smoke-192-causal", 1, 192, 4, 32, "float32", True)
_SMOKE_BLOCKS = square("smoke-176", 1, 176, 4, 32, "float32", False)
SMOKE = [
    _SMOKE_BLOCKS,
    square("smoke-128-full", 2, 128, 4, 64, "float32", False),
    _SMOKE,
    optional(_SMOKE, dropout=0.1),
    optional(_SMOKE, bias=True),
    optional(_SMOKE, window=(48, 0)),
    masked(_SMOKE_BLOCKS, Random(density=0.5, block_size=32)),
    masked(_SMOKE_BLOCKS, Longformer(window=(20, 4), global_tokens=3, block_size=32)),
    Workload("smoke-grouped", 1, 64, 160, 4, 2, 64, "float32", False),
]
