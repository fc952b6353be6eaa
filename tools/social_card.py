"""Draws book/_static/social-card.png, the picture that goes with a shared link (1200 x 630). Run it after changing it."""
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WORDS, WEIGHTS, ASKS = "Yesterday the group finally went home".split(), [0.02, 0.01, 0.46, 0.01, 0.02, 0.48], 4

fig = plt.figure(figsize=(12, 6.3), dpi=100, facecolor="#0f2740")
ax = fig.add_axes((0, 0, 1, 1))
ax.set(xlim=(0, 1200), ylim=(0, 630))
ax.axis("off")
ax.text(80, 520, "Attention, executed", color="white", size=50, weight="bold", va="center")
ax.text(80, 450, "A textbook that runs: every claim has a cell that checks it", color="#b9d3ee", size=23, va="center")
xs = [140, 330, 500, 690, 880, 1040]
for x, word, weight in zip(xs, WORDS, WEIGHTS):
    ax.plot([xs[ASKS], x], [115, 285], color="#f2a541", lw=2 + 26 * weight, alpha=0.25 + 0.75 * min(1, 2 * weight), solid_capstyle="round")
    ax.text(x, 312, word, color="white", size=24, ha="center")
    ax.text(x, 355, f"{weight:.0%}", color="#f2a541", size=17, ha="center", alpha=0.45 + weight)
ax.plot(xs[ASKS], 105, "o", ms=20, color="#f2a541")
ax.text(xs[ASKS], 52, f"whom does “{WORDS[ASKS]}” ask?", color="#b9d3ee", size=19, ha="center")
fig.savefig(Path(__file__).resolve().parent.parent / "book" / "_static" / "social-card.png", metadata={"Software": None})
