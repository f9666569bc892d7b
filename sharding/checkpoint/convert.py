"""`convert`: a checkpoint in another format: of safetensors, of torch's, or of `save`.

safetensors   llama/model-00001-of-00002.safetensors ...      weights by name
checkpoint    checkpoints/step-00000100/                      a tree, {"model": weights, ...}
dcp           a folder of torch.distributed.checkpoint        the same
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.text import shortened
from .agreement import CheckpointError
from .load import load
from .safetensors import mapped_tensors, save_safetensors
from .save import save
from .storage.files import sync_folder, temporary_path, write_whole
from .storage.folder import MANIFEST, METADATA, complete
from .storage.manifest import parse, read_index
from .tree import leaves

FORMATS = ("checkpoint", "safetensors", "dcp")
_MODEL = "model"  # the entry of `state_dict(model, optimizer)` that has the weights
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".distcp")


@dataclass(frozen=True)
class Conversion:
    """What `convert` has written; prints as a line.

    Attributes:
        source, target: folders, as given.
        source_format, target_format: "checkpoint", "safetensors" or "dcp".
        tensors: their number.
        bytes: their size.
        step: of a checkpoint that was read or written; None if there is none.
    """

    source: str
    source_format: str
    target: str
    target_format: str
    tensors: int
    bytes: int
    step: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"{self.source} ({self.source_format}) -> {self.target} ({self.target_format}): "
            f"{self.tensors} tensors, {self.bytes:,} bytes{step}"
        )


def format_of(path: str | os.PathLike[str]) -> str:
    """format_of(path) -> "checkpoint", "safetensors" or "dcp".

    Raises: ValueError if the path is none of them.

    Communication: none.
    """
    path = Path(path)
    if path.is_dir():
        if (path / METADATA).exists():
            return "checkpoint" if (path / MANIFEST).exists() else "dcp"
        if complete(path):
            return "checkpoint"
        if any(path.glob("*.safetensors")):
            return "safetensors"
    elif path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    state = "is neither" if path.exists() else "does not exist; it must be"
    raise ValueError(
        f"convert: {path} {state} a folder of sm.checkpoint.save, one of "
        "torch.distributed.checkpoint, or safetensors files"
    )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    key: str | None = None,
    step: int | None = None,
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | str | None = "5GB",
) -> Conversion:
    """convert(source, target, to) -> what was written: the values of `source` in another format.

    In one process, which needs no mesh and no model. Safetensors files and folders of
    torch.distributed.checkpoint are written under a name that ends in `.unfinished`, beside the
    target or, if it exists, inside it, and moved when they are complete; a process that is killed
    leaves that folder. Weights of safetensors files are mapped into memory as they are written;
    tensors of checkpoints are all in host memory meanwhile.
    Of values that each rank has saved apart (`PerRank`), those of rank 0 are written.

    Args:
        source: what `load` or `load_safetensors` reads, also a folder of
            torch.distributed.checkpoint.
        target: a folder that does not exist, or is empty.
        to: "checkpoint", "safetensors" or "dcp".
        key: the entry of a checkpoint's tree that has the weights in safetensors files; "" for the
            tree itself. By default "model", as in `state_dict(model, optimizer)`; the tree itself
            if a checkpoint has no such entry.
        step: which step to read; by default the newest one. From safetensors: which one to write.
        config: a Hugging Face folder whose other files (configuration, tokenizer) are copied to
            safetensors files, so that `from_pretrained` opens the result.
        max_shard_size: as for `save_safetensors`.

    Raises:
        ValueError: an unknown format; a source that is none; a target that has files; a key that
            the checkpoint does not have, or that is not needed.
        FileNotFoundError, CheckpointError: as `load`.
        RuntimeError: in a job of several ranks.

    Communication: none.

    Example:
        >>> sm.checkpoint.convert("llama", "checkpoints", "checkpoint")
        >>> sm.checkpoint.convert("checkpoints", "trained", "safetensors", config="llama")
    """
    return run_conversion(
        source, target, to, key, step, config, max_shard_size, lambda *_: contextlib.nullcontext()
    )


def run_conversion(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    key: str | None,
    step: int | None,
    config: str | os.PathLike[str] | None,
    max_shard_size: int | str | None,
    progress: Callable[..., contextlib.AbstractContextManager[None]],
) -> Conversion:
    """Convert as `convert`; `progress(label, total, measure)` is entered to read and to write.

    Args:
        progress: as `byte_progress`.
    """
    source, target = Path(source), Path(target)
    if to not in FORMATS:
        raise ValueError(f"convert(to={to!r}): write one of {', '.join(FORMATS)}")
    if current_world().size > 1:
        raise RuntimeError("convert: call it in one process, not in a job of several ranks")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"convert: {target} exists already; write the name of a new folder")
    if config is not None and (to != "safetensors" or not Path(config).is_dir()):
        raise ValueError(
            f"convert(config={os.fspath(config)!r}): it must be a folder, whose files are copied "
            "to safetensors files"
        )
    source_format = format_of(source)
    if key is not None and (source_format == "safetensors") == (to == "safetensors"):
        raise ValueError(
            f"convert(key={key!r}): from {source_format} to {to} all entries are written; leave it "
            "out"
        )
    if source_format == "safetensors":
        weights: Any = mapped_tensors(source)
        inner = _MODEL if key is None else key
        tree = {inner: weights} if inner and to != "safetensors" else weights
        step = step or 0
    else:
        with progress(f"reading {source}"):
            tree, step = _read(source, step, key, to == "safetensors")
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]
    size = sum(x.numel() * x.dtype.itemsize for x in tensors)
    if to == "checkpoint":
        with progress(f"writing {target}", size, lambda: _bytes_in(target)):
            save(tree, target, step=step or 0)
    else:
        with (
            _unfinished(target.resolve()) as folder,
            progress(f"writing {target}", size, lambda: _bytes_in(folder)),
        ):
            if to == "safetensors":
                save_safetensors(tree, folder, max_shard_size=max_shard_size)
                _copy_config(config, folder)
            else:
                _save_dcp(tree, folder)
    is_numbered = "checkpoint" in (source_format, to)
    return Conversion(
        str(source),
        source_format,
        str(target),
        to,
        len(tensors),
        size,
        step if is_numbered else None,
    )


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Give a new folder, which becomes `target` at the end; an error removes it.

    It is inside of a target that exists, whose place may be a mount point, the current folder, or
    in a folder that is not writable; then its files are moved, those that name others last.
    """
    is_inside = target.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = temporary_path(target / "convert" if is_inside else target)
    folder.mkdir()
    moved: list[Path] = []
    try:
        yield folder
        sync_folder(folder)
        if is_inside:
            for path in sorted(folder.iterdir(), key=lambda path: (_names_others(path), path)):
                moved.append(target / path.name)
                os.rename(path, moved[-1])
            folder.rmdir()
        else:
            os.rename(folder, target)
    except BaseException as error:
        for path in moved:
            path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, CheckpointError):  # names a file, of a folder that is not there now
            raise CheckpointError(str(error).replace(str(folder), str(target))) from error
        raise
    sync_folder(target if is_inside else target.parent)


def _names_others(path: Path) -> bool:
    """Return whether readers find the other files by this one."""
    return path.name == METADATA or path.name.endswith(".index.json")


def _save_dcp(tree: Any, folder: Path) -> None:
    """Write a tree as torch.distributed.checkpoint does."""
    from torch.distributed import checkpoint as dcp  # here because importing it takes long

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(dict(tree), checkpoint_id=folder, no_dist=True)


def _bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder, whose files may be renamed meanwhile."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


class _AnyState:
    """An object whose state is whatever the checkpoint has, as plain tensors."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _read(
    source: Path, step: int | None, key: str | None, only_weights: bool
) -> tuple[Any, int | None]:
    """Return a checkpoint's tree, or the weights in it, and its step."""
    folder = source
    like = _AnyState()
    if not (source / METADATA).exists():
        checkpoints = complete(source)
        step = max(checkpoints) if step is None else step
        if step in checkpoints:
            folder = checkpoints[step].path
        else:
            only_weights = False  # `load` says which steps there are
    if not only_weights:
        load(source, like, step=step)
        return like.state, step
    contents = parse(folder, *read_index(folder))
    entries = [name for name, _ in contents.structure.get("dict", [])]
    inner = (_MODEL if _MODEL in entries else "") if key is None else key
    if inner and inner not in entries:
        raise ValueError(
            f"convert(key={key!r}): {folder} has no such entry; it has {shortened(entries)}"
        )
    load(source, {inner: like} if inner else like, step=step)
    return like.state, step


def _copy_config(config: str | os.PathLike[str] | None, target: Path) -> None:
    """Copy the files of a Hugging Face folder that are no weights."""
    if config is not None:
        for path in sorted(Path(config).iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                write_whole(target / path.name, path.read_bytes())
