"""The versions that the site can switch between: `_static/switcher.json`, from git's tags.

https://host/docs/                       the version that was built last
https://host/docs/_static/switcher.json  all of them; pages of older versions read it as well
https://host/docs/0.1.0/                 the site of the tag v0.1.0
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

_TAG = re.compile(r"v(\d+(?:\.\d+)+)")


def write_versions(folder: Path, version: str, site: str) -> None:
    """Write `switcher.json` to a folder.

    Args:
        folder: of the site's static files.
        version: the one that is built.
        site: the address of the site, with a slash at its end.
    """
    text = json.dumps(versions(tags(folder), version, site), indent=2)
    (folder / "switcher.json").write_text(text + "\n")


def versions(names: list[str], version: str, site: str) -> list[dict[str, Any]]:
    """Return the theme's entries: the version that is built, then those of tags, newest first."""
    released = [match[1] for name in names if (match := _TAG.fullmatch(name))]
    released.sort(key=lambda text: [int(part) for part in text.split(".")], reverse=True)
    current = {"version": version, "name": f"{version} (latest)", "url": site, "preferred": True}
    older = [{"version": one, "url": f"{site}{one}/"} for one in released if one != version]
    return [current, *older]


def tags(folder: Path) -> list[str]:
    """Return the tags of the repository that has a folder; none outside of one."""
    command = ["git", "-C", str(folder), "tag", "--list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.split()
