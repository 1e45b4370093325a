"""The file with a coordinator's token and certificate."""

from __future__ import annotations

import stat

import pytest

from shoal.errors import BadCredentials
from shoal.wire.credentials import Credentials, parse, read, ssl_context, write

PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("certificate", [None, PEM])
def test_what_is_written_is_read_again(tmp_path, certificate):
    write(tmp_path / "token", Credentials("secret", certificate))
    assert read(tmp_path / "token") == Credentials("secret", certificate)


def test_only_the_owner_can_read_it_even_if_it_was_open_before(tmp_path):
    (tmp_path / "token").write_text("old")
    (tmp_path / "token").chmod(0o644)
    write(tmp_path / "token", Credentials("secret"))
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["token"]


def test_the_token_is_not_shown_by_accident():
    assert "secret" not in repr(Credentials("secret"))


@pytest.mark.parametrize("text", ["", "\n\n", PEM, "two words\n", "tok\nnot a certificate", "tök", "t\x00k"])
def test_other_files_are_refused(text):
    with pytest.raises(BadCredentials):
        parse(text)


def test_a_missing_binary_or_huge_file_is_refused(tmp_path):
    with pytest.raises(BadCredentials, match="cannot be read"):
        read(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(BadCredentials, match="not text"):
        read(tmp_path / "binary")
    (tmp_path / "huge").write_bytes(b"a" * 100_000)
    with pytest.raises(BadCredentials, match="larger than"):
        read(tmp_path / "huge")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(BadCredentials, match="nowhere"):
        write(tmp_path / "nowhere" / "token", Credentials("secret"))


def test_a_damaged_certificate_is_refused():
    assert ssl_context(Credentials("secret")) is None
    with pytest.raises(BadCredentials, match="damaged"):
        ssl_context(Credentials("secret", PEM))


@pytest.mark.parametrize("url", ["http://lab:7000", "HTTP://lab:7000", "ws://lab:7000/v1/agent"])
def test_token_of_a_coordinator_with_tls_is_not_sent_in_clear(tmp_path, url):
    write(tmp_path / "token", Credentials("secret", PEM))
    with pytest.raises(BadCredentials, match="is not encrypted"):
        read(tmp_path / "token", "https://lab:7000", url)
    write(tmp_path / "token", Credentials("secret"))
    assert read(tmp_path / "token", url).token == "secret"
