"""What docs/format.md says of sealed pages, made with nothing but an AES-GCM and HMAC, is what the code reads and writes."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gdsstore import Namespace, PageLayout
from gdsstore.checksum.definition import finish, reference_raw, seeds
from gdsstore.sealing import cipher
from gdsstore.sealing.identity import SealedNamespace
from tests.test_docs_format import TEXT, table

USER_KEY, UUID = bytes(range(0x20, 0x40)), bytes(range(16, 32))
SALT, NONCE = bytes(range(0x40, 0x50)), bytes(range(0x50, 0x5C))
PAGE = bytes(i % 251 for i in range(5000))
KEY = bytes(range(32))


def hkdf(key: bytes, salt: bytes, info: str, nbytes: int = 32) -> bytes:
    """RFC 5869, for at most one block."""
    extracted = hmac.digest(salt, key, hashlib.sha256)
    return hmac.digest(extracted, info.encode() + b"\x01", hashlib.sha256)[:nbytes]


def infos() -> dict[str, str]:
    return {row[0]: row[3] for row in table("key | from | salt | info")}


def sealed() -> tuple[dict[str, bytes], bytes]:
    """The values of the example, and the sealed page."""
    info = infos()
    store_key = hkdf(USER_KEY, UUID, info["store key"])
    key_id = hkdf(USER_KEY, UUID, info["key id"], 8)
    page_key = hkdf(store_key, SALT, info["page key"])
    namespace = Namespace(model="example", layout=PageLayout.opaque(5000))
    digest = SealedNamespace(namespace, key_id.hex()).digest
    body = AESGCM(page_key).encrypt(NONCE, PAGE, b"gdsstore sealed page 1" + digest + KEY)
    values = {
        "key id": key_id,
        "digest": digest,
        "store key": store_key,
        "page key": page_key,
        "first 16 bytes of the ciphertext": body[:16],
        "tag": body[-16:],
    }
    return values, SALT + NONCE + body


def test_the_worked_example_of_a_sealed_page_is_right() -> None:
    values, page = sealed()
    said = {name: int(value, 16) for name, value in table("of the sealed page | hex")}
    keys = np.frombuffer(KEY, np.uint8)[None]
    seed = seeds(keys, values["digest"], np.array([7], np.uint64), np.array([len(page)], np.int64))
    raw = np.array([reference_raw(page + bytes(8192 - len(page)))], np.uint64)
    expected = {name: int.from_bytes(value) for name, value in values.items()}
    assert said == {**expected, "checksum of the record": int(finish(raw, seed)[0])}


def test_the_code_opens_the_worked_example() -> None:
    values, page = sealed()
    mine = cipher.PageCipher(USER_KEY, UUID)
    assert mine.key_id == values["key id"].hex()
    source, target = np.frombuffer(page, np.uint8).copy(), np.zeros(len(PAGE), np.uint8)
    addresses = [np.array([each.ctypes.data], np.uint64) for each in (source, target)]
    keys = np.frombuffer(KEY, np.uint8)[None]
    assert mine.open(values["digest"], keys, addresses[0], len(PAGE), addresses[1]).all()
    assert target.tobytes() == PAGE


def test_the_parts_are_where_the_page_says() -> None:
    rows = [row[:3] for row in table("offset | bytes | part | meaning")]
    head = cipher.SALT_BYTES + cipher.NONCE_BYTES
    assert rows == [
        ["0", str(cipher.SALT_BYTES), "salt"],
        [str(cipher.SALT_BYTES), str(cipher.NONCE_BYTES), "nonce"],
        [str(head), "n", "ciphertext"],
        [f"{head} + n", str(cipher.TAG_BYTES), "tag"],
    ]
    assert f"is {cipher.OVERHEAD_BYTES} bytes more than the page" in TEXT
    assert cipher.PAGES_A_KEY == 1 << 31


def test_the_description_of_a_sealed_namespace_is_the_one_that_is_shown() -> None:
    plain = Namespace(model="example", layout=PageLayout.opaque(5000))
    described = SealedNamespace(plain, "00" * 8).describe()
    assert described.pop("sealed") == {"version": 1, "cipher": "AES-256-GCM", "key": "00" * 8}
    assert described == plain.describe()
    assert f'`"sealed": {{"version": {cipher.SEALED_VERSION}, "cipher": "{cipher.CIPHER}"' in TEXT


@pytest.mark.parametrize("name", ["store key", "key id", "page key"])
def test_the_labels_are_those_of_the_code(name: str) -> None:
    labels = {
        "store key": cipher.STORE_INFO,
        "key id": cipher.KEY_ID_INFO,
        "page key": cipher.PAGE_INFO,
    }
    assert infos()[name] == labels[name].decode()
