"""Which workloads, providers and directions are measured together, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass

import workloads
from workloads import Workload


@dataclass(frozen=True)
class Quantity:
    """A number of the records that a table or a plot shows.

    Attributes
    ----------
    key : str
        The key in the record.
    unit : str
        The unit shown.
    factor : float
        From the record's unit to the unit shown.
    more_is_better : bool
        Ratios are turned so that above 1 is good for cuflash.
    """

    key: str
    unit: str
    factor: float
    more_is_better: bool


SPEED = Quantity("tflops", "TFLOP/s", 1.0, True)
MILLISECONDS = Quantity("device_ms", "ms", 1.0, False)
MICROSECONDS = Quantity("device_ms", "µs", 1e3, False)
MEMORY = Quantity("peak_bytes", "MiB", 2.0**-20, False)
KEPT = Quantity("kept_bytes", "MB", 1e-6, False)
RMS_ERROR = Quantity("rms_error", "RMS error in 10⁻⁶", 1e6, False)
LARGEST_ERROR = Quantity("max_error", "largest error in 10⁻⁶", 1e6, False)
TRAFFIC = Quantity("moved_bytes", "MiB", 2.0**-20, False)


@dataclass(frozen=True)
class Suite:
    """One run of the program, and one file of results.

    Attributes
    ----------
    device : str
        "cuda" or "cpu".
    method : str
        "time" (of the device's work), "turns" (the same, the providers of a workload taking
        turns), "error" (of whole results), "call" (host time of a call), "peak" (memory on the
        GPU), "process" (time and memory, one process for each case), "build" (host time and memory
        of block masks, host time of compiling), or "traffic" (bytes to and from the GPU's memory,
        all cases in one process under ncu).
    workloads : list of Workload
    providers : tuple of str
        Names in `providers.ALL`. The peers of one workload are measured one after the other, but
        for "turns".
    directions : tuple of str
    shown : tuple of Quantity
    tables : str
        "each" quantity shown has one, "one" holds them all, or "none": the summaries are enough.
    best_peer : bool
        The best peer of each case, by the first quantity shown, is set against cuflash as well.
    summaries : tuple of str
        Names in `summaries.ALL`: what is said of the first quantity shown, below its table.
    over : str
        What the axis of plots is: "length" or "density".
    about : str
        What is said above the table, where the text around its markers does not.
    """

    device: str
    method: str
    workloads: list[Workload]
    providers: tuple[str, ...]
    directions: tuple[str, ...] = ("forward", "backward")
    shown: tuple[Quantity, ...] = (SPEED,)
    tables: str = "each"
    best_peer: bool = False
    summaries: tuple[str, ...] = ()
    over: str = "length"
    about: str = ""


HOPPER_PEERS = ("cuflash", "cudnn", "fa3", "fa4")
SUITES = {
    "float32": Suite(
        "cuda", "time", workloads.FLOAT32, ("cuflash", "cuflash-tf32", "plain", "efficient"),
    ),
    "float64": Suite("cuda", "time", workloads.FLOAT64, ("cuflash", "plain")),
    "papers": Suite(
        "cuda", "time", workloads.PAPERS, ("cuflash", "fa2", "cudnn", "plain-torch"),
        summaries=("means",),
    ),
    "hopper": Suite(
        "cuda", "turns", workloads.HOPPER, HOPPER_PEERS, directions=("forward",), best_peer=True,
        summaries=("means",),
        about="bfloat16, the GPU's time alone, in turns: in every round each provider makes up to "
              "20 calls, in an order drawn anew; medians over all rounds but the first. `best "
              "peer` is the fastest of the others, line by line.",
    ),
    "hopper_float16": Suite(
        "cuda", "turns", workloads.HOPPER_FLOAT16, ("cuflash", "cudnn"), directions=("forward",),
        tables="none", summaries=("dtypes",),
        about="The same sizes in both dtypes, one right after the other, in turns as well:",
    ),
    "hopper_errors": Suite(
        "cuda", "error", workloads.HOPPER_ERRORS, HOPPER_PEERS, directions=("forward",),
        shown=(RMS_ERROR, LARGEST_ERROR), tables="one",
        about="The whole output against float64, 8 heads; 0.1% of the inputs' elements are "
              "outliers, with a variance of 100 added:",
    ),
    "against_plain": Suite(
        "cuda", "time", workloads.AGAINST_PLAIN, ("cuflash", "plain", "plain-torch"),
        summaries=("means", "lead"),
    ),
    "options": Suite(
        "cuda", "time", workloads.OPTIONS, ("cuflash", "fa2", "cudnn", "efficient"),
        shown=(MILLISECONDS,), summaries=("costs",),
    ),
    "gpt2": Suite(
        "cuda", "time", workloads.GPT2, ("cuflash", "plain", "plain-torch", "fa2", "cudnn"),
        directions=("forward", "backward", "both"), shown=(MILLISECONDS,),
    ),
    "traffic": Suite(
        "cuda", "traffic", workloads.TRAFFIC, ("cuflash",), directions=("forward",),
        shown=(TRAFFIC,),
    ),
    "cpu": Suite(
        "cpu", "process", workloads.CPU, ("cuflash", "plain", "sdpa"),
        shown=(MILLISECONDS, MEMORY),
    ),
    "call": Suite(
        "cuda", "call", workloads.CALL, ("cuflash", "cuflash-graph", "cuflash-torch", "sdpa"),
        directions=("call",), shown=(MICROSECONDS,),
    ),
    "compile": Suite(
        "cuda", "build", workloads.COMPILE, ("cuflash",), directions=("compile",),
        shown=(MILLISECONDS,),
        about="Compiling the forward kernel of a call by NVRTC, with nothing cached, bfloat16:",
    ),
    "memory": Suite(
        "cuda", "peak", workloads.MEMORY, ("cuflash", "plain", "efficient", "fa2"),
        shown=(MEMORY,), summaries=("per_token",),
    ),
    "density": Suite(
        "cuda", "time", workloads.DENSITY, ("cuflash",), shown=(MILLISECONDS,), tables="none",
        summaries=("densities",), over="density",
        about="Blocks drawn at random, bfloat16, one sequence (hidden size 2048; 512 at 64k):",
    ),
    "sparse": Suite(
        "cuda", "time", workloads.SPARSE, ("cuflash", "flex"), shown=(MILLISECONDS,),
        summaries=("means",),
        about="Patterns of 16k tokens, hidden size 2048, bfloat16, beside PyTorch's FlexAttention, "
              "compiled:",
    ),
    "long_step": Suite(
        "cuda", "time", workloads.LONG_STEP, ("cuflash",),
        directions=("forward", "backward", "both"), shown=(MILLISECONDS,), summaries=("costs",),
        about="One step of attention over 64k tokens, 8 heads of 64, bfloat16:",
    ),
    "long_step_memory": Suite(
        "cuda", "peak", workloads.LONG_STEP, ("cuflash",),
        directions=("forward", "backward", "both"), shown=(MEMORY,),
        about="Its peak of memory beyond the inputs:",
    ),
    "block_lists": Suite(
        "cuda", "build", workloads.BLOCK_LISTS, ("cuflash",),
        directions=("mask", "lists", "transposed"), shown=(MILLISECONDS, KEPT),
        summaries=("built",),
        about="Making a block mask of 64k tokens for 16 heads, and its lists for both directions, "
              "until the GPU is done:",
    ),
    "smoke": Suite(
        "cpu", "time", workloads.SMOKE, ("cuflash", "plain", "plain-torch", "sdpa"),
        directions=("forward", "backward", "both"), shown=(MILLISECONDS,),
        summaries=("means", "costs"),
    ),
}
