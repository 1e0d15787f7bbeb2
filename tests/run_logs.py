"""Logs of a run without the run."""

from bert_jax.config import PretrainConfig
from bert_jax.objectives.display import Display
from bert_jax.process.signals import StopRequest
from bert_jax.start.start import Start
from bert_jax.training.launch import Launch
from bert_jax.training.logging.run_log import RunLog


def open_log(workdir, start_step=0, loggers=(), callbacks=(), place=None):
    """The logs in ``workdir`` of a run that continues after ``start_step``; ``place``: its workdir in a store."""
    start = Start()
    launch = Launch(workdir=place or workdir, stop=StopRequest(), start=start, loggers=loggers, callbacks=callbacks)
    return RunLog(workdir, PretrainConfig(), launch, start_step, Display())


def train_metrics(step):
    return {"loss": 10.0 - step / 100, "learning_rate": 1e-4, "mfu": None, "skipped_steps": 0}


def log_with_a_kill(workdir, make_logger):
    """Log steps 10 to 30 and an evaluation, then continue from step 20 to 40 as after a kill."""
    for start, last in ((0, 30), (20, 40)):
        log = open_log(workdir, start, (make_logger(),))
        for step in range(start + 10, last + 1, 10):
            log.write(step, train_metrics(step))
        log.write(last, {"split": "eval", "mlm_loss": last / 7})
        log.close()
