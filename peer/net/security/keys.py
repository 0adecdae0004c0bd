"""Private keys, and files that only their owner may read."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from peer.errors import SecurityError


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key, of the kind that every certificate of a run has."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    """Return a private key as PEM, encrypted if there is a passphrase."""
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def is_encrypted(path: Path) -> bool:
    """Return whether a key file needs a passphrase; False where there is no such file."""
    try:
        return b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in path.read_bytes()
    except OSError:
        return False


def parse_key(pem: bytes, source: Path | str, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """Return a PEM private key. Raises SecurityError, with what is wrong, if it is not of the right kind."""
    try:
        key = serialization.load_pem_private_key(pem, password=passphrase or None)
    except TypeError:
        if passphrase:
            return parse_key(pem, source)  # It needs none.
        raise SecurityError(
            f"{source} is protected by a password, and none was given; a daemon needs a key without one"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        wrong = "cannot be read with that passphrase" if passphrase else "does not hold a PEM private key"
        raise SecurityError(f"{source} {wrong}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecurityError(f"{source} is not an ECDSA key on P-256, the only kind that this version uses")
    return key


def read_file(path: Path) -> bytes:
    """Return the contents of a file, without the byte order mark of some editors. Raises SecurityError with what to
    do."""
    try:
        # gRPC finds no PEM behind it, where `cryptography` does.
        return path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise SecurityError(
            f'{path} does not exist; `sotto init cluster` makes it, security.mode = "insecure" goes without'
        ) from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be read: {error.strerror}") from None


def read_secret(path: Path) -> bytes:
    """Return the content of a secret file. Raises SecurityError if every user of the machine may read it."""
    data = read_file(path)
    mode = path.stat().st_mode
    # Groups are left alone: orchestrators hand out secrets to the group of the container.
    if mode & 0o007:
        raise SecurityError(
            f"every user of this machine may read {path} (mode {mode & 0o777:04o}); it is a secret: chmod 600 {path}, "
            "and replace it if others may have read it; a file system without permissions, as of many USB sticks, is "
            "mounted with umask=077"
        )
    return data


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file readable by its owner alone. Raises SecurityError if it exists already."""
    write_new(path, data, mode=0o600)


def write_new(path: Path, data: bytes, *, mode: int) -> None:
    """Write a new file. Raises SecurityError if it exists already."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created with its final mode, so that there is no moment in which others can read a key.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise SecurityError(f"{path} exists already and is not overwritten; move it away first") from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
