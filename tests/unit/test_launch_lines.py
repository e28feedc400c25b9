"""`scalelab doctor --launch`: wrong launch lines are named, right ones give nothing but pass."""

import os
import random
import threading
import time

import pytest

from scalelab.cluster import UsageError
from scalelab.doctor import launch
from scalelab.doctor.launch.commands import Reader

C10D = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29400"


def static(rank, more="--master-addr=node0 --master-port=29500", script="t.py", nnodes=2):
    return f"torchrun --nnodes={nnodes} --node-rank={rank} {more} {script}"


def pair(*lines):
    return "\n".join(lines)


def told(rank, names="NODE_RANK NNODES", program="llamafactory-cli train x.yaml", more=""):
    number, count = names.split()
    return (f"FORCE_TORCHRUN=1 {count}=2 {number}={rank} MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 "
            f"{more} {program}")  # fmt: skip


def machines(rank, more="--num_processes 16", address="--main_process_ip 10.0.0.1"):
    return f"accelerate launch --num_machines 2 {more} --machine_rank {rank} {address} t.py"


# what is wrong: (text, name of the finding that comes first, its status, words in it)
WRONG = {
    "both are node 0": (pair(static(0), static(0)), "node rank", "fail", "both are number 0"),
    "no rank, same text": (
        pair(*["torchrun --nnodes=2 --master-addr=node0 t.py"] * 2),
        "node rank", "fail", "is not given"),
    "counted from 1": (pair(static(1), static(2)), "node rank", "fail", "not below"),
    "rank without nnodes": ("torchrun --node-rank=3 --master-port=29500 t.py",
                            "node rank", "fail", "for ever"),
    "rank alone": ("torchrun --nnodes=1 --node-rank=3 t.py", "node rank", "fail", "by itself"),
    "negative": (pair(static(-1), static(0)), "node rank", "fail", "negative"),
    "not a number": (pair(static("x"), static(0)), "node rank", "fail", "not a whole number"),
    "a number is missing": (pair(static(0, nnodes=3), static(2, nnodes=3)),
                            "node rank", "fail", "no line has --node-rank 1"),
    "nobody is 0": (pair(static(1, nnodes=3), static(2, nnodes=3)), "node rank", "fail", "rank 0"),
    "srun, a literal": ("srun -N 2 " + static(0), "node rank", "fail", "one line for all"),
    "srun, expanded early": ("srun -N 2 " + static("$SLURM_NODEID"), "node rank", "fail",
                             "before srun"),
    "srun, double quotes": (f'srun bash -c "{static("$SLURM_NODEID")}"', "node rank", "fail",
                            "before srun"),
    "fewer lines": (static(0), "lines", "warn", "1 line for --nnodes=2"),
    "more lines": (pair(*[C10D + " t.py"] * 3), "lines", "warn", "3 lines"),
    "ranks started one by one": (
        "RANK=0 WORLD_SIZE=16 MASTER_ADDR=a MASTER_PORT=29500 python t.py\n"
        "RANK=1 WORLD_SIZE=16 MASTER_ADDR=a MASTER_PORT=29500 python t.py",
        "lines", "warn", "16 processes"),
    "nnodes disagree": (pair(static(0), static(1, nnodes=3)), "nnodes", "fail", "disagrees"),
    "nnodes forgotten on both": (
        "node0: torchrun --nproc-per-node=2 t.py\nnode1: torchrun --nproc-per-node=2 t.py",
        "nnodes", "fail", "by itself"),
    "nnodes of 0": ("torchrun --nnodes=0 t.py", "nnodes", "fail", "1 or more"),
    "nnodes no number": ("torchrun --nnodes=two t.py", "nnodes", "fail", "not a number"),
    "Slurm starts others": ("srun -N 4 " + C10D + " t.py", "nnodes", "fail", "4 nodes"),
    "tasks a node": ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun " + C10D + " t.py",
                     "lines", "fail", "8 times"),
    "nproc disagree": (pair(C10D + " --nproc-per-node=7 t.py", C10D + " --nproc-per-node=8 t.py"),
                       "nproc", "warn", "starts 7"),
    "nproc disagree, said to be equal": (
        "export TORCH_ELASTIC_WORKER_IDENTICAL=1\n"
        + pair(C10D + " --nproc-per-node=7 t.py", C10D + " --nproc-per-node=8 t.py"),
        "nproc", "fail", "starts 7"),
    "nproc no number": (C10D + " --nproc-per-node=many t.py", "nproc", "fail", "many"),
    "accelerate shares out": (pair(machines(0, "--num_processes 1"),
                                   machines(1, "--num_processes 1")), "nproc", "fail", "together"),
    "two ids": (pair(C10D + " --rdzv-id=a t.py", C10D + " --rdzv_id b t.py"),
                "rdzv id", "fail", "disagrees"),
    "an id on one": (pair(C10D + " --rdzv-id=a t.py", C10D + " t.py"), "rdzv id", "fail", "none"),
    "random id": (C10D + " --rdzv-id=$RANDOM t.py", "rdzv id", "fail", "RANDOM"),
    "addresses disagree": (
        pair(static(0, "--master-addr=10.0.0.1"), static(1, "--master-addr=10.0.0.2")),
        "endpoint", "fail", "disagrees"),
    "names of one host": (
        pair(static(0, "--master-addr=node0"), static(1, "--master-addr=node0.cluster")),
        "endpoint", "warn", "differently"),
    "name and address": (
        pair(static(0, "--master-addr=node0"), static(1, "--master-addr=10.0.0.1")),
        "endpoint", "warn", "differently"),
    "ports disagree": (
        pair(static(0), static(1, "--master-addr=node0 --master-port=29501")),
        "endpoint", "fail", "ports disagree"),
    "c10d without endpoint": (
        "torchrun --nnodes=2 --rdzv-backend=c10d --master-addr=node0 --master-port=29400 t.py",
        "endpoint", "fail", "static rendezvous only"),
    "c10d with static's": (C10D + " --master-addr=node0 t.py", "endpoint", "warn", "not read"),
    "c10d and node rank": (pair(C10D + " --node-rank=0 t.py", C10D + " --node-rank=1 t.py"),
                           "endpoint", "warn", "--node-rank"),
    "static, two addresses": (
        pair(*[static(i, "--master-addr=node0 --rdzv-endpoint=node0:29500") for i in (0, 1)]),
        "endpoint", "warn", "not read"),
    "localhost": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 t.py",
                  "endpoint", "fail", "each node meets itself"),
    "localhost by default": (pair(static(0, ""), static(1, "")), "endpoint", "fail", "127.0.0.1"),
    "localhost on node 1": (pair(static(0), static(1, "--master-addr=127.0.0.1")),
                            "endpoint", "fail", "this node"),
    "localhost on node 0": (pair(static(0, "--master-addr=localhost"), static(1)),
                            "endpoint", "warn", "the head itself"),
    "no port, static": (
        pair(*[static(i, "--rdzv-endpoint=node0") for i in (0, 1)]), "endpoint", "fail", "no port"),
    "no port, c10d": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0 t.py",
                      "endpoint", "warn", "29400"),
    "privileged": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0:80 t.py",
                   "endpoint", "fail", "privileged"),
    "ephemeral": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0:40000 t.py",
                  "endpoint", "warn", "outgoing"),
    "port no number": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:29x t.py",
                       "endpoint", "fail", "29x"),
    "port too high": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:70000 t.py",
                      "endpoint", "fail", "70000"),
    "scheme": ("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=tcp://node0:29400 t.py",
               "endpoint", "fail", "no scheme"),
    "port in the address": (pair(*[static(i, "--master-addr=node0:29500") for i in (0, 1)]),
                            "endpoint", "fail", "taken for a part"),
    "no address": (pair(*[static(i, "--master-addr=10.0.0.256") for i in (0, 1)]),
                   "endpoint", "fail", "not an IP address"),
    "the head is number 1": (pair("node0: " + static(1), "node1: " + static(0)),
                             "endpoint", "fail", "nobody does there"),
    "LLaMA-Factory without port": (
        pair(*[f"FORCE_TORCHRUN=1 NNODES=2 NODE_RANK={i} MASTER_ADDR=h llamafactory-cli train x"
               for i in (0, 1)]), "endpoint", "fail", "free port"),
    "standalone": ("torchrun --nnodes=2 --standalone t.py", "nnodes", "fail", "--standalone"),
    "RANK for NODE_RANK": (pair(told(0, "RANK NNODES"), told(1, "RANK NNODES")),
                           "variable", "fail", "NODE_RANK"),
    "WORLD_SIZE for NNODES": (pair(told(0, "NODE_RANK WORLD_SIZE"),
                                   told(1, "NODE_RANK WORLD_SIZE")),
                              "variable", "fail", "NNODES"),
    "torchrun told by variables": (
        "MASTER_ADDR=h NNODES=2 NODE_RANK=1 torchrun --nproc-per-node=8 t.py",
        "variable", "fail", "torchrun does not read"),
    "not exported": ("NNODES=2\nNODE_RANK=0\nMASTER_ADDR=h\nMASTER_PORT=29500\n"
                     "FORCE_TORCHRUN=1 llamafactory-cli train x", "variable", "fail", "exported"),
    "expanded before set": ("H=node0 torchrun --nnodes=2 --node-rank=0 --master-addr=$H t.py",
                            "variable", "fail", "before it is set"),
    "NCCL_TIMEOUT": ("NCCL_TIMEOUT=60 " + C10D + " t.py", "variable", "warn", "nothing reads"),
    "old name": ("export NCCL_ASYNC_ERROR_HANDLING=1\n" + C10D + " t.py", "variable", "warn",
                 "old name"),
    "NCCL_SOCKET_INAME": ("NCCL_SOCKET_INAME=eth0 " + C10D + " t.py", "variable", "fail",
                          "NCCL_SOCKET_IFNAME"),
    "GLOO_SOCKET_IFNAMES": ("GLOO_SOCKET_IFNAMES=eth0 " + C10D + " t.py", "variable", "fail",
                            "GLOO_SOCKET_IFNAME"),
    "MASTER_PROT": ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PROT=29500 python t.py",
                    "variable", "fail", "MASTER_PORT"),
    "gloo on lo": ("GLOO_SOCKET_IFNAME=lo " + C10D + " t.py", "interface", "fail", "loopback"),
    "NCCL on lo": ("NCCL_SOCKET_IFNAME=lo " + C10D + " t.py", "interface", "fail", "loopback"),
    "gloo takes no ^": ("GLOO_SOCKET_IFNAME=^lo " + C10D + " t.py", "interface", "fail", "NCCL's"),
    "unknown option": (C10D + " --nprocs=2 t.py", "option", "fail", "no option --nprocs"),
    "misspelt option": (C10D + " --rdzv-endpiont=2 t.py", "option", "fail", "endpiont"),
    "ambiguous option": (C10D + " --master=h t.py", "option", "fail", "more than one"),
    "behind the script": ("torchrun t.py --nnodes=2 --rdzv-endpoint=a:29400", "option", "fail",
                          "behind t.py"),
    "no script": (C10D, "script", "fail", "no script"),
    "other scripts": (pair(C10D + " t.py", C10D + " u.py"), "script", "fail", "different scripts"),
    "other places": (pair(C10D + " /a/t.py", C10D + " /b/t.py"), "script", "warn", "places"),
    "other arguments": (pair(C10D + " t.py --batch-size 8", C10D + " t.py --batch-size=16"),
                        "arguments", "warn", "--batch-size differs: 8 on line 1, 16 on line 2"),
    "chat's dashes": (C10D.replace("--", "—") + " t.py", "character", "fail", "—"),
    "chat's quotes": (C10D + " t.py --x “a b”", "character", "fail", "“"),
    "blank after backslash": (C10D + " \\ \n t.py", "line", "fail", "blank"),
    "no backslash": ("torchrun --nnodes=2\n --rdzv-backend=c10d --rdzv-endpoint=a:29400 t.py",
                     "line", "fail", "backslash"),
    "comment within": (C10D + " \\\n # id\n --rdzv-id=1 t.py", "line", "fail", "comment"),
    "open quote": (C10D + " t.py 'a b", "quote", "fail", "never closed"),
    "placeholder": (pair(*[static(i, "--master-addr=<HEAD_IP>") for i in (0, 1)]), "line", "warn",
                    "placeholder"),
}  # fmt: skip

RIGHT = {
    "c10d, one text for all": C10D + " t.py",
    "c10d twice": pair(C10D + " t.py", C10D + " t.py"),
    "static": pair(static(0), static(1)),
    "other order": pair(static(1), static(0)),
    "underscores and blanks": pair(*[
        f"torchrun --nnodes 2 --nproc_per_node 8 --node_rank {i} --master_addr 10.0.0.1 "
        "--master_port 29500 t.py --lr 1e-3" for i in (0, 1)]),
    "abbreviated": C10D.replace("--nnodes", "--nnode") + " --max-restart 3 t.py",
    "elastic": C10D.replace("=2", "=1:4") + " --max-restarts=3 t.py",
    "labels": pair("node0: " + static(0), "node1: " + static(1)),
    "prompts": pair("node0$ " + static(0), "[root@gpu01 ~]# " + static(1)),
    "other prompts": pair("(base) me@a:~/x$ " + static(0), "PS C:\\x> " + static(1)),
    "headings": "# on node 0\n" + static(0) + "\n\n# on node 1\n" + static(1),
    "Chinese": "主节点：" + static(0) + "\n从节点：" + static(1),
    "prose": f"On the first machine I run `{static(0)}` and\n* on node 1: `{static(1)}`\nbut why?",
    "markdown": f"```bash\n{static(0)}\n```\nand\n```\n{static(1)}\n```",
    "CRLF": pair(static(0), static(1)).replace("\n", "\r\n"),
    "continued": C10D.replace(" --", " \\\n    --") + " \\\n t.py",
    "exported": "export A=node0\n" + pair(*[static(i, "--master-addr=$A") for i in (0, 1)]),
    "a block each": "".join(f"# node {i}\nexport R={i}\nexport H=node0\n"
                            + static("$R", "--master-addr=${H}") + "\n" for i in (0, 1)),
    "unknown variables": "torchrun --nnodes=$N --node-rank=$RANK --master-addr=$A "
                         "--master-port=$P --nproc-per-node=$G t.py",
    "unknown options": "torchrun $ARGS t.py",
    "array": "ARGS=(\n  --nnodes 2 \n  --rdzv-backend c10d\n  --rdzv-endpoint a:29400\n)\n"
             'torchrun "${ARGS[@]}" t.py',
    "ssh": pair(*[f"ssh -p 22 me@node{i} 'cd /x && {static(i)}'" for i in (0, 1)]),
    "ssh loop": f'for i in 0 1; do ssh node$i "{static("$i")}" & done; wait',
    "srun": "srun -N 2 --ntasks-per-node=1 bash -c '" + static("$SLURM_NODEID") + "'",
    "srun, an id of its own": "#SBATCH --nodes=2\nsrun " + C10D + " --rdzv-id=$RANDOM t.py",
    "sbatch": "#!/bin/bash\n#SBATCH -N 2\nhead=$(srun --nodes=1 -w $h hostname -I)\n"
              "srun torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $head:29500 t.py",
    "module": pair(*[f"python -m torch.distributed.run {static(i)[9:]}" for i in (0, 1)]),
    "old launcher": pair(*[f"/x/bin/python3 -u -m torch.distributed.launch --use_env "
                           f"{static(i)[9:]}" for i in (0, 1)]),
    "absolute": "/opt/venv/bin/" + C10D + " /data/t.py",
    "wrapped": "OMP_NUM_THREADS=4 nohup numactl -N 0 " + C10D + " t.py > log 2>&1 &",
    "docker": pair(*[f"docker run --gpus all --network host img {static(i)}" for i in (0, 1)]),
    "accelerate": pair(machines(0), machines(1)),
    "accelerate, hyphens": pair(machines(0), machines(1)).replace("_", "-"),
    "accelerate by file": "accelerate launch --config_file a.yaml --machine_rank 0 t.py",
    "deepspeed": "deepspeed --hostfile h --master_addr 10.0.0.1 t.py --deepspeed ds.json",
    "deepspeed, no ssh": pair(*[f"deepspeed --no_ssh --num_nodes 2 --node_rank {i} "
                                "--master_addr h t.py" for i in (0, 1)]),
    "LLaMA-Factory": pair(told(0), told(1)),
    "LLaMA-Factory, Docker": pair(*[
        f"docker run -e FORCE_TORCHRUN=1 -e NNODES=2 -e NODE_RANK={i} -e MASTER_ADDR=h "
        "-e MASTER_PORT=29500 img llamafactory-cli train x" for i in (0, 1)]),
    "ms-swift": pair(*[told(i, program="swift sft --model q", more="NPROC_PER_NODE=8")
                       for i in (0, 1)]),
    "python": pair(*[f"RANK={i} WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 python t.py"
                     for i in (0, 1)]),
    "python by options": pair(*[f"python main.py --dist-url 'tcp://10.0.0.1:29500' --world-size 2 "
                                f"--rank {i} /data" for i in (0, 1)]),
    "Lightning": pair(*[f"MASTER_ADDR=h MASTER_PORT=29500 NODE_RANK={i} python t.py --num_nodes 2"
                        for i in (0, 1)]),
    "one node": "torchrun --standalone --nproc-per-node=8 t.py",
    "one node each": "torchrun --nproc-per-node=8 train.py\ntorchrun eval.py",
    "NCCL's exclusion": "NCCL_SOCKET_IFNAME=^lo,docker0 NCCL_IB_HCA=mlx5_0 " + C10D + " t.py",
    "names of one's own": "export MASTER_IP=h MY_RANK=0\n" + C10D + " t.py",
    "own outputs": pair(C10D + " t.py --out /a/0", C10D + " t.py --out /a/1"),
    "quotes that are meant": C10D + ' t.py --prompt "it’s – fine"',
    "etcd": "torchrun --nnodes=2 --rdzv-backend=etcd-v2 --rdzv-endpoint=e:2379 --rdzv-id=1 t.py",
    "IPv6": "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=[fd00::1]:29400 t.py",
}  # fmt: skip


def bad(result):
    return [c for c in result["checks"] if c["status"] != "pass"]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lines_are_named(case, tmp_path):
    text, name, status, words = WRONG[case]
    result = launch.read_launch(text, str(tmp_path))
    first = result["checks"][0]
    assert (first["name"], first["status"]) == (name, status), bad(result)
    assert words in first["detail"]
    assert first["fix"] and "\n" not in first["detail"] + first["fix"]
    assert first["fix"] in launch.table(result).replace("\n", " ") or len(first["fix"]) > 30


@pytest.mark.parametrize("case", RIGHT)
def test_right_lines_pass(case, tmp_path):
    result = launch.read_launch(RIGHT[case], str(tmp_path))
    assert bad(result) == []
    assert {c["status"] for c in result["checks"]} == {"pass"}
    assert " 0 failed" in " " + launch.table(result).splitlines()[-1]


def test_what_was_understood(tmp_path):
    result = launch.read_launch("node0: " + static(0) + " --x 1\ngpu7$ " + static(1), str(tmp_path))
    zero, one = result["nodes"]
    assert (zero["node"], zero["line"], zero["node_rank"], zero["nnodes"]) == ("node0", 1, 0, "2")
    assert (one["node"], one["line"], one["node_rank"]) == ("gpu7", 2, 1)
    assert (one["endpoint"], one["script"], one["backend"]) == ("node0:29500", "t.py", "static")


def test_two_faults_are_both_named_and_the_cause_first(tmp_path):
    text = pair(static(0), static(0)) + "\n"
    text = "NCCL_TIMEOUT=9 GLOO_SOCKET_IFNAME=lo " + text
    names = [c["name"] for c in bad(launch.read_launch(text, str(tmp_path)))]
    assert names == ["node rank", "interface", "variable"]


def test_a_consequence_is_not_named_beside_its_cause(tmp_path):
    text = "node0: " + static(1) + "\nnode1: " + static(2)
    assert [c["name"] for c in bad(launch.read_launch(text, str(tmp_path)))] == ["node rank"]


def test_variables_of_one_node_are_not_the_other_s():
    text = "# node 0\nexport H=a\ntorchrun --master-addr=$H t.py\n# node 1\ntorchrun $H t.py"
    one, two = Reader().read(text)
    assert one.words[1] == "--master-addr=a" and one.env == {"H": "a"}
    assert two.words[1] == "\0$H" and two.env == {}
    over_ssh = Reader().read("export H=a\nssh b 'torchrun $H t.py'")[0]
    assert over_ssh.env == {} and over_ssh.node == "b"


@pytest.mark.parametrize(
    "text", ["hello", "", "pip install torch\npython prepare.py", "# torchrun --nnodes=2 t.py"]
)
def test_no_launch_line(text, tmp_path):
    with pytest.raises(UsageError) as e:
        launch.read_launch(text, str(tmp_path))
    assert "no launch line found" in str(e.value) and "accepted: torchrun" in str(e.value)
    assert "\n" not in str(e.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(os.urandom(4096))
    (tmp_path / "large").write_text((C10D + " t.py\n") * 100_000)
    (tmp_path / "prose").write_text("nothing\n")
    cases = {"empty": "is empty", "binary": "binary", "large": "too large", "none": "no such file",
             "prose": "no launch line"}  # fmt: skip
    for name, words in cases.items():
        with pytest.raises(UsageError, match=words):
            launch.read(str(tmp_path / name))
    with pytest.raises(UsageError, match="is a directory"):
        launch.read(str(tmp_path))
    with pytest.raises(UsageError, match="device"):
        launch.read("/dev/zero")


def test_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(C10D + " t.py\n",))
    writer.start()
    assert bad(launch.read(str(tmp_path / "pipe"))) == []
    writer.join(5)


def test_file_with_a_script_beside_it(tmp_path):
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbf" + (C10D + " t.py\r\n").encode())
    (tmp_path / "t.py").write_text('import os\nos.environ["MASTER_ADDR"] = "localhost"\n')
    assert launch.read(str(tmp_path / "lines.txt"))["checks"][0]["name"] == "script"


PIECES = ["'", '"', "`", "$", "${", "$(", ")", "}", "<", ">", "|", ";", "&", "\\", "\\\n", "#", "=",
          "--", "—", "“", "\0", "\1", "\r", "\n", "node0: ", "ssh a ", 'bash -c "', "srun ",
          "9" * 30, "export A=", "A=(", "中", "\u200b", "--nnodes", "torchrun "]  # fmt: skip


def spoiled(text, chance):
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(text) + 1)
        how = chance.random()
        if how < 0.5:
            text = text[:at] + chance.choice(PIECES) + text[at:]
        elif how < 0.75:
            text = text[:at] + text[at + chance.randint(1, 6) :]
        else:
            text = text[:at] + text[at : at + 40] + text[at:]
    return text


def test_no_text_makes_it_crash(tmp_path):
    chance = random.Random(5)
    texts = [w[0] for w in WRONG.values()] + list(RIGHT.values())
    began, read = time.monotonic(), 0
    for _ in range(300):
        text = spoiled(chance.choice(texts), chance)
        try:
            result = launch.read_launch(text, str(tmp_path))
        except UsageError as e:
            assert "\n" not in str(e)
            continue
        read += 1
        launch.table(result)
        assert all("\n" not in c["detail"] + c["fix"] + c["node"] for c in result["checks"])
    assert read > 100
    assert time.monotonic() - began < 60
