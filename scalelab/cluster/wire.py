"""Frames between a client, its cluster's owner and the hosts: JSON, with open files attached.

A frame is a 4-byte length and a JSON object; open file descriptors ride on the first byte
(SCM_RIGHTS), so a rank's output goes straight from the rank to the client's pipe.
"""

from __future__ import annotations

import json
import os
import socket

MAX_FDS = 8


def send(sock: socket.socket, message: dict, fds: tuple[int, ...] = ()) -> None:
    """Send one frame. Raises OSError when the other end is gone."""
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(4, "big") + body
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else sock.send(frame)
    if sent < len(frame):
        sock.sendall(frame[sent:])


def receive(sock: socket.socket) -> tuple[dict, list[int]]:
    """Read one frame, blocking. Raises EOFError when the other end is gone."""
    head, fds, _, _ = socket.recv_fds(sock, 4, MAX_FDS)
    for fd in fds:
        os.set_inheritable(fd, False)
    length = int.from_bytes(head + _exactly(sock, 4 - len(head), bool(head)), "big")
    return json.loads(_exactly(sock, length, True)), fds


def _exactly(sock: socket.socket, n: int, started: bool) -> bytes:
    data = b""
    while len(data) < n:
        more = sock.recv(n - len(data)) if started else b""
        if not more:
            raise EOFError("the other end is gone")
        data += more
    return data
