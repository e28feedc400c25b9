"""All checks, causes before consequences: what is named first is what to mend first."""

from __future__ import annotations

from importlib import import_module

from ..registry import Check

# One module a topic, in causal order.
TOPICS = (
    "host", "names", "endpoint", "interface", "connect", "mtu", "link", "speed", "clock", "shared",
    "data", "environment", "shm", "limits", "threads", "leftovers", "stuck", "reboot", "gpu",
    "matmul",
)  # fmt: skip


def _load() -> tuple[list[Check], list[type]]:
    checks, parts = [], []
    for topic in TOPICS:
        module = import_module(f"{__name__}.{topic}")
        checks += [value for value in vars(module).values() if isinstance(value, Check)]
        parts += [value for name, value in vars(module).items() if name in ("NetOps", "SharedOps")]
    return checks, list(dict.fromkeys(parts))


# PARTS: what an agent can be asked besides probes; see `agent.Agent`.
CHECKS, PARTS = _load()
