"""``python -m cuflash demo``: attention at growing lengths against the plain computation."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import _compile, _interop
from cuflash._compare import (
    HEAD_DIM,
    SAMPLE,
    Cost,
    Place,
    draw,
    first_call,
    measure_cuflash,
    measure_plain,
    plain_bytes,
)
from cuflash._dtypes import ELEMENT_TYPES

LENGTHS = tuple(2**n for n in range(9, 17))
LEAST_LENGTH = 16  # a query that sees only itself has gradients of zero: nothing to compare with
SECONDS = 30.0
PLOT = "cuflash-demo.png"

_COST = f"  {'forward':>9} {'backward':>9} {'peak':>8}"
_UNIT = f"  {'ms':>9} {'ms':>9} {'MiB':>8}"
_HEADING = (
    f"{'':7}  {' cuflash ':-^28}  {' plain ':-^28}\n"
    f"{'length':>7}{_COST}{_COST}  speed-up    error\n{'':7}{_UNIT}{_UNIT}"
)


@dataclass(frozen=True)
class Row:
    """What was measured at one length; `plain` is None where it was left out."""

    length: int
    cuflash: Cost
    plain: Cost | None
    error: float

    def __str__(self) -> str:
        ratio = f"{_short(self.plain.total_ms / self.cuflash.total_ms)}x" if self.plain else "-"
        costs = f"{_columns(self.cuflash)}{_columns(self.plain)}"
        return f"{self.length:7,}{costs}  {ratio:>8}  {self.error:.1e}"


def _columns(cost: Cost | None) -> str:
    numbers = (cost.forward_ms, cost.backward_ms, cost.peak_bytes / 2**20) if cost else ()
    forward, backward, peak = map(_short, numbers) if cost else "---"
    return f"  {forward:>9} {backward:>9} {peak:>8}"


def _short(number: float) -> str:
    return f"{number:,.{2 if number < 10 else 1 if number < 100 else 0}f}"


class Progress:
    """The time budget, and a bar that fills with it on stderr where that is a terminal."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start = time.perf_counter()
        self.visible = sys.stderr.isatty()

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.start + self.seconds - time.perf_counter()

    def show(self, text: str = "") -> None:
        """Draws the bar before a text; takes it away if there is none."""
        if self.visible:
            filled = round(30 * min(1.0, 1 - self.left / max(self.seconds, 1e-9)))
            bar = f"[{'#' * filled:30}] {text}" if text else ""
            sys.stderr.write(f"\r\x1b[K{bar}")
            sys.stderr.flush()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--device", choices=("numpy", "cupy"), help="default: cupy if a GPU can be used"
    )
    parser.add_argument(
        "--lengths", type=_length, nargs="+", default=LENGTHS, metavar="N",
        help=f"sequence lengths (default: {LENGTHS[0]} and doubled as far as time allows)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_TYPES), help="default: float16 on a GPU, else float32"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(PLOT), help="file of the plot (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS,
        help="lengths that would take more in all are left out (default: %(default)g)",
    )  # fmt: skip


def _length(word: str) -> int:
    if not word.isdecimal() or int(word) < LEAST_LENGTH:
        rule = f"a length must be an integer of at least {LEAST_LENGTH}"
        raise argparse.ArgumentTypeError(f"{rule}. Got {word!r}.")
    return int(word)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 if results disagree with float64, or if the GPU asked for is missing."""
    try:
        xp = _module(arguments.device)
    except (ImportError, RuntimeError) as error:
        print(f"{error} (See: python -m cuflash info)", file=sys.stderr)
        return 1
    dtype = arguments.dtype or ("float32" if xp is np else "float16")
    place = Place(xp, ELEMENT_TYPES[dtype].numpy)
    progress = Progress(arguments.seconds)
    lengths = sorted(set(arguments.lengths))
    print(_introduction(place), flush=True)
    seconds = first_call(place, draw(place, lengths[0]))
    if place.on_gpu:
        print(f"Kernels made ready in {seconds:.2f} s (cache: {_compile.cache_folder()}).")
    rows = compare(place, lengths, _plain_obstacle(place), progress)
    worst = float(np.max([row.error for row in rows]))
    agrees = worst <= place.tolerance
    verdict = "cuflash agrees with float64" if agrees else "NO AGREEMENT with float64"
    print(f"{verdict}: greatest error {worst:.1e}, allowed {place.tolerance:.1e}.")
    print(_plot(rows, place, arguments.output))
    return 0 if agrees else 1


def _module(name: str | None) -> Any:
    """NumPy or CuPy, as asked for or as possible."""
    if name == "numpy":
        return np
    try:
        cupy = _interop.cupy_module()
        cupy.cuda.runtime.getDeviceCount()  # raises where there is no driver or no device
        return cupy
    except (ImportError, RuntimeError):
        if name == "cupy":
            raise
        return np


def _introduction(place: Place) -> str:
    return (
        f"Causal attention, {place.heads} heads of {HEAD_DIM}, {place.dtype.name}, by {place}.\n"
        f"plain: matmul, softmax, matmul with all scores in memory, {place.plain_dtype.name}.\n"
        "peak:  memory of both passes beyond their inputs.\n"
        f"error: greatest difference of out, dq, dk and dv from float64, for {SAMPLE} queries,\n"
        "       relative to the largest element.\n"
    )


def _plain_obstacle(place: Place) -> str:
    """Why there is no plain computation: products need cuBLAS; empty if there is one."""
    try:
        measure_plain(place, draw(place, LEAST_LENGTH))
    except Exception as error:  # CuPy has a type of its own for each thing that may be missing
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def compare(place: Place, lengths: Sequence[int], obstacle: str, progress: Progress) -> list[Row]:
    """Measures and prints one length after the other, the first in any case."""
    if obstacle:
        print(f"No plain computation here ({obstacle}).")
    print(_HEADING, flush=True)
    rows: list[Row] = []
    for length in lengths:
        expected, plain_expected = _expected(length, rows)
        if expected > progress.left and rows:
            print(f"Stopped before {length:,}, which would take {expected:.0f} s more.")
            break
        progress.show(f"{length:,}: cuflash")
        inputs = draw(place, length)
        cost, error = measure_cuflash(place, inputs)
        plain = None
        if not obstacle and max(plain_expected, cost.seconds) <= progress.left:
            progress.show(f"{length:,}: plain")
            plain = _plain_if_it_fits(place, inputs)
        progress.show()
        rows.append(Row(length, cost, plain, error))
        print(rows[-1], flush=True)
    return rows


def _expected(length: int, rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds of cuflash and plain, by the row before; plain once left out stays left out."""
    if not rows:
        return 0.0, 0.0
    last, ratio = rows[-1], length / rows[-1].length
    plain = last.plain.seconds_at(ratio) if last.plain else math.inf
    return last.cuflash.seconds_at(ratio), plain


def _plain_if_it_fits(place: Place, inputs: np.ndarray) -> Cost | None:
    if plain_bytes(place, inputs.shape[2]) > place.spare_bytes():
        return None
    try:
        return measure_plain(place, inputs)
    except MemoryError:
        return None


def _plot(rows: Sequence[Row], place: Place, path: Path) -> str:
    """Draws times and memory over the length; one line on where they are, or why nowhere."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No plot: matplotlib is not installed (pip install matplotlib)."
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(f"Causal attention, {place.heads} heads of {HEAD_DIM}, {place.dtype}, {place}")
    for axes, title in zip(figure.subplots(1, 2), ("forward + backward, ms", "peak memory, MiB")):
        for name in ("cuflash", "plain"):
            costs = [(row.length, getattr(row, name)) for row in rows if getattr(row, name)]
            values = [c.total_ms if "ms" in title else c.peak_bytes / 2**20 for _, c in costs]
            axes.plot([length for length, _ in costs], values, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("length")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        return f"No plot: {error}"
    return f"Plot: {path}"
