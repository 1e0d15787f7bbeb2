"""One run from start to end: workdir, programs, initial or restored state, data, logs, training loop, results.

A run trains a ``Job``, which pretraining and fine-tuning implement.
"""

import time

import jax

from bert_jax.io.errors import one_line
from bert_jax.io.storage import ObjectPath
from bert_jax.optim import warmup_warning
from bert_jax.parallel import make_mesh
from bert_jax.process import exits, hosts
from bert_jax.process.program_cache import use_program_cache
from bert_jax.process.signals import Interrupted
from bert_jax.process.watchdog import Watchdog
from bert_jax.training.fit import fit
from bert_jax.training.job import Context, Data, Job
from bert_jax.training.launch import Launch
from bert_jax.training.logging.run_log import RunLog
from bert_jax.training.programs import TrainPrograms
from bert_jax.training.spikes import RollBack
from bert_jax.training.start import FirstState
from bert_jax.training.workdir import Logs, describe_run, hold_workdir, stopped


def train(job: Job, launch: Launch) -> None:
    """Run ``job`` in ``launch.workdir``, starting from the newest checkpoint in the workdir if one exists.

    Must be called by every process of the run with the same config. Raises ``ValueError`` for user errors and
    ``exits.Stop`` if the run ends early.
    """
    workdir, stop = launch.workdir, launch.stop

    def check_stop() -> None:
        if stop:
            line = f"stopped while waiting for {workdir}, {stop.reason()}; run the same command to continue"
            raise exits.Stop(stop.exit_code, line)

    taken = "another run is using this workdir; wait until that run ends, or use another --workdir"
    with (
        hold_workdir(workdir, taken, lead=hosts.is_lead(), check_stop=check_stop) as logs,
        Watchdog(job.config.training.watchdog_seconds if stop.ends_process else 0) as watchdog,
    ):
        watchdog.others = hosts.exchange_activity(lambda: watchdog.doing, watchdog.dump_if_stuck)
        rollback = None
        while True:
            try:
                return Run(job, launch, logs, watchdog, rollback).run()
            except RollBack as back:
                # Resume and skip batches. The traceback is removed, because it would keep the state in memory.
                rollback = back.with_traceback(None)


class Run:
    """One attempt at a run, which ends with the run or with a rollback. The lead process has locked the workdir."""

    def __init__(
        self, job: Job, launch: Launch, logs: Logs, watchdog: Watchdog, rollback: RollBack | None = None
    ) -> None:
        """Create an attempt. ``rollback``, if set, is the rollback that ended the previous attempt; it determines
        the batches to skip."""
        self.job, self.launch, self.logs, self.watchdog, self.rollback = job, launch, logs, watchdog, rollback
        now = time.perf_counter()
        self.began = now if rollback is not None or launch.started is None else launch.started
        self.messages = [*launch.start.messages] if rollback is None else []

    def run(self) -> None:
        """Open the workdir, find the state to start from, load the data, train, and write the results."""
        job, launch = self.job, self.launch
        self._open_workdir()
        programs = job.programs(make_mesh(job.config.mesh, launch.devices))
        start = launch.start.first_state(job, programs, launch, self.rollback, self.messages.append)
        if launch.stop.reached():
            raise stopped(launch, f"stopped at step {start.step:,}")
        complete = start.step >= job.config.training.num_steps or job.stopped_early()
        before_data = time.perf_counter()
        # Raises if the data differ between processes, before the workdir is changed.
        data = self._load_data(start, programs.mesh, complete)
        after_data = time.perf_counter()
        if hosts.is_lead() and not complete:
            describe_run(self.logs.folder, job.config, launch.start.record)
            job.write_tokenizer(self.logs.folder)
        context = self._open_log(programs, start, complete)
        try:
            complete = self._evaluate_if_due(context, start, complete) or complete
            if data.batches is None or complete:
                self._finish_complete(context, start)
                return
            context.log.begin_report()
            with self.watchdog.phase("compiling the training step"):
                programs.step_for(job.batch_shapes(programs.mesh, start.step - start.phase_start))
                # Processes compile at different speeds, and a collective has a shorter timeout than this barrier.
                context.barrier("compiled")
            context.log.line(
                f"start-up {before_data - self.began:.1f} s, data {after_data - before_data:.1f} s, "
                f"compiling the training step {programs.compile_seconds:.1f} s"
            )
            try:
                state = fit(job, context, start, data, self.logs.upload)
            except exits.Stop as early:
                if early.code in (exits.INTERRUPTED, exits.PREEMPTED):
                    raise stopped(launch, str(early)) from None
                raise
            with self.watchdog.phase("writing the report"):
                job.finish(context, state)
        except RollBack:
            raise
        except BaseException as error:
            name = "" if isinstance(error, exits.Stop) or not str(error) else f"{type(error).__name__}: "
            context.log.write_end(name + one_line(error))
            raise
        finally:
            context.log.close()

    def _open_workdir(self) -> None:
        """Check that all processes use the same workdir and config. Set the folder of the compilation cache."""
        workdir, training = self.launch.workdir, self.job.config.training
        hosts.require_shared(workdir, self.launch.host_timeout)
        self.job.require_same_config(self.launch.host_timeout)
        if training.compilation_cache != "none":
            # Hosts share the workdir, and the next machine reads a URL; neither needs to be true of a home folder.
            is_shared = hosts.count() > 1 or isinstance(workdir, ObjectPath)
            own = str(workdir.absolute() / "compilation_cache") if is_shared else ""
            use_program_cache(training.compilation_cache or own)

    def _load_data(self, start: FirstState, mesh: jax.sharding.Mesh, complete: bool) -> Data:
        """Return the training data, positioned before the first batch that follows ``start``."""
        if complete and start.changed:
            used = self.job.options_used_after_completion
            self.messages.append(f"the run is complete; only these options have an effect: {used}")
        data = self.job.data(mesh, complete=complete)
        self.job.require_same_data(data, self.launch.host_timeout)
        if data.rows and not complete:
            self.messages.append(data.rows)
        if data.batches is not None and start.meta is not None:
            data.batches.restore(start.meta["data"])
            if self.rollback is not None:
                self.messages.append(start.guard.go_back(self.rollback, start.step, data.batches))
        return data

    def _open_log(self, programs: TrainPrograms, start: FirstState, complete: bool) -> Context:
        """Open the logs; write the messages collected so far and a line about the model and the devices."""
        config, mesh = self.job.config, programs.mesh
        training = config.training
        if not complete and (line := warmup_warning(config.optimizer, training.num_steps, training.first_step)):
            self.messages.append(line)
        log = RunLog(self.logs.folder, config, self.launch, start.step, programs.objective.display)
        log.write_origin()
        for message in self.messages:
            log.line(message)
        devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
        if hosts.count() > 1:
            devices += f" in {hosts.count()} processes"
        sizes = "x".join(f"{name}={size}" for name, size in mesh.shape.items())
        log.line(f"{programs.parameter_count:,} parameters, {devices}, mesh {sizes}, {config.execution.dtype}")
        return Context(programs, self.launch, log, self.watchdog)

    def _evaluate_if_due(self, context: Context, start: FirstState, complete: bool) -> bool:
        """Evaluate the restored state if its evaluation is due but missing from the log, or the initial state if
        the job wants it. Return True if the run should end after this evaluation."""
        job, step, training = self.job, start.step, self.job.config.training
        is_due = step == training.num_steps or (
            not complete and training.eval_interval > 0 and step % training.eval_interval == 0
        )
        is_done = context.log.has(step, job.eval_split) and job.eval_is_recorded(step)
        is_wanted = start.meta is not None or (job.evaluates_start and step == 0)
        is_due = is_due and is_wanted and job.has_eval_data() and not is_done
        if not hosts.broadcast_from_lead("evaluation_is_due", is_due, self.launch.host_timeout):
            return False
        assert start.state is not None
        try:
            return job.evaluate(context, start.state, step)
        except Interrupted:
            raise stopped(self.launch, f"stopped at step {step:,}") from None

    def _finish_complete(self, context: Context, start: FirstState) -> None:
        """Write the results of a complete run unless the log folder already contains them."""
        is_due = not self.job.is_finished(self.logs.folder)
        if hosts.broadcast_from_lead("report_is_due", is_due, self.launch.host_timeout):
            assert start.state is not None
            self.job.finish(context, start.state)
        context.log.line(
            f"the run in {self.launch.workdir} is complete: {start.step:,} steps; "
            f"its report is {self.launch.workdir}/report.html"
        )
