"""What a check says: passed, or the mistake, in words."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


class Wrong(Exception):
    """Raised by a judge: the answer is wrong; the message names the mistake and what to look at."""


class Stub(Exception):
    """The answer is still the lab's stub."""


@dataclass(frozen=True)
class Verdict:
    """The result of one check. Shown as text in a terminal and as a coloured line in a notebook."""

    exercise: str  # "02.2"
    title: str
    passed: bool
    message: str
    hint: str = ""  # how to get the next hint
    seconds: float = 0.0

    def __str__(self) -> str:
        mark = "passed" if self.passed else "not yet"
        text = f"{self.exercise} {self.title}: {mark}. {self.message}"
        return f"{text}\n{self.hint}" if self.hint else text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        color = "#1a7f37" if self.passed else "#b35900"
        mark = "✔ passed" if self.passed else "✘ not yet"
        body = escape(self.message).replace("\n", "<br>").replace("  ", "&nbsp; ")
        hint = f"<br><i>{escape(self.hint)}</i>" if self.hint else ""
        return (
            f'<div style="border-left:4px solid {color};padding:4px 10px">'
            f"<b>{escape(self.exercise)} {escape(self.title)}</b> "
            f'<b style="color:{color}">{mark}</b><br>{body}{hint}</div>'
        )
