"""One load test from start to table."""

import asyncio
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorakeet.server.bench.client import Record, Target, run_plan
from lorakeet.server.bench.report import Report
from lorakeet.server.bench.workload import Workload


def run_bench(
    target: Target,
    adapters: str,
    workload: Workload,
    json_file: Path | None,
    plot_file: Path | None,
    console: Console,
) -> Report:
    """Run the workload with a live progress bar, print the table, write the files.

    Raises BenchError when the server cannot be measured.
    """
    report, workload = asyncio.run(_run(target, adapters, workload, console))
    console.print(report.table())
    if json_file is not None:
        report.write_json(json_file, asdict(workload))
    if plot_file is not None:
        report.write_plot(plot_file)
    return report


async def _run(
    target: Target, adapters: str, workload: Workload, console: Console
) -> tuple[Report, Workload]:
    async with target:
        workload = replace(workload, adapters=await target.discover(adapters))
        plan = workload.plan()
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens]:,} tokens, {task.fields[failed]} failed"),
            console=console,
        ) as progress:
            bar = progress.add_task("requests", total=len(plan), tokens=0, failed=0)
            tokens = failed = 0

            def on_done(record: Record) -> None:
                nonlocal tokens, failed
                tokens += record.output_tokens
                failed += record.error is not None
                progress.update(bar, advance=1, tokens=tokens, failed=failed)

            start = time.perf_counter()
            records = await run_plan(target, plan, on_done)
            return Report(records, time.perf_counter() - start), workload
