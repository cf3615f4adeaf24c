from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.text.detokenizer import Detokenizer
from serving.text.stop_strings import StopStrings
from tests.serving.demo import demo_tokenizer

TOKENIZER = demo_tokenizer()

# every token that is one byte, so that any byte sequence can be made
BYTE_IDS = {
    TOKENIZER.token_bytes(index)[0]: index
    for index in range(TOKENIZER.vocab_size)
    if index not in TOKENIZER.special_ids and len(TOKENIZER.token_bytes(index)) == 1
}

any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 5), max_size=40)
byte_ids = st.lists(st.sampled_from(sorted(BYTE_IDS.values())), max_size=40)
texts = st.lists(st.sampled_from(["a", " b", "日本", "é", "😀", "👩‍👩‍👧", "\n", "服务", "\u0301"]), max_size=10).map(
    "".join
)
text_ids = texts.map(TOKENIZER.encode)
split_text_ids = texts.map(lambda text: [BYTE_IDS[byte] for byte in text.encode() if byte in BYTE_IDS])
token_ids = st.one_of(any_ids, byte_ids, text_ids, split_text_ids)


def run(ids: list[int], prompt: list[int] | None = None, **options) -> tuple[str, Detokenizer]:
    """All deltas joined."""
    detokenizer = Detokenizer(TOKENIZER, prompt or [1], **options)
    text = ""
    for token in ids:
        text += detokenizer.push(token)
    return text + detokenizer.finish(), detokenizer


def bytewise(text: str) -> list[int]:
    return [BYTE_IDS[byte] for byte in text.encode()]


@settings(max_examples=500, deadline=None)
@given(token_ids, st.booleans())
@example(bytewise("é😀")[:-1], True)
@example([BYTE_IDS[0x80], BYTE_IDS[0xE2], BYTE_IDS[0x41]], True)
def test_deltas_join_to_the_decoded_text(ids, skip):
    text, detokenizer = run(ids, skip_special_tokens=skip)
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert text == TOKENIZER.backend.decode(ids, skip_special_tokens=skip)  # the library's own, as an oracle
    assert detokenizer.length == len(text)


@settings(max_examples=300, deadline=None)
@given(token_ids)
def test_only_whole_characters_are_emitted(ids):
    detokenizer = Detokenizer(TOKENIZER, [1])
    emitted = "".join(detokenizer.push(token) for token in ids)
    raw = b"".join(TOKENIZER.token_bytes(token) for token in ids if token not in TOKENIZER.special_ids)
    assert raw.decode("utf-8", "replace").startswith(emitted)
    assert len(raw.decode("utf-8", "replace")) - len(emitted) <= 1  # at most one character is unfinished


def reference_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Quadratic and obvious: grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


stop_lists = st.lists(st.text("ab日😀", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.text("ab日😀", max_size=30), stop_lists, st.booleans(), st.data())
def test_stops_are_found_at_any_split(text, stops, include, data):
    ids, left = [], text
    while left:
        size = data.draw(st.integers(1, 5))
        ids += data.draw(st.sampled_from([TOKENIZER.encode, bytewise]))(left[:size])
        left = left[size:]
    result, detokenizer = run(ids, stop=stops, include_stop_str_in_output=include)
    assert (result, detokenizer.stop_reason) == reference_cut(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), stop_lists, st.booleans())
def test_what_is_emitted_is_never_taken_back(text, stops, include):
    final, _ = reference_cut(text, stops, include)
    detokenizer = Detokenizer(TOKENIZER, [1], stops, include)
    emitted = ""
    for token in bytewise(text):
        emitted += detokenizer.push(token)
        assert final.startswith(emitted)
        if not detokenizer.stopped:
            assert detokenizer.length - len(emitted) < max(map(len, stops))


def test_text_that_cannot_begin_a_stop_is_not_held():
    detokenizer = Detokenizer(TOKENIZER, [1], ["</answer>"])
    assert [detokenizer.push(token) for token in bytewise("a<b</ans")] == ["a", "", "<b", "", "", "", "", ""]
    assert detokenizer.finish() == "</ans"


def test_nothing_follows_a_stop():
    detokenizer = Detokenizer(TOKENIZER, [1], ["\n"])
    ids = TOKENIZER.encode("one\ntwo")
    assert "".join(detokenizer.push(token) for token in ids) == "one"
    assert detokenizer.stopped
    assert detokenizer.stop_reason == "\n"
    assert detokenizer.push(ids[0]) == ""
    assert detokenizer.finish() == ""


def test_stop_inside_one_token():
    ids = TOKENIZER.encode(" hello")
    assert len(ids) == 1
    assert run(ids, stop=["ll"])[0] == " he"
    assert run(ids, stop=["ll"], include_stop_str_in_output=True)[0] == " hell"


def test_finish_twice_adds_nothing():
    detokenizer = Detokenizer(TOKENIZER, [1], ["zz"])
    detokenizer.push(BYTE_IDS[ord("z")])
    detokenizer.push(BYTE_IDS[0xE6])
    assert detokenizer.finish() == "z\ufffd"
    assert detokenizer.finish() == ""


# The prompt


def test_the_prompt_is_never_emitted():
    assert run(TOKENIZER.encode(" world"), prompt=TOKENIZER.encode("hello"))[0] == " world"


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), texts)
def test_output_finishes_a_character_of_the_prompt(cut, rest):
    whole = bytewise("😀")
    rest_ids = TOKENIZER.encode(rest)
    text, _ = run(whole[cut:] + rest_ids, prompt=bytewise("x") + whole[:cut])
    assert text == "😀" + rest


def test_a_character_the_output_does_not_finish_is_not_emitted():
    assert run(TOKENIZER.encode("ab"), prompt=bytewise("😀")[:2])[0] == "ab"
    assert run([], prompt=bytewise("😀")[:2])[0] == ""
    assert run([2], prompt=bytewise("😀")[:2])[0] == ""


# Stop strings on their own


def test_pending_is_the_longest_begun_stop():
    stops = StopStrings(["abab", "b"])
    assert stops.feed("xa") is None
    assert stops.pending == 1
    assert stops.feed("b") == ("b", 1)


def test_overlapping_starts_are_followed():
    stops = StopStrings(["aab"])
    assert stops.feed("aaaa") is None
    assert stops.pending == 2
    assert stops.feed("bz") == ("aab", 1)


def test_the_longest_of_those_completed_together():
    assert StopStrings(["c", "bc"]).feed("abc") == ("bc", 3)


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="stop is an empty string"):
        StopStrings([""])


# Cost


@pytest.mark.parametrize("stop", [[], ["</s>", "\n\nUser:", "```", "Observation:"]], ids=["none", "four"])
def test_a_push_costs_microseconds_however_long_the_output(stop):
    ids = TOKENIZER.encode("The quick brown fox: jumps\n over 13 lazy dogs, and `so` on. ") * 1500
    detokenizer = Detokenizer(TOKENIZER, [1], stop)
    start = time.perf_counter()
    for token in ids:
        detokenizer.push(token)
    assert (time.perf_counter() - start) / len(ids) < 50e-6  # 0.5 and 1.3 us on an idle core
