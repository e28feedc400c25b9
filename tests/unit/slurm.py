"""A real Slurm in a virtual cluster: munged and slurmd on every host, slurmctld on node0."""

import os
import shutil
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
CONF = """ClusterName=test
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/dev/shm/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir=/dev/shm/slurmd
SlurmctldPidFile=/dev/shm/slurmctld.pid
SlurmdPidFile=/dev/shm/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here, or ""."""
    gone = [p for p in PROGRAMS if shutil.which(p, path=PATH) is None]
    if gone:
        return f"programs missing (Debian packages slurmd slurmctld munge): {', '.join(gone)}"
    return "" if os.geteuid() == 0 else "this Slurm is started by root"


class Slurm:
    """Slurm on the hosts of `cluster`, its files in `folder`; ends with the cluster."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "state").mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        nodes = [f"NodeName={n.name} NodeAddr={n.addr} CPUs=2 State=UNKNOWN" for n in cluster.nodes]
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes="\n".join(nodes)))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.log = open(folder / "log", "w")
        own = {"socket": "sock", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        flags = [f"--{flag}=/dev/shm/munge.{end}" for flag, end in own.items()]
        for node in cluster.nodes:
            self._daemon(node, "munged", "--foreground", "--force", f"--key-file={key}", *flags)
        self._until(lambda n: n.sh("test -S /dev/shm/munge.sock").returncode == 0)
        self._daemon(cluster.node(0), "slurmctld", "-D")
        for node in cluster.nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.name)
        idle = f"idle {len(cluster.nodes)}"
        self._until(lambda n: idle in self.sh("sinfo -h -o '%T %D'").stdout)

    def _daemon(self, node, *argv: str) -> None:
        env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
        out = self.log.fileno()
        node.spawn([*argv], out=out, err=out, env=env, cwd=str(self.folder), admin=True)

    def _until(self, done) -> None:
        end = time.monotonic() + 30
        while not all(done(n) for n in self.cluster.nodes):
            if time.monotonic() > end:
                self.log.flush()
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.2)

    def sh(self, command: str, timeout: float = 60):
        """A shell command on node0, where srun and sinfo find this Slurm."""
        return self.cluster.node(0).sh(
            f"cd {self.folder}; export SLURM_CONF={self.folder}/slurm.conf; {command}", timeout
        )
