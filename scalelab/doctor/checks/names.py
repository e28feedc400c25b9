"""Does a host's own name lead to an address that its peers can dial?

gloo publishes what the host's own name resolves to: the first address that it can bind. Debian
and Ubuntu give a host 127.0.1.1 in its own /etc/hosts, and the peers are then told to dial
themselves.
"""

from __future__ import annotations

import socket
import threading

from ..addresses import is_loopback, lan_address, lan_nic, own_addresses, published
from ..registry import Host, NotChecked, Seen, check, fail, ok, probe
from ..tcp import new

PATIENCE = 2.0  # seconds; a resolver without its server takes 5 s and more a name


def resolve(name: str, **options) -> tuple[list[tuple], str]:
    """(what getaddrinfo returned, "") or ([], why), within PATIENCE."""
    answer: list = []

    def run() -> None:
        try:
            answer.append((socket.getaddrinfo(name, None, **options), ""))
        except (OSError, ValueError) as e:
            answer.append(([], str(getattr(e, "strerror", None) or e)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answer[0] if answer else ([], f"no answer within {PATIENCE:g} s")


@probe("own name", limit=PATIENCE + 1)
def own_name(context: dict) -> dict:
    """What the host's own name resolves to, and the first of it that can be bound, as gloo does
    (doesHostnameResolveToUsableAddress in torch's ProcessGroupGloo.cpp)."""
    name = socket.gethostname()
    found, error = resolve(name, type=socket.SOCK_STREAM)
    addrs = list(dict.fromkeys(f[4][0] for f in found))
    return {"name": name, "addrs": addrs, "error": error,
            "usable": next((a for a in addrs if _can_bind(a)), None)}  # fmt: skip


def _can_bind(addr: str) -> bool:
    try:
        with new(addr) as s:
            s.bind((addr, 0))
        return True
    except OSError:
        return False


def bad_name(host: Host, seen: Seen) -> str:
    """What is wrong with a host's own name, whatever GLOO_SOCKET_IFNAME says; "" for nothing.
    Raises NotChecked."""
    facts = seen.facts(host, "own name")
    if not seen.separate:
        return ""
    name, addrs, usable = facts["name"], ", ".join(facts["addrs"]), facts["usable"]
    if facts["error"]:
        return f"{name} (its own name) does not resolve: {facts['error']}; gloo takes loopback then"
    if usable is None:
        return (f"{name} (its own name) resolves to {addrs}, no address of this machine; "
                "gloo takes loopback then")  # fmt: skip
    if is_loopback(usable):
        return f"{name} (its own name) resolves to {usable}: peers will be told to dial loopback"
    return ""


def is_named(host: Host, seen: Seen) -> bool:
    """Whether the check "own name" fails for this host, so that no later one need do so for the
    same reason. A right GLOO_SOCKET_IFNAME makes up for a bad name."""
    try:
        return bool(bad_name(host, seen)) and not _made_up_for(host, seen)
    except NotChecked:
        return False


def _made_up_for(host: Host, seen: Seen) -> bool:
    address, how = published(host, seen)
    return how.startswith("GLOO") and address in own_addresses(host, seen)


@check("own name", needs=["own name", "interface"], each=True)
def names(host: Host, seen: Seen):
    problem = bad_name(host, seen)
    facts = seen.facts(host, "own name")
    if not problem:
        where = ", ".join(facts["addrs"]) or "nothing"
        one = "" if seen.separate else "; all hosts are one machine"
        yield ok(host, f"{facts['name']} resolves to {where}{one}")
    elif _made_up_for(host, seen):
        address, how = published(host, seen)
        yield ok(host, f"{problem.partition(':')[0]}, but gloo publishes {address} ({how})")
    else:
        line = f"{lan_address(host, seen)} {facts['name']}"
        yield fail(
            host,
            problem,
            f"in /etc/hosts of {host.name}, in place of what it says of {facts['name']}: "
            f"`{line}`; or there: export GLOO_SOCKET_IFNAME={lan_nic(host, seen)}",
        )
