"""Every error cairn raises on purpose.

    CairnError
    ├── ConfigError            a flag, an environment variable or a settings file is wrong; exit code 2
    │   └── ModelError         the checkpoint folder cannot be served: config, tensors, tokenizer; exit code 2
    ├── DownloadError          a model could not be fetched, and nobody asked for anything wrong; exit code 1
    ├── RequestError           one request is wrong; HTTP `status`, error `type` and `param`
    │   ├── InvalidRequest     400
    │   │   └── InvalidBody    400, not even its form is right
    │   ├── NotFound           404
    │   └── Overloaded         503, the request may be tried again later
    │       └── QueueFull      429, and that soon: only others' requests are in the way
    │           └── LeasesFull 429, what is in the way are prompts held for other servers
    ├── EngineDead             503, the engine process is gone; nothing will come any more
    └── AuditError             our own accounting does not add up: a bug in cairn, never the user's fault

Asserts are for our own bugs on the spot; everything that a user, a file or a peer can cause is one of these.
"""


class CairnError(Exception):
    """Base of all errors that cairn raises on purpose."""


class ConfigError(CairnError):
    """A setting is wrong. The text names the flag and the fix."""


class ModelError(ConfigError):
    """A checkpoint folder cannot be served. The text names the file, the field or the tensor."""


class DownloadError(CairnError):
    """A model could not be fetched: no network, a hub in trouble, a full disk. The text says what to look at."""


class RequestError(CairnError):
    """One request is refused; the engine lives.

    `param` names the field of the request, `status` is the HTTP status, `type` vLLM's name of such errors.
    `retry_after`: seconds after which the same request may be sent again; None where that would not help.
    """

    status = 400
    type = "BadRequestError"
    retry_after: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RequestError):
    """The request cannot be served as it stands."""


class InvalidBody(InvalidRequest):
    """The body of the request is no JSON, or has a field of a wrong type."""

    type = "Bad Request"


class NotFound(RequestError):
    """The named thing (a model) is not served here."""

    status = 404
    type = "NotFoundError"


class Overloaded(RequestError):
    """The server takes no more work at the moment: it is draining, or what the request needs is used up."""

    status = 503
    type = "Service Unavailable"
    retry_after = 1


class QueueFull(Overloaded):
    """As many requests are open or waiting as may be."""

    status = 429
    type = "Too Many Requests"


class LeasesFull(QueueFull):
    """As many prompts are held for other servers as may be."""


class EngineDead(CairnError):
    """The engine process has ended; every open request ends with this."""


class AuditError(CairnError):
    """The accounting of pages, nodes and leases does not add up."""
