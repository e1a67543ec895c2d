"""Ids to text as they come: whole characters only, and never a character of a stop string (stage 14).

What a token stands for is bytes, and a character may be spread over several tokens, so bytes go through an incremental UTF-8
decoder that holds an unfinished character back. Characters then go through one automaton for all stop strings (Aho and
Corasick 1975): its state is the longest end of the text that is the beginning of a stop string, which is exactly the text
that must not be shown yet. Both cost O(1) a character, however long the text is and however many stop strings there are.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What is asked of a tokenizer. It may have `strips_leading_space`: its decode drops one space at the very start of a
    text, as SentencePiece's does (the space that its encode put there)."""

    def token_bytes(self, id: int) -> bytes: ...
    def is_special(self, id: int) -> bool: ...


class StopStrings:
    """The automaton of some non-empty stop strings. A state is a number; 0 is the empty text.

    depth[s]   characters of the text that state s holds back
    ends[s]    the longest stop string that the text of state s ends in, or None
    """

    def __init__(self, stops: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                if self.ends[child] is None:
                    self.ends[child] = self.ends[self._fail[child]]
                queue.append(child)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.ends.append(None)
            state = self._next[state][char]
        self.ends[state] = stop

    def step(self, state: int, char: str) -> int:
        """The state after one more character. Each turn of the loop gives back depth that an earlier character added."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


class Detokenizer:
    """The text of one answer.

    tokenizer     gives each id's bytes; special tokens show nothing
    prompt_ids    what the answer follows: at the very start of a text a tokenizer may drop a leading space
    stop          the first of these to be complete ends the text; of several complete at the same character, the longest
    include_stop  whether the text then ends with it or before it

    What push and finish answered, put together, is `text`, and without a stop it equals the decode of all bytes at once:
    bytes that are no UTF-8 become U+FFFD as `bytes.decode(errors="replace")` has it, and nothing else does.
    """

    def __init__(
        self, tokenizer: TokenBytes, prompt_ids: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self.stopped = False
        self.stop_reason: str | None = None
        self.used = 0  # ids of the last push that belong to the answer: up to the one that completed a stop string
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._shown: list[str] = []
        strips = getattr(tokenizer, "strips_leading_space", False)
        self._at_start = strips and all(tokenizer.is_special(id) for id in prompt_ids)

    @property
    def text(self) -> str:
        """All that was shown. Put together when it is asked for: ask at the end, not after every token."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now safe to show. After a stop string nothing is, and `used` is 0."""
        pieces: list[str] = []
        self.used = 0
        for id in ids:
            if self.stopped:
                break
            self.used += 1
            if data := self._bytes(id):
                pieces.append(self._pass(self._decoder.decode(data)))
        return self._show("".join(pieces))

    def finish(self) -> str:
        """What was held back, at the end of the answer: the beginning of a stop string that never came, and U+FFFD for an
        unfinished character. Nothing after a stop string, nor the second time."""
        if self.stopped:
            return ""
        text = self._pass(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text += self._held
            self._held, self._state = "", 0
        return self._show(text)

    def _bytes(self, id: int) -> bytes:
        data = b"" if self._tokenizer.is_special(id) else self._tokenizer.token_bytes(id)
        if data and self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ")
        return data

    def _pass(self, text: str) -> str:
        """Takes characters through the automaton; answers what no stop string can begin with any more."""
        if self._stops is None:
            return text
        for place, char in enumerate(text):
            self._state = self._stops.step(self._state, char)
            stop = self._stops.ends[self._state]
            if stop is not None:
                self.stopped, self.stop_reason = True, stop
                whole = self._held + text[: place + 1]
                self._held = ""
                return whole if self._include_stop else whole[: len(whole) - len(stop)]
        whole = self._held + text
        safe = len(whole) - self._stops.depth[self._state]
        self._held = whole[safe:]
        return whole[:safe]

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
