"""Made-up facts of hosts for the doctor's checks, and what a check makes of them."""

from scalelab.doctor.registry import Host, Seen, judge


def seen(probe, *values, separate=True, **options):
    """A Seen in which `probe` found these values on node0, node1, …; a text is why it did not."""
    hosts = []
    for i, value in enumerate(values):
        found = {"not_checked": value} if isinstance(value, str) else {"value": value}
        machine = {"boot_id": str(i if separate else 0), "net": "n"}
        hosts.append(Host(f"node{i}", None, {probe: found, "identity": {"value": machine}}))
    return Seen(hosts, **options)


def verdicts(check, what):
    """[(status, node)] in the order in which they are shown."""
    return [(f.status, f.node) for f in judge([check], what)]


def worst(check, what):
    return judge([check], what)[0]


def is_fine(check, what):
    assert {f.status for f in judge([check], what)} == {"pass"}, judge([check], what)
