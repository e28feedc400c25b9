"""A file, a pipe or standard input as numbered lines of text, in bounded memory and time."""

from __future__ import annotations

import codecs
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterator

from ..cluster import UsageError

CHUNK = 1 << 16  # bytes
LINE = 8192  # characters kept of one line; the widest real one (a matrix row) has under 2000
MOST = 1 << 30  # bytes looked at
CPU_SECONDS = 15.0  # spent looking; what was read by then is judged, and the reader told
SILENCE = 10.0  # seconds that a pipe given by name may stay without data
CONTROL = re.compile(r"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
NO_DIGITS = str.maketrans("", "", "0123456789")


class Source:
    """The bytes of a file, a pipe or standard input, as numbered lines of text."""

    def __init__(self, path: str):
        self.name = "standard input" if path == "-" else _shown(path)
        self.standard = path == "-"
        self.size = 0
        self.cut = ""  # how much was looked at, if not all
        self.wait = None
        if path == "-":
            self.fd = _stdin()
            return
        if not path:
            raise UsageError("no file is named: use a path, or - for standard input")
        try:
            mode = os.stat(path).st_mode
            ordinary = stat.S_ISREG(mode) or stat.S_ISFIFO(mode)
            # without O_NONBLOCK, opening a pipe that nobody writes to would never return
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if ordinary else -1
        except FileNotFoundError:
            raise UsageError(f"{self.name}: there is no such file") from None
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else str(e)
            raise UsageError(f"{self.name} cannot be read: {why}") from None
        if stat.S_ISDIR(mode):
            raise UsageError(f"{self.name} is a directory: name a file in it")
        if not ordinary:
            raise UsageError(f"{self.name} is a device or a socket, not a file")
        self.wait = SILENCE if stat.S_ISFIFO(mode) else None

    def close(self) -> None:
        if not self.standard:
            os.close(self.fd)

    def _chunks(self) -> Iterator[bytes]:
        began = time.process_time()
        heard = time.monotonic()
        while True:
            try:
                if self.wait is not None:
                    select.select([self.fd], [], [], 0.2)
                chunk = os.read(self.fd, CHUNK)
            except BlockingIOError:
                chunk = b""
            except OSError as e:
                raise UsageError(f"{self.name} cannot be read: {e.strerror}") from None
            if not chunk:
                # a pipe opened before its writer looks as if it had ended
                if self.wait and not self.size and time.monotonic() - heard < self.wait:
                    time.sleep(0.05)
                    continue
                if self.wait and self._writer_left() and time.monotonic() - heard < self.wait:
                    continue
                return
            heard = time.monotonic()
            self.size += len(chunk)
            yield chunk
            if self.size >= MOST or time.process_time() - began > CPU_SECONDS:
                self.cut = f"the first {self.size / 1e6:.0f} MB"
                return

    def _writer_left(self) -> bool:
        """Whether a pipe still has somebody at its other end."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not any(event & select.POLLHUP for _, event in poll.poll(0))

    def lines(self) -> Iterator[tuple[int, str, str]]:
        """(line number from 1, text, text without digits), blank lines too.

        Raises UsageError for an empty or a binary file.
        """
        decoder, left, number = None, "", 0
        for chunk in self._chunks():
            if decoder is None:
                decoder = codecs.getincrementaldecoder(_encoding(chunk))("replace")
                text = decoder.decode(chunk)
                self._refuse_binary(chunk, text)
                text = text.removeprefix("\ufeff")
            else:
                text = decoder.decode(chunk)
            held = text.endswith("\r")  # the other half of CRLF may be in the next chunk
            if held:
                text = text[:-1]
            text = (left + text).replace("\r\n", "\n").replace("\r", "\n")
            whole, shapes = text.split("\n"), text.translate(NO_DIGITS).split("\n")
            left = whole.pop()[:LINE] + ("\r" if held else "")
            for line, shape in zip(whole, shapes):
                number += 1
                yield number, line[:LINE], shape
        if left.strip():
            yield number + 1, left, ""
        if not self.size:
            raise UsageError(f"{self.name} is empty")

    def _refuse_binary(self, chunk: bytes, text: str) -> None:
        for magic, what in ((b"\x1f\x8b", "gunzip"), (b"BZh", "bunzip2"), (b"\xfd7zXZ", "unxz"),
                            (b"\x28\xb5\x2f\xfd", "unzstd"), (b"PK\x03\x04", "unzip")):  # fmt: skip
            if chunk.startswith(magic):
                raise UsageError(f"{self.name} is compressed: {what} it first")
        if len(CONTROL.findall(text)) > 0.02 * len(text) + 1:
            raise UsageError(f"{self.name} is a binary file, not the text a tool printed")
        if text.count("\ufffd") > 0.3 * len(text):
            raise UsageError(f"{self.name} is not text in UTF-8 or UTF-16")


def _shown(path: str) -> str:
    """A path for one line of a terminal: nothing that moves its cursor, of long ones the end."""
    name = "".join(c if c.isprintable() else "?" for c in path)
    return name if len(name) <= 120 else "…" + name[-119:]


def _stdin() -> int:
    try:
        return sys.stdin.fileno()
    except (AttributeError, ValueError, OSError):
        raise UsageError("standard input is closed: name a file") from None


def _encoding(head: bytes) -> str:
    """PowerShell's `>` writes UTF-16."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = head[0:2000:2], head[1:2000:2]
    if len(odd) > 8 and odd.count(0) > 0.8 * len(odd) and even.count(0) < 0.1 * len(even):
        return "utf-16-le"
    if len(odd) > 8 and even.count(0) > 0.8 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "utf-16-be"
    return "utf-8"
