"""Run audits in a separate process behind a bounded queue, so that submitting an audit never blocks.

The worker is a new Python interpreter that communicates over its standard input and output. It does not use
``multiprocessing``, whose workers run the main script again: that of a server would start the federation again.
"""

import logging
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from spearpp.errors import OptionError, SpearError
from spearpp.integrations.common.job import LOGGER, Job, Settings, perform, scratch_of
from spearpp.integrations.common.outcome import Outcome
from spearpp.integrations.common.policy import log_outcome

PATIENCE = 120.0
"""Seconds, in addition to ``BUDGETS`` times its time limit, after which a silent worker is killed. Design choice:
covers the start of an interpreter and its imports, which take seconds, on a busy machine."""
BUDGETS = 10
"""Multiple of the time limit after which a worker counts as hanging. Design choice: an audit can exceed its limit."""
ATTEMPTS = 2
"""Number of attempts for an audit whose worker dies. Design choice: the second attempt covers an unrelated kill."""
ENTRY = """
import os
if hasattr(os, "nice"):
    os.nice(10)  # Before the imports, which take seconds: the federation has priority on the CPU cores.
from spearpp.integrations.common.worker import serve
serve()
"""
JobFactory = Callable[[], Job]


class Auditor:
    """A queue of audits and the worker process that runs them one after another.

    The worker starts with the first audit, and again if it dies. An audit whose worker dies twice is abandoned.
    """

    def __init__(self, settings: Settings, *, waiting: int = 4) -> None:
        if waiting < 1:
            raise OptionError(f"waiting={waiting}: expected at least 1")
        if settings.out is not None:  # The server may change its working directory.
            settings = replace(settings, out=Path(settings.out).absolute())
        self.settings = settings
        self.dropped = 0
        """Number of audits that were dropped because the queue was full."""
        self._serialised_settings = _serialise(settings)
        self._jobs: queue.Queue[tuple[str, JobFactory] | None] = queue.Queue(waiting)
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        """Results of the finished audits, in their order."""
        with self._lock:
            return list(self._outcomes)

    @property
    def worker(self) -> int | None:
        """Process id of the worker. None if no worker is running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def submit(self, name: str, make_job: JobFactory) -> bool:
        """Add an audit to the queue, and return whether the queue had room for it.

        ``make_job`` is called later in another thread, so it may be slow.
        """
        try:
            self._jobs.put_nowait((name, make_job))
        except queue.Full:
            self.dropped += 1
            LOGGER.warning(
                "%s: not audited, because %d audits are waiting (%d dropped)", name, self._jobs.maxsize, self.dropped
            )
            return False
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spearpp-audits", daemon=True)
                self._thread.start()
        return True

    def finish(self) -> list[Outcome]:
        """Wait until all audits in the queue are finished, and return all results so far."""
        self._jobs.join()
        return self.outcomes

    def close(self) -> None:
        """Wait for the audits in the queue, then stop the worker. A later ``submit`` starts a new worker."""
        thread = self._thread
        if thread is None:
            return
        self._jobs.put(None)
        thread.join()
        self._thread = None

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            try:
                outcome = self._audit(*item)
            except Exception as error:  # An exception here would block everyone who waits for the queue.
                outcome = Outcome.failed(item[0], f"not audited, internal error: {type(error).__name__}: {error}")
            with self._lock:
                self._outcomes.append(outcome)
            log_outcome(outcome)
            self._jobs.task_done()
        self._stop()
        self._jobs.task_done()

    def _audit(self, name: str, make_job: JobFactory) -> Outcome:
        try:
            job = pickle.dumps(make_job(), protocol=5)
        except SpearError as error:
            return Outcome.failed(name, f"not audited: {error}")
        except Exception as error:  # A reply from outside can raise any exception.
            return Outcome.failed(name, f"not audited: cannot read the reply: {type(error).__name__}: {error}")
        for attempt in range(ATTEMPTS):
            try:
                return self._send(job)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                status = self._stop(kill=True)
                action = "trying again" if attempt + 1 < ATTEMPTS else "giving up"
                LOGGER.warning("%s: the audit worker died (%s, %s): %s", name, status, type(error).__name__, action)
                if self.settings.out is not None:
                    shutil.rmtree(scratch_of(Path(self.settings.out) / name), ignore_errors=True)
        return Outcome.failed(name, f"not audited: the worker died {ATTEMPTS} times during this audit")

    def _send(self, job: bytes) -> Outcome:
        """Send a serialised job to the worker and return its answer. Kill a worker that does not answer in time."""
        process = self._running()
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        timeout = PATIENCE + BUDGETS * (self.settings.budget or PATIENCE)

        def give_up() -> None:
            LOGGER.warning("killed the audit worker, because it gave no answer for %.3g s", timeout)
            process.kill()

        timer = threading.Timer(timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(job)
            process.stdin.flush()
            answer = pickle.load(process.stdout)  # noqa: S301  # The answer comes from our own process.
        finally:
            timer.cancel()
        if not isinstance(answer, Outcome):
            raise pickle.UnpicklingError("the worker returned no outcome")
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the worker process. Start it if necessary."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            LOGGER.warning("the audit worker ended (%s): starting a new one", self._stop())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
        environment.setdefault("OMP_NUM_THREADS", "1")  # The other cores belong to the federation.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", ENTRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(self._serialised_settings)
        self._process.stdin.flush()
        return self._process

    def _stop(self, *, kill: bool = False) -> str:
        """Stop the worker, if there is one, and describe how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "never started"
        if kill:
            process.kill()
        for stream in filter(None, (process.stdin, process.stdout)):
            with suppress(OSError):  # Unwritten data for a dead process is lost.
                stream.close()
        code = process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _serialise(settings: Settings) -> bytes:
    """Serialise the settings for the worker.

    The model is serialised separately, so that the worker can run audits without a model that it cannot read.
    """
    dumps: Callable[..., bytes] = pickle.dumps
    try:  # cloudpickle stores classes by value. A worker cannot import classes of the main script.
        import cloudpickle

        dumps = cloudpickle.dumps
    except ImportError:
        pass
    try:
        model = dumps(settings.model)
    except Exception as error:  # A model can contain any object.
        LOGGER.warning("cannot send the model to the audit worker (%s): audits continue without the model", error)
        model = pickle.dumps(None)
    return pickle.dumps((replace(settings, model=None), model), protocol=5)


def serve() -> None:
    """Run the worker: read the settings and then jobs from standard input, and write one outcome per job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the submitting process handles Ctrl-C.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Redirect printed text to standard error, so that it does not mix with the answers.
    _answer(sys.stdin.buffer, answers)


def _answer(jobs: IO[bytes], answers: IO[bytes]) -> None:
    settings, model = pickle.load(jobs)  # noqa: S301  # The data comes from our own parent process.
    settings = replace(settings, model=_load_model(model))
    while True:
        try:
            job: Any = pickle.load(jobs)  # noqa: S301
        except EOFError:
            return
        pickle.dump(perform(job, settings), answers, protocol=5)
        answers.flush()


def _load_model(content: bytes) -> Any:
    try:
        return pickle.loads(content)  # noqa: S301
    except Exception as error:  # For example a class that this process cannot import.
        logging.getLogger(__name__).warning("audits continue without the model: %s: %s", type(error).__name__, error)
        return None
