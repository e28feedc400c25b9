"""Is training on many ranks the same as on one device? torchrun --nproc-per-node 2 equals_one.py"""
import argparse
import json
import os
import sys

import train_ddp
import train_one


def train(main, batch_size, steps):
    """Run one of the two scripts and return all its parameters as one vector."""
    sys.argv = [main.__module__, "--batch-size", str(batch_size), "--steps", str(steps)]
    sys.argv += ["--lr", "0.0003"]
    parameters = [p.detach().flatten().cpu() for p in main().parameters()]
    return train_one.torch.cat(parameters)


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, "start it with: torchrun --nproc-per-node 2 equals_one.py\n")
    world_size = int(os.environ["WORLD_SIZE"])
    many = train(train_ddp.main, args.global_batch // world_size, args.steps)
    if os.environ["RANK"] == "0":
        one = train(train_one.main, args.global_batch, args.steps)
        other = train(train_one.main, args.global_batch // world_size, args.steps)
        found = {"world_size": world_size, "parameters": one.numel(),
                 "one_device": (many - one).abs().max().item(),
                 "rank_batch_only": (many - other).abs().max().item()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
