"""Draw what another benchmark's `--json FILE` holds.

    python benchmarks/plot.py benchmarks/results/decode_step.json docs/decode_step.svg
    python benchmarks/plot.py benchmarks/results/slora.json docs/slora.svg

Of decode_step.py the step over its floor, and LoRA's price; of slora.py the time to the first token
and the throughput by rate, few adapters against many.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "lorakeet"  # the same bytes from the same numbers
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

BARS = (
    ("floor_ms", "floor", "0.75"),
    ("step_ms", "Lorakeet", "C0"),
    ("peer_ms", "best peer", "C1"),
)


# --- decode_step.py ---


def counted(points: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Those with a number of adapters: batch, adapters, point."""
    names = [point["point"].split(":") for point in points]
    return [
        (int(batch), int(adapters), point)
        for (batch, adapters), point in zip(names, points, strict=True)
        if adapters.isdigit()
    ]


def draw_steps(axis: Axes, points: list[dict[str, Any]]) -> None:
    rows = counted(points)
    for number, (key, label, color) in enumerate(BARS):
        heights = [point[key] or 0 for _, _, point in rows]
        places = [place + 0.28 * (number - 1) for place in range(len(rows))]
        axis.bar(places, heights, 0.28, label=label, color=color)
    names = [f"{batch}\n{adapters}" for batch, adapters, _ in rows]
    axis.set_xticks(range(len(rows)), names, fontsize=8)
    axis.set(title="Decode step", ylabel="ms", xlabel="batch, distinct adapters (rank 16)")
    axis.legend(frameon=False)


def draw_price(axis: Axes, points: list[dict[str, Any]]) -> None:
    rows = [row for row in counted(points) if row[2]["lora_ms"] is not None]
    for batch in sorted({batch for batch, _, _ in rows}):
        line = [(adapters, point) for size, adapters, point in rows if size == batch]
        axis.plot(
            [adapters for adapters, _ in line],
            [point["lora_ms"] for _, point in line],
            marker="o",
            label=f"batch {batch}",
        )
    longest = {adapters: point["lora_bytes_ms"] for _, adapters, point in rows}
    floor = sorted(longest.items())
    axis.plot(*zip(*floor, strict=True), color="0.5", linestyle="--", label="their bytes")
    axis.set(title="LoRA's price", ylabel="ms of a step", xlabel="distinct adapters")
    axis.legend(frameon=False, fontsize=8)


def plot_decode_step(measured: dict[str, Any]) -> Figure:
    figure, (steps, price) = pyplot.subplots(
        1, 2, figsize=(13, 4), width_ratios=(3, 1), constrained_layout=True
    )
    draw_steps(steps, measured["points"])
    draw_price(price, measured["points"])
    return figure


# --- slora.py ---


def draw_by_rate(axis: Axes, rows: list[dict[str, Any]], key: str, label: str, style: str) -> None:
    """A line for each number of adapters."""
    for number, adapters in enumerate(sorted({row["adapters"] for row in rows})):
        own = [row for row in rows if row["adapters"] == adapters]
        rates, values = [row["rate"] for row in own], [row[key] for row in own]
        name = f"{adapters:,} adapters{label}"
        axis.plot(rates, values, style, marker="o", color=f"C{number}", label=name)


def plot_slora(measured: dict[str, Any]) -> Figure:
    figure, (ttft, throughput) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    draw_by_rate(ttft, measured["outcomes"], "ttft_p50_ms", ", p50", "-")
    draw_by_rate(ttft, measured["outcomes"], "ttft_p99_ms", ", p99", "--")
    ttft.set(title="Time to the first token", ylabel="ms", yscale="log")
    draw_by_rate(throughput, measured["outcomes"], "tokens_per_second", "", "-")
    most = max(row["tokens_per_second"] for row in measured["outcomes"])
    throughput.set(title="Throughput", ylabel="output tokens a second", ylim=(0, 1.1 * most))
    for axis in (ttft, throughput):
        axis.set_xlabel("requests a second")
        axis.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("plot", type=Path)
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    figure = plot_slora(measured) if "outcomes" in measured else plot_decode_step(measured)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(args.plot, metadata={"Date": None})


if __name__ == "__main__":
    main()
