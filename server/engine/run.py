"""The engine from its settings to its end, the same in a process of its own and in a thread."""

import logging
from collections.abc import Callable
from pathlib import Path

from lorakeet.configs.settings import Settings, SettingsError
from lorakeet.lora.pool import bytes_per_row
from lorakeet.models.config import UnsupportedModelError
from lorakeet.models.weights import WeightsError
from lorakeet.server.engine.loop import EngineLoop, Inbox
from lorakeet.server.engine.memory import blend_rows
from lorakeet.server.engine.messages import MAX_BLEND, EngineDead, EngineInfo, Event
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.scheduler import Scheduler
from lorakeet.server.engine.scheduler_config import SchedulerConfig

logger = logging.getLogger(__name__)

# What a user can put right: the message says all that there is to say.
_USER_ERRORS = (SettingsError, UnsupportedModelError, WeightsError)


def run_engine(
    settings: Settings, model_folder: Path, inbox: Inbox, send: Callable[[Event], None]
) -> bool:
    """Build the engine, tell that it is ready, and run it until `Shutdown`.

    An error ends it with `EngineDead`. Returns whether it ended as it should.
    """
    try:
        runner = Runner(settings, model_folder)
        try:
            loop = EngineLoop(make_scheduler(settings, runner), runner, runner.host_store, send)
            send(_info(settings, runner))
            loop.run(inbox)
        finally:
            runner.host_store.shutdown()
    except _USER_ERRORS as error:
        send(EngineDead(str(error)))
        return False
    except Exception as error:
        logger.exception("the engine is dead")
        send(EngineDead(f"{type(error).__name__}: {error}"))
        return False
    return True


def make_scheduler(settings: Settings, runner: Runner) -> Scheduler:
    """A scheduler of what the runner has room for."""
    return Scheduler(
        SchedulerConfig(
            num_blocks=runner.cache.num_blocks,
            block_size=settings.block_size,
            max_model_len=runner.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_loras=settings.max_loras,
            num_slots=runner.pool.num_slots,
            num_rows=runner.pool.num_rows,
            max_lora_rank=settings.max_lora_rank,
            vocabulary_bytes=runner.vocabulary_bytes,
            max_blend=MAX_BLEND,
            max_blend_rows=blend_rows(settings, runner.pool.num_rows),
            enable_prefix_caching=settings.enable_prefix_caching,
        )
    )


def _info(settings: Settings, runner: Runner) -> EngineInfo:
    return EngineInfo(
        vocab_size=runner.config.vocab_size,
        max_model_len=runner.max_model_len,
        num_blocks=runner.cache.num_blocks,
        block_size=settings.block_size,
        max_loras=settings.max_loras,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        memory=runner.memory_by_part(),
        max_blend_rows=blend_rows(settings, runner.pool.num_rows),
        lora_row_bytes=bytes_per_row(tuple(runner.pool.specs.values()), runner.dtype),
        lora_host_limit=runner.host_store.max_bytes or 0,
    )
