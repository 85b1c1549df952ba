"""What a launch under a block mask needs: lists, the share of each block, partial results."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuflash import _plan
from cuflash._interop import cupy_module
from cuflash._params import Arrays
from cuflash._problem import Problem


class Launches(NamedTuple):
    """A kernel's launch under a block mask, and the one that combines partial results, if any.

    `counts` are the works, cuts and splits of a head of the mask; see :func:`cuflash._params.pack`.
    """

    plans: tuple[_plan.Plan, ...]
    arrays: Arrays
    counts: tuple[int, int, int]


def with_lists(problem: Problem, arrays: Arrays, plan: _plan.Plan, mask: Any) -> Launches:
    """Adds the lists of a BlockMask in tiles of a kernel's size."""
    tile = int(plan.constant("BLOCK_M")), int(plan.constant("BLOCK_N"))
    own = rows = mask.lists(*tile)
    found = {"row_offsets": rows.offsets, "row_blocks": rows.blocks}
    heads = problem.q_heads
    if plan.kernel.startswith("attention_backward"):
        # Heads of a group do not share lists if the mask has some for each head.
        split = mask.shape[1] == 1 or problem.q_heads == problem.kv_heads
        columns = mask.lists(*tile, transposed=True, split=split)
        found |= {"column_offsets": columns.offsets, "column_blocks": columns.blocks}
        if plan.kernel == "attention_backward":
            own, heads = columns, problem.kv_heads
    heads *= problem.batch
    counts = own.work.shape[1], own.cuts.shape[1], own.splits
    combine = _plan.combine(plan, heads * counts[1]) if counts[1] else None
    plans: tuple[_plan.Plan, ...] = (plan,)
    if combine is not None:
        empty, splits = cupy_module().empty, heads * own.splits
        values, lse = _plan.partial_sizes(plan)
        found |= {"partials": empty(splits * values, "float32")}
        found |= {"partial_lse": empty(splits * lse, "float32")} if lse else {}
        plans = (plan.over(heads * counts[0]), combine)
    arrays = arrays._replace(**found, block_words=rows.words, work=own.work, cuts=own.cuts)
    return Launches(plans, arrays, counts)
