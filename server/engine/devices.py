"""Which device a rank works on, and whether a model can be cut over the ranks."""

import torch

from lorakeet.configs.settings import Settings, SettingsError
from lorakeet.models.config import ModelConfig, UnsupportedModelError
from lorakeet.models.cuts import cut_model
from lorakeet.models.process_group import ProcessGroup


def uses_cuda(settings: Settings) -> bool:
    """ "auto" is the GPU where there is one."""
    return settings.device != "cpu" and torch.cuda.is_available()


def choose_device(settings: Settings, rank: int = 0) -> torch.device:
    """Each rank has a GPU of its own, the process's current one.

    Raises SettingsError for "cuda" without one, and for more ranks than GPUs.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: there is no CUDA device that torch can use")
    if not uses_cuda(settings):
        return torch.device("cpu")
    size, num_devices = settings.tensor_parallel_size, torch.cuda.device_count()
    if size == 1:
        return torch.device("cuda")
    if size > num_devices:
        raise SettingsError(f"tensor_parallel_size: {size}; this machine has {num_devices} GPUs")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def check_parallel(settings: Settings, config: ModelConfig) -> None:
    """Raise SettingsError for a `tensor_parallel_size` that the model cannot be cut by, or for
    which there are not enough devices."""
    try:
        cut_model(config, ProcessGroup(0, settings.tensor_parallel_size))
    except UnsupportedModelError as error:
        raise SettingsError(f"tensor_parallel_size: {error}") from None
    choose_device(settings)
