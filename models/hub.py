"""Where a model comes from: a folder, a GGUF file, or the Hugging Face hub."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from lorakeet.models.cache import cache_dir
from lorakeet.models.gguf import convert_gguf

_WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
    "model*.safetensors",
    "model.safetensors.index.json",
]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class ModelNotFoundError(Exception):
    """There is no such model, or it cannot be fetched; the message says what to do."""


def resolve_model(name_or_path: str) -> Path:
    """The local folder (config.json, tokenizer, safetensors) of a model.

    Takes a folder, a .gguf file, a folder that holds one .gguf file, or a hub id, whose files go
    to Hugging Face's own cache. What lies on disk wins over the hub.
    Raises ModelNotFoundError, or UnsupportedModelError for a GGUF file that cannot be served.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a folder nor a .gguf file.")
        return convert_gguf(path, cache_dir())
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name_or_path):
        raise ModelNotFoundError(f"There is no file or folder {name_or_path}.")
    return _download(name_or_path)


def _folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return convert_gguf(ggufs[0], cache_dir())
    if ggufs:
        raise ModelNotFoundError(f"{path} holds {len(ggufs)} .gguf files; name one of them.")
    raise ModelNotFoundError(f"{path} is no model: it holds neither config.json nor a .gguf file.")


def _download(repo_id: str) -> Path:
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_WANTED))
    except GatedRepoError:
        reason = "its owner grants access by request; ask there, then run `hf auth login`"
    except RepositoryNotFoundError:
        reason = (
            "there is neither such a folder here nor such a model on the hub "
            "(a private one needs `hf auth login`)"
        )
    except HFValidationError:
        reason = "there is no such folder, and it is no hub id"
    except LocalEntryNotFoundError:
        reason = (
            "there is no such folder here, the hub cannot be reached, and no earlier download "
            "is whole; connect, or give a local folder or .gguf file"
        )
    except Exception as error:  # the hub client's HTTP library differs from version to version
        reason = f"{type(error).__name__}: {error}"
    else:
        return _folder(folder)
    raise ModelNotFoundError(f"Cannot get the model {repo_id!r}: {reason}.") from None
