"""Where the tests run: NumPy always, CuPy when there is a CUDA device that works."""

import functools
import os
from types import SimpleNamespace

import emulated
import numpy
import pytest
from arrays import bytes_under
from forwards import portable

from cuflash import _launch

gpu = pytest.mark.gpu


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device and CuPy")
    config.addinivalue_line("markers", "slow: left out unless --slow is given")


@functools.cache
def cuda_problem():
    """Return why no CUDA device can be used, or an empty string if one can."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < 1:
            return "no CUDA device"
        cupy.zeros(1).get()
    except Exception as error:  # a missing wheel, driver or library all mean the same here
        return f"no usable CUDA device ({type(error).__name__})"
    return ""


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow; run with --slow")
    if item.get_closest_marker("gpu") and cuda_problem():
        pytest.skip(cuda_problem())


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=gpu)])
def xp(request):
    """The array library under test: the module numpy, or the module cupy."""
    if request.param == "numpy":
        return numpy
    import cupy

    return cupy


@pytest.fixture
def cupy():
    """The module cupy, for tests that are marked gpu."""
    return pytest.importorskip("cupy")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the emulator keeps its kernels: the same for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that were launched so far."""
    names, launch = [], _launch._launch

    def recording(plan, *more):
        names.append(plan.kernel)
        launch(plan, *more)

    monkeypatch.setattr(_launch, "_launch", recording)
    return names


@pytest.fixture
def portable_forward():
    """Outputs are not made by Hopper's kernel."""
    with portable():
        yield


@pytest.fixture(params=["emulated", pytest.param("cupy", marks=gpu)])
def machine(request, launched, monkeypatch):
    """A GPU or its emulator: `put` takes NumPy arrays there as they lie; other values stay."""
    if request.param == "emulated":
        if emulated.COMPILER is None:
            pytest.skip("needs g++")
        emulated.install(monkeypatch, request.getfixturevalue("folder"))
        place, lengths, arch = emulated.put_as_it_lies, (37, 144), 90
    else:
        cupy = pytest.importorskip("cupy")
        place, lengths = functools.partial(on_gpu, cupy), (330, 464)
        arch = int(cupy.cuda.Device().compute_capability)

    def put(value):
        return place(value) if isinstance(value, numpy.ndarray) else value

    return SimpleNamespace(
        put=put, emulated=request.param == "emulated", arch=arch, lengths=lengths, launched=launched
    )


def on_gpu(cupy, array):
    """Return a NumPy array on the GPU, with its strides and its alignment."""
    octets, first = bytes_under(array)
    memory = cupy.asarray(octets).data + first
    return cupy.ndarray(array.shape, array.dtype, memory, array.strides)
