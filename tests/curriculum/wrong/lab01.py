"""Wrong answers to lab 01 that people write: for each exercise (name, function, its words)."""

import torch
from torch.utils.data import DataLoader


# -- 01.1 ----------------------------------------------------------------------------------------
def as_given(dataset, step, batch_size):
    for start in range(0, len(dataset), batch_size):
        stop = min(start + batch_size, len(dataset))
        step(torch.stack([dataset[i] for i in range(start, stop)]))


def no_workers(dataset, step, batch_size):
    for batch in DataLoader(dataset, batch_size=batch_size, pin_memory=False):
        step(batch)


def one_worker(dataset, step, batch_size):
    for batch in DataLoader(dataset, batch_size=batch_size, num_workers=1, prefetch_factor=8):
        step(batch)


def new_iterator_each_time(dataset, step, batch_size):
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=2)
    for _ in range(3):
        step(next(iter(loader)))


def all_first(dataset, step, batch_size):
    for batch in list(DataLoader(dataset, batch_size=batch_size, num_workers=4)):
        step(batch)


def drops_the_last(dataset, step, batch_size):
    for batch in DataLoader(dataset, batch_size=batch_size, num_workers=3, drop_last=True):
        step(batch)


def shuffles(dataset, step, batch_size):
    for batch in DataLoader(dataset, batch_size=batch_size, num_workers=3, shuffle=True):
        step(batch)


def larger_batch(dataset, step, batch_size):
    for batch in DataLoader(dataset, batch_size=2 * batch_size, num_workers=3):
        step(batch)


def too_many_workers(dataset, step, batch_size):
    for batch in DataLoader(dataset, batch_size=batch_size, num_workers=12):
        step(batch)


def only_loads(dataset, step, batch_size):
    for _ in DataLoader(dataset, batch_size=batch_size, num_workers=4):
        pass


def sample_by_sample(dataset, step, batch_size):
    for sample in DataLoader(dataset, batch_size=None, num_workers=3):
        step(sample)


# -- 01.2 ----------------------------------------------------------------------------------------
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def right_memory(vocabulary, batch_size, block_size, layers, width, heads, dtype, optimizer,
                 **change):  # fmt: skip
    c = {"numbers": {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer], "size": BYTES[dtype],
         "state_size": BYTES[dtype], "positions": 1, "own_head": 1, "scores": 0,
         "tokens": batch_size * block_size, "last": 1, "blocks": layers, "units": 16,
         "gradients": 1}  # fmt: skip
    c |= change
    P = (2 * vocabulary * width + vocabulary + c["positions"] * block_size * width + 2 * width
         + layers * (12 * width**2 + 10 * width))  # fmt: skip
    P -= (1 - c["own_head"]) * (vocabulary * width)
    kept = c["tokens"] * (c["blocks"] * c["units"] * width + c["last"] * (2 * width + vocabulary)
                          + c["scores"] * c["blocks"] * heads * block_size)  # fmt: skip
    size = c["size"]
    return {
        "parameters": size * P,
        "gradients": c["gradients"] * size * P,
        "optimizer": c["state_size"] * c["numbers"] * P,
        "activations": size * kept,
    }


def counts_numbers(**c):
    return right_memory(**c, size=1, state_size=1)


def always_four_bytes(**c):
    return right_memory(**c, size=4, state_size=4)


def one_adam_average(**c):
    return right_memory(**c, numbers=0 if c["optimizer"] == "sgd" else 1)


def adam_for_all(**c):
    return right_memory(**c, numbers=2)


def state_in_float32(**c):
    return right_memory(**c, state_size=4)


def shared_head(**c):
    return right_memory(**c, own_head=0)


def no_positions(**c):
    return right_memory(**c, positions=0)


def no_gradients(**c):
    return right_memory(**c, gradients=0)


def one_sequence(**c):
    return right_memory(**c, tokens=c["block_size"])


def keeps_the_scores(**c):
    return right_memory(**c, scores=1)


def keeps_scores_twice(**c):
    return right_memory(**c, scores=2)


def forgets_the_head(**c):
    return right_memory(**c, last=0)


def only_block_outputs(**c):
    return right_memory(**c, units=1)


def one_layer(**c):
    return right_memory(**c, blocks=1)


def a_total(**c):
    return sum(right_memory(**c).values())


# -- 01.3 ----------------------------------------------------------------------------------------
def pieces(x, y, micro_batch):
    return list(zip(x.split(micro_batch), y.split(micro_batch)))


def not_divided(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    losses = []
    for xs, ys in pieces(x, y, micro_batch):
        loss = model(xs, ys)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return sum(losses) / len(losses)


def mean_of_means(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    parts, total = pieces(x, y, micro_batch), 0.0
    for xs, ys in parts:
        loss = model(xs, ys) / len(parts)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def zero_grad_in_the_loop(model, optimizer, x, y, micro_batch):
    total = 0.0
    for xs, ys in pieces(x, y, micro_batch):
        optimizer.zero_grad()
        loss = model(xs, ys) * len(xs) / len(x)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def zero_grad_before_step(model, optimizer, x, y, micro_batch):
    total = 0.0
    for xs, ys in pieces(x, y, micro_batch):
        loss = model(xs, ys) * len(xs) / len(x)
        loss.backward()
        total += loss.item()
    optimizer.zero_grad()
    optimizer.step()
    return total


def never_zero_grad(model, optimizer, x, y, micro_batch):
    total = 0.0
    for xs, ys in pieces(x, y, micro_batch):
        loss = model(xs, ys) * len(xs) / len(x)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def step_in_the_loop(model, optimizer, x, y, micro_batch):
    total = 0.0
    for xs, ys in pieces(x, y, micro_batch):
        optimizer.zero_grad()
        loss = model(xs, ys) * len(xs) / len(x)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def whole_batch(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return loss.item()


def one_backward_at_the_end(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    loss = sum(model(xs, ys) * len(xs) / len(x) for xs, ys in pieces(x, y, micro_batch))
    loss.backward()
    optimizer.step()
    return loss.item()


def drops_the_rest(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    count, total = max(len(x) // micro_batch, 1), 0.0
    for xs, ys in pieces(x, y, micro_batch)[:count]:
        loss = model(xs, ys) / count
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def returns_the_last_loss(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    for xs, ys in pieces(x, y, micro_batch):
        loss = model(xs, ys)
        (loss * len(xs) / len(x)).backward()
    optimizer.step()
    return loss.item()


def returns_nothing(model, optimizer, x, y, micro_batch):
    returns_the_last_loss(model, optimizer, x, y, micro_batch)


def forgets_the_step(model, optimizer, x, y, micro_batch):
    optimizer.zero_grad()
    for xs, ys in pieces(x, y, micro_batch):
        (model(xs, ys) * len(xs) / len(x)).backward()


def does_nothing(model, optimizer, x, y, micro_batch):
    return 0.0


WRONG = {
    "01.1": [
        ("reads each batch itself, as given", as_given, r"no worker process read anything"),
        ("a DataLoader without workers", no_workers, r"no worker process read anything"),
        ("one worker and a long queue", one_worker, r"with 1 worker.* how many workers"),
        ("a new iterator for each batch", new_iterator_each_time, r"iterator is made new"),
        ("reads everything first", all_first, r"all 190 samples had been read before the first"),
        ("drops the last batch", drops_the_last, r"drop_last=True drops it"),
        ("shuffles", shuffles, r"another order"),
        ("a larger batch", larger_batch, r"Another batch size is another training"),
        ("twelve workers", too_many_workers, r"12 worker processes.*at most 8"),
        ("never calls step", only_loads, r"step was never called"),
        ("sample by sample", sample_by_sample, r"give it a batch of samples"),
    ],
    "01.2": [
        ("counts numbers, not bytes", counts_numbers, r"number of parameters: each takes several"),
        ("always 4 bytes", always_four_bytes, r"4 bytes a number; bfloat16 has 2"),
        ("one average for AdamW", one_adam_average, r"AdamW keeps two numbers"),
        ("AdamW's state for SGD", adam_for_all, r"plain SGD keeps nothing"),
        ("state always in float32", state_in_float32, r"state has the dtype of the parameters"),
        ("head shared with the embedding", shared_head, r"does not share them"),
        ("no position embedding", no_positions, r"position embedding is missing"),
        ("no gradients", no_gradients, r"Backward leaves a gradient"),
        ("one sequence", one_sequence, r"one sequence: the batch is missing"),
        ("attention scores kept", keeps_the_scores, r"attention scores"),
        ("attention scores kept twice", keeps_scores_twice, r"attention scores"),
        ("nothing after the blocks", forgets_the_head, r"part after the blocks is missing"),
        ("outputs of blocks only", only_block_outputs, r"what checkpointing keeps"),
        ("one layer", one_layer, r"one block: each layer keeps its own"),
        ("one total", a_total, r"return a dict of bytes with the keys"),
    ],
    "01.3": [
        ("does not divide", not_divided, r"sum of 3 means, not divided"),
        ("the mean of the means", mean_of_means, r"last micro-batch has 4 samples, the others 8"),
        ("zero_grad in the loop", zero_grad_in_the_loop, r"zero_grad\(\) in the loop"),
        ("zero_grad before step", zero_grad_before_step, r"gradients were gone when step\(\) came"),
        ("never zero_grad", never_zero_grad, r"gradients of the update before are still there"),
        ("a step for each micro-batch", step_in_the_loop, r"step\(\) was called 3 times"),
        ("the whole batch at once", whole_batch, r"given 12 samples at once; only 4 fit"),
        ("one backward at the end", one_backward_at_the_end, r"3 micro-batches were alive at once"),
        ("drops the smaller micro-batch", drops_the_rest, r"last, smaller micro-batch"),
        ("returns the last loss", returns_the_last_loss, r"the mean over the whole batch is"),
        ("returns nothing", returns_nothing, r"it returned None; return the mean loss"),
        ("no step", forgets_the_step, r"without optimizer.step\(\) nothing is learnt"),
        ("does nothing", does_nothing, r"the model was never called"),
    ],
}
