"""Configuration files that `sotto init` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peer.config.options import SECTIONS, Config, load
from peer.config.writer import render, write_peer_file
from peer.errors import ConfigError
from peer.foreign_values import parse_toml


def test_the_written_file_documents_every_key_and_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "new" / "peer.toml"
    write_peer_file(file, all_keys=True)
    text = file.read_text()
    for name, section in SECTIONS.items():
        assert f"[{name}]" in text
        for key, field in section.model_fields.items():
            assert re.search(rf"(?m)^(# )?{key} =", text), f"{name}.{key}"
            # Wrapped comments are joined again before looking for the sentence.
            assert name == "peers" or str(field.description).split("\n")[0][:60] in text.replace("\n# ", " ")
    assert load(file, environment={}) == Config()


MANY_KEYS = Path(__file__).parents[1] / "fixtures" / "release_0_2" / "many-keys.toml"


def test_a_short_file_names_what_differs_and_means_the_same(tmp_path: Path) -> None:
    config, file = load(MANY_KEYS, environment={}), tmp_path / "peer.toml"
    write_peer_file(file, config)
    assert load(file, environment={}) == config
    write_peer_file(file, load(overrides=["training.learning_rate=0.05"], environment={}), force=True)
    keys = [line.partition(" =")[0] for line in file.read_text().splitlines() if " = " in line and line[0] != "#"]
    assert keys == ["defaults", "name", "rounds", "index", "listen", "task", "learning_rate"]
    assert "# γ, the learning rate at the peak of its schedule.\nlearning_rate = 0.05\n" in file.read_text()
    # Its name would follow from the task.
    other = load(overrides=["training.task=mnist", "run.name=digits"], environment={})
    write_peer_file(file, other, force=True)
    assert load(file, environment={}).run.name == "digits"


@pytest.mark.parametrize("section", SECTIONS)
def test_each_key_of_a_short_file_survives(section: str, tmp_path: Path) -> None:
    """What is not at its default is written, and read as it was."""
    for key, field in SECTIONS[section].model_fields.items():
        default = field.get_default(call_default_factory=True)
        if section == "peers" or not isinstance(default, (bool, int, float)):
            continue
        other = not default if isinstance(default, bool) else 1 if default == 0 else type(default)(default / 2) or 2
        config = Config.model_construct(**dict(Config()) | {section: SECTIONS[section].model_construct(**{key: other})})
        text = render(config, header="", all_keys=False)
        assert parse_toml(text)[section][key] == other, key


def test_the_defaults_of_another_release_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    write_peer_file(file)
    file.write_text(file.read_text().replace('defaults = "0.3"', 'defaults = "0.4"'))
    with pytest.raises(ConfigError, match=r"peer\.toml: defaults: this release knows no other .*\(got '0\.4'\)"):
        load(file, environment={})


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"peer\.toml: already exists"):
        write_peer_file(file)
    assert file.read_text() == "mine"
    write_peer_file(file, force=True)
    assert "mine" not in file.read_text().split()
