"""python -m cuflash: demo and info, in processes of their own and in this one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from arrays import normal

import cuflash
from cuflash import _attention, _compare, _demo, _info, _interop
from cuflash.__main__ import main
from cuflash._device import Device

ROOT = Path(cuflash.__file__).parents[1]
NO_CUPY = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from cuflash.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
ROW = re.compile(r"^ *[\d,]+(?:  +[\d,.]+|  +-){6}  +(?:[\d.]+x|-)  \d\.\de-\d\d$", re.MULTILINE)


def run(words, folder, *, blocked=()):
    """Return the finished process of a command, which could not import the blocked packages."""
    program = ["-c", NO_CUPY.format(blocked=blocked)] if blocked else ["-m", "cuflash"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *program, *words], check=False, capture_output=True, text=True,
        cwd=folder, env=os.environ | {"PYTHONPATH": path}, timeout=300,
    )  # fmt: skip


def numbers(line):
    """Return the columns of a row of the demonstration's table; None for a dash."""
    words = line.replace(",", "").replace("x", "").split()
    return [None if word == "-" else float(word) for word in words]


def check_demo(result, lengths):
    """Assert that a demonstration went well; return the rows of its table."""
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""  # no terminal, no progress bar
    rows = [numbers(line) for line in ROW.findall(result.stdout)]
    assert [row[0] for row in rows] == lengths
    assert all(number > 0 for row in rows for number in row if number is not None)
    assert "cuflash agrees with float64" in result.stdout
    return rows


def test_without_a_command_it_says_how_to_start(tmp_path):
    result = run([], tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: python -m cuflash")
    assert result.stdout.splitlines()[-1] == "To start: python -m cuflash demo"


@pytest.mark.parametrize("command", ["demo", "info", "compile"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"python -m cuflash {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["demonstrate"], *(["demo", "--lengths", n] for n in ("0", "-5", "15", "many"))]
)
def test_what_makes_no_sense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.split() == ["cuflash", cuflash.__version__]


def test_demo_prints_a_table_and_draws_a_plot(tmp_path):
    result = run(["demo", "--device", "numpy", "--lengths", "300", "64"], tmp_path)
    rows = check_demo(result, [64, 300])
    for row in rows:
        assert row[7] == pytest.approx((row[4] + row[5]) / (row[1] + row[2]), rel=0.1, abs=0.1)
    plots = list(tmp_path.iterdir())
    if "No plot: matplotlib is not installed" in result.stdout:
        assert plots == []
    else:
        assert plots == [tmp_path / "cuflash-demo.png"]
        assert plots[0].read_bytes().startswith(b"\x89PNG")


def test_demo_without_matplotlib_and_cupy(tmp_path):
    words = ["demo", "--lengths", "64", "--dtype", "float64"]
    result = run(words, tmp_path, blocked=("cupy", "matplotlib"))
    check_demo(result, [64])
    assert "No plot: matplotlib is not installed" in result.stdout
    assert "float64, by NumPy" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_demo_asked_for_a_gpu_says_what_is_missing(tmp_path):
    result = run(["demo", "--device", "cupy"], tmp_path, blocked=("cupy",))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "pip install" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_demo_passes_in_every_dtype(dtype, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--device", "numpy", "--lengths", "16", "90", "--dtype", dtype]) == 0
    assert dtype in capsys.readouterr().out


def scaled(factor, name):
    """Return a broken function of cuflash: one of its results is a little too large."""
    right = getattr(_attention, name)

    def broken(*args, **options):
        first, *others = right(*args, **options)
        return (first * first.dtype.type(factor), *others)

    return broken


def silent(name):
    """Return a broken function of cuflash whose results were never written."""
    right = getattr(_attention, name)
    return lambda *args, **options: tuple(
        None if array is None else np.full_like(array, np.nan) for array in right(*args, **options)
    )


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
@pytest.mark.parametrize("breaking", [lambda name: scaled(1.0001, name), silent])
def test_demo_of_a_broken_attention_fails(name, breaking, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_attention, name, breaking(name))
    assert main(["demo", "--device", "numpy", "--lengths", "64"]) == 1
    assert "NO AGREEMENT with float64" in capsys.readouterr().out


def test_demo_notices_one_wrong_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    right = _attention.attention_backward

    def broken(*args, **options):
        gradients = right(*args, **options)
        gradients.dv[0, 17, 2] *= 1.01
        return gradients

    monkeypatch.setattr(_attention, "attention_backward", broken)
    assert main(["demo", "--device", "numpy", "--lengths", "64"]) == 1
    assert "NO AGREEMENT" in capsys.readouterr().out


def test_demo_stops_when_time_is_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["demo", "--device", "numpy", "--lengths", "64", "4096", "--seconds", "0"]
    assert main(words) == 0
    out = capsys.readouterr().out
    (row,) = map(numbers, ROW.findall(out))
    assert row[0] == 64 and row[4:8] == [None] * 4  # the plain computation is left out first
    assert "Stopped before 4,096" in out


@pytest.mark.parametrize("fault", ["too large", "fails"])
def test_demo_goes_on_where_the_plain_computation_has_no_memory(
    fault, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    right = _demo.measure_plain

    def short_of_memory(place, inputs):
        if inputs.shape[2] > _demo.LEAST_LENGTH:
            raise MemoryError
        return right(place, inputs)

    if fault == "too large":
        monkeypatch.setattr(_compare.Place, "spare_bytes", lambda place: 1000)
    else:
        monkeypatch.setattr(_demo, "measure_plain", short_of_memory)
    assert main(["demo", "--device", "numpy", "--lengths", "64", "100"]) == 0
    rows = [numbers(line) for line in ROW.findall(capsys.readouterr().out)]
    assert [row[4:8] for row in rows] == [[None] * 4] * 2


def test_demo_that_cannot_write_its_plot_says_so(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["demo", "--device", "numpy", "--lengths", "64", "--output"]
    assert main([*words, str(tmp_path / "missing" / "plot.png")]) == 0
    assert "No plot: " in capsys.readouterr().out


def test_progress_bar_is_drawn_on_terminals_only(monkeypatch, capsys):
    _demo.Progress(1.0).show("512: plain")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = _demo.Progress(0.0)
    bar.show("512: plain")
    assert capsys.readouterr().err == f"\r\x1b[K[{'#' * 30}] 512: plain"
    bar.show()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_plain_computation_is_attention():
    q, k, v, dout = normal((4, 1, 40, 3, _compare.HEAD_DIM), np.float64)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    right = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    hidden = np.where(np.tri(40, dtype=bool), 0, -np.inf)
    q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    plain_out, p = _compare.plain_forward(np, q, k, v, hidden)
    np.testing.assert_allclose(plain_out.swapaxes(1, 2), out, rtol=0, atol=1e-14)
    gradients = _compare.plain_backward(np, dout, q, k, v, plain_out, p)
    for got, wanted in zip(gradients, right[:3], strict=True):
        np.testing.assert_allclose(got.swapaxes(1, 2), wanted, rtol=0, atol=1e-13)


def test_peak_memory_is_that_of_the_arrays(xp):
    place = _compare.Place(xp, np.dtype(np.float32))

    def call():
        first = xp.zeros(1 << 20, np.uint8)
        del first
        second = xp.zeros(3 << 20, np.uint8)
        return second, xp.zeros(1 << 20, np.uint8)

    before = xp.zeros(5 << 20, np.uint8)
    peak, result = place.peak(call)
    assert peak == pytest.approx(4 << 20, rel=0.01)
    assert len(result) == 2 and before.size == 5 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_demo_on_a_gpu(dtype, tmp_path):
    words = ["demo", "--device", "cupy", "--dtype", dtype, "--lengths", "100", "256"]
    result = run(words, tmp_path)
    rows = check_demo(result, [100, 256])
    assert "Kernels made ready in" in result.stdout
    elements = 16 * 256 * 64
    size = {"float32": 4, "float64": 8}.get(dtype, 2)
    assert 4 * elements * size <= rows[1][3] * 2**20 <= 10 * elements * max(size, 4)


def facts(out):
    """Return the labelled lines of `info` by their labels, and the lines of its tables."""
    head, *tables = out.rstrip().split("\n\n")
    return dict(line.split(maxsplit=1) for line in head.splitlines()), tables


def test_info_tells_versions_and_kernels(tmp_path):
    result = run(["info"], tmp_path)
    assert result.returncode == 0, result.stderr
    told, tables = facts(result.stdout)
    assert told["cuflash"] == cuflash.__version__
    assert told["NumPy"].startswith(np.__version__)
    assert {"Python", "CuPy", "NVRTC", "driver", "cache"} <= told.keys()
    for table in tables:
        lines = table.splitlines()[2:]
        assert [line.split()[0] for line in lines] == [d for d in _info.DTYPES for _ in range(3)]
        assert all("attention_forward" in line and "attention_backward" in line for line in lines)


def test_info_without_cupy_says_how_to_get_it(tmp_path):
    result = run(["info"], tmp_path, blocked=("cupy",))
    assert result.returncode == 0, result.stderr
    told, (table,) = facts(result.stdout)
    assert "not installed (pip install" in told["CuPy"]
    assert told["NVRTC"] == told["devices"] == "not looked for without CuPy"
    assert "sm_90" in table


def test_info_counts_the_kernels_in_the_cache(tmp_path, monkeypatch, capsys):
    for name in ("cuflash-1.cubin", "cuflash-2.ptx", "cuflash-1.sha256", "other.cubin"):
        (tmp_path / name).write_bytes(b"x" * 2**20)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert main(["info"]) == 0
    cache = facts(capsys.readouterr().out)[0]["cache"]
    assert cache == f"{tmp_path}: 2 cuflash kernels, 2.0 MiB"


def test_info_plans_for_architectures_that_are_not_here(capsys):
    assert main(["info", "--arch", "80", "120"]) == 0
    tables = facts(capsys.readouterr().out)[1]
    assert [re.search(r"\(sm_(\d+)\)", table)[1] for table in tables] == ["80", "120"]


def test_info_refuses_an_unknown_architecture(capsys):
    assert main(["info", "--arch", "13"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "Got 13" in shown.err


@pytest.mark.parametrize(
    ("driver", "told_driver", "extra"),
    [(None, "not found", "cuda13"), (12040, "supports CUDA 12.4", "cuda12"),
     (13000, "supports CUDA 13.0", "cuda13")],
)  # fmt: skip
def test_info_advises_what_the_driver_can_run(driver, told_driver, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(_info, "driver_version", lambda: driver)
    assert main(["info"]) == 0
    told = facts(capsys.readouterr().out)[0]
    assert f"cuflash[{extra}]" in told["CuPy"]
    assert told["driver"] == told_driver


def test_info_tells_of_each_device(monkeypatch, capsys):
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2, runtimeGetVersion=lambda: 13020,
        getDeviceProperties=lambda index: {"totalGlobalMem": (index + 1) * 2**30},
    )  # fmt: skip
    library = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))
    gpus = [Device(90, 132, 232448, "First"), Device(120, 170, 101376, "Second")]
    monkeypatch.setattr(_interop, "cupy_module", lambda: library)
    monkeypatch.setattr(_info, "device", gpus.__getitem__)
    monkeypatch.setattr(_info, "_nvrtc", lambda: "13.2")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "First, compute capability 9.0, 1.0 GiB, 132 multiprocessors, 227 KiB" in out
    assert "Second, compute capability 12.0, 2.0 GiB, 170 multiprocessors, 99 KiB" in out
    assert [table.split()[2] for table in out.split("\n\n")[1:]] == ["First", "Second"]


@pytest.mark.gpu
def test_info_on_a_gpu(cupy, tmp_path):
    result = run(["info"], tmp_path)
    assert result.returncode == 0, result.stderr
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert name in result.stdout and "device 0" in result.stdout
