"""Lab 05: two nodes."""

from __future__ import annotations

from ...exercise import Exercise
from .lines import judge_lines
from .names import judge_names
from .opening import judge_opening
from .own_check import judge_own_check
from .parts import CHECK_SECONDS
from .practice import broken
from .storage import judge_storage

__all__ = ["EXERCISES", "broken"]

EXERCISES = [
    Exercise(
        id="05.1", title="launch lines", difficulty=2, minutes=15,
        target="one line a node, for any hosts, ranks a node, port and job; 6 ranks start on 3 "
               "nodes",
        hints=(
            "What is a number of machines, and what a number of ranks on each? Then: where do the "
            "nodes meet, and do all lines say the same place?",
            "With the c10d rendezvous no node has a number, so all lines can be the same. One of "
            "the hosts, any of them, is the place to meet.",
            "torchrun --nnodes=N --nproc-per-node=P --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST0:PORT --rdzv-id=ANYTHING JOB, the same for each of "
            "range(len(hosts)).",
        ),
        judge=judge_lines, seconds=CHECK_SECONDS,
    ),
    Exercise(
        id="05.2", title="a cluster that does not come together", difficulty=4, minutes=35,
        target="six faults found and mended on the host that has them, nothing else changed, the "
               "job passes",
        hints=(
            "What does a rank need to know before it can talk? Its own address, where the "
            "rendezvous is; then the network has to carry what it sends. Ask each host in turn.",
            "On each host: getent ahostsv4 NAME, for every node's name (the first address counts), "
            "node.env for GLOO_SOCKET_IFNAME, and ping -M do -s (MTU - 28) to the other.",
            "Names: read /etc/hosts, leave out the lines that hold a wrong name, add the right "
            "one, set_hosts. Interface: take that one variable out of node.env. MTU: "
            'cluster.set_link(mtu=1500), return "network".',
        ),
        judge=judge_names, seconds=CHECK_SECONDS,
    ),
    Exercise(
        id="05.3", title="the smallest opening", difficulty=3, minutes=20,
        target="the job passes behind the firewall; no other host and no other port gets through",
        hints=(
            "The rendezvous is one port on one host. But who connects to whom afterwards, and on "
            "which port does a rank listen?",
            "A rank listens on a port that the kernel chooses, from low to high. Who may come in: "
            "the peers, one rule each. And the first rule that matches wins.",
            "For each peer a rule with ports f\"{low}-{high}\", on the head another one with the "
            "rendezvous port, proto tcp, direction in; then the rules that were there.",
        ),
        judge=judge_opening, seconds=CHECK_SECONDS,
    ),
    Exercise(
        id="05.4", title="hosts that see different files", difficulty=4, minutes=30,
        target="five faults found and mended on the host that has them, no checkpoint lost, "
               "nothing else changed",
        hints=(
            "Two of the five raise no error. What has to be equal on both hosts: that a file is "
            "there, how many there are, their order? When are two directories one?",
            "One directory has one number: stat -c %d:%i PATH prints the same on both hosts and in "
            "the notebook, which sees the shared storage as it is. test -w PATH tells who may "
            "write.",
            "If stat differs from the notebook's, or test -w fails: copy what lies in that "
            "host's checkpoints to a directory beside them, node.set_dir(str(path), \"shared\"), "
            "and copy back what is not there.",
        ),
        judge=judge_storage, seconds=CHECK_SECONDS,
    ),
    Exercise(
        id="05.5", title="a check of your own", difficulty=2, minutes=20,
        target="right on eight made-up hosts and on real ones; what cannot be known is not checked",
        hints=(
            "Three answers are possible, not two: enough, too little, and nobody knows.",
            "host.sh(command) gives .stdout, .stderr and .returncode; Available is the fourth "
            "column of df -Pk's last line, in units of 1024 bytes. A folder's name may hold a "
            "blank.",
            "if done.returncode: raise doctor.NotChecked(done.stderr.strip()); "
            "free = 1024 * int(done.stdout.splitlines()[-1].split()[3]); then yield doctor.fail("
            "host, words, fix) or doctor.ok(host, words).",
        ),
        judge=judge_own_check, seconds=CHECK_SECONDS,
    ),
]  # fmt: skip
