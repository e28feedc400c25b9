"""What `scalelab doctor --launch` says of the script that the lines start: wrong ones are named,
and the right one beside each stays silent."""

import contextlib
import io

import pytest

from scalelab.doctor import launch
from scalelab.doctor.launch.options import LAUNCH, PARSERS, TORCHRUN, Refused, parse

TWO = "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 s.py"
STATIC = "\n".join(f"torchrun --nnodes=2 --node-rank={i} --master-addr=10.0.0.1 "
                   "--master-port=29500 s.py" for i in (0, 1))  # fmt: skip
OLD = STATIC.replace("torchrun", "python -m torch.distributed.launch")
HEAD = """import argparse, glob, os, torch
import torch.distributed as dist
from pathlib import Path
from torch.utils.data import DistributedSampler
"""
INIT = "dist.init_process_group('gloo')\n"
RANKED = "rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE'])"
LOCAL_RANK = """p = argparse.ArgumentParser()
p.add_argument({names}, type=int, default={default})
args = p.parse_args()
torch.cuda.set_device(args.local_rank)
"""
URL = """p = argparse.ArgumentParser()
p.add_argument('--dist-url', default={url!r})
args = p.parse_args()
dist.init_process_group('nccl', init_method=args.dist_url)
"""
LOOP = "for epoch in range(3):\n    {body}\n"

# (lines, wrong script, status, words, right script)
CASES = {
    "init_method on localhost": (
        TWO, f"dist.init_process_group('gloo', init_method='tcp://127.0.0.1:29501', {RANKED})",
        "fail", "each node meets itself", "dist.init_process_group('gloo', init_method='env://')"),
    "init_method elsewhere": (
        STATIC, f"dist.init_process_group('gloo', 'tcp://10.0.0.9:29501', {RANKED})",
        "fail", "while the lines say 10.0.0.1", f"dist.init_process_group('gloo', {RANKED})"),
    "init_method by an option": (
        TWO, URL.format(url="tcp://127.0.0.1:23456"), "fail", "each node meets itself",
        URL.format(url="env://")),
    "rank written down": (
        TWO, "dist.init_process_group('gloo', rank=0, world_size=4)", "fail", "rank=0",
        f"dist.init_process_group('gloo', {RANKED})"),
    "world size written down": (
        TWO, "dist.init_process_group('gloo', rank=int(os.environ['RANK']), world_size=2)",
        "fail", "world_size=2",
        "dist.init_process_group('gloo', rank=int(os.environ['RANK']), world_size=4)"),
    "MASTER_ADDR set": (
        TWO, "os.environ['MASTER_ADDR'] = 'localhost'\n" + INIT, "fail", "MASTER_ADDR",
        "os.environ.setdefault('MASTER_ADDR', 'localhost')\n" + INIT),
    "MASTER_PORT set": (
        STATIC, "os.environ['MASTER_PORT'] = '12355'\n" + INIT, "fail", "29500",
        "os.environ['MASTER_PORT'] = '29500'\n" + INIT),
    "RANK set": (
        TWO, "os.environ['RANK'] = '0'\n" + INIT, "fail", "same number",
        "if 'RANK' not in os.environ:\n    os.environ['RANK'] = '0'\n" + INIT),
    "WORLD_SIZE set": (
        TWO, "os.environ.update({'WORLD_SIZE': '2'})\n" + INIT, "fail", "4 ranks",
        "os.environ.update({'WORLD_SIZE': '4'})\n" + INIT),
    "no set_epoch": (
        TWO, INIT + "s = DistributedSampler(d)\n" + LOOP.format(body="pass"), "warn", "set_epoch",
        INIT + "s = DistributedSampler(d)\n" + LOOP.format(body="s.set_epoch(epoch)")),
    "no set_epoch, not shuffled": (
        TWO, INIT + "s = DistributedSampler(d, shuffle=True)\n" + LOOP.format(body="pass"),
        "warn", "set_epoch",
        INIT + "s = DistributedSampler(d, shuffle=False)\n" + LOOP.format(body="pass")),
    "listdir": (TWO, INIT + "mine = os.listdir('d')[0::2]", "warn", "order of each node's disk",
                INIT + "mine = sorted(os.listdir('d'))[0::2]"),
    "listdir, sorted later": (
        TWO, INIT + "f = os.listdir('d')\nmine = f[0::2]", "warn", "listdir",
        INIT + "f = os.listdir('d')\nf.sort()\nmine = f[0::2]"),
    "imported listdir": (
        TWO, "from os import listdir as ls\n" + INIT + "f = ls('d')\nmine = f[::2]", "warn", "ls",
        "from os import listdir as ls\n" + INIT + "n = len(ls('d'))"),
    "glob, collected": (
        TWO, INIT + "f = []\nfor n in glob.glob('*'):\n    f.append(n)\nmine = f[::2]", "warn",
        "glob.glob", INIT + "for n in glob.glob('*.tmp'):\n    os.remove(n)"),
    "iterdir": (TWO, INIT + "f = list(Path('d').iterdir())\nmine = f[::2]", "warn", "iterdir",
                INIT + "f = sorted(p for p in Path('d').iterdir() if p.is_file())\nmine = f[::2]"),
    "rglob": (TWO, INIT + "mine = [p for p in Path('d').rglob('*.pt')][0::2]", "warn", "rglob",
              INIT + "last = max(Path('d').rglob('*.pt'), key=os.path.getmtime)"),
    "walk": (
        TWO, INIT + "f = []\nfor a, b, c in os.walk('d'):\n    for n in c:\n        f.append(n)\n"
        "mine = f[::2]", "warn", "os.walk",
        INIT + "f = []\nfor a, b, c in os.walk('d'):\n    b.sort()\n    for n in sorted(c):\n"
        "        f.append(n)\nmine = f[::2]"),
    "scandir": (TWO, INIT + "f = [e.name for e in os.scandir('d')]\nmine = f[::2]", "warn",
                "scandir", INIT + "f = {e.name for e in os.scandir('d')}"),
    "a dataset's files": (
        TWO, INIT + "class D:\n    def __init__(self, r):\n        self.f = os.listdir(r)\n"
        "    def __getitem__(self, i):\n        return self.f[i]", "warn", "listdir",
        INIT + "class D:\n    def __init__(self, r):\n        self.f = os.listdir(r)\n"
        "        self.f.sort()\n"),
    "a function's list": (
        TWO, INIT + "def names():\n    return glob.glob('*')\nmine = names()[::2]", "warn", "glob",
        INIT + "def names():\n    return glob.glob('*')\nmine = sorted(names())[::2]"),
    "on every rank": (
        TWO, INIT + "f = os.listdir('d')\nlast = f[-1]", "warn", "listdir",
        INIT + "if dist.get_rank() == 0:\n    f = os.listdir('d')\n    last = f[-1]"),
    "--local_rank under torchrun": (
        TWO, LOCAL_RANK.format(names="'--local_rank'", default=0) + INIT, "fail", "--local_rank",
        LOCAL_RANK.format(names="'--local_rank'", default="int(os.environ['LOCAL_RANK'])") + INIT),
    "--local_rank under the old launcher": (
        OLD, LOCAL_RANK.format(names="'--local_rank'", default=0) + INIT, "fail", "--local-rank",
        LOCAL_RANK.format(names="'--local-rank', '--local_rank'", default=0) + INIT),
    "set_device by the global rank": (
        TWO, INIT + "rank = dist.get_rank()\ntorch.cuda.set_device(rank)", "fail", "global rank",
        INIT + "rank = dist.get_rank()\ntorch.cuda.set_device(rank % torch.cuda.device_count())"),
    "cuda:RANK": (
        TWO, INIT + "rank = int(os.environ['RANK'])\ndevice = f'cuda:{rank}'", "fail",
        "global rank", INIT + "rank = int(os.environ['LOCAL_RANK'])\ndevice = f'cuda:{rank}'"),
    "a spawned function's rank": (
        TWO, INIT + "torch.cuda.set_device(dist.get_rank())", "fail", "global rank",
        INIT + "def main(rank, n):\n    torch.cuda.set_device(rank)"),
    "no init": (
        TWO, "m = torch.nn.Linear(1, 1)\nm(torch.ones(1)).backward()", "fail",
        "never calls init_process_group",
        INIT + "m = torch.nn.Linear(1, 1)\nm(torch.ones(1)).backward()"),
    "no init, but another's": (
        TWO, "loss = torch.ones(1)\nloss.backward()", "fail", "never calls init_process_group",
        "from accelerate import Accelerator\nloss = torch.ones(1)\nloss.backward()"),
    "no init, but in a module": (
        TWO, "loss = torch.ones(1)\nloss.backward()", "fail", "never calls init_process_group",
        "import mine\nmine.setup()\nloss.backward()"),
    "another Python": (TWO, "print 'x'", "warn", "not the Python", INIT + "print('x')"),
}  # fmt: skip


def judged(text, script, folder):
    (folder / "s.py").write_text(HEAD + script + "\n")
    return [c for c in launch.read_launch(text, str(folder))["checks"] if c["status"] != "pass"]


@pytest.mark.parametrize("case", CASES)
def test_wrong_script_is_named_and_the_right_one_is_not(case, tmp_path):
    text, wrong, status, words, right = CASES[case]
    first = judged(text, wrong, tmp_path)[0]
    assert (first["name"], first["status"]) == ("script", status)
    assert words in first["detail"] and "s.py line" in first["detail"] or case == "another Python"
    assert judged(text, right, tmp_path) == []


def test_one_node_may_say_localhost(tmp_path):
    one = "torchrun --standalone --nproc-per-node=2 s.py"
    script = "os.environ['MASTER_ADDR'] = 'localhost'\n" + INIT
    script += "rank = dist.get_rank()\ntorch.cuda.set_device(rank)\n"
    assert judged(one, script, tmp_path) == []
    assert len(judged(TWO, script, tmp_path)) == 2


def test_what_an_option_switches_off_is_not_judged(tmp_path):
    script = INIT + "p = argparse.ArgumentParser()\np.add_argument('--data')\n"
    script += "def share(d):\n    return os.listdir(d)[::2]\nargs = p.parse_args()\n"
    script += "if args.data:\n    mine = share(args.data)\n"
    assert judged(TWO, script, tmp_path) == []
    for given in (" --data d", " --data=d", " $MORE"):
        assert "listdir" in judged(TWO + given, script, tmp_path)[0]["detail"]


def test_the_script_is_never_run(tmp_path):
    judged(TWO, f"open({str(tmp_path / 'ran')!r}, 'w')", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_scripts_that_cannot_be_read_are_left_alone(tmp_path):
    (tmp_path / "s.py").mkdir()
    result = launch.read_launch(TWO, str(tmp_path))
    assert {c["status"] for c in result["checks"]} == {"pass"}
    for content in (b"\0\xff" * 100, b"(" * 100_000, b"x = 1" + b" + 1" * 20_000):
        (tmp_path / "t.py").write_bytes(content)
        launch.read_launch(TWO.replace("s.py", "t.py"), str(tmp_path))


def test_a_module_is_found_as_a_file(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "job.py").write_text(HEAD + CASES["listdir"][1])
    result = launch.read_launch(TWO.replace("s.py", "-m pkg.job"), str(tmp_path))
    assert result["checks"][0]["name"] == "script"


# ---- torchrun itself must say what is said of it

LINES = (
    "--nnodes=2 t.py", "--nnode 2 t.py", "--nproc 2 t.py", "--nproc_per 2 t.py", "--stand t.py",
    "--node-rank=x t.py", "--node-rank -1 t.py", "--nnodes 2 --foo 3 t.py", "--master_port=2.5 t",
    "--master_addr t.py", "-m pkg --x 1", "--node-rank= t.py", "--rdzv_end a t.py -m",
    "t.py --nnodes 2",
    "--rdzv-id --nnodes=2 t.py", "-t 3 -r 0:1 t.py", "--no-python ./x", "--standalone=1 t.py", "",
    "--max-restarts=1e3 t.py", "--monitor-interval 1e3 t.py", "--role", "-x t.py", "--use-env t.py",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_options_are_read_as_torch_reads_them(launcher):
    from torch.distributed.run import get_args_parser

    theirs = get_args_parser()
    if launcher == "launch":
        theirs.add_argument("--use-env", "--use_env", default=False, action="store_true")
    known = {n for a in theirs._actions for n in a.option_strings} - {"-h", "--help"}
    ours = {n for names, _ in (TORCHRUN if launcher == "torchrun" else LAUNCH) for n in names}
    assert ours == known
    for line in LINES:
        words = line.split()
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                expected = vars(theirs.parse_args(words))
        except SystemExit:
            expected = None
        try:
            PARSERS[launcher].parse_args(words)
            refused = False
        except Refused:
            refused = True
        assert refused == (expected is None), line
        options, problems = parse(launcher, words)
        assert bool(problems) == (expected is None), (line, problems)
        if expected:
            assert options["script"] == expected["training_script"], line
            assert options["args"] == expected["training_script_args"], line
            for name in ("nnodes", "node_rank", "master_addr", "rdzv_endpoint", "standalone"):
                if options[name] not in (None, False):
                    assert str(options[name]) == str(expected[name]), line


@pytest.mark.slow
@pytest.mark.parametrize(
    "endpoint, refused",
    [("tcp://node0:29400", True), ("node0:29x", True), ("node0:70000", True), ("node0:", True),
     ("node0:29400", False), ("node0", False), ("[fd00::1]:29400", False), ("a b:1", True)],
)  # fmt: skip
def test_endpoints_are_judged_as_torch_parses_them(endpoint, refused, tmp_path):
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    line = f"torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint='{endpoint}' t.py"
    result = launch.read_launch(line, str(tmp_path))
    failed = [c for c in result["checks"] if c["status"] == "fail"]
    assert bool(failed) == refused
    if refused:
        with pytest.raises(ValueError):
            parse_rendezvous_endpoint(endpoint, 29400)
    else:
        host, port = parse_rendezvous_endpoint(endpoint, 29400)
        assert host in ("node0", "fd00::1") and port == 29400


@pytest.mark.slow
def test_static_without_a_port_is_refused_by_torch():
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

    parameters = RendezvousParameters("static", "node0", "none", 2, 2, rank=0)
    with pytest.raises(ValueError, match="Port is absent"):
        create_rdzv_handler(parameters)
    # … and a node rank that is not below nnodes is not
    far = RendezvousParameters("static", "node0:29400", "none", 1, 1, rank=3)
    assert create_rdzv_handler(far).rank == 3
