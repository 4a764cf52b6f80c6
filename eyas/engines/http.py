"""The control side of an engine: blocking calls to one server, for what is asked now and then.

Requests for answers go another way, through eyas.wire. Both trust the same servers with https: those with certificates of
the system or, if the environment says so, of SSL_CERT_FILE and SSL_CERT_DIR, as OpenSSL has it.
"""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import Any

import msgspec

from eyas.errors import EyasError
from eyas.plugins import Retry
from eyas.wire import Answer

CONNECT_TIMEOUT = 5.0  # s
PROXY_STATUS = (408, 425)  # a load balancer gave up on the server's behalf, which may pass
REPLY_TIMEOUT = 600.0  # s; a reply of one token may wait for long answers before it


class Client:
    """One server, with kept connections."""

    def __init__(
        self, url: str, key: str | None, patience: int = 0, reply_timeout: float = REPLY_TIMEOUT
    ) -> None:
        """patience: how often a call is repeated when the server is away, after 0, 1, 2, 4… s. reply_timeout: in s."""
        import requests
        import urllib3
        from requests.adapters import HTTPAdapter

        self._url, self._timeout = url.rstrip("/"), (CONNECT_TIMEOUT, reply_timeout)
        self._session = requests.Session()
        # Neither a proxy nor a .netrc entry of the environment belongs between us and the server.
        self._session.trust_env = False
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"
        repeat = urllib3.Retry(
            total=patience,
            backoff_factor=0.5,
            status_forcelist=[503],
            allowed_methods=None,
            raise_on_status=False,
        )
        self._session.mount("http://", HTTPAdapter(max_retries=repeat, pool_maxsize=32))
        if self._url.lower().startswith("https://"):
            self._session.mount("https://", _over_tls(max_retries=repeat, pool_maxsize=32))

    def get(self, path: str) -> Answer:
        return self._call("GET", path, None)

    def post(self, path: str, fields: Any) -> Answer:
        return self._call("POST", path, msgspec.json.encode(fields))

    def _call(self, method: str, path: str, body: bytes | None) -> Answer:
        """Raises Retry if no reply comes, EyasError if the address is none or leads elsewhere, where eyas.wire does not follow."""
        from requests import RequestException
        from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema, SSLError

        try:
            reply = self._session.request(
                method,
                self._url + path,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=self._timeout,
                allow_redirects=False,
            )
        except (InvalidURL, InvalidSchema, MissingSchema) as error:
            raise EyasError(
                f"server.url: {self._url} is no address ({error}); it looks like http://host:port"
            ) from None
        except SSLError as error:
            raise Retry(
                "connection: SSLError (if its certificate is of your own authority, name that one's in SSL_CERT_FILE)"
            ) from error
        except RequestException as error:
            raise Retry(f"connection: {type(error).__name__}") from error
        if reply.is_redirect:
            raise EyasError(
                f"server.url: {self._url} leads on to {reply.headers['location']} (HTTP {reply.status_code}); name that server itself"
            )
        return Answer(reply.status_code, reply.content)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """As eyas.wire makes it."""
    return ssl.create_default_context()


def _over_tls(**options: Any) -> Any:
    """requests' adapter for https that leaves whom to trust to `_tls`; its own would add the certificates of certifi."""
    from requests.adapters import HTTPAdapter

    class OverTls(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **more: Any) -> None:
            super().init_poolmanager(*arguments, ssl_context=_tls(), **more)

        def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:
            conn.cert_reqs = "CERT_REQUIRED"

    return OverTls(**options)
