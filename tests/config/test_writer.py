"""Configuration files that `sotto init` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peer.config.options import SECTIONS, Config, load
from peer.config.writer import write_peer_file
from peer.errors import ConfigError


def test_the_written_file_documents_every_key_and_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "new" / "peer.toml"
    write_peer_file(file)
    text = file.read_text()
    for name, section in SECTIONS.items():
        assert f"[{name}]" in text
        for key, field in section.model_fields.items():
            assert re.search(rf"(?m)^(# )?{key} =", text), f"{name}.{key}"
            # Wrapped comments are joined again before looking for the sentence.
            assert name == "peers" or str(field.description).split("\n")[0][:60] in text.replace("\n# ", " ")
    assert load(file, environment={}) == Config()


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"peer\.toml: already exists"):
        write_peer_file(file)
    assert file.read_text() == "mine"
    write_peer_file(file, force=True)
    assert "mine" not in file.read_text().split()
