"""Follows an answer's point-to-point calls while it runs, so that a hang can be explained.

count.py tells what a rank sent once it has returned; these notes are there even if it never does.
"""

from __future__ import annotations

import contextlib
import mmap


class Notes:
    """What each rank does, kept where it can be read even if the rank never returns."""

    def __init__(self, world_size: int) -> None:
        self.maps = [mmap.mmap(-1, 1 << 16) for _ in range(world_size)]  # shared over a fork

    def add(self, rank: int, *words) -> None:
        line = " ".join(map(str, words)).encode() + b"\n"
        if self.maps[rank].tell() + len(line) <= len(self.maps[rank]):
            self.maps[rank].write(line)

    def of(self, rank: int) -> list[list[str]]:
        """The notes of a rank, each as a list of words."""
        text = bytes(self.maps[rank][:]).rstrip(b"\0").decode()
        return [line.split() for line in text.splitlines()]


class _Handle:
    """What isend and irecv return, noting that it was waited for."""

    def __init__(self, work, note) -> None:
        self.work, self.note = work, note

    def wait(self, *args, **kwargs):
        self.note()
        return self.work.wait(*args, **kwargs)

    def is_completed(self):
        done = self.work.is_completed()
        if done:
            self.note()
        return done

    def __getattr__(self, name):
        return getattr(self.work, name)


@contextlib.contextmanager
def noted(notes: Notes, rank: int):
    """Within it, this rank's point-to-point calls and barriers are noted: "send 1", "recv 0",
    "waited isend"."""
    import torch.distributed as dist

    places = (dist, dist.distributed_c10d)
    names = ("send", "isend", "recv", "irecv", "barrier")
    real = {name: getattr(dist, name) for name in names}
    inside = [False]  # send is made of isend

    def noting(name):
        def call(*args, **kwargs):
            if inside[0]:
                return real[name](*args, **kwargs)
            peer = args[1] if len(args) > 1 else next(
                (kwargs[k] for k in ("dst", "src", "group_dst", "group_src") if k in kwargs), None
            )  # fmt: skip
            notes.add(rank, name, "?" if peer is None else peer)
            inside[0] = True
            try:
                done = real[name](*args, **kwargs)
            finally:
                inside[0] = False
            if name in ("isend", "irecv"):
                return _Handle(done, lambda: notes.add(rank, "waited", name))
            return done

        call.__name__ = name
        return call

    wrapped = {name: noting(name) for name in names}
    try:
        for place in places:
            for name in names:
                setattr(place, name, wrapped[name])
        yield
    finally:
        for place in places:
            for name in names:
                setattr(place, name, real[name])


def rounds(notes: Notes, world_size: int) -> int:
    """Rounds that a pattern of sends needs if a rank sends one message a round, and can pass on in
    a round what it got in one before."""
    left = [[(w[0].removeprefix("i"), w[1]) for w in notes.of(r) if w[0] in
             ("send", "isend", "recv", "irecv")] for r in range(world_size)]  # fmt: skip
    clock, mail = [0] * world_size, []  # mail: (from, to, round)
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(left):
            while todo:
                name, peer = todo[0]
                if name == "send":
                    clock[rank] += 1
                    mail.append((rank, int(peer), clock[rank]))
                else:
                    mine = (m for m in mail if m[1] == rank and peer in ("?", str(m[0])))
                    letter = next(mine, None)
                    if letter is None:
                        break
                    mail.remove(letter)
                    clock[rank] = max(clock[rank], letter[2])
                todo.pop(0)
                moved = True
    return max(clock)
