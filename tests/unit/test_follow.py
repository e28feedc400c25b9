"""Rounds of a pattern of sends, counted from what each rank did; pictures of tensors."""

import pytest

from scalelab.grading.follow import Notes, rounds
from scalelab.panels.tensors import draw, owners


def of(*ranks):
    """Notes as the ranks would have made them: of("send 1", "recv 0")."""
    notes = Notes(len(ranks))
    for rank, calls in enumerate(ranks):
        for call in filter(None, calls.split(", ")):
            notes.add(rank, *call.split())
    return notes


@pytest.mark.parametrize("expected, ranks", [
    (0, ["", ""]),
    (1, ["send 1", "recv 0"]),
    (3, ["send 1, send 2, send 3", "recv 0", "recv 0", "recv 0"]),  # a star
    (3, ["send 1", "recv 0, send 2", "recv 1, send 3", "recv 2"]),  # a chain
    (2, ["send 1, isend 2", "recv 0, send 3", "irecv 0", "recv 1"]),  # a tree
    (2, ["send 1, isend 2, waited isend", "recv ?, send 3", "recv ?", "recv ?"]),
    (1, ["isend 1, recv 1", "isend 0, recv 0"]),  # both ways at once
])  # fmt: skip
def test_rounds(expected, ranks):
    assert rounds(of(*ranks), len(ranks)) == expected


def test_a_message_that_never_comes_ends_the_count():
    assert rounds(of("recv 1", "recv 0"), 2) == 0


def test_notes_outlive_what_does_not_fit():
    notes = Notes(1)
    for _ in range(70_000):
        notes.add(0, "send", 1)
    assert set(map(tuple, notes.of(0))) == {("send", "1")}


def test_digits_say_whose_numbers_are_in_a_sum():
    assert owners(0) == [] and owners(300) == [2] and owners(1010) == [1, 3]


def test_a_picture_has_the_same_in_words():
    picture = draw([("scatter", [[[1, 2], []], [[1], [2]]])], ["before", "after"])
    assert picture.png.startswith(b"\x89PNG")
    assert picture.words.splitlines() == [
        "scatter, rank 0: before: 1 2; after: 1", "scatter, rank 1: before: -; after: 2",
    ]  # fmt: skip
    assert set(picture._repr_mimebundle_()) == {"image/png", "text/plain"}
