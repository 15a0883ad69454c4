"""Tokenizers: every text comes back exactly, in one piece and as a stream, and all of it is reproducible."""

import random
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from softattn_lm.errors import UserError
from softattn_lm.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    UnseenCharacters,
    from_state,
)
from softattn_lm.tokenizer.bpe import SAFE_CUT, byte_alphabet, last_safe_cut

TEXT = "It's late, Emma said (twice).\n\nNaïve café — 日本語 \U0001f389\r\n\tthe the the theatre of the others\n" * 20


def bpe(size: int = 300, text: str = TEXT) -> BPETokenizer:
    tokenizer = BPETokenizer(size)
    tokenizer.fit([text])
    return tokenizer


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    """A GPT-2-like tokenizer.json with a control id."""
    trained = bpe().backend
    trained.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("pretrained") / "tokenizer.json"
    trained.save(str(path))
    return PretrainedTokenizer(str(path))


@pytest.fixture(scope="module", params=["byte", "bpe", "pretrained"])
def any_text(request: pytest.FixtureRequest, pretrained: PretrainedTokenizer) -> Tokenizer:
    """The tokenizers that know every text."""
    return {"byte": ByteTokenizer(), "bpe": bpe(), "pretrained": pretrained}[request.param]


@settings(max_examples=150, deadline=None)
@given(text=st.text())
@example(text="")
@example(text="<|endoftext|> \x00 \ufeff \u2028\x85\r \r\n  \t\n")
@example(text="\ufffd half of it")
def test_any_text_comes_back_from_tokenizers_that_know_all(any_text: Tokenizer, text: str) -> None:
    ids = any_text.encode(text)
    assert ids.dtype == np.int32
    assert ids.max(initial=0) < any_text.vocab_size
    assert any_text.decode(ids) == text
    stream = any_text.stream()
    assert "".join([stream.push(int(i)) for i in ids]) + stream.flush() == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1))
def test_any_text_comes_back_from_a_character_tokenizer_that_has_seen_it(text: str) -> None:
    tokenizer = CharTokenizer()
    tokenizer.fit([text])
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_a_stream_has_emitted_never_ends_inside_a_character(any_text: Tokenizer) -> None:
    text = "é日\U0001f389x"
    stream = any_text.stream()
    seen = ""
    for token in any_text.encode(text):
        seen += stream.push(int(token))
        assert text.startswith(seen)
    assert seen + stream.flush() == text


@pytest.mark.parametrize("kind", ["byte", "bpe", "pretrained"])
def test_a_stream_cut_off_inside_a_character_says_so_at_the_end(kind: str, pretrained: PretrainedTokenizer) -> None:
    # No merge was learned for a crab, so each of its four bytes is a token of its own.
    tokenizer = {"byte": ByteTokenizer(), "bpe": bpe(), "pretrained": pretrained}[kind]
    ids = list(tokenizer.encode("x\U0001f980"))
    stream = tokenizer.stream()
    assert "".join(stream.push(int(i)) for i in ids[:-1]) == "x"
    assert set(stream.flush()) == {"\ufffd"}


def test_training_twice_gives_the_same_state_and_the_state_the_same_tokenizer() -> None:
    text = (Path(__file__).parents[1] / "data" / "austen" / "emma.txt").read_text(encoding="utf-8")[:200_000]
    at = last_safe_cut(text[:77_777])
    for make in (CharTokenizer, lambda: CharTokenizer("symbol"), ByteTokenizer, lambda: BPETokenizer(1500)):
        first, second = make(), make()
        first.fit([text])
        second.fit([text[:at], text[at:]])
        assert first.state() == second.state()
        again = from_state(first.state())
        assert again.state() == first.state()
        assert again.vocab_size == first.vocab_size
        assert again.encode(text).tolist() == first.encode(text).tolist()


def test_a_state_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'words'"):
        from_state({"kind": "words"})


def test_half_a_surrogate_pair_is_refused_by_all(any_text: Tokenizer) -> None:
    char = CharTokenizer()
    char.fit(["ab"])
    for tokenizer in (any_text, char):
        with pytest.raises(UserError, match="surrogate"):
            tokenizer.encode("a\ud800")


# --- char


def test_characters_are_numbered_in_code_point_order() -> None:
    tokenizer = CharTokenizer()
    tokenizer.fit(["ba", "\U0001f389\nb"])
    assert tokenizer.encode("\nab\U0001f389").tolist() == [0, 1, 2, 3]


def test_unseen_characters_are_listed_with_their_counts() -> None:
    tokenizer = CharTokenizer()
    tokenizer.fit(["abc"])
    with pytest.raises(UserError, match=r"'é' U\+00E9 \(2 times\), '\\n' U\+000A \(once\).*tokenizer=byte"):
        tokenizer.encode("aé\néb")
    with pytest.raises(UserError, match="and 40 more"):
        tokenizer.encode("".join(chr(0x4E00 + i) for i in range(52)))


def test_the_unknown_symbol_stands_for_unseen_characters_and_is_counted() -> None:
    tokenizer = CharTokenizer(unknown="symbol")
    tokenizer.fit(["abc"])
    assert tokenizer.vocab_size == 4
    with pytest.warns(UnseenCharacters, match="3 of its characters were replaced"):
        ids = tokenizer.encode("aé\néb")
    assert ids.tolist() == [0, 3, 3, 3, 1]
    assert tokenizer.decode(ids) == "a\ufffd\ufffd\ufffdb"


def test_a_replacement_character_in_the_text_is_a_character_like_others() -> None:
    tokenizer = CharTokenizer(unknown="symbol")
    tokenizer.fit(["a\ufffd"])
    assert tokenizer.encode("\ufffda").tolist() == [1, 0]
    assert tokenizer.vocab_size == 3


def test_a_wrong_choice_and_an_empty_text_are_refused() -> None:
    with pytest.raises(UserError, match=r"tokenizer\.unknown=drop"):
        CharTokenizer("drop")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="empty"):
        CharTokenizer().fit([""])


# --- bpe


def test_the_byte_alphabet_is_that_of_tokenizers() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["Ġ"], alphabet["Ċ"]) == (ord("a"), ord(" "), ord("\n"))


def test_a_vocabulary_of_256_is_the_bytes_and_less_is_refused() -> None:
    tokenizer = bpe(256)
    assert tokenizer.vocab_size == 256
    assert len(tokenizer.encode("日本")) == 6
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size=255 is below 256"):
        BPETokenizer(255)


def test_a_vocabulary_the_text_cannot_fill_is_reported() -> None:
    tokenizer = BPETokenizer(5000)
    with pytest.warns(UserWarning, match="tokenizer.vocab_size=5000 was not reached.*is 257"):
        tokenizer.fit(["abab"])  # one pair occurs twice: "ab"; then "ab"+"ab" occurs once
    assert tokenizer.vocab_size == 257


def test_merges_follow_frequency() -> None:
    tokenizer = bpe(257, "low lower lowest")
    # "lo" and "ow" both occur three times: one of them is the only merge, whichever tokenizers takes first.
    assert tokenizer.decode([256]) in ("lo", "ow")
    assert len(tokenizer.encode("low")) == 2


def test_there_are_no_control_ids() -> None:
    tokenizer = bpe(256)
    assert len(tokenizer.encode("<|endoftext|>")) == len("<|endoftext|>")


def test_no_blank_is_put_in_front() -> None:
    assert bpe().decode(bpe().encode("Emma")) == "Emma"
    assert bpe(256).encode("E").tolist() == [bpe(256).pieces.index(b"E")]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from(" \n\t\r\u00a0\u2028\x1c\x85ab1.'sé"), st.characters(codec="utf-8"))))
def test_encoding_two_halves_of_a_safe_cut_is_encoding_the_whole(text: str) -> None:
    tokenizer = BPE
    at = last_safe_cut(text)
    halves = np.concatenate([tokenizer.encode(text[:at]), tokenizer.encode(text[at:])])
    assert halves.tolist() == tokenizer.encode(text).tolist()


# White space is what a wrong cut would show in, so it has merges of its own here.
BPE = bpe(340, "".join(random.Random(0).choices(" \n\n\t\rab1.'sé", k=4000)))


def test_a_safe_cut_is_the_last_one_and_may_lie_far_back() -> None:
    for length in range(1200):  # of several searches, and cuts where one ends
        text = "".join(random.Random(length).choices("ab \n", weights=[400, 400, 1, 1], k=length))
        assert last_safe_cut(text) == max((cut.start() for cut in SAFE_CUT.finditer(text)), default=0)
    assert last_safe_cut("one two\n\nthree") == 7
    assert last_safe_cut("one") == 0
    assert last_safe_cut("  \n x") == 0
    assert last_safe_cut("a b" + "x" * 100_000) == 1


# --- pretrained


def test_a_literal_control_word_stays_text(pretrained: PretrainedTokenizer) -> None:
    control = pretrained.backend.token_to_id("<|endoftext|>")
    assert control == pretrained.vocab_size - 1
    assert control not in pretrained.encode("a <|endoftext|> b").tolist()
    assert pretrained.decode([control]) == "<|endoftext|>"


def test_a_folder_with_a_tokenizer_json_will_do(pretrained: PretrainedTokenizer, tmp_path: Path) -> None:
    pretrained.backend.save(str(tmp_path / "tokenizer.json"))
    assert PretrainedTokenizer(str(tmp_path)).recipe() == pretrained.recipe()


@pytest.mark.parametrize("path", ["./nothing.json", "/no/such/tokenizer.json", "a/b/c", "~/nothing", "tokeniser.json"])
def test_a_missing_file_is_no_hub_name(path: str) -> None:
    with pytest.raises(UserError, match="no such file"):
        PretrainedTokenizer(path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.path=.*not a tokenizer\.json"):
        PretrainedTokenizer(str(tmp_path))


def test_a_tokenizer_that_changes_text_is_pointed_out(tmp_path: Path) -> None:
    backend = bpe().backend
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match="does not give text back"):
        PretrainedTokenizer(str(tmp_path))


def test_a_long_text_is_cut_only_where_the_ids_stay_the_same(pretrained: PretrainedTokenizer, tmp_path: Path) -> None:
    at = pretrained.cut(TEXT)
    assert 0 < at < len(TEXT)
    halves = [*pretrained.encode(TEXT[:at]), *pretrained.encode(TEXT[at:])]
    assert halves == pretrained.encode(TEXT).tolist()
    # One that puts a mark in front of every text cannot be cut at all.
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match="does not give text back"):
        marked = PretrainedTokenizer(str(tmp_path))
    assert marked.cut("a a " * 1000) == 0


def test_a_batch_is_the_texts_one_by_one(any_text: Tokenizer) -> None:
    texts = [TEXT[:50], "", unicodedata.normalize("NFD", "é"), TEXT[50:99]]
    batch = any_text.encode_batch(texts, Counter())
    assert [ids.tolist() for ids in batch] == [any_text.encode(text).tolist() for text in texts]
