"""Lab 03: DDP on one node."""

from __future__ import annotations

from ...exercise import Exercise
from .accumulation import judge_accumulation
from .sampler import judge_sampler
from .script import judge_script
from .uneven import judge_uneven
from .validation import judge_validation

EXERCISES = [
    Exercise(
        id="03.1", title="train_one.py on many ranks", difficulty=2, minutes=25,
        target="equal to one device at 1, 2 and 3 ranks to 1e-6, at most 15 lines changed",
        hints=(
            "Four changes: start (init_process_group), split (starts), wrap (the model), and leave "
            "the group at the end. Saving, printing and the optimizer can stay.",
            "torchrun has put RANK, LOCAL_RANK and WORLD_SIZE into os.environ, as text. One line "
            "of main() sets these three already, to those of one device.",
            "starts.chunk(world_size)[rank] is this rank's part. Keep model for the parameters and "
            "the validation, and call ddp_model = DistributedDataParallel(model) for the loss.",
        ),
        judge=judge_script, seconds=90,
    ),
    Exercise(
        id="03.2", title="a sampler", difficulty=2, minutes=15,
        target="every sample at least once an epoch, ranks of equal length, another order each "
               "epoch",
        hints=(
            "Shuffle all indices, the same way on every rank; then take every n-th.",
            "torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)) disturbs "
            "nobody else.",
            "How many does each rank need? ceil(size / world_size). Repeat the list until it is "
            "world_size times as long as that (with 3 samples on 7 ranks once is not enough).",
        ),
        judge=judge_sampler,
    ),
    Exercise(
        id="03.3", title="accumulation without extra traffic", difficulty=2, minutes=15,
        target="equal to one device to 1e-9, the gradients all-reduced once for 4 micro-batches",
        hints=(
            "Which micro-batches need no synchronisation? All but the last.",
            "ddp_model.no_sync() is looked at in forward: put forward and backward both inside.",
            "with ddp_model.no_sync() if not last else contextlib.nullcontext(): and divide the "
            "loss by the number of micro-batches.",
        ),
        judge=judge_accumulation,
    ),
    Exercise(
        id="03.4", title="uneven data", difficulty=2, minutes=10,
        target="every batch used once, no hang, equal parameters on all ranks, at 2 and 3 ranks",
        hints=(
            "A rank without data must still answer the all-reduces of the others.",
            "DistributedDataParallel has a context manager for that. Look at its name in lesson "
            "03, section 7.",
            "with ddp_model.join(): round the whole loop, and nothing else changes.",
        ),
        judge=judge_uneven,
    ),
    Exercise(
        id="03.5", title="validation that counts each sample once", difficulty=3, minutes=20,
        target="loss and accuracy of all samples to 1e-6 on every rank, each sample read once",
        hints=(
            "The padding of DistributedSampler is for training. range(rank, size, world_size) "
            "leaves nobody out and repeats nobody.",
            "Ranks and batches have different sizes. What can be added up over all of them?",
            "Sum of losses (reduction='sum'), number of right answers, number of samples: one "
            "tensor of three, one all_reduce, one division at the end.",
        ),
        judge=judge_validation,
    ),
]  # fmt: skip
