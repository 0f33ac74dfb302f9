"""The engine from its settings to its end, the same in a process of its own and in a thread."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lorakeet.configs.settings import Settings, SettingsError
from lorakeet.kernels.sizes import FEW_TOKENS
from lorakeet.lora.pool import bytes_per_row
from lorakeet.models.config import UnsupportedModelError, load_config
from lorakeet.models.process_group import ProcessGroupError, join
from lorakeet.models.weights import WeightsError
from lorakeet.server.engine.devices import check_parallel, choose_device
from lorakeet.server.engine.leader import Followers, LeadingRunner
from lorakeet.server.engine.loop import EngineLoop, Inbox
from lorakeet.server.engine.memory import blend_rows
from lorakeet.server.engine.messages import MAX_BLEND, EngineDead, EngineInfo, Event
from lorakeet.server.engine.runner import Runner
from lorakeet.server.engine.scheduler import Scheduler
from lorakeet.server.engine.scheduler_config import SchedulerConfig

logger = logging.getLogger(__name__)

# What a user can put right: the message says all that there is to say.
USER_ERRORS = (SettingsError, UnsupportedModelError, WeightsError, ProcessGroupError)

# An error of one rank may come of another's death, which is told, and ends all, in this time.
SETTLE_SECONDS = 1.0


def run_engine(
    settings: Settings,
    model_folder: Path,
    inbox: Inbox,
    send: Callable[[Event], None],
    die: Callable[[str], None] | None = None,
) -> bool:
    """Build the engine, tell that it is ready, and run it until `Shutdown`.

    An error ends it with `EngineDead`. Returns whether it ended as it should. With several ranks
    this is rank 0, in a process of its own: `die(reason)` must end it at once, from any thread,
    when another rank has ended.
    """
    try:
        with _other_ranks(settings, model_folder, die) as followers:
            runner = _make_runner(settings, model_folder, followers)
            executor = runner if followers is None else LeadingRunner(runner, followers)
            loop = EngineLoop(make_scheduler(settings, runner), executor, runner.host_store, send)
            send(_info(settings, runner))
            loop.run(inbox)
            runner.shutdown()
    except USER_ERRORS as error:
        send(EngineDead(str(error)))
        return False
    except Exception as error:
        logger.exception("the engine is dead")
        send(EngineDead(f"{type(error).__name__}: {error}"))
        return False  # waits for no thread: one may wait for a device that waits for dead ranks
    return True


@contextmanager
def _other_ranks(
    settings: Settings, model_folder: Path, die: Callable[[str], None] | None
) -> Iterator[Followers | None]:
    if settings.tensor_parallel_size == 1:
        yield None
        return
    assert die is not None, "several ranks need a process of the engine's own"
    check_parallel(settings, load_config(model_folder))
    followers = Followers(settings, model_folder, die)
    try:
        yield followers
    except Exception as error:
        if not isinstance(error, USER_ERRORS):
            time.sleep(2 * SETTLE_SECONDS)  # theirs come first
        raise
    finally:
        followers.close()


def _make_runner(settings: Settings, model_folder: Path, followers: Followers | None) -> Runner:
    if followers is None:
        return Runner(settings, model_folder)
    size, timeout = settings.tensor_parallel_size, settings.start_timeout + settings.step_timeout
    group = join(0, size, followers.listener, choose_device(settings, 0), timeout)
    followers.reach("joined")
    runner = Runner(settings, model_folder, group, followers, partial(followers.reach, "loaded"))
    followers.wait_ready()
    return runner


def make_scheduler(settings: Settings, runner: Runner) -> Scheduler:
    """A scheduler of what the runner has room for."""
    on_gpu = runner.device.type == "cuda"
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
            short_step_tokens=FEW_TOKENS if on_gpu else None,
        )
    )


def _devices(runner: Runner) -> str:
    size, kind = runner.group.size, runner.device.type
    return kind if size == 1 else f"{size} x {kind}"


def _info(settings: Settings, runner: Runner) -> EngineInfo:
    return EngineInfo(
        vocab_size=runner.config.vocab_size,
        max_model_len=runner.max_model_len,
        num_blocks=runner.cache.num_blocks,
        block_size=settings.block_size,
        max_loras=settings.max_loras,
        device=_devices(runner),
        dtype=str(runner.dtype).removeprefix("torch."),
        memory=runner.memory_by_part(),
        max_blend_rows=blend_rows(settings, runner.pool.num_rows),
        lora_row_bytes=bytes_per_row(tuple(runner.pool.specs.values()), runner.dtype),
        lora_host_limit=runner.host_store.max_bytes or 0,
    )
