"""A GPU without a GPU: the kernels of `kernels/` compiled by the host's C++ compiler.

`install` puts it in CuPy's place, so that cuflash's own host code launches the kernels. Arrays lie
at the end (or the beginning) of their memory pages with an inaccessible page behind (or before), so
that a kernel that touches anything outside of them ends the process.
"""

import ctypes
import dataclasses
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from arrays import bytes_under

import cuflash
from cuflash import (
    _compile,
    _counters,
    _execute,
    _interop,
    _launch,
    _plan,
    _source,
    _sparse,
    _tensor_maps,
)
from cuflash._device import Device
from cuflash._lists import Lists

HERE = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++")
PAGE = mmap.PAGESIZE

_MAIN = """
static Params emulated_params;
extern "C" int run(unsigned grid, unsigned threads, unsigned shared_bytes, const void* params,
                   int descending) {
    emulator::copies_first = descending;
    std::memcpy(&emulated_params, params, sizeof(Params));
    std::vector<double> memory(shared_bytes / 8 + 18, NAN);
    emulated_shared = reinterpret_cast<unsigned char*>(memory.data());
    emulated_shared += -reinterpret_cast<uintptr_t>(emulated_shared) & 15;
    emulator::entry = [] { KERNEL(emulated_params); };
    gridDim.x = grid;
    emulator::make_stacks(threads);
    bool done = true;
    for (blockIdx.x = 0; done && blockIdx.x < grid; ++blockIdx.x)
        done = emulator::run_block(threads, descending);
    munmap(emulator::stacks, threads * emulator::STACK);
    return !done;
}
extern "C" unsigned params_size() { return sizeof(Params); }
"""


def library(plan, folder):
    """Compile the kernel of a plan; the file is kept by its text in `folder`."""
    text = _source.source(plan.kernel, plan.constants)
    for name in ("ptx.cuh", "ptx_sm90.cuh", "wgmma.cuh"):
        start = text.find(f'#line 1 "{name}"')
        if start >= 0:
            end = text.index("#line", start + 1)
            text = text[:start] + f'#include "{name}"\n' + text[end:]
    text = text.replace(
        "extern __shared__ __align__(16) unsigned char shared[];",
        "unsigned char* shared = emulated_shared + 128;",  # aligned no better than the kernels need
    )
    kind = "MappedParams" if "struct MappedParams" in text else "Params"
    main = _MAIN.replace("KERNEL", plan.kernel).replace("Params", kind)
    text = '#include "cuda.h"\n' + text + main
    headers = "".join(path.read_text() for path in sorted(HERE.iterdir()))
    path = Path(folder) / f"{hashlib.sha256((headers + text).encode()).hexdigest()[:32]}.so"
    if not path.exists():
        source, made = (path.with_suffix(f".{os.getpid()}{end}") for end in (".cpp", ".so"))
        source.write_text(text)
        options = ["-std=gnu++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=fast"]
        options.append("-U_FORTIFY_SOURCE")  # it takes the jumps between fibers for attacks
        if os.uname().machine == "x86_64":
            options.append("-mfma")
        command = [COMPILER, *options, f"-I{HERE}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        os.replace(made, path)  # other processes of the test run may be at it, too
    return ctypes.CDLL(str(path))


def fenced(array, before=False):
    """A copy of an array between inaccessible pages, at the end or at the beginning of its own."""
    size = max(1, array.nbytes)
    pages = -(-size // PAGE)
    area = mmap.mmap(-1, (pages + 2) * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (base, base + (pages + 1) * PAGE):
        assert libc.mprotect(ctypes.c_void_p(fence), PAGE, 0) == 0
    # Wide accesses need 16-byte alignment, which the end of an odd array cannot have.
    offset = PAGE if before else PAGE + pages * PAGE - -(-size // 16) * 16
    copy = np.frombuffer(area, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy


class Array:
    """As much of a `cupy.ndarray` as cuflash asks for, around a NumPy array."""

    __module__ = "cupy"
    device = nullcontext()

    def __init__(self, inner):
        self.inner = inner
        self.data = SimpleNamespace(ptr=inner.ctypes.data, device_id=0)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, index):
        return Array(self.inner[index])

    def reshape(self, shape):
        return Array(self.inner.reshape(shape))

    def fill(self, value):
        self.inner.fill(value)

    def get(self):
        return self.inner

    def __setitem__(self, index, value):
        self.inner[index] = value.inner if isinstance(value, Array) else value

    def astype(self, dtype, copy=True):
        return Array(self.inner.astype(dtype, copy=copy))


def put(array, before=False):
    """A NumPy array on the emulated GPU."""
    return Array(fenced(np.asarray(array), before))


def put_as_it_lies(array):
    """A NumPy array on the emulated GPU, with its strides and its alignment."""
    octets, first = bytes_under(array)
    return Array(np.ndarray(array.shape, array.dtype, fenced(octets), first, array.strides))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask(cuflash.BlockMask):
    """A block mask on the emulated GPU, whose lists are made by NumPy."""

    @property
    def here(self):
        return cuflash.BlockMask(self.grid, self.states.get(), self.bits)

    @property
    def hides_nothing(self):
        return self.here.hides_nothing

    def lists(self, tile_m, tile_n, transposed=False, *, split=True):
        key = tile_m, tile_n, transposed, split
        if key not in self._kept:
            *arrays, splits = self.here.lists(*key[:3], split=split)
            self._kept[key] = Lists(*map(put, arrays), splits)
        return self._kept[key]


def put_mask(mask):
    """A block mask of NumPy on the emulated GPU."""
    return BlockMask(mask.grid, put(mask.states), mask.bits)


def placed(values, place=put):
    """The arrays among these on the emulated GPU, and what is none."""
    return {
        name: place(value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def one_way(inputs, options, place=put):
    """Attention on the emulated GPU: out and lse by name, as NumPy arrays."""
    there = placed({name: inputs[name] for name in "qkv"} | options, place)
    out, lse = cuflash.attention(**there, return_lse=True)
    return {"out": out.inner, "lse": lse.inner}


def both_ways(inputs, options, place=put, **more):
    """Attention and its gradients on the emulated GPU: all results by name, as NumPy arrays."""
    arrays, there = placed(inputs, place), placed(options, place)
    dout, dlse = arrays.pop("dout"), arrays.pop("dlse", None)
    out, lse = cuflash.attention(**arrays, **there, return_lse=True)
    more.setdefault("bias_grad", "bias" in there)
    got = cuflash.attention_backward(dout, *arrays.values(), out, lse, **there, dlse=dlse, **more)
    results = {"out": out, "lse": lse} | got._asdict()
    return {name: value.inner for name, value in results.items() if value is not None}


def _empty(shape, dtype):
    """Memory in which nothing useful lies."""
    dtype = np.dtype(dtype)
    return put(np.full(shape, 0x5555 if dtype.kind in "iu" else np.nan).astype(dtype))


def _cupy():
    """The functions of CuPy that cuflash calls."""
    return SimpleNamespace(
        empty=_empty,
        zeros=lambda shape, dtype: put(np.zeros(shape, dtype)),
        ascontiguousarray=lambda array, dtype=None: put(
            np.ascontiguousarray(array.inner, dtype=dtype)
        ),
        broadcast_to=lambda array, shape: Array(np.broadcast_to(array.inner, shape)),
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(id=0),
            runtime=SimpleNamespace(getDevice=lambda: 0),
            get_current_stream=lambda: SimpleNamespace(
                synchronize=lambda: None, ptr=0, is_capturing=lambda: False
            ),
        ),
    )


def _encoded(pointer, shape, strides, kind, rows):
    """A tensor's map as emulator/ptx_sm90.cuh reads it."""
    batch, length, heads, channels = shape
    lengths, steps = (channels, length, heads, batch), (strides[1], strides[2], strides[0])
    return struct.pack("<Q4q3q2i", pointer, *lengths, *steps, rows, 2).ljust(128, b"\0")


def install(monkeypatch, folder, arch=90, descending=False, multiprocessors=2):
    """Make cuflash use the emulated GPU for arrays of type `Array`.

    Threads run one after another, in ascending or descending order, from one barrier to the next:
    where the order shows in a result, a barrier is missing. In descending order, asynchronous
    copies are early and asynchronous products are late, else the other way round (cuda.h).
    """
    planned = _plan.backward

    def backward(*arguments):
        """The plans, whose kernels are compiled side by side."""
        plans = planned(*arguments)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda plan: library(plan, folder), plans))
        return plans

    def kernel(plan, device_index, arch):
        built = library(plan, folder)

        def launch(grid, threads, arguments, shared_mem):
            (parameters,) = arguments
            assert built.params_size() == parameters.nbytes
            room = np.zeros(parameters.nbytes + 64, np.uint8)
            room = room[-room.ctypes.data % 64 :][: parameters.nbytes]
            room[:] = np.frombuffer(parameters.tobytes(), np.uint8)
            address = ctypes.c_void_p(room.ctypes.data)
            vain = built.run(grid[0], threads[0], shared_mem, address, int(descending))
            assert not vain, "the threads of a block wait for each other in vain"

        return launch

    module = _cupy()
    for place in (_counters, _interop, _launch, _sparse):
        monkeypatch.setattr(place, "cupy_module", lambda: module)
    monkeypatch.setattr(_counters, "_of_streams", {})
    monkeypatch.setattr(_compile, "kernel", kernel)
    monkeypatch.setattr(_tensor_maps, "encoded", _encoded)
    monkeypatch.setattr(_plan, "backward", backward)
    device = dataclasses.replace(Device.of_arch(arch), multiprocessors=multiprocessors)
    for place in (_launch, _execute):
        monkeypatch.setattr(place, "device", lambda index: device)
