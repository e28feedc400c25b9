"""A small matrix product on every device, whose right result is known: `python -m` of this prints
one JSON line a device: {"device", "name", "seconds", "finite", "right"}.

A process of its own, since importing torch takes a second or two and may be what is broken.
"""

from __future__ import annotations

import json
import os
import time

SIZE = 256
HIGHEST = 8  # integers below this: products and their sums are exact in float32, TF32 or not


def main() -> None:
    os.nice(10)  # what the doctor times meanwhile must not wait for this
    import torch

    torch.set_num_threads(1)
    print_line = lambda line: print(json.dumps(line), flush=True)  # noqa: E731
    rows = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    a, b = (rows * 7 + rows // SIZE) % HIGHEST, (rows * 3 + rows // 5) % HIGHEST
    expected = a @ b  # in 64-bit integers, which no BLAS and no tensor core touches
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for device in devices:
        name = torch.cuda.get_device_name(device) if device != "cpu" else ""
        x, y = a.to(device, torch.float32), b.to(device, torch.float32)
        (x @ y).sum().item()  # the first product loads libraries
        began = time.perf_counter()
        product = (x @ y).cpu()  # the copy waits for the device
        seconds = time.perf_counter() - began
        print_line({
            "device": device, "name": name, "seconds": seconds,
            "finite": bool(torch.isfinite(product).all()),
            "right": bool((product.to(torch.int64) == expected).all()),
        })  # fmt: skip


if __name__ == "__main__":
    main()
