"""Reading and writing recipes: TOML to Recipe and back, with every mistake named by its key."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from fourfold.recipe.errors import Problem, RecipeError, nearest_name, show
from fourfold.recipe.schema import Recipe, Section

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies overrides such as `layout.tp=4`, in order.

    The value of an override is parsed as TOML (`optimizer.betas=[0.9, 0.95]`); what is not TOML is taken as a string
    (`data.source=/some/path`). Without `output.name` the run has the name of the file.

    Raises:
        RecipeError: unreadable file, TOML syntax, unknown keys, wrong types, malformed overrides; all that were found.
    """
    path = Path(path)
    table = _read(path)
    problems = [problem for text in overrides if (problem := _apply(table, text)) is not None]
    output = table.setdefault("output", {})
    if isinstance(output, dict) and re.fullmatch(r"[^/\\]+", path.stem):
        output.setdefault("name", path.stem)
    recipe, found = _convert(table)
    problems += found
    if problems:
        raise RecipeError(problems, source=str(path))
    return recipe


def from_table(table: Mapping[str, object]) -> Recipe:
    """Makes a Recipe from nested dictionaries. Raises RecipeError with every unknown key and wrong type."""
    recipe, problems = _convert(table)
    if problems:
        raise RecipeError(problems)
    return recipe


def to_table(recipe: Recipe) -> dict[str, dict[str, object]]:
    """A recipe as nested dictionaries of what TOML can hold; keys without a value (None) are left out."""
    table = {name: dict(_without_none(getattr(recipe, name))) for name in recipe.__struct_fields__}
    return {name: section for name, section in table.items() if section}


def to_toml(recipe: Recipe) -> str:
    """A recipe as TOML with every key written out, so that a run can keep what it was made from; `load` reads it."""
    lines = ["# Written by Fourfold: every key of the recipe, defaults included."]
    for name, section in to_table(recipe).items():
        lines.append(f"\n[{name}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in section.items() if not isinstance(value, dict)]
        for key, value in section.items():
            if isinstance(value, dict):
                lines.append(f"\n[{name}.{key}]")
                lines += [f"{inner} = {toml_value(v)}" for inner, v in value.items()]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, object]:
    """The TOML of a file, or a RecipeError that a person understands."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        similar = nearest_name(path.name, others) or nearest_name(path.name + ".toml", others)
        hint = f"; did you mean {path.parent / similar}?" if similar else ""
        raise RecipeError([Problem("", None, f"no such file{hint}")], source=str(path)) from None
    except IsADirectoryError:
        raise RecipeError([Problem("", None, "is a directory; a recipe is a TOML file")], source=str(path)) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError([Problem("", None, f"line {line} is not UTF-8 text")], source=str(path)) from None
    except OSError as error:
        raise RecipeError([Problem("", None, f"cannot be read: {error.strerror}")], source=str(path)) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r"\(at line (\d+), column (\d+)\)", message)
        line, column = (int(at[1]), int(at[2])) if at else (text.count("\n") + 1, 1)
        what = re.sub(r"\s*\(at .*\)$", "", message)
        raise RecipeError([Problem("", None, f"not valid TOML: {what}")], source=f"{path}:{line}:{column}") from None


def _apply(table: dict[str, object], override: str) -> Problem | None:
    """Sets one `section.key=value` in the table; returns the problem if the override cannot be understood."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(_BARE_KEY.fullmatch(part) for part in parts):
        return Problem("", None, f"override {show(override)}: must be section.key=value, such as layout.tp=4")
    here = table
    for i, part in enumerate(parts[:-1]):
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            return Problem("", None, f"override {show(override)}: {'.'.join(parts[: i + 1])} holds a value, not keys")
        here = inner
    here[parts[-1]] = _value(text.strip(), parts)
    return None


def _value(text: str, parts: Sequence[str]) -> object:
    """A TOML value; what is none is a string, and so is anything for a key that holds text only (output.name=7)."""
    hint: object = Recipe
    for part in parts:
        section = next((t for t in _alternatives(hint) if isinstance(t, type) and issubclass(t, Section)), None)
        hint = _types(section).get(part) if section is not None else None
    quoted = text[:1] in ('"', "'")
    if not quoted and set(_alternatives(hint)) <= {str, types.NoneType}:
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _convert(table: Mapping[str, object]) -> tuple[Recipe, list[Problem]]:
    """Checks keys and types of the whole table. The recipe is usable only when the list of problems is empty."""
    problems: list[Problem] = []
    sections: dict[str, typing.Any] = {}
    hints = _types(Recipe)
    for name, value in table.items():
        if name not in hints:
            problems.append(_unknown(name, _home_of(name) or nearest_name(name, hints), known=hints))
        elif not isinstance(value, Mapping):
            problems.append(Problem(name, value, f"is a section; write keys under [{name}]"))
        else:
            section, found = _convert_section(hints[name], value, name)
            problems += found
            if section is not None:
                sections[name] = section
    return Recipe(**sections), problems


def _convert_section(
    section: type[Section], table: Mapping[str, object], name: str
) -> tuple[Section | None, list[Problem]]:
    problems: list[Problem] = []
    values: dict[str, object] = {}
    hints = _types(section)
    for key, value in table.items():
        full = f"{name}.{key}"
        if key not in hints:
            similar = nearest_name(key, hints)
            near = _home_of(key) or (f"{name}.{similar}" if similar else None)
            problems.append(_unknown(full, near, known=hints))
            continue
        nested, listed = _nested(hints[key])
        if nested is not None and not listed and isinstance(value, Mapping):
            values[key], found = _convert_section(nested, value, full)
            problems += found
            continue
        if nested is not None and listed and isinstance(value, list | tuple):
            made = [_convert_entry(nested, entry, f"{full}[{i}]") for i, entry in enumerate(value)]
            values[key] = tuple(entry for entry, _ in made)
            problems += [problem for _, found in made for problem in found]
            continue
        try:
            values[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError:
            problems.append(Problem(full, value, f"must be {_describe(hints[key])}", _nearest(value, hints[key])))
    return (None if problems else section(**values)), problems


def _convert_entry(section: type[Section], entry: object, name: str) -> tuple[Section | None, list[Problem]]:
    """One of an array of tables. What it must have but lacks is a problem of its own."""
    if not isinstance(entry, Mapping):
        return None, [Problem(name, entry, f"must be a table with {', '.join(_types(section))}")]
    required = [f.name for f in msgspec.structs.fields(section) if f.required and f.name not in entry]
    missing = [Problem(f"{name}.{key}", None, "must be given") for key in required]
    if missing:
        return None, missing
    return _convert_section(section, entry, name)


def _nested(hint: object) -> tuple[type[Section] | None, bool]:
    """The section that a key's value is made of, if any, and whether the value is a list of them."""
    for t in _alternatives(hint):
        listed = typing.get_origin(t) is tuple
        inner = typing.get_args(t)[0] if listed else t
        if isinstance(inner, type) and issubclass(inner, Section):
            return inner, listed
    return None, False


def _unknown(full: str, similar: str | None, *, known: Iterable[str]) -> Problem:
    hint = f"did you mean {similar}?" if similar else f"known here: {', '.join(known)}"
    return Problem(full, None, f"unknown key; {hint}")


def _home_of(key: str) -> str | None:
    """Where a key lives that was written in the wrong section, be it in several places; None if it is nowhere."""
    homes = [f"{name}.{key}" for name, section in _types(Recipe).items() if key in _types(section)]
    return " or ".join(homes) or None


@cache
def _types(section: type[Section]) -> dict[str, typing.Any]:
    return typing.get_type_hints(section)


def _alternatives(hint: object) -> tuple[typing.Any, ...]:
    """The members of a union; a single type is its own only member."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _choices(hint: object) -> list[object]:
    return [c for t in _alternatives(hint) if typing.get_origin(t) is typing.Literal for c in typing.get_args(t)]


def _nearest(value: object, hint: object) -> tuple[object, ...]:
    """The legal value that a text looks like; of a list of texts, with each that is none replaced by such a one."""
    lists = [t for t in _alternatives(hint) if typing.get_origin(t) is tuple]
    if isinstance(value, list | tuple) and lists:
        known = [c for c in _choices(typing.get_args(lists[0])[0]) if isinstance(c, str)]
        meant = [text if text in known else nearest_name(str(text), known) for text in value]
        return () if not known or None in meant else (tuple(meant),)
    near = nearest_name(value, [c for c in _choices(hint) if isinstance(c, str)]) if isinstance(value, str) else None
    return (near,) if near else ()


def _describe(hint: object) -> str:
    """A type in words: `one of "auto", 1, 2, 3`, `an integer`, `a list of integers`."""
    words = []
    choices = _choices(hint)
    if choices:
        words.append(f"one of {', '.join(map(show, choices))}" if len(choices) > 1 else show(choices[0]))
    names = {int: "an integer", float: "a number", str: "text in quotes", bool: "true or false"}
    plural = {int: "integers", float: "numbers", str: "texts"}
    for t in _alternatives(hint):
        arguments = typing.get_args(t)
        if typing.get_origin(t) is tuple:
            many = "a list of" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
            inner = arguments[0]
            if typing.get_origin(inner) is tuple:
                words.append(f"{many} pairs of {plural[typing.get_args(inner)[0]]}")
            elif inner in plural:
                words.append(f"{many} {plural[inner]}")
            elif set(_choices(inner)) <= set(choices) and choices:
                words.append(f"{many} these")
            else:
                words.append(f"{many} tables with {', '.join(_types(inner))}")
        elif t in names:
            words.append(names[t])
        elif isinstance(t, type) and issubclass(t, Section):
            words.append(f"a table with {', '.join(_types(t))}")
    return " or ".join(words)


def _without_none(section: Section) -> Iterator[tuple[str, object]]:
    for key in section.__struct_fields__:
        value = getattr(section, key)
        if isinstance(value, Section):
            yield key, dict(_without_none(value))
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            yield key, [dict(_without_none(entry)) for entry in value]
        elif value is not None:
            yield key, value


def toml_value(value: object) -> str:
    """A value as TOML. Strings may hold anything: control characters are escaped."""
    if isinstance(value, str):
        return show(value).translate({c: f"\\u{c:04x}" for c in (*range(32), 127)})
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_value(inner)}' for key, inner in value.items())}}}"
    return show(value)
