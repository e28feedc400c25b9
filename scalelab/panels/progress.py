"""What a learner has done, drawn."""

from __future__ import annotations

from scalelab import grading

DONE, OPEN = "#1a7f37", "#d8dee4"


def draw_progress():
    """A matplotlib Figure: one row a lab, one box an exercise, filled where it has passed; the next
    exercise is named. Reads $SCALELAB_HOME/progress.jsonl."""
    from matplotlib.figure import Figure

    done = grading.summary()
    rows = list(done["labs"].items())
    fig = Figure(figsize=(7, 0.9 + 0.45 * len(rows)), layout="constrained")
    ax = fig.add_subplot()
    known = grading.exercises()
    for y, (lab, row) in enumerate(rows):
        mine = [e for e in known.values() if e.lab == lab]
        for x, exercise in enumerate(mine):
            color = DONE if exercise.id in row["passed"] else OPEN
            ax.barh(y, 0.92, 0.7, left=x, color=color)
            ink = "white" if exercise.id in row["passed"] else "#57606a"
            ax.text(x + 0.46, y, exercise.id, ha="center", va="center", color=ink, fontsize=9)
        ax.text(len(mine) + 0.1, y, f"{len(row['passed'])} of {row['of']}", va="center")
    ax.set_yticks(range(len(rows)), [f"lab {lab}" for lab, _ in rows])
    ax.set_xlim(0, max((row["of"] for _, row in rows), default=1) + 1)
    ax.set_xticks([])
    ax.invert_yaxis()
    ax.tick_params(left=False)
    ax.spines[:].set_visible(False)
    if done["next"]:
        following = known[done["next"]]
        title = f"next: {following.id} {following.title} ({following.minutes} minutes)"
    else:
        title = "every exercise has passed"
    ax.set_title(title, loc="left", fontsize=11)
    return fig
