"""What a load test found: numbers, a table, JSON, a plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from lorakeet.server.bench.client import Record

_SUMMARY = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class Report:
    """`elapsed`: seconds from the first request's time to the last answer."""

    records: list[Record]
    elapsed: float

    @property
    def completed(self) -> list[Record]:
        return [record for record in self.records if record.error is None]

    def numbers(self) -> dict[str, Any]:
        """Throughput and latencies (seconds) of the completed requests."""
        done = self.completed
        tokens = sum(record.output_tokens for record in done)
        errors: dict[str, int] = {}
        for record in self.records:
            if record.error is not None:
                errors[record.error] = errors.get(record.error, 0) + 1
        return {
            "requests": len(self.records),
            "completed": len(done),
            "failed": len(self.records) - len(done),
            "elapsed": self.elapsed,
            "requests_per_second": len(done) / self.elapsed,
            "output_tokens_per_second": tokens / self.elapsed,
            "prompt_tokens": sum(record.prompt_tokens for record in done),
            "output_tokens": tokens,
            "ttft": _summary([record.ttft for record in done]),
            "inter_token": _summary([gap for record in done for gap in record.gaps]),
            "latency": _summary([record.latency for record in done]),
            "errors": errors,
        }

    def table(self) -> Table:
        numbers = self.numbers()
        table = Table(title="Load test", show_header=True)
        for column in ("", *_SUMMARY):
            table.add_column(column, justify="left" if not column else "right")
        for key, label in (
            ("ttft", "time to first token, ms"),
            ("inter_token", "inter-token time, ms"),
            ("latency", "end-to-end latency, ms"),
        ):
            table.add_row(label, *(f"{numbers[key][name] * 1e3:,.1f}" for name in _SUMMARY))
        table.add_section()
        table.add_row("requests", f"{numbers['completed']:,} of {numbers['requests']:,}")
        table.add_row("failed", f"{numbers['failed']:,}")
        table.add_row("requests a second", f"{numbers['requests_per_second']:.2f}")
        table.add_row("output tokens a second", f"{numbers['output_tokens_per_second']:,.1f}")
        for error, count in numbers["errors"].items():
            table.add_row(f"failed: {error}", f"{count:,}")
        return table

    def write_json(self, file: Path, workload: dict[str, Any]) -> None:
        result = {"workload": workload, **self.numbers()}
        file.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))

    def write_plot(self, file: Path) -> None:
        """Distribution of the three latencies, each as the share of requests at or below it."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        done = self.completed
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
        for axis, title, seconds in (
            (axes[0], "time to first token", [record.ttft for record in done]),
            (axes[1], "inter-token time", [gap for record in done for gap in record.gaps]),
            (axes[2], "end-to-end latency", [record.latency for record in done]),
        ):
            values = np.sort(seconds) * 1e3
            axis.plot(values, np.arange(1, len(values) + 1) / max(len(values), 1))
            axis.set(title=title, xlabel="ms", ylabel="share at or below", ylim=(0, 1))
            axis.grid(alpha=0.3)
        figure.savefig(file, dpi=120)
        pyplot.close(figure)


def _summary(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return dict.fromkeys(_SUMMARY, 0.0)
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {
        "mean": float(np.mean(seconds)),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
    }
