"""A host firewall from a list of rules, loaded by nft in one transaction.

A rule is a dict; first match wins, then the policy:

    action     "drop", "reject" or "accept"
    proto      "tcp", "udp", "icmp" or "any" (default)
    ports      "29500", "1024-65535" or None: destination ports
    peer       the other host's address, or a network such as 10.77.0.0/24, or None for all
    direction  "in" (default) or "out"

As usual on a host (ufw, firewalld): the policy is about traffic coming in, and what goes out is
let go unless a rule says otherwise; loopback always passes; replies to what this host began always
pass. Telling a reply needs the kernel's connection tracking. Without it, TCP packets other than
a connection's first pass instead, and a UDP reply needs a rule of its own.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess

from . import linux

_CLEAR = "table inet scalelab\ndelete table inet scalelab\n"
_TRACKED = "ct state established,related accept"
_UNTRACKED = "tcp flags & (fin | syn | rst | ack) != syn accept"
_KEYS = {"action", "proto", "ports", "peer", "direction"}


def find_nft() -> str | None:
    """Path of the nft program; /usr/sbin counts although it is on few users' PATH."""
    return shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def load(rules: list[dict], policy: str) -> str:
    """Replace the firewall of this network namespace. "" or one sentence: why not.

    Raises ValueError, with one line, for a rule that means nothing.
    """
    text = ruleset(rules, policy, _TRACKED)
    nft = find_nft()
    if nft is None:
        return "no firewall here: the program nft is missing (Debian package nftables)"
    problem = _nft(nft, text)
    if problem and (rules or policy != "accept"):
        problem = _nft(nft, ruleset(rules, policy, _UNTRACKED)) and problem
    return problem and f"nft refused the firewall: {problem}"


def ruleset(rules: list[dict], policy: str, established: str = _TRACKED) -> str:
    """The whole firewall in nft's language; only a cleared table for no rules and accept."""
    if policy not in ("accept", "drop", "reject"):
        raise ValueError(f"policy {policy!r}: accepted: accept, drop, reject")
    lines = {"in": [], "out": []}
    for rule in rules:
        direction, text = _line(rule)
        lines[direction].append(text)
    if not rules and policy == "accept":
        return _CLEAR
    last = ["reject"] if policy == "reject" else []
    default = "accept" if policy == "accept" else "drop"
    return _CLEAR + "\n".join(
        [
            "table inet scalelab {",
            f"chain in {{ type filter hook input priority 0; policy {default};",
            "iif lo accept",
            established,
            *lines["in"],
            *last,
            "}",
            "chain out { type filter hook output priority 0; policy accept;",
            "oif lo accept",
            *lines["out"],
            "}",
            "}",
            "",
        ]
    )


def _line(rule: dict) -> tuple[str, str]:
    unknown = set(rule) - _KEYS
    if unknown:
        raise ValueError(
            f"firewall rule: unknown key {sorted(unknown)[0]!r}; accepted: "
            "action, proto, ports, peer, direction"
        )
    action, proto = rule.get("action"), rule.get("proto") or "any"
    ports, peer = rule.get("ports"), rule.get("peer")
    direction = rule.get("direction") or "in"
    if action not in ("drop", "reject", "accept"):
        raise ValueError(f"firewall action {action!r}: accepted: drop, reject, accept")
    if proto not in ("tcp", "udp", "icmp", "any"):
        raise ValueError(f"firewall proto {proto!r}: accepted: tcp, udp, icmp, any")
    if direction not in ("in", "out"):
        raise ValueError(f"firewall direction {direction!r}: accepted: in, out")
    words = []
    if peer is not None:
        try:
            network = ipaddress.IPv4Network(peer)
        except ValueError:
            raise ValueError(
                f"firewall peer {peer!r}: accepted: an IPv4 address or network"
            ) from None
        words.append(f"ip {'saddr' if direction == 'in' else 'daddr'} {network}")
    if ports is not None:
        low, high = _ports(ports)
        if proto == "icmp":
            raise ValueError("firewall ports: icmp has none; accepted: with tcp, udp or any")
        names = "{ tcp, udp }" if proto == "any" else proto
        words.append(f"meta l4proto {names} th dport {low}-{high}")
    elif proto != "any":
        words.append(f"meta l4proto {proto}")
    if action == "reject" and proto == "tcp":
        words.append("reject with tcp reset")
    else:
        words.append(action)
    return direction, " ".join(words)


def _ports(text) -> tuple[int, int]:
    low, _, high = str(text).partition("-")
    high = high or low
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
        raise ValueError(f"firewall ports {text!r}: accepted: a port or a range such as 1024-65535")
    if not 1 <= int(low) <= int(high) <= 65535:
        raise ValueError(f"firewall ports {text!r}: accepted: 1 to 65535, the lower one first")
    return int(low), int(high)


def _nft(nft: str, text: str) -> str:
    # A user who is not root inside has the right to do this, but loses it at exec without help.
    keep = linux.keep_capabilities_over_exec if os.geteuid() else None
    done = subprocess.run(
        [nft, "-f", "-"], input=text, text=True, capture_output=True, timeout=30, preexec_fn=keep
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason"])[0]
