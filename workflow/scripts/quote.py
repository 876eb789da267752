"""Update the tables of documents from recorded rows, draw the figures that they show, or print one table.

python workflow/scripts/quote.py --figures README.md docs/*.md
"""

from pathlib import Path

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright_study.cli import parser_for, script
from tilewright_study.figures import _quoted as pictures
from tilewright_study.tables import _quoted

ROOT = Path(__file__).parents[2]


def run(documents, table, figures):
    if not documents and not table:
        raise ConfigError("expected documents or a --table, found neither")
    if table:
        print(_quoted.quoted(table, ROOT), end="")
    for path in documents:
        try:
            text = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ArtifactError(f"{path}: expected a document, found other bytes: {error}") from error
        artifacts.write_text(path, _quoted.updated(text, ROOT))
        for name in pictures.shown(text) if figures else ():
            print(f"{path}: {name}")
            pictures.draw(name, ROOT)


if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("documents", nargs="*", type=Path, metavar="FILE", help="documents whose tables to write")
    parser.add_argument("--table", help=f"print this table: {', '.join(_quoted.NAMES)}")
    parser.add_argument("--figures", action="store_true", help="draw the figures of recorded rows that documents show")
    script(parser, run)
