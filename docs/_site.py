"""Hooks of mkdocs: pages that lie beside `docs`, all decisions and trials, and links between them and to files."""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages from elsewhere in the checkout, by their name on the site.
PAGES = {
    "index.md": "README.md",
    "configuration.md": "config/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
}
FOLDERS = {"Decisions": "decisions", "Trials": "trials"}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


# Griffe, which reads the package without importing it, does not know what torch compiled.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "torch._C." not in record.getMessage())


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Enter the pages of `FOLDERS` into the last tab."""
    builders = config.nav[-1]["For builders"]
    for title, folder in FOLDERS.items():
        builders.append({title: [f"{folder}/{path.name}" for path in sorted((ROOT / "docs" / folder).glob("*.md"))]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `PAGES`."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the checkout into links between pages; one to another file becomes its text."""
    name = page.file.src_uri
    source = PAGES.get(name, f"docs/{name}")
    known = {source: name for name, source in PAGES.items()}

    def turned(match):
        text, link, anchor = match[1], match[2], match[3] or ""
        if link.startswith("https://"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        there = known.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None or files.get_file_from_path(there) is None:
            return text.strip("[]") if text.startswith("[`") else f"{text.strip('![]')} (`{target}`)"
        return f"{text}({posixpath.relpath(there, posixpath.dirname(name) or '.')}{anchor})"

    # Code stays as it is.
    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(turned, part) for part in _CODE.split(markdown))
