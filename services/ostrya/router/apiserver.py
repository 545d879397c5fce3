"""How to reach the Kubernetes API server and be let in: its URL, the authority of its certificate, a token.

cluster.py asks for a client a watch. What is read here of files is never logged.
"""

import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from ostrya.errors import ConfigError
from ostrya.router.settings import RouterSettings

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, Configuration

log = logging.getLogger(__name__)


def connect(settings: RouterSettings) -> "ApiClient":
    """The official client for kubernetes_api, or for the pod we are in if that is empty.

    One for each watcher: a client's connections are cleared when one of them fails. ConfigError without the official
    client, outside of a pod, and with files that are not there or not what they should be.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        problem = "discovery=kubernetes needs the official Kubernetes client: pip install 'ostrya[kubernetes]'"
        raise ConfigError([problem]) from error
    configuration = client.Configuration()
    if settings.kubernetes_api:
        _use_files(configuration, settings)
    else:
        try:
            config.load_incluster_config(configuration)
        except config.ConfigException as error:
            problem = f"discovery=kubernetes found no service account ({error}); run in a pod or set kubernetes_api"
            raise ConfigError([problem]) from error
    # We try again ourselves, with a bound; the client's own tries would stretch a failure to several timeouts.
    configuration.retries = False
    return client.ApiClient(configuration)


def _use_files(configuration: "Configuration", settings: RouterSettings) -> None:
    configuration.host = settings.kubernetes_api
    problems = []
    if settings.kubernetes_ca_file:
        problems += _authority_problems(settings.kubernetes_ca_file)
        # Every new connection reads it again.
        configuration.ssl_ca_cert = settings.kubernetes_ca_file
    if settings.kubernetes_token_file:
        token = _Token(Path(settings.kubernetes_token_file))
        try:
            token.read()
        except ValueError as error:
            problems.append(str(error))
        token.refresh(configuration)
        configuration.refresh_api_key_hook = token.refresh
    if problems:
        raise ConfigError(problems)


def _authority_problems(path: str) -> list[str]:
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:  # an OSError, too
        return [f"kubernetes_ca_file is {path!r}, which holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"]
    except OSError as error:
        return [f"kubernetes_ca_file is {path!r}, which cannot be read: {error.strerror or error}"]
    return []


class _Token:
    """A bearer token in a file, read before every request: whoever renews it writes the file anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = ""
        self._problem = ""
        """As last logged."""

    def read(self) -> None:
        """Takes the file's token over. ValueError says why it cannot; the one held stays."""
        try:
            text = self._path.read_text(encoding="ascii").strip()
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            problem = f"kubernetes_token_file is {str(self._path)!r}, which cannot be read: {error.strerror or error}"
            raise ValueError(problem) from error
        if not text or not text.isprintable() or " " in text:
            raise ValueError(f"kubernetes_token_file is {str(self._path)!r}, which holds no token: one line of ASCII")
        self._held = text

    def refresh(self, configuration: "Configuration") -> None:
        """The client's hook before each request. A file that is just being replaced leaves the token as it was."""
        try:
            self.read()
            self._problem = ""
        except ValueError as error:
            if self._held and self._problem != str(error):
                self._problem = str(error)
                fields = {"error": self._problem}
                log.warning("no new token for the API server; keeping the last", extra={"fields": fields})
        configuration.api_key["authorization"] = f"Bearer {self._held}"
