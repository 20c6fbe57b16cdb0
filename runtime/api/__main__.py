"""`tenuto api`: serve the HTTP face."""

from __future__ import annotations

import uvicorn

from runtime.api.app import make_app
from runtime.process import start_logging
from runtime.settings import Settings


def main() -> None:
    settings = Settings.load()
    start_logging(settings.log_level)
    uvicorn.run(
        make_app(settings),
        host=settings.api_host,
        port=settings.api_port or 0,
        log_level=settings.log_level.lower(),
        access_log=False,
        timeout_graceful_shutdown=2,
    )


main()
