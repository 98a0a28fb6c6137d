"""Run commands and pages in forks of one process that has imported torch, which saves seconds for each of them.

``python forking.py SOCKET`` serves; ``ask`` is what a client does. A request is a folder, an environment, arguments and
three open files, and is answered with an exit code. Arguments that begin with ``--page`` run the blocks of a page, and
``--audits`` serves audits as the worker of a federation does.
"""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({socket!r})
    asked = dict(arguments={arguments}, folder=os.getcwd(), environment=dict(os.environ))
    socket.send_fds(server, [b"?"], [0, 1, 2])
    server.sendall(json.dumps(asked).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or 70))
"""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Start a server, and yield the path of its socket."""
    paths = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:  # short, as the names of sockets have to be
        place = str(Path(folder) / "socket")
        server = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, place],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        if server.stdout is None or server.stdout.readline() != "ready\n":
            raise RuntimeError("the server did not start")
        yield place
        server.kill()
        server.communicate()


def serve(place: str) -> None:
    """Answer requests, each in a process of its own, until killed."""
    import sklearn.datasets  # noqa: F401
    import torch

    import spearpp.cli
    import spearpp.simulate  # noqa: F401

    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            asking, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                listener.close()
                _answer(asking)
            asking.close()


def _answer(asking: socket.socket) -> None:
    code = 70
    try:
        _, files, _, _ = socket.recv_fds(asking, 1, 3)
        asked = json.loads(b"".join(iter(lambda: asking.recv(2**16), b"")))
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        code = _run(asked["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            os.write(2, ended.code.encode() + b"\n")
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        code = 1
    finally:
        asking.sendall(str(code).encode())
        os._exit(0)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--page"]:
        return run_page(json.loads(Path(arguments[1]).read_text()))
    if arguments == ["--audits"]:
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        from spearpp.integrations.common.worker import serve

        serve()
        return 0
    from spearpp.cli import main

    sys.argv = ["spearpp", *arguments]
    return main()


def run_page(blocks: list[dict[str, str]]) -> int:
    """Run blocks in order, Python with names in common, and compare with what they say they print."""
    names, printed = {"__name__": "__main__"}, ""
    for block in blocks:
        where, lines = block["where"], block["code"].splitlines()
        wanted: list[str] = []
        if block["language"] == "output":
            wanted = lines
        elif block["language"] == "python":
            page, _, number = where.partition(":")
            code = compile("\n" * int(number) + block["code"], page, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                exec(code, names)  # noqa: S102
            printed = caught.getvalue()
        else:
            if block["language"] == "console":
                wanted = [line for line in lines if not line.startswith("$ ")]
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            done = subprocess.run(  # noqa: S603
                ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],  # noqa: S607
                text=True,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            printed = done.stdout
            if done.returncode:
                sys.exit(f"{where}: ended with {done.returncode}\n{printed}")
        _compare(where, wanted, printed)
        sys.stdout.write(f"done {where}\n")
    return 0


def _compare(where: str, wanted: list[str], printed: str) -> None:
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    for line in (" ".join(each.split()) for each in wanted):
        if line in ("", "..."):
            continue
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        found = next((number for number, each in enumerate(rest, 1) if re.fullmatch(pattern, each)), None)
        if found is None:
            sys.exit(f"{where}: {line!r} was not printed, but\n{printed}")
        rest = rest[found:]


if __name__ == "__main__":
    serve(sys.argv[1])
