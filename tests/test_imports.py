"""What importing cuflash brings in, and which module may import which."""

import ast
import pathlib
import subprocess
import sys

import pytest

import cuflash

PACKAGE = pathlib.Path(cuflash.__file__).parent

# Lower numbers lie below. A module imports from layers below its own; siblings never.
LAYERS = {
    "__main__": 14,
    "_demo": 13,
    "_info": 13,
    "_precompile": 13,
    "_variants": 9,
    "__init__": 12,
    "_compare": 12,
    "_attention": 11,
    "_execute": 10,
    "_merge": 10,
    "reference": 9,
    "_launch": 9,
    "_explain": 9,
    "_compile": 8,
    "_blockmask": 7,
    "_sparse": 8,
    "_tensor_maps": 8,
    "_lists": 6,
    "_patterns": 6,
    "_picture": 6,
    "_blocks": 5,
    "_ranges": 5,
    "_grid": 4,
    "_bits": 3,
    "_counters": 3,
    "_draws": 3,
    "_plan": 7,
    "_plan_generic": 6,
    "_plan_tensor": 6,
    "_plan_parts": 5,
    "_params": 6,
    "_tiles": 4,
    "_source": 4,
    "_device": 4,
    "_problem": 3,
    "_dropout": 2,
    "_interop": 2,
    "_dtypes": 1,
    "_errors": 1,
    "_values": 1,
    "_version": 1,
}
MAY_IMPORT_CUPY = {"_interop", "_device", "_compile", "_launch"}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def test_every_module_has_a_layer():
    assert sorted(LAYERS) == MODULES


def imported(module):
    """Return the names of all modules that a module of the package imports, anywhere in it."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"cuflash.{node.module or ''}".rstrip(".") if node.level else node.module
            if base == "cuflash":
                yield from (f"cuflash.{alias.name}" for alias in node.names)
            else:
                yield base


def own_imports(module):
    """Return the modules of cuflash that a module imports; a name of __init__ counts as it."""
    for name in imported(module):
        root, _, rest = name.partition(".")
        if root == "cuflash":
            part = rest.partition(".")[0]
            yield part if part in MODULES or part == "kernels" else "__init__"


def run(program):
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True,
                          text=True,
                          cwd=PACKAGE.parent, timeout=120)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_layer_and_imports_only_from_below(module):
    assert module in LAYERS, f"give {module} a place in LAYERS"
    for other in own_imports(module):
        if other != "kernels":
            assert LAYERS[other] < LAYERS[module], f"{module} imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_cupy_is_imported_in_few_places_and_never_on_import(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    names = [name.partition(".")[0] for name in imported(module)]
    if "cupy" in names:
        assert module in MAY_IMPORT_CUPY
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in top:
        names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
        assert not any(name.partition(".")[0] == "cupy" for name in names)


def test_importing_brings_in_no_cupy():
    program = (
        "import sys, cuflash, numpy; "
        "q = numpy.ones((1, 2, 1, 4), 'float32'); cuflash.attention(q, q, q); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'cupy', 'cupy_backends', 'torch', 'jax', 'tensorflow', 'numba', 'cuda'}))"
    )
    result = run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_works_where_cupy_cannot_be_imported():
    program = (
        "import sys; sys.modules['cupy'] = None; import cuflash, numpy; "
        "q = numpy.ones((1, 2, 1, 4), 'float32'); print(cuflash.attention(q, q, q).sum())"
    )
    result = run(program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "8.0"


def test_no_environment_variable_but_one():
    for module in MODULES:
        text = (PACKAGE / f"{module}.py").read_text()
        if "environ" in text or "getenv" in text:
            assert "CUFLASH_DEBUG" in text or "CUPY_CACHE_DIR" in text, module


def test_public_names():
    for name in ("attention", "attention_backward", "merge_states", "dropout_mask", "explain",
                 "new_seed"):
        assert callable(getattr(cuflash, name)) and getattr(cuflash, name).__doc__
        assert name in cuflash.__all__
    assert isinstance(cuflash.BlockMask, type) and cuflash.BlockMask.__doc__
    assert all(hasattr(cuflash, name) for name in cuflash.__all__)
