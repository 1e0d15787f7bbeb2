"""Asynchronous saves. The run waits only until the state is copied; files are written in the background."""

import contextlib
import dataclasses
import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from bert_jax.config import RunConfig, to_dict
from bert_jax.io.errors import first_line
from bert_jax.io.storage import Location, ObjectPath, StorageError, StorageUnavailable, is_transient
from bert_jax.json_values import Json
from bert_jax.process import hosts
from bert_jax.training.checkpoint.digest import (
    compile_digest,
    json_digest,
    lines_digest,
    part_digests,
    start_digest,
    write_checksums,
)
from bert_jax.training.checkpoint.folder import checkpoint_folder
from bert_jax.training.checkpoint.restore import FORMAT, META_FILE, carried_shapes, nested
from bert_jax.training.state import TrainState


@functools.cache
def _quiet_failed_saves() -> None:
    """Suppress all messages about a failed save except the error that :class:`CheckpointWriter` raises."""
    # Each thread of Orbax logs a traceback (test_a_save_that_fails_on_one_process_ends_all).
    absl = logging.getLogger("absl")
    absl.addFilter(lambda record: "orbax" not in record.pathname or record.levelno < logging.ERROR)
    # asyncio logs a traceback for each further write that fails (test_disk_full_while_a_checkpoint_is_saved).
    report = logging.Formatter()
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in report.format(record))
    # Python warns about each write that was not begun (test_disk_full_while_a_checkpoint_is_saved).
    warnings.filterwarnings("ignore", r"coroutine '.*\.write_fragment' was never awaited", RuntimeWarning)
    hook = sys.unraisablehook

    def without_late_writes(unraisable: "sys.UnraisableHookArgs") -> None:
        # tensorstore raises this error for each write that finishes after its event loop was closed
        # (test_a_save_that_fails_on_one_process_ends_all).
        if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = without_late_writes


@dataclasses.dataclass(frozen=True)
class _Reported:
    """Future of a save. If the save fails, the error is passed to ``report`` and then raised."""

    future: ocp.future.Future
    report: Callable[[BaseException], None]

    def result(self, timeout: float | None = None) -> None:
        try:
            return self.future.result(timeout)
        except BaseException as error:
            self.report(error)
            raise

    def cancel(self) -> bool | None:
        return self.future.cancel()


class _StateHandler(ocp.PyTreeCheckpointHandler):
    """Handler that writes the arrays uncompressed. Compression would reduce the size by a tenth, but would need
    several times the CPU time and a second copy of the state."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        super().__init__(use_compression=False)
        self._report = report

    async def async_save(self, *arguments: Any, **options: Any) -> list[ocp.future.Future]:
        futures = await super().async_save(*arguments, **options)
        return [_Reported(future, self._report) for future in futures or ()]


class _MetaHandler(ocp.JsonCheckpointHandler):
    """Handler that writes the JSON part of a checkpoint. A function, called in the background before the commit,
    returns this part."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        super().__init__(META_FILE)
        self._report = report

    async def async_save(
        self, directory: epath.Path, item: Any = None, args: Any = None
    ) -> list[ocp.future.Future]:
        future = ocp.future.CommitFutureAwaitingContractedSignals(self._write(directory, args.item))
        return [_Reported(future, self._report)]

    async def _write(self, directory: epath.Path, complete: Callable[[], dict[str, Json]]) -> None:
        unit = complete()
        if hosts.is_lead():
            (directory / META_FILE).write_text(json.dumps(unit))


# Orbax chooses the handler of an item by the type of its arguments.
@ocp.args.register_with_handler(_StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveState(ocp.args.PyTreeSave):
    pass


@ocp.args.register_with_handler(_MetaHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveMeta(ocp.args.JsonSave):
    pass


class CheckpointWriter:
    """Writer of the checkpoints of one run. Every process must create one writer and make the same calls.

    If a save fails on a process, a later call on this process raises the error.

    Args:
        like: the state, as arrays or ``jax.ShapeDtypeStruct`` objects with shardings. The programs that compute its
            digest are compiled in the background.
        before_commit: function that is called in the background before each commit, to store files that must not be
            older than the checkpoint.
    """

    def __init__(
        self,
        workdir: Location,
        config: RunConfig,
        like: TrainState | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        _quiet_failed_saves()
        self.config, self._before_commit = config, before_commit
        self.folder = checkpoint_folder(workdir)
        training = config.training
        policies = [checkpoint_managers.LatestN(training.keep_checkpoints)]
        if training.keep_every:
            policies.append(checkpoint_managers.EveryNSteps(training.keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._barrier if hosts.count() > 1 else None),
        )
        self._lost: BaseException | None = None  # error of a save; set only if the run has several processes
        handlers = {"state": _StateHandler(self._note), "meta": _MetaHandler(self._note)}
        self._manager = ocp.CheckpointManager(str(self.folder), options=options, item_handlers=handlers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Background work that the next save waits for: compiling the digest, writing checksums.
        self._beside: Future[None] | None = None
        if like is not None:
            self._beside = self._thread.submit(compile_digest, like, config.model.vocab_size)
        self._unlisted: int | None = None

    def _note(self, error: BaseException) -> None:
        if hosts.count() > 1:
            self._lost = error

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Wait for the other processes. If the save failed on this process, raise its error, which ends the run."""
        if self._lost is not None:
            raise self._lost
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _raise_lost(self) -> None:
        if self._lost is not None:
            with self._one_line():
                raise self._lost

    def save(self, state: TrainState, meta: Mapping[str, Json]) -> None:
        """Start saving ``state`` and ``meta`` (JSON values) as checkpoint ``state.step``.

        Returns as soon as the buffers of ``state`` may be donated. Raises the error of an earlier save.
        """
        self.wait()
        step = int(state.step)
        # Copied, because the run changes the original while the copy is written in the background.
        own = {"format": FORMAT, "step": step, "config": to_dict(self.config), "carried": carried_shapes(state)}
        unit = json.loads(json.dumps(own | dict(meta)))
        digest = start_digest(state, self.config.model.vocab_size)

        def complete() -> dict[str, Json]:
            lines = digest()
            unit["digest"] = lines_digest(lines)
            unit["digests"] = part_digests(lines)
            unit["json_digest"] = json_digest(unit)
            self._before_commit()
            return unit

        saved = self._manager.save(
            step,
            args=ocp.args.Composite(state=_SaveState(nested(state)), meta=_SaveMeta(complete)),
            force=True,
        )
        assert saved, f"checkpoint {step} was not accepted for saving"
        self._unlisted = step

    def poll(self) -> None:
        """Write the checksums of a save committed since the last call. Raises the error of a save that failed.

        Cheap enough to call at every step.
        """
        self._raise_lost()
        if self._unlisted is not None and not self._manager.is_saving_in_progress():
            step, self._unlisted = self._unlisted, None
            with self._one_line():
                # check_for_errors() raises an error only once, and the thread that ends the save has called it.
                self._manager.wait_until_finished()
            if hosts.is_lead():
                self._beside = self._thread.submit(write_checksums, self.folder / str(step))

    def is_writing(self) -> bool:
        """Return True while a save is being written. May be called from any thread."""
        return self._unlisted is not None and self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Wait until the pending save is committed and its checksums are written. Raises the error of the save."""
        while hosts.count() > 1 and self._manager.is_saving_in_progress():
            self._raise_lost()  # Orbax would wait for processes that are waiting for this process
            time.sleep(0.01)
        try:
            with self._one_line():
                self._manager.wait_until_finished()
        except BaseException:
            self._unlisted = None  # not committed, so no checksums are needed
            raise
        self.poll()
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.result()

    def close(self) -> None:
        """Complete the pending save and release the checkpoint manager."""
        self.wait()
        self._manager.close()
        self._thread.shutdown()

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        """Convert any error of a save in an object store to a ``StorageError`` with a one-line message."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            if not isinstance(self.folder, ObjectPath):
                raise
            kind = StorageUnavailable if is_transient(error) else StorageError
            raise kind(
                f"{self.folder}: a save failed: {first_line(error)}; run the same command to continue"
            ) from None
