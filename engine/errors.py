"""The errors of the engine, all in one place.

EngineError
 ├── ModelError                 the caller named or gave a model that cannot be used
 │    ├── UnknownModel          no such name in the catalogue, no such file
 │    ├── ModelNotPulled        known, but not on this disk
 │    ├── ModelFileError        a file that is not a model this engine can run
 │    ├── DownloadError         the wheels could not be had, or were not what the catalogue says
 │    └── TemplateError         the file's chat template cannot be used
 ├── BackendUnavailable         the backend that was asked for cannot be built, or cannot run the model here
 │    └── UnsupportedShape      a kernel does not support a shape that the model needs
 ├── PlanError                  a model or a wish that nothing can be planned with; carries the `key` that is wrong
 ├── RequestError               the caller asked for something impossible; carries a stable `code`
 │    └── ToolSchemaError       a tool whose schema cannot become a grammar (code bad_grammar)
 └── EngineFault                ours
      ├── ArrivalFailed         pages that a step was to read did not come; the step is thrown away
      ├── PageError             page bookkeeping was asked for the impossible, or does not add up
      ├── WeightsCacheError     the cache of dequantised weights could not be written
      ├── EngineGone            the engine process cannot be reached, or went away in the middle
      └── ServerUnavailable     the model server behind the engine cannot answer now; carries `retry_after_s`
"""

from __future__ import annotations

REQUEST_CODES: tuple[str, ...] = (
    "bad_answer",
    "bad_frame",
    "bad_grammar",
    "bad_request",
    "context_length_exceeded",
    "duplicate_request",
    "empty_prompt",
    "pool_too_small",
    "server_refused",
    "stale_epoch",
    "token_out_of_range",
)


class EngineError(Exception):
    """Anything this package raises on purpose."""


class ModelError(EngineError):
    """The caller named or gave a model that cannot be used."""


class UnknownModel(ModelError):
    """No such name in the catalogue, and no such file."""


class ModelNotPulled(ModelError):
    """The catalogue knows it, this disk does not have it."""


class ModelFileError(ModelError):
    """The file is not a model that this engine can run."""


class DownloadError(ModelError):
    """A model could not be downloaded, assembled or verified."""


class TemplateError(ModelError):
    """The model's chat template cannot be used."""


class BackendUnavailable(EngineError):
    """A backend cannot be built here, or cannot run the model; the message says why."""


class UnsupportedShape(BackendUnavailable):
    """A kernel does not support this shape; the message names the shape, what is supported and the setting."""


class PlanError(EngineError):
    """Nothing can be planned with this; `key` is what is wrong: of the model's config, or an option of the plan."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


class RequestError(EngineError):
    """The caller's fault; `code` is one of REQUEST_CODES and is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ToolSchemaError(RequestError):
    """A tool's schema, or the form of an answer, cannot become a grammar."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_grammar", message)


class EngineFault(EngineError):
    """Our fault, or the machine's."""


class ArrivalFailed(EngineFault):
    """Pages that a step was to read while they came from a tier did not come."""


class PageError(EngineFault):
    """Page bookkeeping was asked for the impossible, or does not add up."""


class WeightsCacheError(EngineFault):
    """The cache of dequantised weights could not be written."""


class EngineGone(EngineFault):
    """The engine process cannot be reached, or went away in the middle of a call."""


class ServerUnavailable(EngineFault):
    """The model server behind the engine is busy, broke, or went away; `retry_after_s`: what it asks to be given."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
