"""Reading a YAML file strictly, and saying what is wrong with it in our own words.

pydantic's messages name types and input values but not what to do. Here each problem becomes one
line `FILE: field.path: what, value, accepted, what to do`, and all problems are told at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import annotated_types
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_TYPE_NAMES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (quote it in YAML)",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "finite_number": "a finite number",
}


class Problem(NamedTuple):
    """One thing wrong with a configuration: dotted path of the field, and the rest of the line."""

    path: str
    text: str


class ConfigError(ValueError):
    """A configuration that must not be started; its text has one line a problem.

    Attributes:
        file: where the configuration came from.
        problems: all that was found, in the order of the schema.
    """

    def __init__(self, file: str, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(problems)
        lines = (": ".join(filter(None, (file, path, text))) for path, text in self.problems)
        super().__init__("\n".join(lines))


class RelationError(ValueError):
    """Fields that are each legal and do not go together; raised inside pydantic validators."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{path}: {text}" for path, text in self.problems))


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """SafeLoader that refuses a key given twice, of which YAML would keep the last in silence."""


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key = str(key_node.value)
        if key in seen:
            text = f"duplicate key {key!r}, first given on line {seen[key]}: keep one of the two"
            raise yaml.constructor.ConstructorError(None, None, text, key_node.start_mark)
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return dict(loader.construct_mapping(node, deep=True))


_StrictLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    _construct_mapping,
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is empty, or is not a mapping.
    """
    file = str(path)
    try:
        # _StrictLoader is a SafeLoader: it builds plain data only.
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as err:
        raise ConfigError(
            file, [Problem("", f"cannot read the file ({err.strerror}): check the path")]
        ) from err
    except UnicodeDecodeError as err:
        raise ConfigError(
            file, [Problem("", f"not UTF-8 text (byte {err.start}): save it as UTF-8")]
        ) from err
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(file, [Problem(where, str(err.problem or err))]) from err
    except yaml.YAMLError as err:
        raise ConfigError(file, [Problem("", f"not valid YAML: {err}")]) from err
    if data is None:
        raise ConfigError(
            file, [Problem("", "the file is empty: give at least model.path and model.served_name")]
        )
    if not isinstance(data, dict):
        text = f"must be a mapping of sections such as `model:`, got {_shown(data)}"
        raise ConfigError(file, [Problem("", text)])
    return data


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Our wording of a pydantic error against the schema `root`."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, RelationError):
            problems.extend(cause.problems)
            continue
        # Keys inside a free mapping may hold anything; only names of ours make a path.
        path = ".".join(str(part) for part in item["loc"])
        problems.append(Problem(path, _text(item, root)))
    return problems


def _text(item: Any, root: type[BaseModel]) -> str:
    kind, loc, value = item["type"], item["loc"], item["input"]
    field = _field_at(root, loc)
    if kind == "missing":
        return f"is required: {_summary(field)}"
    if kind == "extra_forbidden":
        return _unknown_key_text(root, loc)
    if kind == "literal_error":
        expected = item["ctx"]["expected"].replace("True", "true").replace("False", "false")
        return f"must be one of {expected}, got {_shown(value)}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind in _TYPE_NAMES:
        return f"must be {_TYPE_NAMES[kind]}, got {_shown(value)}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal") and field:
        return f"must be {_range_text(field)}, got {_shown(value)}"
    if kind == "invalid_key":
        return f"keys must be text, got {_shown(loc[-1])}"
    if kind == "string_too_short":
        return f"must not be empty: {_summary(field)}"
    return f"{item['msg']}, got {_shown(value)}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _summary(field: FieldInfo | None) -> str:
    return ((field and field.description) or "see `eldr config schema`").split("\n")[0]


def _range_text(field: FieldInfo) -> str:
    """Accepted range of a numeric field, from the same constraints that pydantic checks."""
    bounds: dict[str, Any] = {}
    for constraint in field.metadata:
        for name in ("gt", "ge", "lt", "le"):
            if isinstance(constraint, getattr(annotated_types, name.capitalize())):
                bounds[name] = getattr(constraint, name)
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        return f"in {'[' if 'ge' in bounds else '('}{low}, {high}{']' if 'le' in bounds else ')'}"
    if low is not None:
        return f"{'>=' if 'ge' in bounds else '>'} {low}"
    return f"{'<=' if 'le' in bounds else '<'} {high}"


def _model_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    """The section that a location leads to, or None when it leads elsewhere."""
    model: type[BaseModel] = root
    for part in loc:
        annotation = fields_by_key(model).get(part)
        section = annotation.annotation if annotation else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return None
        model = section
    return model


def _field_at(root: type[BaseModel], loc: tuple[Any, ...]) -> FieldInfo | None:
    model = _model_at(root, loc[:-1]) if loc else None
    return fields_by_key(model).get(loc[-1]) if model else None


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields of a section under the names they have in YAML."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _unknown_key_text(root: type[BaseModel], loc: tuple[Any, ...]) -> str:
    key = str(loc[-1])
    section = _model_at(root, loc[:-1])
    known = list(fields_by_key(section)) if section else []
    if elsewhere := [path for path in _all_paths(root) if path.split(".")[-1] == key]:
        return f"unknown key here: did you mean {' or '.join(elsewhere)}?"
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return f"unknown key: did you mean {near[0]!r}?"
    return f"unknown key: accepted are {', '.join(known)}"


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, field in fields_by_key(model).items():
        path = f"{prefix}{key}"
        yield path
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _all_paths(section, f"{path}.")
