"""``python -m cuflash``: the commands demo, info and compile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import cuflash

COMMANDS = {
    "demo": "forward and backward at growing lengths against plain attention: time, memory, errors",
    "info": "versions, kernel cache, devices, and the kernels they get",
    "compile": "compile all kernel variants ahead of time, with or without a GPU",
}


def _command(name: str) -> Any:
    """The module of a command; one does not need what another imports."""
    if name == "demo":
        from cuflash import _demo as module
    elif name == "info":
        from cuflash import _info as module  # type: ignore[no-redef]
    else:
        from cuflash import _precompile as module  # type: ignore[no-redef]
    return module


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after ``python -m cuflash``; those of this process if None.

    Returns
    -------
    int
        The process's exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    about = (cuflash.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m cuflash", description=about)
    parser.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="demo | info | compile")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if words[:1] == [name]:
            _command(name).add_arguments(command)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        print("\nTo start: python -m cuflash demo")
        return 0
    try:
        return int(_command(arguments.command).run(arguments))
    except KeyboardInterrupt:
        return 130  # as shells count a process ended by Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
