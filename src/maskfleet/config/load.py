"""Resolves a configuration from recipe, file and --set, in this order; reads and writes run.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap

from maskfleet.config.base import replaced
from maskfleet.config.fields import nearest, walk_fields
from maskfleet.config.launch import DEFAULT_TARGET, LAUNCH_ADAPTER, LAUNCH_CLASSES, AnyLaunch, launch_problems
from maskfleet.config.legacy.table import is_legacy, translate
from maskfleet.config.recipes import FASTER, recipe
from maskfleet.config.run import ALTERNATIVES, RunConfig
from maskfleet.config.yaml import dump_mapping, line_of, parse_value, plain, read_mapping
from maskfleet.errors import ConfigError
from maskfleet.system.files import write_atomically

DEFAULT_RECIPE = "scratch"
RUN_FILE, METRICS_FILE, CHECKPOINTS = "run.yaml", "metrics.jsonl", "checkpoints"  # of a run directory

# TensorPack's and AWS Samples' presets allow any model.mask; the other recipes are named after what they train.
_SWITCHABLE = {name for base in ("standard", "optimized") for name in (base, FASTER + base)}

# What may change when a run resumes: paths, limits, how often it logs, evaluates and saves, and its length; not what it
# computes. A name that ends with a dot is a section.
_FREE_TO_CHANGE = (
    "data.root",
    "data.cache_dir",
    "data.cache_gb",
    "data.num_workers",
    "data.max_image_mpx",
    "data.allow_outside",
    "data.on_bad",  # with broken data, error computes nothing
    "train.join_timeout_s",
    "train.peer_timeout_s",
    "train.log_every_steps",
    "train.epochs",
    "train.steps",
    "train.patience",
    "log.",
    "train.compile",
    "eval.",
    "checkpoint.",
)

_FIELDS = {field.path: field for field in walk_fields(RunConfig)}
_ALL_FIELDS = "`maskfleet config show` lists every field"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A complete configuration, and where each value came from."""

    config: RunConfig
    launch: AnyLaunch | None
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value for one field, and where it came from."""

    path: str
    value: Any
    origin: str


def resolve(
    *,
    recipe_name: str | None = None,
    file: Path | None = None,
    sets: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    sets_are: str = "--set",
) -> Resolved:
    """The configuration of a run: the recipe, changed by the file, by `--set` in order, and by `changes`.

    Error messages call a set what the user does: `sets_are`.
    """
    mapping = read_mapping(file) if file is not None else CommentedMap()
    launch = _launch_section(mapping, file)
    in_file = mapping.pop("recipe", None)
    name = recipe_name or (str(in_file) if in_file is not None else DEFAULT_RECIPE)
    data = recipe(name).model_dump(mode="python")
    origins = {path: f"recipe {name}" for path, field in _FIELDS.items() if not field.is_section}
    origins["recipe"] = "--recipe" if recipe_name else f"{file}" if in_file is not None else "default"
    layers = (
        list(_file_assignments(mapping, file)),
        [part for text in sets for part in _set_assignments(text, sets_are)],
        [_checked(Assignment(path, _plain(value), "changes")) for path, value in (changes or {}).items()],
    )
    for layer in layers:
        for assignment in _with_alternatives_cleared(layer):
            _assign(data, assignment)
            origins[assignment.path] = assignment.origin
    config = _validated(data, origins)
    if name not in _SWITCHABLE and config.model.mask == name.startswith(FASTER):  # the two differ in nothing else
        config = replaced(config, {"recipe": name.removeprefix(FASTER) if config.model.mask else FASTER + name})
    return Resolved(config, launch, origins)


def recipe_with(name: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The recipe called `name`, with dotted fields changed as `--set` changes them.

        config = maskfleet.recipe("r50_fpn_1x", {"data.root": "/data/coco", "train.base_lr": 0.01})

    `maskfleet config recipes` lists the recipes, `maskfleet config show` the fields.
    """
    return resolve(recipe_name=name, changes=changes).config


def dump(config: RunConfig, origins: dict[str, str] | None = None) -> str:
    """The text of run.yaml; with `origins`, values that differ from the recipe have their origin as a comment."""
    comments = {path: origin for path, origin in (origins or {}).items() if not origin.startswith("recipe ")}
    return dump_mapping(config.model_dump(mode="json"), comments)


def load(path: Path) -> RunConfig:
    """The run that `dump` wrote to `path`."""
    return resolve(file=path).config


def write_run_file(run_dir: Path, config: RunConfig) -> Path:
    """Write `config` to RUN_DIR/run.yaml; ConfigError if the directory belongs to another run."""
    path = run_dir / RUN_FILE
    refuse_another_run(run_dir, config)
    if not path.exists() or differences(load(path), config):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dump(config))
    return path


def refuse_another_run(run_dir: Path, config: RunConfig) -> None:
    """Raise ConfigError if `run_dir` holds the results of another run than `config`.

    A run that failed before its first step has none, so that the next one may take its place.
    """
    path = run_dir / RUN_FILE
    if not path.exists() or not _has_results(run_dir):
        return
    changed = changes_of_run(load(path), config)
    if changed:
        raise ConfigError(
            f"{run_dir} holds another run, which differs in\n{changed}",
            remedy=f"choose another run directory, or continue that run with --config {path}",
        )


def changes_of_run(old: RunConfig, new: RunConfig) -> str:
    """A line for each difference that makes `new` another run than `old`; empty if it is the same.

    The same run may resume with other paths and limits, and log, evaluate and save at other intervals.
    """
    return "\n".join(
        f"    {name}: there {was!r}, here {now!r}"
        for name, (was, now) in differences(old, new).items()
        if not _is_free_to_change(name) and ["auto"] not in (was, now)  # auto is replaced by the sets in data.root
    )


def _is_free_to_change(name: str) -> bool:
    return any(name.startswith(free) if free.endswith(".") else name == free for free in _FREE_TO_CHANGE)


def _has_results(run_dir: Path) -> bool:
    metrics = run_dir / METRICS_FILE
    return any((run_dir / CHECKPOINTS).glob("step-*.json")) or (metrics.exists() and metrics.stat().st_size > 0)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted paths at which two runs differ, with both values."""
    before, after = dict(_leaves(old.model_dump(mode="json"))), dict(_leaves(new.model_dump(mode="json")))
    return {path: (before[path], after[path]) for path in before if before[path] != after[path]}


def _launch_section(mapping: CommentedMap, file: Path | None) -> AnyLaunch | None:
    section = mapping.pop("launch", None)
    if section is None:
        return None
    data = plain(section)
    if isinstance(data, dict):
        data.setdefault("on", DEFAULT_TARGET)
    try:
        return LAUNCH_ADAPTER.validate_python(data)
    except ValidationError as error:
        lines = "\n".join(f"{file}: launch: {problem}" for problem in launch_problems(error))
        *most, last = LAUNCH_CLASSES
        remedy = f"launch.on is {', '.join(most)} or {last}; the fields depend on it"
        raise ConfigError(lines, remedy=remedy) from None


def _file_assignments(mapping: CommentedMap, file: Path | None, prefix: str = "") -> Iterator[Assignment]:
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        origin = f"{file}:{line_of(mapping, key)}"
        field = _FIELDS.get(path)
        if isinstance(value, CommentedMap) and (field is None or field.is_section):
            known_section = field is not None or any(is_legacy(f"{path}.{inner}") for inner in value)
            if not known_section:
                raise _unknown(path, origin)
            yield from _file_assignments(value, file, f"{path}.")
        elif field is None and is_legacy(path):
            text = value if isinstance(value, str) else repr(plain(value))
            for ours, parsed in translate(path, text).items():
                yield Assignment(ours, parsed, origin)
        else:
            yield _checked(Assignment(path, plain(value), origin))


def _set_assignments(text: str, origin: str) -> list[Assignment]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(
            f"{origin} {text!r} has no value", remedy=f"write {origin} FIELD=VALUE, such as {origin} train.base_lr=0.01"
        )
    if name not in _FIELDS and is_legacy(name):
        return [Assignment(path, parsed, origin) for path, parsed in translate(name, value).items()]
    return [_checked(Assignment(name, parse_value(value, where=f"{origin} {name}"), origin))]


def _plain(value: Any) -> Any:
    """A value from Python as a configuration file would hold it."""
    return str(value) if isinstance(value, PurePath) else value


def _checked(assignment: Assignment) -> Assignment:
    """`assignment`, if its field exists and holds a value."""
    field = _FIELDS.get(assignment.path)
    if field is None:
        raise _unknown(assignment.path, assignment.origin)
    if field.is_section and not isinstance(assignment.value, dict):
        inner = next(path for path in _FIELDS if path.startswith(f"{assignment.path}."))
        raise ConfigError(
            f"{assignment.origin}: {assignment.path} is a section, not a value",
            remedy=f"set a field in it, such as {inner}",
        )
    return assignment


# What other trainers call our fields.
_OTHER_NAMES = {
    "batch_size": "train.images_per_gpu",
    "batch": "train.images_per_gpu",
    "lr": "train.base_lr",
    "lr0": "train.base_lr",
    "learning_rate": "train.base_lr",
    "epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_iter": "train.steps",
    "max_steps": "train.steps",
    "workers": "data.num_workers",
    "num_workers": "data.num_workers",
    "imgsz": "data.train_short_edge_px",
    "img_size": "data.train_short_edge_px",
    "image_size": "data.train_short_edge_px",
    "num_classes": "model.num_categories",
    "weights": "train.weights",
    "pretrained": "train.weights",
    "checkpoint": "train.weights",
    "amp": "train.precision",
    "fp16": "train.precision",
    "seed": "train.seed",
}


def field_named(name: str) -> str | None:
    """The field called `name`, by its path or its last part alone, or by other trainers."""
    name = name.lower()
    if name in _OTHER_NAMES or name in _FIELDS:
        return _OTHER_NAMES.get(name, name)
    return next((path for path, one in _FIELDS.items() if not one.is_section and path.endswith(f".{name}")), None)


def _unknown(path: str, origin: str) -> ConfigError:
    if path.rpartition(".")[2].lower() in ("device", "devices"):
        return ConfigError(
            f"{origin}: there is no field {path}", remedy="choose it with --device, such as --device cpu; or --gpus N"
        )
    near = _OTHER_NAMES.get(path.rpartition(".")[2].lower()) or nearest(path, _FIELDS)
    return ConfigError(f"{origin}: there is no field {path}", remedy=f"did you mean {near}?" if near else _ALL_FIELDS)


def _with_alternatives_cleared(layer: list[Assignment]) -> list[Assignment]:
    """`layer`, where setting a field also clears its alternative in another unit."""
    given = {a.path: a for a in layer if a.path in ALTERNATIVES and a.value is not None}
    for path, one in given.items():
        other = given.get(ALTERNATIVES[path])
        if other is not None:
            raise ConfigError(
                f"{path} ({one.origin}) and {other.path} ({other.origin}) are the same setting in two units",
                remedy="keep one of them",
            )
    return layer + [Assignment(ALTERNATIVES[path], None, one.origin) for path, one in given.items()]


def _assign(data: dict[str, Any], assignment: Assignment) -> None:
    *parents, leaf = assignment.path.split(".")
    for name in parents:
        data = data[name]
    if isinstance(assignment.value, dict) and isinstance(data.get(leaf), dict):
        data[leaf] = data[leaf] | assignment.value
    else:
        data[leaf] = assignment.value


def _validated(data: dict[str, Any], origins: dict[str, str]) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        lines = dict.fromkeys(_describe(problem, origins) for problem in problems)
        path = _field_path(problems[0]["loc"])
        remedy = f"`maskfleet config explain {path}` says what it takes" if path else _ALL_FIELDS
        raise ConfigError("\n".join(lines), remedy=remedy) from None


def _describe(problem: Any, origins: dict[str, str]) -> str:
    path = _field_path(problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "it should be")
    if problem["type"] == "value_error":  # from a validator over several fields, which names them
        return f"{path}: {message}" if path else message
    field = _FIELDS.get(path)
    takes = f" ({field.takes})" if field is not None and not field.is_section else ""
    return f"{origins.get(path, 'the configuration')}: {path} = {problem['input']!r}: {message}{takes}"


def _field_path(location: Iterable[int | str]) -> str:
    """The longest prefix of `location` that is a field."""
    path = ""
    for part in location:
        longer = f"{path}.{part}" if path else str(part)
        if longer not in _FIELDS:
            break
        path = longer
    return path


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and f"{prefix}{key}" in _FIELDS:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
