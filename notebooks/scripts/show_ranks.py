"""Each rank says who it is, from its environment: torchrun --nproc-per-node 2 show_ranks.py"""
import argparse
import json
import os
import socket
import sys

# What torchrun sets for every process that it starts. PyTorch is not even imported here.
NAMES = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
         "MASTER_ADDR", "MASTER_PORT"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with: torchrun --nproc-per-node 2 {parser.prog}\n")
    me = {name: os.environ[name] for name in NAMES}
    me |= {"host": socket.gethostname(), "pid": os.getpid()}
    sys.stdout.write(json.dumps(me) + "\n")


if __name__ == "__main__":
    main()
