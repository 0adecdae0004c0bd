"""Following a page notices when the page is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.walk import walk

PAGE = """# A page

Save this as `greet.py`:

```python
import sys
print(f"hello {sys.argv[1]}, {40 + 2} times")
```

Then, in `greet.py`:

```diff
 import sys
+
-print(f"hello {sys.argv[1]}, {40 + 2} times")
+print(f"hello {sys.argv[1]}, {40 + 3} times")
```

```sh
python greet.py you
x=kept
```

```text
hello you, 17 times
```

```console
$ false
```

```sh
echo "$x and ${x}"; sleep 100 &
```

```text
kept … kept
```
"""


def page(folder: Path, text: str) -> Path:
    (folder / "page.md").write_text(text)
    return folder / "page.md"


def test_files_commands_and_outputs_of_a_good_page(tmp_path: Path) -> None:
    printed = walk(page(tmp_path, PAGE), tmp_path, replace={"greet.py you": "greet.py you"})
    assert "hello you, 43 times" in printed
    assert "kept and kept" in printed


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("hello you, 17", "hello me, 17", "shows 'hello me, 17 times'"),
        ("kept … kept", "hello you", "shows 'hello you', which is not in the rest"),
        ("x=kept", "false", "exit code 1 after"),
        ("Save this as `greet.py`:", "Save this:", r"No such file or directory: .*greet\.py"),
        ("-print(f", "-print(F", "these lines are not in the file"),
        ("python greet.py", "python great.py", "exit code 2 after"),
    ],
)
def test_a_wrong_page_fails(ours: str, theirs: str, said: str, tmp_path: Path) -> None:
    assert ours in PAGE
    with pytest.raises((AssertionError, FileNotFoundError), match=said):
        walk(page(tmp_path, PAGE.replace(ours, theirs)), tmp_path)


def test_a_page_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code -1"):
        walk(page(tmp_path, "```sh\nsleep 100\n```\n"), tmp_path, timeout_s=0.5)


def test_a_word_that_is_to_be_replaced_stands_on_the_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has no 'rounds=40'"):
        walk(page(tmp_path, PAGE), tmp_path, replace={"rounds=40": "rounds=4"})
