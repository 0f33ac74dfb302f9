"""The `lorakeet` command."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lorakeet.configs import settings as settings_module
from lorakeet.configs.settings import Settings, SettingsError

app = typer.Typer(
    help="Serve one Llama-style model and thousands of its LoRA adapters at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names off
    context_settings={"help_option_names": ["-h", "--help"]},
)
adapters_app = typer.Typer(help="Work with adapter files.", no_args_is_help=True)
app.add_typer(adapters_app, name="adapters")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorakeet {importlib.metadata.version('lorakeet')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of every command."""


def _setting(name: str, *flags: str, **extra: Any) -> Any:
    """A command-line option for one setting: its help and its default come from `Settings`."""
    field = Settings.model_fields[name]
    text = field.description or ""
    if isinstance(field.default, str | int | float) and "default:" not in text:
        text += f" (default: {field.default})"
    return typer.Option(*flags, help=text, show_default=False, **extra)


def _named_paths(values: list[str] | None) -> dict[str, Path] | None:
    if not values:
        return None
    named: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path):
            raise typer.BadParameter(f"{value!r} is not NAME=PATH", param_hint="--adapter")
        if name in named:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="--adapter")
        named[name] = Path(path)
    return named


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help=Settings.model_fields["model"].description)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings; options given here win")
    ] = None,
    adapter: Annotated[
        list[str] | None, _setting("adapters", "--adapter", metavar="NAME=PATH")
    ] = None,
    adapter_dir: Annotated[
        list[Path] | None, _setting("adapter_dirs", "--adapter-dir", metavar="DIR")
    ] = None,
    served_model_name: Annotated[str | None, _setting("served_model_name")] = None,
    load_format: Annotated[str | None, _setting("load_format", metavar="auto|dummy")] = None,
    device: Annotated[str | None, _setting("device", metavar="auto|cpu|cuda")] = None,
    dtype: Annotated[str | None, _setting("dtype", metavar="auto|float32|bfloat16|float16")] = None,
    tensor_parallel_size: Annotated[int | None, _setting("tensor_parallel_size")] = None,
    start_timeout: Annotated[float | None, _setting("start_timeout")] = None,
    step_timeout: Annotated[float | None, _setting("step_timeout")] = None,
    max_model_len: Annotated[int | None, _setting("max_model_len")] = None,
    max_num_seqs: Annotated[int | None, _setting("max_num_seqs")] = None,
    max_num_batched_tokens: Annotated[int | None, _setting("max_num_batched_tokens")] = None,
    block_size: Annotated[int | None, _setting("block_size")] = None,
    gpu_memory_utilization: Annotated[float | None, _setting("gpu_memory_utilization")] = None,
    cpu_kv_memory: Annotated[str | None, _setting("cpu_kv_memory", metavar="SIZE")] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        _setting("enable_prefix_caching", "--enable-prefix-caching/--no-enable-prefix-caching"),
    ] = None,
    max_loras: Annotated[int | None, _setting("max_loras")] = None,
    max_lora_rank: Annotated[int | None, _setting("max_lora_rank")] = None,
    lora_memory: Annotated[str | None, _setting("lora_memory", metavar="SIZE")] = None,
    lora_vocabulary_memory: Annotated[
        str | None, _setting("lora_vocabulary_memory", metavar="SIZE")
    ] = None,
    max_blend_rank: Annotated[int | None, _setting("max_blend_rank")] = None,
    host_lora_memory: Annotated[str | None, _setting("host_lora_memory", metavar="SIZE")] = None,
    adapter_upload_dir: Annotated[
        Path | None, _setting("adapter_upload_dir", metavar="DIR")
    ] = None,
    adapter_upload_limit: Annotated[
        str | None, _setting("adapter_upload_limit", metavar="SIZE")
    ] = None,
    state_dir: Annotated[Path | None, _setting("state_dir", metavar="DIR")] = None,
    host: Annotated[str | None, _setting("host")] = None,
    port: Annotated[int | None, _setting("port")] = None,
    api_key: Annotated[str | None, _setting("api_key", envvar="LORAKEET_API_KEY")] = None,
    max_queue: Annotated[int | None, _setting("max_queue")] = None,
    request_timeout: Annotated[float | None, _setting("request_timeout")] = None,
    drain_timeout: Annotated[float | None, _setting("drain_timeout")] = None,
    log_level: Annotated[
        str | None, _setting("log_level", metavar="debug|info|warning|error")
    ] = None,
) -> None:
    """Serve a model and its adapters over the OpenAI API.

    Without a model: the demo model with the demo adapters.
    """
    overrides = dict(locals())
    config_file = overrides.pop("config")
    overrides["adapters"] = _named_paths(overrides.pop("adapter"))
    overrides["adapter_dirs"] = tuple(overrides.pop("adapter_dir") or ()) or None
    if model is None and config_file is None:
        config_file = Path(settings_module.__file__).with_name("demo.yaml")
    from lorakeet.server.serve import run

    run(_load(config_file, overrides))


@app.command()
def bench(
    url: Annotated[str, typer.Option(help="The server, for example http://127.0.0.1:8000")],
    adapters: Annotated[
        str,
        typer.Option(
            help="Names to ask for, a comma list or `all`; `base` and none: the base model"
        ),
    ] = "",
    rate: Annotated[float, typer.Option(help="Requests a second", min=1e-3)] = 2.0,
    cv: Annotated[
        float, typer.Option(help="Coefficient of variation of the arrival times", min=1e-2)
    ] = 1.0,
    alpha: Annotated[
        float, typer.Option(help="Power law of adapter choice; 0: each as often", min=0.0)
    ] = 1.0,
    input_len: Annotated[str, typer.Option(help="Prompt tokens, LOW:HIGH")] = "8:512",
    output_len: Annotated[str, typer.Option(help="Answer tokens, LOW:HIGH")] = "8:512",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals", min=0.1)] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the whole workload")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Name of the base model (default: the server's first)")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAKEET_API_KEY", help="Bearer token to send")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Send random token ids below this instead of words", min=2)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for full-length answers (not every server can)")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the latencies into a .png")
    ] = None,
) -> None:
    """Load-test any OpenAI-compatible server with S-LoRA's workload.

    Gamma arrivals, power-law choice of adapters, uniform lengths; open loop.
    """
    from rich.console import Console

    from lorakeet.server.bench.client import BenchError, Target
    from lorakeet.server.bench.run import run_bench
    from lorakeet.server.bench.workload import Workload

    workload = Workload(
        adapters=(),
        rate=rate,
        cv=cv,
        alpha=alpha,
        input_len=_length_range(input_len, "--input-len"),
        output_len=_length_range(output_len, "--output-len"),
        duration=duration,
        seed=seed,
        vocab_size=vocab_size,
    )
    target = Target(url, model, api_key, ignore_eos)
    try:
        report = run_bench(target, adapters, workload, json_file, plot_file, Console())
    except BenchError as error:
        _fail(str(error))
    if not report.completed:
        raise typer.Exit(1)


def _length_range(text: str, option: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        lengths = int(low), int(high if colon else low)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not LOW:HIGH", param_hint=option) from None
    if not 1 <= lengths[0] <= lengths[1]:
        raise typer.BadParameter("wants 1 <= LOW <= HIGH", param_hint=option)
    return lengths


@adapters_app.command()
def check(
    path: Annotated[Path, typer.Argument(help="Folder of a PEFT adapter")],
    model: Annotated[
        str | None, typer.Option(help=Settings.model_fields["model"].description)
    ] = None,
    max_lora_rank: Annotated[int | None, _setting("max_lora_rank")] = None,
) -> None:
    """Would this adapter load?

    Prints what it holds, or why it would not load, and then exits with 1.
    Without --model it is checked against the demo model.
    """
    from lorakeet.lora.adapter import AdapterError
    from lorakeet.lora.describe import describe
    from lorakeet.lora.specs import group_specs
    from lorakeet.models.config import UnsupportedModelError, load_config
    from lorakeet.models.hub import ModelNotFoundError
    from lorakeet.server.demo import DemoModelError, model_folder

    rank = max_lora_rank or Settings.model_fields["max_lora_rank"].default
    try:
        specs = group_specs(load_config(model_folder(model)))
        description = describe(path, specs, max_rank=rank)
    except (ModelNotFoundError, UnsupportedModelError, DemoModelError, OSError) as error:
        _fail(str(error))
    except AdapterError as error:
        typer.secho(f"{path} would not load: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    typer.echo("\n".join(description.lines()))


def _load(config_file: Path | None, overrides: dict[str, Any]) -> Settings:
    try:
        return settings_module.load(config_file, **overrides)
    except SettingsError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.secho(f"lorakeet: {message}", fg="red", err=True)
    raise typer.Exit(2)


def main() -> None:
    sys.exit(app())


if __name__ == "__main__":
    main()
