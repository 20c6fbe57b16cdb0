"""`tenuto api`: serve the HTTP face."""

from __future__ import annotations

import os

import uvicorn

from runtime.api.app import make_app
from runtime.errors import StartupError
from runtime.process import refuse, settle, start_logging
from runtime.settings import Settings

NICE = 5  # beside an engine, tokens come first: who reads them can wait for a moment


def main() -> None:
    settings = Settings.load()
    start_logging(settings.log_level)
    os.nice(NICE)
    try:
        app = make_app(settings)
    except StartupError as error:
        refuse(error)
    settle()
    uvicorn.run(
        app,
        host=settings.api_host,
        port=settings.api_port or 0,
        log_level=settings.log_level.lower(),
        access_log=False,
        timeout_graceful_shutdown=2,
    )


main()
