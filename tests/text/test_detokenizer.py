"""Streams against the decode of everything at once, and stop strings that nobody may see."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cutaway.text import detokenizer
from cutaway.text.detokenizer import Detokenizer

REPEATABLE = settings(deadline=None, derandomize=True)
TEXTS = [
    "",
    "Hello, world.",
    "日本語のテキスト、漢字とかな。",
    "한국어 문장과 中文句子",
    "family 👨‍👩‍👧‍👦 flag 🇯🇵 wave 👋🏽 done",
    "  spaces   and\n\nlines\t ",
    "e\u0301 a\u0308 \u200d \ufeff \u0000",
    "naïve café — “quotes”",
    "x = {'a': [1, 2]}\n    return x\n",
    "\ufffd is in the true text",
]


class Bytes:
    """Ids 0..255 are bytes, 256 is special, ids from 1000 on are given strings."""

    def __init__(self, words=(), strips=False):
        self.words = [w.encode() if isinstance(w, str) else w for w in words]
        self.strips_leading_space = strips

    def token_bytes(self, id):
        assert id != 256, "a special token's bytes are nobody's business"
        return bytes([id]) if id < 256 else self.words[id - 1000]

    def is_special(self, id):
        return id == 256


class Trained:
    """A real byte-level BPE, trained here on a little text."""

    def __init__(self):
        self.core = Tokenizer(models.BPE())
        self.core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False)
        self.core.train_from_iterator(TEXTS * 3, trainer)
        # GPT-2's map: printable bytes stand for themselves, the others for 256, 257, ... in order
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}

    def token_bytes(self, id):
        return bytes(self.byte_of[c] for c in self.core.id_to_token(id))

    def is_special(self, id):
        return id == self.core.token_to_id("<end>")


@pytest.fixture(scope="module")
def trained():
    return Trained()


def stream(tokenizer, ids, stop=(), size=1, prompt=(65,), **kwargs):
    """(pieces, detokenizer, ids used), pushed `size` ids at a time until a stop."""
    detok = Detokenizer(tokenizer, list(prompt), stop, **kwargs)
    pieces, used = [], 0
    for i in range(0, len(ids), size):
        pieces.append(detok.push(ids[i : i + size]))
        used += detok.used
        if detok.stopped:
            break
    pieces.append(detok.finish())
    assert "".join(pieces) == detok.text
    return pieces, detok, used


def first_stop(text, stops):
    """(start, stop) of the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


# What a stream shows


@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_is_the_whole_decode(text, trained):
    ids = trained.core.encode(text).ids
    for size in (1, 2, 7):
        pieces, detok, used = stream(trained, ids, size=size)
        assert detok.text == text == trained.core.decode(ids)
        assert used == len(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_a_byte_shows_whole_characters_only(text):
    detok = Detokenizer(Bytes(), [65])
    shown = ""
    for i, byte in enumerate(text.encode()):
        shown += detok.push([byte])
        whole = text.encode()[: i + 1].decode(errors="ignore")  # every complete character and no other is out at once
        assert shown == whole
    assert detok.finish() == ""


@REPEATABLE
@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(1, 7), min_size=1))
def test_any_bytes_equal_python_s_own_decode(data, cuts):
    ids, words, at, turn = [], [], 0, 0
    while at < len(data):
        n = cuts[turn % len(cuts)]
        words.append(data[at : at + n])
        ids.append(1000 + len(words) - 1)
        at, turn = at + n, turn + 1
    _, detok, _ = stream(Bytes(words), ids)
    assert detok.text == data.decode(errors="replace")


@REPEATABLE
@given(ids=st.lists(st.integers(0, 599), max_size=40), size=st.integers(1, 5))
def test_random_ids_of_a_real_vocabulary(trained, ids, size):
    tokenizer = trained
    ids = [i % tokenizer.core.get_vocab_size() for i in ids]
    data = b"".join(b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in ids)
    _, detok, used = stream(tokenizer, ids, size=size)
    assert detok.text == data.decode(errors="replace") == tokenizer.core.decode(ids)
    assert used == len(ids)


def test_an_answer_cut_inside_a_character_shows_every_complete_one_before_it():
    pieces, detok, _ = stream(Bytes(), list("a漢字".encode())[:-1])
    assert "".join(pieces[:-1]) == "a漢"
    assert detok.text == "a漢\ufffd"  # as the decode of all bytes has it
    assert detok.finish() == ""


def test_special_tokens_show_nothing_and_are_used():
    _, detok, used = stream(Bytes(), [72, 256, 105, 256])
    assert detok.text == "Hi"
    assert used == 4


def test_a_special_token_inside_a_character_does_not_break_it():
    first, *rest = "é".encode()
    _, detok, _ = stream(Bytes(), [first, 256, *rest])
    assert detok.text == "é"


def test_empty_push_shows_nothing():
    detok = Detokenizer(Bytes(), [])
    assert (detok.push([]), detok.used, detok.finish(), detok.text) == ("", 0, "", "")


@pytest.mark.parametrize(
    ("prompt", "strips", "text"),
    [([], True, "Hi"), ([256], True, "Hi"), ([256, 65], True, " Hi"), ([], False, " Hi"), ([256], False, " Hi")],
)
def test_a_leading_space_is_dropped_only_at_the_very_start_of_a_text(prompt, strips, text):
    _, detok, _ = stream(Bytes([" Hi", " "], strips), [1000], prompt=prompt)
    assert detok.text == text
    _, detok, _ = stream(Bytes([" Hi", " "], strips), [256, 1001, 1000], prompt=prompt)  # one space, not both
    assert detok.text == text.replace("Hi", " Hi")


# Stop strings


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_over_many_tokens_is_never_seen(size):
    ids = [*b"The end<|stop|> and more"]
    pieces, detok, used = stream(Bytes(), ids, ["<|stop|>"], size)
    assert detok.text == "The end"
    assert not any("<" in p for p in pieces)
    assert (detok.stopped, detok.stop_reason) == (True, "<|stop|>")
    assert used == 15  # up to the id that completed it, whatever came in the same push


def test_text_after_the_stop_in_the_same_token_is_dropped():
    words = ["one ", "two END three", "four"]
    pieces, detok, used = stream(Bytes(words), [1000, 1001, 1002], ["END"], size=3)
    assert pieces == ["one two ", ""]
    assert (used, detok.stop_reason) == (2, "END")


def test_after_a_stop_nothing_is_shown_or_used():
    detok = Detokenizer(Bytes(), [], ["b"])
    assert detok.push([*b"abc"]) == "a"
    assert detok.used == 2
    assert detok.push([*b"def"]) == ""
    assert (detok.used, detok.finish(), detok.text) == (0, "", "a")


def test_include_stop_shows_it_and_nothing_after():
    _, detok, used = stream(Bytes(), [*b"a STOP b"], ["STOP"], include_stop=True)
    assert (detok.text, detok.stop_reason, used) == ("a STOP", "STOP", 6)


def test_held_back_text_comes_at_the_end():
    detok = Detokenizer(Bytes(), [], ["###END"])
    assert detok.push([*b"text ##"]) == "text "
    assert detok.push([*b"#EN"]) == ""
    assert detok.finish() == "###EN"
    assert (detok.text, detok.stopped, detok.stop_reason) == ("text ###EN", False, None)
    assert detok.finish() == ""


def test_held_back_text_is_let_go_as_soon_as_it_cannot_be_a_stop():
    detok = Detokenizer(Bytes(), [], ["aab"])
    assert [detok.push([b]) for b in b"aaaac"] == ["", "", "a", "a", "aac"]


def test_without_stop_strings_nothing_is_held_back():
    detok = Detokenizer(Bytes(), [])
    assert [detok.push([b]) for b in b"stop"] == list("stop")


@pytest.mark.parametrize(
    ("text", "stops", "shown", "reason"),
    [
        ("ab cd", ["ab cd", "b"], "a", "b"),  # the first to be complete
        ("xabcd", ["bc", "abc"], "x", "abc"),  # complete together: the longest, so that nothing of it is shown
        ("xabd", ["abc", "b"], "xa", "b"),  # inside the beginning of another
        ("xabcabd", ["abcabe", "cab"], "xab", "cab"),
        ("aaab", ["aab"], "a", "aab"),
        ("\n\nUser:", ["User:", "\n\n\n"], "\n\n", "User:"),
        ("日本語", ["本"], "日", "本"),
        ("👨‍👩‍👧", ["\u200d👩"], "👨", "\u200d👩"),
    ],
)
def test_which_stop_string_ends_the_text(text, stops, shown, reason):
    for stop in (stops, stops[::-1]):
        for size in (1, 2, 100):
            _, detok, _ = stream(Bytes(), [*text.encode()], stop, size)
            assert (detok.text, detok.stop_reason) == (shown, reason)


def test_a_stop_string_may_begin_or_end_inside_a_character_s_token():
    words = ["日".encode()[:2], "日".encode()[2:] + b"EN", b"D" + "語".encode()[:1]]
    _, detok, used = stream(Bytes(words), [1000, 1001, 1002], ["END"])
    assert (detok.text, used) == ("日", 3)


SMALL = st.text("ab<", max_size=30)


@REPEATABLE
@given(text=SMALL, stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4), size=st.integers(1, 4))
def test_stops_equal_a_search_of_the_whole_text(text, stops, size):
    found = first_stop(text, stops)
    pieces, detok, used = stream(Bytes(), [*text.encode()], stops, size)
    assert detok.stopped == (found is not None)
    if found is None:
        assert (detok.text, detok.stop_reason, used) == (text, None, len(text))
    else:
        start, stop = found
        assert (detok.text, detok.stop_reason, used) == (text[:start], stop, start + len(stop))
    shown = ""
    for piece, end in zip(pieces[:-1], range(size, len(text) + size, size), strict=False):  # as much as may be, at once
        shown += piece
        seen = text[:end]
        if first_stop(seen, stops) is None:
            held = max(n for n in range(len(seen) + 1) if n == 0 or any(s.startswith(seen[-n:]) for s in stops))
            assert shown == seen[: len(seen) - held]


# Cost


def lines_run(function, *args):
    """Lines of the detokenizer's own file that a call executes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != detokenizer.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("stop", [(), ("ab" * 40 + "c", "x" * 10)])
def test_a_token_costs_the_same_however_long_the_text_is(stop):
    detok = Detokenizer(Bytes(), [65] * 5, stop)
    ids = [*b"ababab" * 10]
    costs = [lines_run(detok.push, ids) for _ in range(100)]
    assert max(costs[5:]) <= min(costs[5:]) * 1.1
    assert max(costs) < 30 * len(ids)
    detok.finish()
    assert detok.text == "ababab" * 1000


def test_the_text_is_kept_in_pieces_and_never_copied_by_a_push():
    detok = Detokenizer(Bytes(), [])
    held = [sum(map(len, detok._shown))]
    for _ in range(50):
        detok.push([*b"word "])
        held.append(len(detok._shown[-1]))
    assert held[1:] == [5] * 50
    assert detok.text == "word " * 50
    assert detok.push([*b"more"]) == "more"
    assert detok.text == "word " * 50 + "more"


def test_the_front_of_a_long_prompt_is_not_read():
    class Counting(Bytes):
        asked = 0

        def is_special(self, id):
            self.asked += 1
            return super().is_special(id)

    tokenizer = Counting(strips=True)
    Detokenizer(tokenizer, [256] + [65] * 10_000)
    assert tokenizer.asked == 2
