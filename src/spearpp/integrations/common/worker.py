"""Audits in a process of their own, behind a bounded queue: whoever submits never waits.

The worker is a new interpreter that talks over its standard input and output. It is none of ``multiprocessing``'s:
those run the main script again, which in a federation's server may start the federation again.
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
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from spearpp.errors import OptionError, SpearError
from spearpp.integrations.common.job import Job, Outcome, Settings, perform, scratch_of
from spearpp.integrations.common.policy import tell

LOGGER = logging.getLogger("spearpp.integrations")
PATIENCE = 120.0
"""Seconds beyond ten times its budget after which a worker is taken to hang, and killed."""
TRIES = 2
"""How often an audit is begun whose worker dies."""
ENTRY = """
import os
if hasattr(os, "nice"):
    os.nice(10)  # before the imports, which take seconds: the cores are the federation's
from spearpp.integrations.common.worker import serve
serve()
"""
Make = Callable[[], Job]


class Auditor:
    """A queue of audits and the worker that does them, one after another.

    The worker starts with the first audit. It is started again when it dies: an audit that kills it twice is given up.
    """

    def __init__(self, settings: Settings, *, waiting: int = 4) -> None:
        if waiting < 1:
            raise OptionError(f"waiting={waiting}: at least one audit must be able to wait")
        if settings.out is not None:  # the server may go elsewhere before an audit ends
            settings = replace(settings, out=Path(settings.out).absolute())
        self.settings = settings
        self.dropped = 0
        """Audits that were not done because the queue was full."""
        self._carried = _carried(settings)
        self._jobs: queue.Queue[tuple[str, Make] | None] = queue.Queue(waiting)
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        """What came of the audits that are done, in their order."""
        with self._lock:
            return list(self._outcomes)

    @property
    def worker(self) -> int | None:
        """The process id of the worker, while there is one."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def submit(self, name: str, make: Make) -> bool:
        """Have an update audited if there is room in the queue; whether there was.

        Args:
            name: of the audit, for the log.
            make: gives the job; called later, in another thread, so that its work holds nobody up.
        """
        try:
            self._jobs.put_nowait((name, make))
        except queue.Full:
            self.dropped += 1
            LOGGER.warning(
                "%s: not audited, %d audits are waiting (%d dropped)", name, self._jobs.maxsize, self.dropped
            )
            return False
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spearpp-audits", daemon=True)
                self._thread.start()
        return True

    def finish(self) -> list[Outcome]:
        """Wait until all audits in the queue are done; what came of every one so far."""
        self._jobs.join()
        return self.outcomes

    def close(self) -> None:
        """Wait for the audits in the queue, then end the worker. A later ``submit`` starts another."""
        thread = self._thread
        if thread is None:
            return
        self._jobs.put(None)
        thread.join()
        self._thread = None

    def _run(self) -> None:
        while True:
            item = self._jobs.get()
            try:
                if item is None:
                    self._stop()
                    return
                try:
                    outcome = self._audit(*item)
                except Exception as error:  # whoever waits for the queue must not wait for ever
                    outcome = Outcome.failed(item[0], f"not audited, a defect: {type(error).__name__}: {error}")
                with self._lock:
                    self._outcomes.append(outcome)
                tell(outcome)
            finally:
                self._jobs.task_done()

    def _audit(self, name: str, make: Make) -> Outcome:
        try:
            content = pickle.dumps(make(), protocol=5)
        except SpearError as error:
            return Outcome.failed(name, f"not audited: {error}")
        except Exception as error:  # a reply from outside may break anything
            return Outcome.failed(name, f"not audited: the reply cannot be read: {type(error).__name__}: {error}")
        for attempt in range(TRIES):
            try:
                return self._asked(content)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                ended = self._stop(kill=True)
                again = "started again" if attempt + 1 < TRIES else "given up"
                LOGGER.warning("%s: the audit worker died (%s, %s): %s", name, ended, type(error).__name__, again)
                if self.settings.out is not None:
                    shutil.rmtree(scratch_of(Path(self.settings.out) / name), ignore_errors=True)
        return Outcome.failed(name, f"not audited: the worker died {TRIES} times over it")

    def _asked(self, content: bytes) -> Outcome:
        process = self._running()
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        patience = PATIENCE + 10 * (self.settings.budget or PATIENCE)

        def give_up() -> None:
            LOGGER.warning("the audit worker gave no answer for %.3g s: killed", patience)
            process.kill()

        limit = threading.Timer(patience, give_up)
        limit.daemon = True
        limit.start()
        try:
            process.stdin.write(content)
            process.stdin.flush()
            answer = pickle.load(process.stdout)  # noqa: S301  # our own process
        finally:
            limit.cancel()
        if not isinstance(answer, Outcome):
            raise pickle.UnpicklingError("the worker gave no outcome")
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            LOGGER.warning("the audit worker is gone (%s): started again", self._stop())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
        environment.setdefault("OMP_NUM_THREADS", "1")  # the cores are the federation's
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", ENTRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(self._carried)
        self._process.stdin.flush()
        return self._process

    def _stop(self, *, kill: bool = False) -> str:
        """End the worker, if there is one; how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "never started"
        if kill:
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # what was to be written to a dead process
        code = process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _carried(settings: Settings) -> bytes:
    """Settings as the worker reads them: the model apart, so that one that cannot be read spoils no audit."""
    model, rest = settings.model, replace(settings, model=None)
    dumps: Callable[..., bytes] = pickle.dumps
    try:  # by value, where it is there: classes of the main script cannot be imported elsewhere
        import cloudpickle

        dumps = cloudpickle.dumps
    except ImportError:
        pass
    try:
        network = dumps(model)
    except Exception as error:  # a model may hold anything
        LOGGER.warning("the model cannot be given to the audit worker (%s): audits go without it", error)
        network = pickle.dumps(None)
    return pickle.dumps((rest, network), protocol=5)


def serve() -> None:
    """The worker: reads settings, then jobs, and answers each with its outcome, until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who submits
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    _answer(sys.stdin.buffer, answers)


def _answer(jobs: IO[bytes], answers: IO[bytes]) -> None:
    settings, network = pickle.load(jobs)  # noqa: S301  # from our own parent
    settings = replace(settings, model=_model(network))
    while True:
        try:
            job: Any = pickle.load(jobs)  # noqa: S301
        except EOFError:
            return
        pickle.dump(perform(job, settings), answers, protocol=5)
        answers.flush()


def _model(network: bytes) -> Any:
    try:
        return pickle.loads(network)  # noqa: S301
    except Exception as error:  # a class that is not to be found here
        logging.getLogger(__name__).warning("audits go without the model: %s: %s", type(error).__name__, error)
        return None
