"""A picture of a run: return, version lag of the actors and publish latency over time."""

from __future__ import annotations

from pathlib import Path

from examples.cartpole.history import History


def draw(history: History, path: Path, *, title: str, goal: float) -> None:
    """Write a PNG."""
    import matplotlib as mpl  # takes a second, so only here

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (top, middle, bottom) = plt.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
    top.plot(*zip(*history.returns, strict=True), color="tab:blue")
    top.axhline(goal, color="gray", linestyle=":", linewidth=1)
    top.set(ylabel="return, mean of 20", ylim=(0, 510), title=title)
    rows = [(at, number, lag) for number, points in enumerate(history.lags.values(), 1) for at, lag in points]
    times, numbers, lags = zip(*rows, strict=True)
    dots = middle.scatter(times, numbers, c=lags, s=9, marker="s", cmap="viridis_r", vmin=0, vmax=max(2, *lags))
    figure.colorbar(dots, ax=middle, label="version lag", ticks=MaxNLocator(integer=True))
    middle.set(ylabel="actor", ylim=(0.3, len(history.lags) + 0.7))
    middle.yaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.semilogy([at for at, _ in history.latencies], [s * 1000 for _, s in history.latencies], ".", markersize=3)
    bottom.set(ylabel="publish to loaded, ms", xlabel="seconds", xlim=(0, None))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        for at, text in history.events:
            axes.axvline(at, color="tab:red" if "killed" in text else "tab:green", linewidth=0.6, alpha=0.7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
