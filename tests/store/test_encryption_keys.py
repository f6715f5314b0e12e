"""Keys of encrypted stores: how they are given, what goes with them, and that nothing shows them."""

from __future__ import annotations

import base64
import dataclasses
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import Config, ConfigError, MissingExtraError
from gdsstore.sealing import cipher as cipher_module
from gdsstore.sealing.cipher import HEAD_BYTES, NONCE_BYTES, OVERHEAD_BYTES, SALT_BYTES, PageCipher
from gdsstore.sealing.key import parse_key
from sglang_backend.linker_options import parse_linker_options
from sglang_backend.options import parse_options
from tests.store.helpers import check, make_keys, opaque, save, small_store
from tests.store.sealed_helpers import KEY, OTHER_KEY, sealed_store

RAW = bytes(range(200, 232))
FORMS = {
    "raw": RAW,
    "hex": RAW.hex().encode(),
    "hex in capitals with a line end": RAW.hex().upper().encode() + b"\n",
    "base64": base64.b64encode(RAW) + b"\n",
    "base64 for urls, without padding": base64.urlsafe_b64encode(RAW).rstrip(b"="),
}


def key_file(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_another_key_misses_and_the_right_one_hits_again(tmp_path: Path) -> None:
    keys = make_keys(20)
    with sealed_store(tmp_path / "s") as store:
        assert save(opaque(store), keys).all_ok
    with sealed_store(tmp_path / "s", encryption_key=OTHER_KEY) as store:
        assert opaque(store).lookup(keys) == 0
        assert check(opaque(store), keys).reasons() == {"MISS_ABSENT": 20}
        assert store.stats().get("damaged_pages", 0) == 0
        assert save(opaque(store), keys[:10]).all_ok
        assert check(opaque(store), keys).prefix == 10
    with sealed_store(tmp_path / "s") as store:
        assert check(opaque(store), keys).all_ok


def test_a_key_is_the_same_in_every_form(tmp_path: Path) -> None:
    keys = make_keys(5)
    with small_store(tmp_path / "s", encryption_key=RAW.hex()) as store:
        assert save(opaque(store), keys).all_ok
    for number, content in enumerate(FORMS.values()):
        file = key_file(tmp_path / f"key{number}", content)
        with small_store(tmp_path / "s", encryption_key_file=file) as store:
            assert check(opaque(store), keys).all_ok


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_key_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = key_file(tmp_path / "key", RAW, mode)
    with pytest.raises(ConfigError, match=r"chmod 600.*path=.*key"):
        small_store(tmp_path / "s", encryption_key_file=file)
    assert not (tmp_path / "s").exists(), "a store was made without its key"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        RAW[:31],
        RAW + RAW,
        b"correct horse battery staple 123",
        RAW.hex()[:32].encode(),
        b"g" * 64,
        RAW + b"\n",
    ],
    ids=["empty", "short", "long", "passphrase", "half a key in hex", "no hex", "raw with a line end"],
)
def test_a_key_file_without_a_key_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    file = key_file(tmp_path / "key", content)
    with pytest.raises(ConfigError, match="must hold 32 bytes") as caught:
        small_store(tmp_path / "s", encryption_key_file=file)
    shown = repr(caught.value) + str(caught.value)
    assert not content or content.decode("latin-1").strip() not in shown


@pytest.mark.parametrize("what", ["missing", "directory"])
def test_a_key_file_that_is_none_is_refused_with_its_path(tmp_path: Path, what: str) -> None:
    path = tmp_path if what == "directory" else tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=f"encryption_key_file.*{path}"):
        small_store(tmp_path / "s", encryption_key_file=str(path))


def test_a_mounted_secret_may_be_a_link(tmp_path: Path) -> None:
    key_file(tmp_path / "key", RAW)
    (tmp_path / "link").symlink_to(tmp_path / "key")
    small_store(tmp_path / "s", encryption_key_file=str(tmp_path / "link")).close()


SPELLINGS = [KEY, base64.b64encode(bytes.fromhex(KEY)).decode(), repr(bytes.fromhex(KEY))]


def hidden(text: str) -> bool:
    return not any(spelling in text for spelling in SPELLINGS)


def test_nothing_shows_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = Config.load(env={"GDSSTORE_ENCRYPTION_KEY": KEY})
    assert "<secret>" in repr(config)
    shown = [repr(config), str(config), str(dataclasses.asdict(config)), f"{config.encryption_key}"]
    with sealed_store(tmp_path / "s") as store:
        assert save(opaque(store), make_keys(5)).all_ok
        shown += [str(store.stats()), repr(vars(store)), str(store.path_report())]
    shown.append(caplog.text)
    shown += [file.read_text("latin-1") for file in (tmp_path / "s").rglob("*") if file.is_file()]
    assert all(map(hidden, shown))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("text", [KEY + "0", KEY[:-2], KEY[:-1] + "g", ""])
def test_a_wrong_key_is_refused_and_not_quoted(text: str) -> None:
    for make in (
        lambda: Config.load(env={"GDSSTORE_ENCRYPTION_KEY": text}),
        lambda: Config(encryption_key=text),
        lambda: parse_key(text),
    ):
        with pytest.raises(ValueError, match="must be 32 bytes, as 64 hex digits or as base64") as caught:
            make()
        error: BaseException | None = caught.value
        while error is not None:
            assert error.__suppress_context__ or error.__context__ is None
            assert KEY[:-2] not in str(error)
            error = error.__cause__


def test_a_key_does_not_stand_in_a_config_file_or_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f'encryption_key = "{KEY}"')
    refused: list[Any] = [
        lambda: Config.load(file, {}),
        lambda: parse_options({"path": "x", "encryption_key": KEY}),
        lambda: parse_linker_options({"path": "x", "encryption_key": KEY}, on_device=False),
    ]
    for make in refused:
        with pytest.raises(ConfigError, match="encryption_key_file") as caught:
            make()
        assert hidden(str(caught.value))


def test_both_adapters_take_a_key_file(tmp_path: Path) -> None:
    given = {"path": "x", "encryption_key_file": "/run/secrets/kv"}
    assert parse_options(given).config.encrypts
    assert parse_linker_options(given, on_device=False).config.encrypts
    with pytest.raises(ConfigError, match="hicache-storage-backend"):
        parse_linker_options(given, on_device=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"path": "direct"}, "go past|goes past"),
        ({"strict": True}, "strict"),
        ({"share_host_cache": True, "host_cache": "1GiB"}, "share_host_cache"),
        ({"encryption_key_file": "/run/key"}, "not both"),
    ],
)
def test_what_excludes_a_key_is_refused_at_once(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(encryption_key=KEY, **other)


def test_gpu_memory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with sealed_store(tmp_path / "s") as store:
        for call in (lambda: store.device_moving(0), lambda: store.measure_paths(0)):
            with pytest.raises(ConfigError, match="Give pages in host memory"):
                call()


@pytest.mark.parametrize("lacking", ["all of it", "what is new"])
def test_without_the_extra_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "all of it":
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.kdf.hkdf", None)
    else:
        monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", type("AESGCM", (), {}))
    with pytest.raises(MissingExtraError, match=r'pip install "gdsstore\[encryption\]"'):
        sealed_store(tmp_path / "s")
    small_store(tmp_path / "plain").close()


# --- the cipher ---

PAGES, NBYTES = 500, 64


def seal(cipher: PageCipher, sealed: np.ndarray) -> None:
    clear = np.ones((PAGES, NBYTES), np.uint8)
    source = clear.ctypes.data + np.arange(PAGES, dtype=np.uint64) * np.uint64(NBYTES)
    target = sealed.ctypes.data + np.arange(PAGES, dtype=np.uint64) * np.uint64(sealed.shape[1])
    cipher.seal(bytes(16), make_keys(PAGES), source, NBYTES, target)


def test_no_nonce_comes_twice_under_one_salt_and_each_process_has_a_salt_of_its_own() -> None:
    heads = set()
    salts = set()
    for _ in range(3):  # as three processes
        cipher = PageCipher(RAW, bytes(16))
        for _ in range(4):
            sealed = np.zeros((PAGES, NBYTES + OVERHEAD_BYTES), np.uint8)
            seal(cipher, sealed)
            heads |= {row[:HEAD_BYTES].tobytes() for row in sealed}
            salts |= {row[:SALT_BYTES].tobytes() for row in sealed}
    assert len({head[-NONCE_BYTES:] for head in heads}) == 3 * 4 * PAGES
    assert len(salts) == 3


def test_a_salt_is_given_up_before_its_nonces_could_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher_module, "PAGES_A_KEY", 2 * PAGES)
    cipher, salts = PageCipher(RAW, bytes(16)), []
    for _ in range(6):
        sealed = np.zeros((PAGES, NBYTES + OVERHEAD_BYTES), np.uint8)
        seal(cipher, sealed)
        assert (sealed[:, :SALT_BYTES] == sealed[0, :SALT_BYTES]).all()
        salts.append(sealed[0, :SALT_BYTES].tobytes())
    assert salts[0::2] == salts[1::2]
    assert len(set(salts)) == 3


def test_only_so_many_keys_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher_module, "KEYS_KEPT", 4)
    cipher = PageCipher(RAW, bytes(16))
    clear, sealed = np.zeros(NBYTES, np.uint8), np.zeros((20, NBYTES + OVERHEAD_BYTES), np.uint8)
    for row in sealed:  # as records of twenty processes
        other = PageCipher(RAW, bytes(16))
        address = np.array([row.ctypes.data], np.uint64), np.array([clear.ctypes.data], np.uint64)
        other.seal(bytes(16), make_keys(1), address[1], NBYTES, address[0])
        clear[:] = 1
        assert cipher.open(bytes(16), make_keys(1), address[0], NBYTES, address[1]).all()
        assert not clear.any()
    assert len(cipher._opening) == 4
