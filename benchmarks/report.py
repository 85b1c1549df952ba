"""Make README.md's tables, and the plots, from the committed results.

    python benchmarks/report.py            rewrite the tables between their markers, draw the plots
    python benchmarks/report.py --print    print the tables only

The table of ``results/NAME.json`` goes between ``<!-- benchmarks:NAME -->`` and
``<!-- /benchmarks:NAME -->``; a file without markers is named and left out. Every number in the
tables is a row of a committed file.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import machine
import page
import plots
import record
from suites import SUITES, Suite

RESULTS = Path(__file__).resolve().parent / "results"


def suite_of(path: Path) -> Suite | None:
    """Find the suite of a file ``<gpu>-<suite>.json``."""
    return SUITES.get(path.stem.rsplit("-", 1)[-1])


def replace_between_markers(text: str, name: str, table: str) -> str | None:
    """Put a table between its markers. Returns None if the text has no such markers."""
    opening, closing = f"<!-- benchmarks:{name} -->", f"<!-- /benchmarks:{name} -->"
    pattern = re.compile(re.escape(opening) + ".*?" + re.escape(closing), re.DOTALL)
    if not pattern.search(text):
        return None
    return pattern.sub(lambda _: f"{opening}\n{table.strip()}\n{closing}", text)


def draw_plots(path: Path, suite: Suite, output: Path) -> list[Path]:
    """Draw every quantity that a suite shows, beside the file of results."""
    records = record.load(path)
    drawn = []
    for n, quantity in enumerate(suite.shown):
        target = output / (path.stem + ("" if n == 0 else f"-{quantity.key}") + ".svg")
        if plots.draw(records, quantity, target, suite.over):
            drawn.append(target)
    return drawn


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--readme", type=Path, default=machine.ROOT / "README.md")
    parser.add_argument("--print", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--no-plots", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; see the head of this file."""
    options = parse(arguments)
    text = options.readme.read_text(encoding="utf-8") if options.readme.exists() else ""
    for path in sorted(options.results.glob("*.json")):
        suite = suite_of(path)
        if suite is None:
            print(f"{path.name}: no such suite, left out", file=sys.stderr)
            continue
        table = page.suite_text(record.load(path), suite)
        if options.print:
            print(f"## {path.stem}\n\n{table}")
            continue
        changed = replace_between_markers(text, path.stem, table)
        if changed is None:
            print(f"{options.readme}: no markers benchmarks:{path.stem}", file=sys.stderr)
        else:
            text = changed
        if not options.no_plots:
            for drawn in draw_plots(path, suite, options.results):
                print(drawn)
    if not options.print and options.readme.exists():
        options.readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
