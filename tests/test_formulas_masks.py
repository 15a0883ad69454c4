"""Each mask by hand, and the places of packed documents, with and without a cache."""

import pytest
import torch

from softattn_lm.attention.cache import Keep, KVCache
from softattn_lm.attention.visibility import Causal, Visibility
from softattn_lm.errors import UserError
from softattn_lm.model.documents import continue_documents


def rows(visible: Visibility) -> list[str]:
    """The dense mask of the first row of a batch, as a picture."""
    dense = visible.dense()
    return ["".join("1" if read else "." for read in row) for row in (dense if dense.ndim == 2 else dense[0, 0])]


def test_a_query_reads_itself_and_the_past():
    assert rows(Visibility(3)) == ["1..", "11.", "111"]
    assert rows(Visibility(2, past=2)) == ["111.", "1111"]


def test_a_window_of_two_reads_two_keys_itself_included():
    assert rows(Visibility(new=4, window=2)) == ["1...", "11..", ".11.", "..11"]
    assert rows(Visibility(new=3, past=1, window=2)) == ["11..", ".11.", "..11"]
    assert Visibility(new=4, window=1).dense().equal(torch.eye(4, dtype=torch.bool))


def test_sinks_are_read_besides_the_window():
    assert rows(Visibility(6, window=2, sinks=1)) == ["1.....", "11....", "111...", "1.11..", "1..11.", "1...11"]
    assert rows(Visibility(5, window=1, sinks=2)) == ["1....", "11...", "111..", "11.1.", "11..1"]


def test_sinks_behind_a_cache_that_dropped_keys_are_still_the_first_of_the_text():
    # Tokens 0 and 1, then 7 and 8; the queries are 9 and 10 with a window of 3.
    seen = Visibility(2, past=4, window=3, sinks=2, start=9)
    assert seen.key_positions.tolist() == [0, 1, 7, 8, 9, 10]
    assert rows(seen) == ["11111.", "11.111"]
    assert seen.count().flatten().tolist() == [5, 5]


def test_documents_read_themselves_only_and_padding_reads_nothing():
    documents = torch.tensor([[0, 0, 1, 1, -1], [-1, 3, 3, 3, 5]])
    seen = Visibility(5, documents=documents)
    assert rows(seen) == ["1....", "11...", "..1..", "..11.", "....."]
    assert rows(Visibility(5, documents=documents[1:])) == [".....", ".1...", ".11..", ".111.", "....1"]
    assert seen.count()[:, 0, :, 0].tolist() == [[1, 2, 1, 2, 0], [0, 1, 2, 3, 1]]
    assert rows(Visibility(2, past=3, documents=documents)) == ["..11.", "....."]


def test_a_number_that_comes_back_belongs_to_the_same_document():
    # Documents are told apart by their numbers; two that follow each other must differ.
    assert rows(Visibility(3, documents=torch.tensor([[0, 1, 0]]))) == ["1..", ".1.", "1.1"]


def test_each_document_has_its_own_window_and_its_own_sinks():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    places = continue_documents(documents, None)
    assert rows(Visibility(7, window=2, documents=documents))[2:6] == [".11....", "...1...", "...11..", "....11."]
    seen = Visibility(7, window=1, sinks=1, documents=documents, places=places)
    assert rows(seen) == ["1......", "11.....", "1.1....", "...1...", "...11..", "...1.1.", "...1..1"]


def test_a_tile_of_a_mask_is_that_part_of_it():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    places = continue_documents(documents, None)
    for seen in (
        Visibility(5, past=3),
        Visibility(5, past=3, window=3),
        Visibility(5, past=3, window=2, sinks=1, start=30),
        Visibility(5, past=3, window=2, sinks=1, documents=documents, places=places),
    ):
        assert seen.tile(slice(1, 4), slice(2, 7)).equal(seen.dense()[..., 1:4, 2:7])


@pytest.mark.parametrize("past", [0, 1, 5])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("sinks", [0, 2])
def test_counts_and_shortcuts_agree_with_the_dense_mask(past, window, sinks):
    for new in (1, 4):
        visible = Visibility(new, past, window, sinks if window else 0)
        assert visible.count()[:, 0].tolist() == visible.dense().sum(-1).tolist()
        if visible.reads_all:
            assert new == 1 and visible.dense().all()
        triangle = torch.ones(new, past + new).tril().bool()  # torch's is_causal: aligned to the top left corner
        if visible.is_plain_causal:
            assert past == 0 and visible.dense().equal(triangle)
        if not sinks:  # with sinks a shortcut may be missed, never taken wrongly
            assert visible.reads_all == (new == 1 and bool(visible.dense().all()))
            assert visible.is_plain_causal == (past == 0 and visible.dense().equal(triangle))


def test_places_start_again_with_every_document():
    documents = torch.tensor([[4, 4, 4, 7, 7, 2], [-1, -1, 0, 0, 0, 0]])
    assert continue_documents(documents, None).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("chunks", [[1] * 8, [3, 5], [2, 1, 4, 1]])
def test_places_go_on_where_the_last_call_stopped(chunks):
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [-1, 0, 0, 0, 0, 0, 0, 0]])
    cache = KVCache([Keep(8)])
    parts = [continue_documents(part, cache) for part in documents.split(chunks, dim=1)]
    assert torch.cat(parts, dim=1).tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_masks_keep_a_window_of_the_context_at_most():
    assert Causal().span(16) == 16 and Causal(5).span(16) == 5 and Causal(50).span(16) == 16
    seen = Causal(2, sinks=1).visibility(Visibility(4), context=16)
    assert rows(seen) == ["1...", "11..", "111.", "1.11"]
    documents = torch.tensor([[0, 1]])
    assert rows(Causal(documents=True).visibility(Visibility(2, documents=documents), 16)) == ["1.", ".1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, r"mask\.window=0"),
        ({"window": 4, "sinks": -1}, r"mask\.sinks=-1"),
        ({"sinks": 2}, r"mask\.sinks=2 needs a window"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        Causal(**settings)
