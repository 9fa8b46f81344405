"""Errors, one tree.

MiniPICError
├── ConfigurationError (ValueError)             an option, or options that do not go together
│   ├── MarkerError                             no usable marker or pad tokens in a tokenizer
│   └── UnsupportedModelError                   a model whose attention or rotations we refuse
├── PromptError (ValueError)                    a prompt that cannot be laid out or served
│   ├── MalformedSpansError                     a marker or pad at a wrong place (`token_index`)
│   └── ContextWindowError                      longer than the model's context
├── AnswerError (ValueError)                    an answer that is not what was asked for
├── ModelNotFoundError (FileNotFoundError)      no model of that name
├── EngineError (RuntimeError)                  the engine, or the server, failed
│   ├── EngineStartError                        ... while starting
│   ├── EngineClosedError                       ... was closed
│   ├── RequestAbortedError                     a request was aborted before it finished
│   ├── ServerUnreachableError (ConnectionError)  no server there, or the connection was lost
│   └── ServerTimeoutError (TimeoutError)       a server that says nothing for too long
└── PluginMissingError (RuntimeError)           vLLM runs without the plugin
"""

from __future__ import annotations

import reprlib

__all__ = [
    "AnswerError",
    "ConfigurationError",
    "ContextWindowError",
    "EngineClosedError",
    "EngineError",
    "EngineStartError",
    "MalformedSpansError",
    "MarkerError",
    "MiniPICError",
    "ModelNotFoundError",
    "PluginMissingError",
    "PromptError",
    "RequestAbortedError",
    "ServerTimeoutError",
    "ServerUnreachableError",
    "UnsupportedModelError",
    "shown",
]

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = 120


def shown(value: object) -> str:
    """A value as messages show it: its `repr`, cut short where it is long, deep or wide, to 400
    characters at most. Whatever a client sends can be shown so, lone surrogates included."""
    text = _repr.repr(value)
    return text if len(text) <= 400 else f"{text[:300]}...{text[-97:]}"


class MiniPICError(Exception):
    """Base of every error that MiniPIC raises on purpose."""


class ConfigurationError(MiniPICError, ValueError):
    """An option has a value we do not know, or two options contradict each other."""


class MarkerError(ConfigurationError):
    """A tokenizer has no special tokens left that could serve as markers."""


class UnsupportedModelError(ConfigurationError):
    """The model's attention or rotary embedding cannot be used with spans."""


class PromptError(MiniPICError, ValueError):
    """A prompt that cannot be laid out or served."""


class MalformedSpansError(PromptError):
    """A marker or a pad stands where it may not stand.

    Attributes:
        token_index: index of the offending token in the prompt, counted from 0.
    """

    def __init__(self, message: str, token_index: int) -> None:
        super().__init__(f"{message} (token index {token_index})")
        self.token_index = token_index


class ContextWindowError(PromptError):
    """The prompt does not fit into the model's context.

    Attributes:
        num_tokens: tokens of the prompt as laid out, pads included.
        max_model_len: tokens that the model's context holds.
    """

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens (markers and pads included); the context of "
            f"this model holds {max_model_len}, and at least one must be left for the answer. "
            "Use fewer or shorter documents, or raise max_model_len."
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class AnswerError(MiniPICError, ValueError):
    """The model's answer is not of the form that was asked for."""


class ModelNotFoundError(MiniPICError, FileNotFoundError):
    """No model at the given path or name."""


class EngineError(MiniPICError, RuntimeError):
    """The engine failed while it served a request."""


class EngineStartError(EngineError):
    """The engine did not start."""


class EngineClosedError(EngineError):
    """The engine was closed before or while the request ran."""


class RequestAbortedError(EngineError):
    """The request was aborted before it finished."""


class ServerUnreachableError(EngineError, ConnectionError):
    """No server answers at the address, or the connection was lost on the way."""


class ServerTimeoutError(EngineError, TimeoutError):
    """The server was silent for longer than the client's timeout."""


class PluginMissingError(MiniPICError, RuntimeError):
    """vLLM runs, but without the MiniPIC plugin."""
