"""XProf's own server on a run, for this machine alone."""

import logging
from collections.abc import Callable
from pathlib import Path

from mla_bench.console import silenced
from mla_bench.errors import NO_XPROF, MlaBenchError

_HOST = "127.0.0.1"


def serve(logdir: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serves `logdir` until interrupted; calls `ready` with the address once it answers there.

    XProf's own command listens on all interfaces; this one on loopback alone.

    Args:
      logdir: as for `xprof --logdir`.
      port: 0 for any that is free.
      ready: is told the address.

    Raises:
      MlaBenchError: there is nothing to show, xprof is not installed, or the port is taken.
    """
    # Past Python it logs every request.
    with silenced():
        _serve(logdir, port, ready)


def _serve(logdir: Path, port: int, ready: Callable[[str], None]) -> None:
    if not any(logdir.glob("plugins/profile/*/*.pb")):
        raise MlaBenchError(f"there is nothing for XProf in {logdir}; a run of mla-bench sweep puts it there")
    try:
        from cheroot import wsgi
        from xprof import server as xprof
    except ImportError as error:
        raise MlaBenchError(NO_XPROF) from error
    logging.getLogger("tensorboard.plugins.profile").setLevel(logging.ERROR)  # a line a request
    folder = str(logdir.resolve())
    context = xprof.TBContext(folder, xprof.DataProvider(folder), xprof.TBContext.Flags(False))
    context.hide_capture_profile_button = True
    server = wsgi.Server((_HOST, port), xprof.make_wsgi_app(xprof.ProfilePluginLoader().load(context)))
    try:
        server.prepare()
    except OSError as error:
        raise MlaBenchError(f"port {port} is taken; choose another with --port, or 0 for any") from error
    try:
        ready(f"http://{_HOST}:{server.bind_addr[1]}/")
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
