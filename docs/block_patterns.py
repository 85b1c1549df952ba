"""Draws the patterns of block masks: ``python docs/block_patterns.py`` makes block_patterns.png."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from cuflash import BlockMask

LENGTH, BLOCK = 1024, 32
PATTERNS = {
    "causal": {},
    "sliding_window": {"window": (200, 60)},
    "longformer": {"window": (90, 90), "global_tokens": [*range(40), 600, 601]},
    "bigbird": {},
    "strided": {"stride": 6},
    "fixed": {"stride": 6},
    "butterfly": {},
    "documents": {"lengths": [300, 80, 420, 224]},
}


def main() -> None:
    figure, axes = pyplot.subplots(2, 4, figsize=(10, 5.6), layout="constrained")
    for ax, (name, options) in zip(axes.flat, PATTERNS.items()):
        lengths = () if "lengths" in options else (LENGTH,)
        mask = getattr(BlockMask, name)(*lengths, **options, block_size=BLOCK)
        mask.plot(ax=ax)
        handles = ax.get_legend().legend_handles
        ax.get_legend().remove()
        ax.set(title=f"{name}: {mask.density:.0%}", xlabel="", ylabel="", xticks=[], yticks=[])
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
