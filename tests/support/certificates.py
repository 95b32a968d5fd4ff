"""Certificates made with openssl for one test run: an authority, a server and a client; and a stranger's authority."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Certificates:
    """`ca`, `server`, `client`, `stranger`: NAME.pem and NAME.key in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ca", "stranger"):
            self._openssl("req", "-x509", *_new_key(name), "-out", f"{name}.pem", "-subj", f"/CN={name}", "-days", "2")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        for name in ("server", "client"):
            self._openssl("req", *_new_key(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signer)

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def server_settings(self, port: int) -> dict[str, str]:
        return {
            "tls-port": str(port),
            "tls-cert-file": self.path("server.pem"),
            "tls-key-file": self.path("server.key"),
            "tls-ca-cert-file": self.path("ca.pem"),
            "tls-auth-clients": "yes",
        }

    def url(self, port: int, *, ca: str = "ca", client: str = "client", scheme: str = "rediss", rest: str = "") -> str:
        """`client` may be empty: no certificate is shown then."""
        shown = f"&ssl_certfile={self.path(client)}.pem&ssl_keyfile={self.path(client)}.key" if client else ""
        return f"{scheme}://127.0.0.1:{port}{rest}?ssl_ca_certs={self.path(ca)}.pem{shown}"


def _new_key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
