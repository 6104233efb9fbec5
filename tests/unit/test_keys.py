"""Hashes of request ids and stages: BLAKE2b, as the standard library has it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_fastshm import keys
from omni_fastshm._core import text_hash

TEXT = st.text(st.characters(exclude_categories=()), max_size=300)


def expected(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


@given(TEXT, st.integers(1, 64))
def test_any_text_and_size(text: str, size: int) -> None:
    assert text_hash(text, size) == expected(text, size)


@pytest.mark.parametrize("length", [0, 1, 63, 127, 128, 129, 255, 256, 257, 1000])
def test_around_the_ends_of_blocks(length: int) -> None:
    assert text_hash("x" * length, 16) == expected("x" * length, 16)


@pytest.mark.parametrize("size", [0, 65])
def test_no_other_size(size: int) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        text_hash("x", size)


@given(TEXT)
def test_halves_of_a_request_id(text: str) -> None:
    digest = expected(text, 16)
    halves = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    assert keys.request_hash(text) == halves
    assert keys.request_hash(text[:1] + text[1:]) == halves, "also when it is remembered"


def test_more_ids_than_are_remembered() -> None:
    ids = [f"chatcmpl-{number}" for number in range(3000)]
    for _ in range(2):
        assert [keys.request_hash(each) for each in ids] == [
            (int.from_bytes(d[:8], "little"), int.from_bytes(d[8:], "little")) for d in (expected(e, 16) for e in ids)
        ]


def test_edges_whose_names_run_together() -> None:
    assert keys.edge_hash("a", "bc") != keys.edge_hash("ab", "c")
    assert keys.edge_hash("a", "b") == int.from_bytes(expected("1:ab", 8), "little")
    assert keys.stage_hash("talker") == int.from_bytes(expected("talker", 4), "little")
