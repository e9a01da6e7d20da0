"""Watermark keys: 64 bits that are never shown, and files that only their owner may read (S file)."""

from __future__ import annotations

import getpass
import hashlib
import os
import secrets
import stat
import string
import warnings
from pathlib import Path
from typing import Any

from jaxbench import philox

SALT = b"jaxbench/watermark/key/v1"  # fixed: a passphrase gives the same key on every machine
SCRYPT = {"n": 2**14, "r": 8, "p": 1}  # 16 MB and tens of milliseconds per guess (RFC 7914)


class Key:
    """A secret of 64 bits; repr and str hide it, and only `halves` reveals it."""

    __slots__ = ("_value",)

    def __init__(self, value: int):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not 0 <= value < 2**64:
            other = "size" if is_whole else f"type, {type(value).__name__}"
            raise ValueError(f"key: wanted an integer in [0, 2**64), got one of another {other} (not shown)")
        self._value = value

    @property
    def halves(self) -> tuple[int, int]:
        """Low and high 32 bits."""
        return self._value & philox.MASK32, self._value >> 32

    @classmethod
    def random(cls) -> Key:
        """Return a new key from the operating system's random source."""
        return cls(secrets.randbits(64))

    @classmethod
    def from_passphrase(cls, text: str) -> Key:
        """Derive a key from a passphrase (scrypt, RFC 7914; the same on every machine).

        Raises:
          ValueError: the passphrase is empty.
        """
        if not text:
            raise ValueError(f"key: the passphrase has {len(text)} characters, wanted at least one")
        return cls(int.from_bytes(hashlib.scrypt(text.encode(), salt=SALT, dklen=8, **SCRYPT), "big"))

    def derive(self, label: str) -> Key:
        """Derive a key from this key and a label: the first 8 bytes of sha256(label, key), big-endian.

        The labels "key_a" and "key_b" give the two keys of vLLM's dual-key Gumbel watermark.
        """
        digest = hashlib.sha256(label.encode() + self._value.to_bytes(8, "big")).digest()
        return Key(int.from_bytes(digest[:8], "big"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Key(hidden)"


PUBLIC_KEY = Key(0)  # for schemes whose key is one of their fields


def ask_passphrase() -> Key:
    """Ask for a passphrase on the terminal, without showing it, and return its key.

    Raises:
      ValueError: there is no terminal to ask on, or the passphrase is empty.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", getpass.GetPassWarning)  # else getpass reads standard input and echoes it
        try:
            return Key.from_passphrase(getpass.getpass("passphrase: "))
        except (getpass.GetPassWarning, EOFError) as error:
            raise ValueError(
                f"--passphrase asks on a terminal, and there is none ({error}); run it in one, or leave the flag out "
                "for a random key"
            ) from error


def read_key_file(path: str | Path) -> Key:
    """Read a key file: one line, `jaxbench-key ` and 16 hexadecimal digits, as write_key_file writes it.

    Raises:
      ValueError: there is no such file, other users may access it, or it holds something else. The message never shows
        the content.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"key file: {path} is no file")
        if os.name == "posix" and mode & 0o077:
            allowed = f"{stat.S_IMODE(mode):03o}"
            raise ValueError(f"key file: {path} may be used by others (mode {allowed}); run chmod 600 {path}")
        words = path.read_bytes().decode("ascii", errors="replace").split()
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError)
        cure = f"; make one with `watermark.py keygen --output={path}`" if is_absent else ""
        raise ValueError(f"key file: {path} cannot be read: {error.strerror}{cure}") from error
    digits = words[1] if len(words) == 2 and words[0] == "jaxbench-key" else ""
    if len(digits) != 16 or set(digits) - set(string.hexdigits):
        wanted = "wanted one line, `jaxbench-key ` and 16 hexadecimal digits"
        raise ValueError(f"key file: {path} holds no key (content not shown), {wanted}")
    return Key(int(digits, 16))


def key_of(scheme: Any, path: str | None, *, missing: str) -> Key:
    """Read a scheme's key file; schemes whose key is one of their fields take none.

    Raises:
      ValueError: `missing`, if the scheme needs a key and no file is named; a file is named for a scheme that would
        not read it, so that its mark would not be secret; or as read_key_file.
    """
    if scheme.key_field is None:
        if path is None:
            raise ValueError(missing)
        return read_key_file(path)
    if path is not None:
        raise ValueError(
            f"key file: {path} would do nothing with scheme {scheme.scheme}, whose key is its field "
            f"{scheme.key_field}; leave the file out, and set {scheme.key_field} to a number that only you know"
        )
    return PUBLIC_KEY


def write_key_file(path: str | Path, key: Key) -> None:
    """Write a key to a new file that only its owner may read.

    Raises:
      ValueError: the file exists (overwriting a key loses the watermark), or its folder does not.
    """
    path = Path(path)
    low, high = key.halves
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ValueError(f"key file: {path} cannot be made: {error.strerror}") from error
    with os.fdopen(handle, "w") as file:
        file.write(f"jaxbench-key {high:08x}{low:08x}\n")
