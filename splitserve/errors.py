"""One exception tree for everything that can go wrong in a way a person can act on.

    SplitserveError
    ├── ConfigError            the deployment file, a flag or the environment is wrong      exit 2
    │   ├── WeightsError       a model file is missing, truncated, misshapen or unknown     exit 2
    │   ├── CapacityError      the memory given cannot hold what was asked                  exit 2
    │   └── PortTaken          somebody else listens there                                  exit 2
    ├── RequestError           the client's request is wrong                                HTTP 400
    │   ├── NotFound           unknown path or id                                           HTTP 404
    │   │   └── ModelNotFound      this server has another model                                HTTP 404
    │   ├── BodyTooLarge       the body is over the limit                                   HTTP 413
    │   ├── HeadTooLarge       request line and headers are over the limit                  HTTP 431
    │   └── RequestTimeout     head or body did not arrive in time                          HTTP 400
    ├── Unauthorized           an API key is set and was not given                          HTTP 401
    ├── Overloaded             no room now; try later                                       HTTP 503 + Retry-After
    ├── DeadlineExceeded       the request's one deadline passed                            HTTP 503
    ├── TransferError          the state did not cross and could not be made up for         HTTP 503
    ├── FetchError             a model could not be downloaded: network, disk, damaged       exit 1
    ├── PeerLost               a process of the pair died under the request                 HTTP 502
    │   └── EngineLost         the engine behind this server's own HTTP front died          HTTP 502
    ├── ProtocolError          two of our processes disagree; always a bug or a version mix HTTP 500
    └── InvariantError         a `check()` failed: something owned was lost or shared       HTTP 500

Every error has a stable `code` (clients may match on it), an HTTP `status`, and a message that holds the numbers.
`field` names the request field at fault; `fix` says what to do, and over HTTP there is always one: `usual_fix` of the
class where a place has none of its own. Statuses are those that sglang_router passes through
unchanged: it turns others (409, 429, 504) into 500 and retries them.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SplitserveError(Exception):
    """Base of the tree; never raised itself."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    usual_fix: ClassVar[str] = ""

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.fix = fix

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error object: {"message", "type", "param", "code"} and our "fix"."""
        body: dict[str, Any] = {
            "message": self.message,
            "type": _error_type(self.status),
            "param": self.field,
            "code": self.code,
        }
        if fix := self.fix or self.usual_fix:
            body["fix"] = fix
        return body


def _error_type(status: int) -> str:
    return "invalid_request_error" if 400 <= status < 500 else "server_error"


class ConfigError(SplitserveError):
    code = "config_error"


class WeightsError(ConfigError):
    code = "weights_error"


class CapacityError(ConfigError):
    code = "capacity_error"


class PortTaken(ConfigError):
    code = "port_taken"


class RequestError(SplitserveError):
    code = "invalid_request"
    status = 400
    usual_fix = "the message says what is wrong; docs/api.md has the fields"


class NotFound(RequestError):
    code = "not_found"
    status = 404
    usual_fix = "docs/api.md lists the paths and docs/router.md the router's; GET /openapi.json too"


class ModelNotFound(NotFound):
    code = "model_not_found"
    usual_fix = "GET /v1/models says which it has"


class BodyTooLarge(RequestError):
    code = "body_too_large"
    status = 413
    usual_fix = "send less, or raise max_body_mb"


class HeadTooLarge(RequestError):
    code = "head_too_large"
    status = 431
    usual_fix = "send fewer or shorter headers"


class RequestTimeout(RequestError):
    code = "request_timeout"
    usual_fix = "send it faster, in one go"


class Unauthorized(SplitserveError):
    code = "unauthorized"
    status = 401
    usual_fix = "send a key as `Authorization: Bearer KEY`"


class Overloaded(SplitserveError):
    code = "overloaded"
    status = 503
    usual_fix = "try again after the seconds of Retry-After"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(SplitserveError):
    code = "deadline_exceeded"
    status = 503
    usual_fix = "ask for fewer tokens, or try again when less is going on"


class TransferError(SplitserveError):
    code = "transfer_failed"
    status = 503
    usual_fix = "try again; `splitserve logs` says why"


class FetchError(SplitserveError):
    code = "fetch_failed"


class PeerLost(SplitserveError):
    code = "peer_lost"
    status = 502
    usual_fix = "try again; `splitserve logs` says what died"


class EngineLost(PeerLost):
    code = "engine_lost"


class ProtocolError(SplitserveError):
    code = "protocol_error"
    usual_fix = "run the same version of splitserve everywhere"


class InvariantError(SplitserveError):
    code = "invariant_error"
    usual_fix = "restart it and report this, with what `splitserve logs` shows"


def first_line(error: BaseException) -> str:
    """What another library's error says, without what follows; its kind where it says nothing."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def by_code(code: str, message: str) -> SplitserveError:
    """The error of this tree with that `code`, as it came over a wire; TransferError where the code is unknown."""
    todo = [SplitserveError]
    while todo:
        cls = todo.pop()
        if cls.code == code and cls is not SplitserveError:
            return cls(message)
        todo.extend(cls.__subclasses__())
    return TransferError(message)
