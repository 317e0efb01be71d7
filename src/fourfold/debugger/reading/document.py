"""The events of a trace file, a block at a time, and what stands beside them, whatever state the file is in.

A block is cut between two events and decoded at once. Only where that fails is it read event by event, and only where
an event is no JSON is something skipped: up to the next place that looks like the start of an event, and is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fourfold.debugger.reading.events import Event, ExactEvent, decimal
from fourfold.debugger.reading.source import PIECE, Source

_STRING = rb'"(?:[^"\\]|\\.)*+"'
_DEEP = 12  # levels of brackets in an event or a header that are followed


def _balanced(levels: int) -> bytes:
    """A pattern of an object or a list with everything in it. It never goes back, so it takes linear time."""
    pattern = rb"(?!)"
    for _ in range(levels):
        pattern = rb'[\[{](?:[^\[\]{}"]++|' + _STRING + rb"|" + pattern + rb")*+[\]}]"
    return pattern


_BALANCED = re.compile(_balanced(_DEEP), re.DOTALL)
_KEY = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_SCALAR = re.compile(_STRING + rb'|[^\s,"\[\]{}]++', re.DOTALL)
_FIRST = rb'"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s|cname|tts|sf)"\s*:'
_START = re.compile(rb"\{\s*" + _FIRST)
_CUT = re.compile(rb"\}\s*(,)\s*(?=\{\s*" + _FIRST + rb")")
_BETWEEN = re.compile(rb"[\s,\x00-\x1f]*+")
_AFTER = re.compile(rb'\s*(?:,\s*"|\}|\Z)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')

_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_SPACES = bytes(range(32))
_NO_CONTROL = bytes.maketrans(_SPACES, b" " * len(_SPACES))
_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|u[0-9a-fA-F]{4}|.?)', re.DOTALL)
_NO_NUMBER = re.compile(rb"([:,\[]\s*)[-+]?(?:nan|inf(?:inity)?)\b(?:\([^)]*\))?", re.IGNORECASE)

_HEADER = 64 << 20  # bytes that are read beside the events
_LARGE = 1 << 20  # bytes that no event has: one that goes on for longer lacks its end
_USUAL = 1 << 16  # bytes that events hardly have
_OVERLAP = 256  # bytes in which the start of an event has room
_WINDOW = 1 << 16  # bytes at the end of a block in which a place to cut is looked for
_TRIES = 4


class Header(msgspec.Struct, gc=False):
    """What stands beside the events, before or after them. Any value may have any type."""

    events: list[Event] = msgspec.field(default_factory=list, name="traceEvents")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    base: Any = msgspec.field(default=None, name="baseTimeNanoseconds")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    host: Any = msgspec.field(default=None, name="host_name")
    fourfold: Any = None


class _ExactHeader(msgspec.Struct, gc=False):
    events: list[ExactEvent] = msgspec.field(name="traceEvents")


_KEYS = {name: key for name, key in zip(Header.__struct_fields__, Header.__struct_encode_fields__, strict=True)
         if name != "events"}  # fmt: skip


@dataclass
class Block:
    """Some events, and the text that they were decoded from: a list of them, or an object with that list."""

    events: list[Event]
    text: bytes
    is_exact: bool = False

    def make_exact(self) -> None:
        """Replaces the times by decimal numbers, with all their digits."""
        if self.is_exact:
            return
        self.is_exact = True
        try:
            if self.text.startswith(b"["):
                exact = msgspec.json.decode(self.text, type=list[ExactEvent])
            else:
                exact = msgspec.json.decode(self.text, type=_ExactHeader).events
        except msgspec.DecodeError:  # somewhere stands no number: then what a float holds must do
            exact = [ExactEvent(decimal(event.ts), decimal(event.dur)) for event in self.events]
        for event, times in zip(self.events, exact, strict=True):
            event.ts, event.dur = times.ts, times.dur


class Document:
    """One file, read so many bytes at a time. `header` and `notes` are complete when all blocks were had."""

    def __init__(self, path: Path, piece: int = PIECE) -> None:
        self.path = path
        self.header = Header()
        self.size = 0
        """Bytes of the text, inflated."""
        self._source = Source(path, piece)
        self._pieces = self._ahead()
        self._events = msgspec.json.Decoder(list[Event])
        self._event = msgspec.json.Decoder(Event)
        self._whole = msgspec.json.Decoder(Header)
        self._skipped: list[tuple[int, int]] = []  # from byte, to byte
        self._replaced = -1  # byte near which the first forbidden character was
        self._open_at = -1  # byte at which the list of events ends without being closed
        self._torn = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with the file, a sentence each."""
        out = []
        if self._source.damage:
            out.append(self._source.damage)
        if self._open_at >= 0:
            where = "inside an event" if self._torn else "after an event"
            out.append(f"the list of events is cut off at byte {self._open_at:,}, {where}; what comes before was read")
        if self._skipped:
            gone = sum(end - start for start, end in self._skipped)
            places = "one damaged place" if len(self._skipped) == 1 else f"{len(self._skipped):,} damaged places"
            out.append(f"{places} skipped, {gone:,} bytes, from byte {self._skipped[0][0]:,} on")
        if self._replaced >= 0:
            out.append(f"characters that JSON forbids were replaced, the first near byte {self._replaced:,}")
        return tuple(out)

    def blocks(self) -> Iterator[Block]:
        """All events. ValueError if the file is no trace."""
        text, at, is_last = self._begin()
        while True:
            block, text, at, is_done = self._next(text, at, is_last)
            if block is not None and block.events:
                yield block
            if is_done:
                return
            if not is_last:
                piece, is_last = next(self._pieces)
                text += piece

    def _ahead(self) -> Iterator[tuple[bytes, bool]]:
        """Pieces, and whether each is the last."""
        previous: bytes | None = None
        for piece in self._source.pieces():
            self.size += len(piece)
            if previous is not None:
                yield previous, False
            previous = piece
        yield previous or b"", True

    # The header ------------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[bytes, int, bool]:
        """The text from the first event on, where in the file it begins, and whether it is all there is."""
        text, is_last = next(self._pieces)
        text = text.removeprefix(b"\xef\xbb\xbf")
        start = len(text) - len(text.lstrip(_SPACES + b" "))
        if text[start : start + 1] == b"[":
            self._is_list = True
            return text[start + 1 :], start + 1, is_last
        if text[start : start + 1] != b"{":
            raise ValueError(f"{self.path}: no trace: the text begins with neither {{ nor [")
        self._is_list = False
        done = start + 1
        while True:
            found, done = _walk_to_events(text, done)
            if found is None and is_last:
                match = _EVENTS.search(text)
                found = match.end() if match else None
                if found is None:
                    raise ValueError(f"{self.path}: {self._no_events(text, done)}")
            if found is not None:
                self._take_header(text[start : found - 1] + b"[]}")
                return text[found:], found, is_last
            if len(text) > _HEADER:
                raise ValueError(f'{self.path}: no trace: no "traceEvents" in its first {len(text):,} bytes')
            piece, is_last = next(self._pieces)
            text += piece

    def _no_events(self, text: bytes, done: int) -> str:
        if _SCALAR.match(text, done) is None and text[done:].strip(_SPACES + b" ") in (b"}", b""):
            closed = text.rstrip(_SPACES + b" \x00").endswith(b"}")
            if closed:
                return 'no trace: it has no "traceEvents"'
        return f'no trace, or one that is cut off at byte {len(text):,}, before its "traceEvents"'

    def _take_header(self, text: bytes) -> None:
        """Keys beside the events; where the text is damaged those that can be had."""
        try:
            found = self._whole.decode(_cleaned(text)[0])
        except msgspec.DecodeError:
            found = Header()
            for name, key in _KEYS.items():
                match = re.search(b'"' + key.encode() + rb'"\s*:\s*', text)
                value = match and (_BALANCED.match(text, match.end()) or _SCALAR.match(text, match.end()))
                if value:
                    try:
                        setattr(found, name, msgspec.json.decode(_repaired(value[0])))
                    except msgspec.DecodeError:
                        continue
        for name in _KEYS:
            value = getattr(found, name)
            if value is not None:
                setattr(self.header, name, value)

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _next(self, text: bytes, at: int, is_last: bool) -> tuple[Block | None, bytes, int, bool]:
        """One block, what remains of the text, where that begins, and whether all events were had."""
        block, cut = self._at_once(text, at, is_last)
        if block is not None:
            return block, text[cut:], at + cut, is_last
        block, cut, closed = self._one_by_one(text, at, is_last)
        if closed:
            self._end(text[cut:])
        return block, text[cut:], at + cut, closed or is_last

    def _at_once(self, text: bytes, at: int, is_last: bool) -> tuple[Block | None, int]:
        """A block of whole events, and where it ends; None if the text is not in order."""
        if is_last:
            whole = b"[" + text if self._is_list else b'{"traceEvents":[' + text
            try:
                header = Header(events=self._events.decode(whole)) if self._is_list else self._whole.decode(whole)
            except msgspec.DecodeError:
                return None, 0
            for name in _KEYS:
                value = getattr(header, name)
                if value is not None:
                    setattr(self.header, name, value)
            return Block(header.events, whole), len(text)
        for cut in _cuts(text):
            listed = b"".join((b"[", memoryview(text)[:cut], b"]"))
            try:
                return Block(self._events.decode(listed), listed), cut + 1
            except msgspec.DecodeError:
                clean, where = _cleaned(listed)
                if where >= 0:
                    try:
                        events = self._events.decode(clean)
                    except msgspec.DecodeError:
                        continue
                    self._replace(at + where)
                    return Block(events, clean), cut + 1
        return None, 0

    def _one_by_one(self, text: bytes, at: int, is_last: bool) -> tuple[Block, int, bool]:
        """Every event that is whole, where the next begins, and whether the list is closed there."""
        events, texts = [], []
        pos = _gap(text, 0)
        while pos < len(text):
            if text[pos : pos + 1] == b"]" and _AFTER.match(text, pos + 1):
                if not is_last and not text[pos + 1 :].strip():
                    break
                return Block(events, _listed(texts)), pos + 1, True
            match = self._whole_event(text, pos)
            found = match[0] if match else b""
            event, good = self._decoded(found) if match else (None, b"")
            if match and event is not None:
                if good is not found:
                    self._replace(at + pos)
                events.append(event)
                texts.append(good)
                pos = _gap(text, match.end())
                continue
            if match is None and not is_last and len(text) - pos < _LARGE:
                break
            start = _START.search(text, pos + 1)
            if start is None and not is_last:
                after = max(len(text) - _OVERLAP, pos)
                self._skip(at + pos, at + after)
                pos = after
                break
            if start is None and text[pos : pos + 1] == b"{" and not match:
                self._torn = True
                break
            after = start.start() if start else len(text)
            self._skip(at + pos, at + after)
            pos = after
        if is_last:
            self._open_at = at + min(pos, len(text))
        return Block(events, _listed(texts)), pos, False

    def _whole_event(self, text: bytes, pos: int) -> re.Match[bytes] | None:
        """An event that begins here and ends somewhere; None if there is none."""
        if text[pos : pos + 1] != b"{":
            return None
        match = _BALANCED.match(text, pos, pos + _USUAL)
        if match is not None or len(text) - pos <= _USUAL:
            return match
        # Longer than events are: if soon another begins that is whole, this one has lost its end.
        start = _START.search(text, pos + 1, pos + _USUAL)
        found = start and _BALANCED.match(text, start.start(), start.start() + _USUAL)
        other = self._decoded(found[0])[0] if found else None
        if other is not None and other.ph is not None and other.ts is not None:
            return None
        return _BALANCED.match(text, pos, pos + _LARGE)

    def _decoded(self, text: bytes) -> tuple[Event | None, bytes]:
        """An event, if need be after repairs, and the text that it is in."""
        try:
            return self._event.decode(text), text
        except msgspec.DecodeError:
            text = _repaired(text)
        try:
            return self._event.decode(text), text
        except msgspec.DecodeError:
            return None, b""

    def _end(self, text: bytes) -> None:
        """Reads what follows the list of events."""
        rest = [text]
        for piece, _ in self._pieces:
            if sum(map(len, rest)) < _HEADER:
                rest.append(piece)
        self._take_header(b'{"traceEvents":[]' + b"".join(rest))

    def _skip(self, start: int, end: int) -> None:
        if start == end:
            return
        if self._skipped and self._skipped[-1][1] == start:
            start = self._skipped.pop()[0]
        self._skipped.append((start, end))

    def _replace(self, at: int) -> None:
        if self._replaced < 0:
            self._replaced = at


def _walk_to_events(text: bytes, done: int) -> tuple[int | None, int]:
    """Passes over the keys of an object from `done` on: where the list of events begins, if so far, and how far."""
    while True:
        key = _KEY.match(text, done)
        if key is None:
            return None, done
        after = key.end()
        if key[1] == b'"traceEvents"' and text[after : after + 1] == b"[":
            return after + 1, done
        value = _BALANCED.match(text, after) or _SCALAR.match(text, after)
        if value is None or value.end() == len(text):  # a number may go on in the next piece
            return None, done
        done = value.end()


def _cuts(text: bytes) -> list[int]:
    """Where commas between events are, the last ones, latest first."""
    window = _WINDOW
    while True:
        found = [match.start(1) for match in _CUT.finditer(text, max(len(text) - window, 0))]
        if found or window >= len(text):
            return found[: -_TRIES - 1 : -1]
        window *= 8


def _gap(text: bytes, pos: int) -> int:
    match = _BETWEEN.match(text, pos)
    return match.end() if match else pos


def _listed(texts: list[bytes]) -> bytes:
    return b"[" + b",".join(texts) + b"]"


def _cleaned(text: bytes) -> tuple[bytes, int]:
    """Without control characters and bytes that are no UTF-8, and where the first was; -1 if there is none."""
    control = _CONTROL.search(text)
    where = control.start() if control else -1
    try:
        text.decode()
    except UnicodeDecodeError as error:
        where = error.start if where < 0 else min(where, error.start)
        text = text.decode(errors="replace").encode()
    return text.translate(_NO_CONTROL), where


def _repaired(text: bytes) -> bytes:
    """What a single value may have meant: no control characters, broken escapes, or numbers that are none."""
    text = _ESCAPE.sub(lambda match: match[0] if match[1] else b"?", _cleaned(text)[0])
    kept, pos = [], 0
    for match in re.finditer(_STRING, text, re.DOTALL):
        kept += [_NO_NUMBER.sub(rb"\1null", text[pos : match.start()]), match[0]]
        pos = match.end()
    return b"".join([*kept, _NO_NUMBER.sub(rb"\1null", text[pos:])])
