"""The folder of compiled programs that later processes of a user read instead of compiling again."""

import contextlib
import os
from pathlib import Path

# Size of the user's folder from which the programs that were used longest ago are deleted.
MAX_BYTES = 2 << 30
# A program that compiles faster is not stored. The default of JAX leaves out most programs of small models.
LEAST_SECONDS, _DEFAULT_SECONDS = 0.1, 1.0


def use_program_cache(folder: str = "") -> None:
    """Let JAX store compiled programs in ``folder``. Empty: the folder that JAX_COMPILATION_CACHE_DIR names, else
    ``~/.cache/bert_jax/programs`` (XDG_CACHE_HOME applies), if it can be written.

    JAX finds a program by its code, versions, options, devices and the instruction set of the CPU, and compiles it
    if its file is damaged. A program for CPUs also divides its work among the threads of the process that compiled
    it, which JAX does not compare, so ``folder`` and the user's folder have a subfolder for each number of threads.
    Processes and machines can therefore share a folder. JAX_ENABLE_COMPILATION_CACHE=false turns this off.
    """
    import jax

    if not folder and jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = _user_folder()
    if folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/{_threads()}_threads")
    least = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    if least == _DEFAULT_SECONDS and "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def _threads() -> int:
    """Return the number of threads for which XLA compiles a program for CPUs."""
    for name in ("PJRT_NPROC", "NPROC"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _user_folder() -> str:
    """Return the folder in the cache of the user, with at most ``MAX_BYTES``; empty: it cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert_jax" / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return ""
        paths = [path for path in folder.rglob("*") if not path.is_dir()]
    except (OSError, RuntimeError):  # no home folder
        return ""
    files = {}
    for path in paths:
        with contextlib.suppress(OSError):  # another process has deleted it
            files[path] = path.stat()
    excess = sum(status.st_size for status in files.values()) - MAX_BYTES
    for path, status in sorted(files.items(), key=lambda item: max(item[1].st_atime, item[1].st_mtime)):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        excess -= status.st_size
    return str(folder)
