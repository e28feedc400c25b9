"""A text that is slow to read, and how fast it can be read: python slow_books.py --workers 4"""
import argparse
import functools
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

BOOKS = Path(__file__).resolve().parent.parent / "data" / "books.txt"


@functools.cache  # read once, however many data sets are made of it
def read(path):
    text = Path(path).read_text(encoding="utf-8")
    return torch.tensor([ord(c) for c in text]).unique(return_inverse=True)[1]


class SlowBooks(Dataset):
    """Blocks of characters and those that follow. Each costs `wait` seconds of waiting, as for a
    disk or a network, and `compute` seconds of a core, as a decoder does."""

    def __init__(self, samples, block_size, wait=0.0, compute=0.0, data=BOOKS):
        self.tokens = read(data)
        self.samples, self.block_size, self.wait, self.compute = samples, block_size, wait, compute
        # workers are processes of their own: only shared memory lets the others see what they did
        self.read = torch.zeros(samples, dtype=torch.long).share_memory_()

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        time.sleep(self.wait)
        done = time.thread_time() + self.compute  # seconds on a core, not seconds on the wall
        while time.thread_time() < done:
            pass
        self.read[i] += 1
        start = i * self.block_size % (len(self.tokens) - self.block_size - 1)
        block = self.tokens[start : start + self.block_size + 1]
        return block[:-1], block[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--wait", type=float, default=0.005, help="seconds a sample waits")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds a sample computes")
    args = parser.parse_args()
    if not (args.workers >= 0 and 0 <= args.wait < 60 and 0 <= args.compute < 60):
        parser.error("--workers must be 0 or more, --wait and --compute from 0 to 60 seconds")
    books = SlowBooks(200, 64, args.wait, args.compute)
    start = time.perf_counter()
    for _ in DataLoader(books, batch_size=8, num_workers=args.workers):
        pass
    seconds = time.perf_counter() - start
    print(f"{args.workers} workers: {len(books) / seconds:,.0f} samples/s, their start included")


if __name__ == "__main__":
    main()
