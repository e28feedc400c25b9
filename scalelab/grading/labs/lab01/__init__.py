"""Lab 01: one device."""

from __future__ import annotations

from ...exercise import Exercise
from .accumulate import judge_accumulate
from .feed import judge_feed
from .memory import judge_memory

EXERCISES = [
    Exercise(
        id="01.1", title="feed a starved device", difficulty=2, minutes=15,
        target="the device busy 75 % of the time or more, every sample once and in order",
        hints=(
            "Draw it: when does the device work, when is a batch being read? Which of them could "
            "happen at the same time?",
            "A batch is 8 samples of 6 ms, a step is 30 ms. With w workers a batch comes every "
            "48 / w ms.",
            "torch.utils.data.DataLoader(dataset, batch_size=batch_size, num_workers=...) and one "
            "for loop over it.",
        ),
        judge=judge_feed,
    ),
    Exercise(
        id="01.2", title="account for every byte", difficulty=3, minutes=25,
        target="each of four parts within 2 % of the bytes counted, for five models",
        hints=(
            "Count the parameters first: print the shapes of model.named_parameters() once and "
            "find each in your formula. Everything but the activations follows from that number.",
            "AdamW keeps two numbers a parameter, SGD with momentum one, SGD none; all of them, "
            "and the gradients, have the dtype of the parameters.",
            "Activations: 16 numbers a layer, token and width; after the blocks 2 a token and "
            "width (LayerNorm) and vocabulary a token (probabilities). Tokens: batch_size x "
            "block_size.",
        ),
        judge=judge_memory,
    ),
    Exercise(
        id="01.3", title="accumulate an uneven batch", difficulty=3, minutes=20,
        target="parameters and loss equal to those of the whole batch, to 1e-9",
        hints=(
            "What does backward() do to a .grad that is not empty? So where must zero_grad() "
            "stand, and where step()?",
            "The mean over 20 samples is not the mean of the means over 8, 8 and 4.",
            "Multiply each micro-batch's loss by its number of samples over the batch's, then call "
            "backward() on it. The sum of these is the loss to return.",
        ),
        judge=judge_accumulate,
    ),
]  # fmt: skip
