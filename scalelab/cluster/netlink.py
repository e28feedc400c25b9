"""The part of pyroute2 that is used, without the rest.

`import pyroute2` loads all of that package, 0.06 s more than its IPRoute needs. Every start of a
cluster would pay for it, which is a fifth of what `scalelab run` may add to torchrun.
"""

from __future__ import annotations

import importlib.util
import sys
import types


def _iproute():
    if "pyroute2" in sys.modules:
        from pyroute2 import IPRoute

        return IPRoute
    spec = importlib.util.find_spec("pyroute2")
    bare = types.ModuleType("pyroute2")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["pyroute2"] = bare
    try:
        from pyroute2.iproute.linux import IPRoute
    finally:
        del sys.modules["pyroute2"]  # whoever imports it next gets the whole
    return IPRoute


IPRoute = _iproute()
from pyroute2.netlink.exceptions import NetlinkError  # noqa: E402

__all__ = ["IPRoute", "NetlinkError"]
