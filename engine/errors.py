"""The engine's errors.

    EngineError
    ├── ConfigError            a setting of the engine cannot work
    ├── ModelLoadError         a model's files cannot be used; names file and tensor
    ├── RequestRejected        a request can never run; answered at once, never queued
    ├── EngineUnavailable      no engine process answers
    ├── TemplateError          a chat template is absent, broken, or refuses these messages
    └── ProtocolError          a message that this version does not understand

`IntegrityError` stands apart: it is an AssertionError, a bug of ours that was found before it did harm.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """A setting cannot work; the message names the setting and its value."""


class ModelLoadError(EngineError):
    """Weights, configuration or tokenizer of a model cannot be used.

    Attributes:
        file: the file that is at fault.
        tensor: the tensor in it that is at fault, if it is about one.
    """

    def __init__(self, message: str, *, file: str, tensor: str | None = None) -> None:
        where = f"{file}: tensor '{tensor}'" if tensor is not None else file
        super().__init__(f"{where}: {message}")
        self.file = file
        self.tensor = tensor


class RequestRejected(EngineError):
    """A request can never run here, whatever else is running.

    Attributes:
        code: a stable word for programs, for example ``over_capacity``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineUnavailable(EngineError):
    """The engine process is down, starting, or has vanished while a request ran."""


class TemplateError(EngineError):
    """Messages cannot be made into a prompt: no template, a broken one, or one that refuses them; it says which."""


class ProtocolError(EngineError):
    """A message of another protocol version, or one that cannot be decoded."""


class IntegrityError(AssertionError):
    """The books of the KV pool or of the planner do not add up: a bug of ours; the engine must not go on."""
