"""Self-check questions and predictions: asked in a lesson, recorded with the learner's progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import progress


def predict(key: str, value: Any) -> Any:
    """Record a prediction (None: not made yet) and return it, so that it can be compared below."""
    if value is not None:
        progress.note("prediction", key, value=value)
    return value


class Question:
    """A question with choices. Show it as the last line of a cell; clicking answers it.

    `right` is the index of the right choice; `why` is shown after any answer. Without a live
    kernel it shows as text: question and choices, and not which one is right.
    """

    def __init__(self, key: str, text: str, choices: Sequence[str], right: int, why: str) -> None:
        if not 0 <= right < len(choices):
            raise ValueError(f"question {key}: right must be from 0 to {len(choices) - 1}")
        self.key, self.text, self.choices, self.right, self.why = key, text, choices, right, why

    def answer(self, choice: int) -> str:
        """Record an answer and return what there is to say to it."""
        correct = choice == self.right
        progress.note("question", self.key, correct=correct, choice=choice)
        return f"{'Right.' if correct else 'Not that one.'} {self.why}"

    def widget(self):
        """Question, buttons, and a line that answers."""
        import ipywidgets as w

        said = w.HTML()
        buttons = []
        for index, choice in enumerate(self.choices):
            button = w.Button(description=choice, layout=w.Layout(width="auto"))
            button.style.text_color = "#222"

            def clicked(_, index=index):
                said.value = self.answer(index)
                for other, b in enumerate(buttons):
                    b.button_style = ("success" if index == self.right else "danger") * (
                        other == index
                    )

            button.on_click(clicked)
            buttons.append(button)
        title = w.HTML(f"<b>{self.text}</b>")
        left = w.Layout(align_items="flex-start")
        return w.VBox([title, w.VBox(buttons, layout=left), said])

    def __repr__(self) -> str:
        lines = [f"  {chr(97 + i)}) {choice}" for i, choice in enumerate(self.choices)]
        return "\n".join([self.text, *lines])

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = dict(self.widget()._repr_mimebundle_())
        bundle["text/plain"] = repr(self)
        return bundle
