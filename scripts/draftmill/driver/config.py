"""The configuration: read, checked against the schema, completed with its defaults."""

import copy
import difflib
import math
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import yaml

from draftmill.driver import drafter_config, engine, refused_algorithms
from draftmill.driver.target_source import layer_count
from draftmill.errors import DraftmillError
from draftmill.layers import check_layers

SCHEMA = Path(__file__).resolve().parents[3] / "rules" / "schemas" / "config.schema.yaml"


def schema() -> dict:
    return yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))


def completed(config: dict) -> dict:
    """A copy of `config` with every default filled in.

    Raises DraftmillError that names the first offending key by its dotted path.
    """
    check_values(config, "")
    refused_algorithms.refuse(config)
    given, config = config, copy.deepcopy(config)
    known = schema()
    errors = sorted(defaulting_validator(known).iter_errors(config), key=lambda e: len(e.path))
    if errors:
        raise DraftmillError(sentence(errors[0]))
    check_target(config["target"])
    for name, source in config["sources"].items():
        check_source(name, source)
    engine.check(config["responses"])
    drafter_config.settle(config, given, known)
    check_roles(config)
    count = layer_count(config["target"])
    for name, capture in config["hidden_states"]["captures"].items():
        if count is not None:
            check_layers(capture["output_of"], count, f"hidden_states.captures.{name}")
    return config


def check_values(value: object, path: str) -> None:
    """Refuses what YAML knows and JSON does not: dates, NaN and infinities, keys that are no text."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise DraftmillError(f"config: '{path}{key}' is a key that is no text; quote it.")
            check_values(child, f"{path}{key}.")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            check_values(child, f"{path}{index}.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise DraftmillError(f"config: '{path[:-1]}' is {value}; give a finite number.")
    elif value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise DraftmillError(
            f"config: '{path[:-1]}' is a {kind} ({value}); quote it to make it text."
        )


def is_integer(checker: object, value: object) -> bool:
    """An integer proper: 5.0 would reach range() as a float."""
    return isinstance(value, int) and not isinstance(value, bool)


def defaulting_validator(known: dict) -> jsonschema.Validator:
    """A validator that sets a schema's defaults while it descends (the jsonschema FAQ's recipe)."""
    base = jsonschema.Draft202012Validator
    plain = base.VALIDATORS["properties"]

    def properties(validator, names, instance, parent) -> Iterator:
        if isinstance(instance, dict):
            for name, child in names.items():
                if "default" in child:
                    instance.setdefault(name, copy.deepcopy(child["default"]))
        yield from plain(validator, names, instance, parent)

    types = base.TYPE_CHECKER.redefine("integer", is_integer)
    return jsonschema.validators.extend(base, {"properties": properties}, type_checker=types)(known)


def sentence(error: jsonschema.ValidationError) -> str:
    """One sentence for a schema violation, with the nearest known key for an unknown one."""
    path = ".".join(map(str, error.absolute_path))
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema["properties"]
        key = next(k for k in error.instance if k not in known)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        name = f"{path}.{key}" if path else key
        return f"config: unknown key '{name}'; the nearest known key is '{near}'."
    if error.validator == "required":
        return f"config: '{path or 'the top level'}' lacks a key: {error.message}."
    return f"config: '{path}' is not valid: {error.message}."


RENDERING = ("add_generation_prompt", "tokenize", "return_dict", "conversation")


def check_target(target: dict) -> None:
    for key in RENDERING:
        if key in target["chat_template_kwargs"]:
            raise DraftmillError(
                f"config: 'target.chat_template_kwargs.{key}' is set by the stages; leave it out."
            )
    given = [key for key in ("path", "hub", "package") if target[key]]
    if len(given) != 1:
        raise DraftmillError(
            f"config: 'target' names {' and '.join(given) or 'no checkpoint'}; give exactly one of "
            "path, hub and package."
        )
    partner = {"hub": "revision", "package": "gguf"}.get(given[0])
    if partner and not target[partner]:
        raise DraftmillError(f"config: 'target.{given[0]}' needs 'target.{partner}' beside it.")
    check_tokenizer(target)


def check_tokenizer(target: dict) -> None:
    tokenizer = target["tokenizer"]
    if tokenizer["path"] and tokenizer["hub"]:
        raise DraftmillError(
            "config: 'target.tokenizer' names path and hub; give one of them, or none for the checkpoint's own."
        )
    if bool(tokenizer["hub"]) != bool(tokenizer["revision"]):
        raise DraftmillError(
            "config: 'target.tokenizer.hub' and 'target.tokenizer.revision' belong together; give both or "
            "neither."
        )
    elsewhere = tokenizer["path"] or tokenizer["hub"]
    if tokenizer["trust_remote_code"] and target["package"] and not elsewhere:
        raise DraftmillError(
            "config: 'target.tokenizer.trust_remote_code' is true, but a tokenizer from a GGUF file brings no "
            "code; name its folder in 'target.tokenizer.path', or its hub id and revision."
        )


def check_source(name: str, source: dict) -> None:
    local = source["id"] is not None and Path(source["id"]).is_dir()
    needs = {
        "stdlib": [],
        "file": ["path"],
        "hub": ["id", "rows"] + ([] if local else ["revision"]),
    }[source["kind"]]
    for key in needs:
        if source[key] is None:
            hint = ""
            if key == "rows":
                hint = f" (python scripts/count_rows.py {source['id']} prints the number)"
            raise DraftmillError(
                f"config: 'sources.{name}' of kind {source['kind']} needs '{key}'{hint}."
            )
    if source["kind"] == "stdlib" and source["responses"] == "given":
        raise DraftmillError(
            f"config: 'sources.{name}.responses' is given, but stdlib prompts come without answers; "
            "use generate."
        )


def check_roles(config: dict) -> None:
    roles = {source["role"] for source in config["sources"].values()}
    needed = ["train", "validation", "test"]
    if not drafter_config.trained_drafters(config):
        needed = ["test"]
        refuse_training_sources(config["sources"])
    for role in needed:
        if role not in roles:
            raise DraftmillError(
                f"config: no source has the role {role}; training needs train and validation, "
                "the report needs test."
            )
    longest, answer = config["target"]["max_length"], config["responses"]["max_new_tokens"]
    if longest is not None and answer >= longest:
        raise DraftmillError(
            f"config: 'responses.max_new_tokens' is {answer} and 'target.max_length' {longest}; no prompt "
            "would fit."
        )


def refuse_training_sources(sources: dict) -> None:
    """Where every drafter comes from others, states of such sources would be made for nothing."""
    for name, source in sources.items():
        if source["role"] != "test":
            raise DraftmillError(
                f"config: 'sources.{name}.role' is {source['role']}, but no drafter is trained: each has a path or "
                "hub; leave the source out, or give it the role test."
            )
