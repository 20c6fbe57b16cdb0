"""The operator's console, served by the API at /console. It shows and does what `/v1/admin/*` shows and does."""

from runtime.console.app import install

__all__ = ["install"]
