"""Do the interfaces that the job names exist, and do peers reach what is published?"""

from __future__ import annotations

import os

from .. import addresses
from ..addresses import is_loopback, lan_address, lan_nic, nccl_choice, nic_of, nics, published
from ..nics import interfaces
from ..registry import Host, NotChecked, Seen, check, fail, ok, probe, skip


@probe("interface")
def interface(context: dict) -> dict:
    """Interfaces of this host (nics.interfaces) and the variables that choose among them."""
    return {"nics": interfaces(), "gloo": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "nccl": os.environ.get("NCCL_SOCKET_IFNAME", "")}  # fmt: skip


@check("interface", needs=["interface", "own name"], each=True)
def chosen(host: Host, seen: Seen):
    facts, found = seen.facts(host, "interface"), nics(host, seen)
    problems = list(_gloo(facts["gloo"], found, seen)) + list(_nccl(facts["nccl"], found, seen))
    right = lan_nic(host, seen)
    for variable, words in problems:
        yield fail(host, words, f"on {host.name}: export {variable}={right}")
    address, how = published(host, seen)
    if not problems and _unreached(host, address, seen):
        nic = nic_of(address, host, seen)
        of = f" of {nic['name']}" if nic else ""
        container = " (a container network's)" if addresses.from_container_range(address) else ""
        fix = f"on {host.name}: export GLOO_SOCKET_IFNAME={right} NCCL_SOCKET_IFNAME={right}"
        if container:
            fix += "; in a container: --network=host"
        yield fail(
            host,
            f"published address {address}{of}{container}, from {how}, is not reached by peers; "
            f"{lan_address(host, seen)} is",
            fix,
        )
        return
    if not problems:
        theirs = nccl_choice(facts["nccl"], found)
        nccl = ", ".join(n["name"] for n in theirs) or "none"
        nic = nic_of(address, host, seen)
        gloo = f"{nic['name'] if nic else 'loopback'} {address or ''} ({how})"
        if seen.separate and (not address or is_loopback(address)):
            yield skip(host, f"gloo takes loopback: see own name; NCCL: {nccl}")
        else:
            yield ok(host, f"gloo: {gloo}; NCCL: {nccl}")


def _gloo(wanted: str, found: list[dict], seen: Seen):
    """(variable, words) for each interface that gloo is told to use and cannot."""
    by_name = {n["name"]: n for n in found}
    for name in wanted.split(",") if wanted else []:
        nic, said = by_name.get(name), f"GLOO_SOCKET_IFNAME={wanted}"
        if nic is None:
            yield "GLOO_SOCKET_IFNAME", f"{said}: no interface {name!r} here ({_list(found)})"
        elif not nic["up"]:
            yield "GLOO_SOCKET_IFNAME", f"{said}: {name} is down"
        elif not nic["addrs"]:
            yield "GLOO_SOCKET_IFNAME", f"{said}: {name} has no IPv4 address"
        elif nic["loopback"] and seen.separate:
            yield "GLOO_SOCKET_IFNAME", f"{said}: peers will be told to dial loopback"


def _nccl(wanted: str, found: list[dict], seen: Seen):
    if not wanted:
        return
    theirs, said = nccl_choice(wanted, found), f"NCCL_SOCKET_IFNAME={wanted}"
    if not theirs:
        yield ("NCCL_SOCKET_IFNAME",
               f"{said}: NCCL finds no such interface that is up ({_list(found)})")  # fmt: skip
    elif seen.separate and theirs[0]["loopback"]:
        yield "NCCL_SOCKET_IFNAME", f"{said}: peers will be told to dial loopback"


def _list(found: list[dict]) -> str:
    return ", ".join(n["name"] for n in found if n["addrs"])


def _unreached(host: Host, address: str | None, seen: Seen) -> bool:
    """Whether no peer reaches what the host publishes, and one reaches it by another address."""
    if not address or not seen.separate or is_loopback(address):
        return False
    at, elsewhere = [], []
    for (_, to), pair in seen.pairs.items():
        for tried, results in pair.get("dialled", {}).items() if to == host.name else []:
            good = any(r["result"] == "ok" for r in results)
            (at if tried == address else elsewhere).append(good)
    return bool(at) and not any(at) and any(elsewhere)


def reached_by(host: Host, seen: Seen) -> dict | None:
    """The interface in use between this host and its peers; None where it is not known."""
    addrs = [p["addr"] for (_, to), p in seen.pairs.items() if to == host.name and p.get("addr")]
    try:
        return nic_of((addrs or [lan_address(host, seen)])[0], host, seen)
    except NotChecked:
        return None
