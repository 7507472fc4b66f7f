"""Metadata that depends on where the package is published: its addresses, and README as an index shows it.

    make dist                        no addresses: links of README to files of this repository become their texts
    make dist URL=https://<host>/<owner>/<name>    addresses of the project; links and pictures of README begin with it

An index shows README outside of the repository, where a relative link leads nowhere. A wheel that is built from the
source distribution takes both from there.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "DISTILL_RUN_URL"
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")


def readme_for_index(readme: str, url: str | None, tag: str) -> str:
    """Return README with absolute links below ``url``; None turns links into their texts and leaves pictures out."""

    def absolute(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if url is None:
            return "" if mark else text
        return f"{mark}[{text}]({url}/{'raw' if mark else 'blob'}/{tag}/{target})"

    return LINK.sub(absolute, readme)


def addresses(url: str, tag: str) -> dict[str, str]:
    """Return the project's addresses, in the layout of GitHub, which GitLab follows by redirection."""
    files = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    below = {name: f"{url}/blob/{tag}/{file}" for name, file in files.items()}
    return {"Repository": url, "Issues": f"{url}/issues", **below}


class CustomMetadataHook(MetadataHookInterface):
    """Sets ``readme`` and ``urls``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        url, tag = os.environ.get(VARIABLE, "").rstrip("/") or None, f"v{metadata['version']}"
        if url is not None and not re.fullmatch(r"https://[^\s/]+/\S+", url):
            raise ValueError(f"{VARIABLE}={url}: is not an address such as https://<host>/<owner>/<name>")
        if "readme" not in metadata:
            readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
            metadata["readme"] = {"content-type": "text/markdown", "text": readme_for_index(readme, url, tag)}
        if url is not None:
            metadata.setdefault("urls", addresses(url, tag))
