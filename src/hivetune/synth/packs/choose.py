"""What the command line names: categories that are shipped, packs of a user, folders of documents or of packages."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from hivetune.errors import UsageError
from hivetune.synth.packs.pack import Pack, parse_pack, shipped_packs
from hivetune.synth.sources.places import Places


def find_packs(names: Sequence[str], help_of: Sequence[str]) -> tuple[list[Pack], Places]:
    """The packs, and where to look. A folder with usr/share is a place to look in, any other a pack of its own.

    `help_of`: commands whose help may be read; one that no pack names is a category of its own. All that are shipped
    where no category is named. Raises UsageError.
    """
    shipped = {pack.category: pack for pack in shipped_packs()}
    found: list[Pack] = []
    roots: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if name in shipped:
            found.append(shipped[name])
        elif (path / "usr" / "share").is_dir():
            roots.append(path)
        elif path.is_dir():
            found.append(Pack(path.resolve().name, f"documents in {name}", name, documents=(str(path.resolve()),)))
        elif path.is_file():
            found.append(parse_pack(_text(path), str(path)))
        else:
            near = difflib.get_close_matches(name, shipped, 1)
            hint = f"did you mean '{near[0]}'?" if near else "see the categories: hivetune data synth"
            raise UsageError(f"{name!r} is not a category, a file or a folder", hint=hint)
    alone = [command for command in help_of if not any(command in pack.help for pack in (*found, *shipped.values()))]
    found += [Pack(command.split()[0], f"{command} --help", "--run-help", help=(command,)) for command in alone]
    packs = found or list(shipped.values())
    for pack in packs:
        if sum(other.category == pack.category for other in packs) > 1:
            raise UsageError(f"two packs have the category {pack.category!r}", hint="name each once")
    return packs, Places(tuple(roots), tuple(help_of))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="give a TOML file in UTF-8") from None
