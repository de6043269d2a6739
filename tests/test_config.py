"""The configuration: its schema, its defaults, and what it refuses in one sentence."""

import copy
import datetime
import math
from pathlib import Path

import jsonschema
import pytest
import yaml

from draftmill.driver.config import completed, schema
from draftmill.driver.drafter_config import NUM_LAYERS
from draftmill.driver.engine import reached
from draftmill.errors import DraftmillError

# keys whose default follows from other keys
DEPENDENT = {"draft_tokens", "num_layers", "layers"}
# one example name for each map of named things
EXAMPLES = {"sources": "train", "captures": "low", "drafters": "first"}


def levels(node: dict, path: tuple[str, ...] = ()):
    """Every object of the schema with fixed keys: its place in the base configuration, and itself."""
    if "$ref" in node:
        node = schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    if "properties" in node:
        yield path, node
        for name, child in node["properties"].items():
            yield from levels(child, (*path, name))
    elif isinstance(node.get("additionalProperties"), dict):
        yield from levels(node["additionalProperties"], (*path, EXAMPLES[path[-1]]))


LEVELS = list(levels(schema()))
KEYS = [(path, node, name) for path, node in LEVELS for name in node["properties"]]
OPTIONAL = [(path, node, name) for path, node, name in KEYS if name not in node.get("required", [])]
IDS = [".".join((*path, name)) for path, _, name in KEYS]
OPTIONAL_IDS = [".".join((*path, name)) for path, _, name in OPTIONAL]
dotted = ".".join


def refusal(config: dict) -> str:
    with pytest.raises(DraftmillError) as caught:
        completed(config)
    return str(caught.value)


def at(config: dict, path: tuple[str, ...]):
    for name in path:
        config = config.get(name, {})
    return config


def test_the_walk_over_the_schema_reaches_every_definition():
    reached = [id(node) for _, node in LEVELS]
    assert len(reached) == len(set(reached)) == 15
    text = yaml.safe_dump(schema())
    assert text.count("additionalProperties: false") == len(LEVELS)


@pytest.mark.parametrize(("path", "node", "name"), KEYS, ids=IDS)
def test_every_key_is_described(path, node, name):
    description = node["properties"][name].get("description", "")
    assert description.endswith(".")
    assert len(description) > len(name)


def with_drafter(config: dict, kind: str, folder: Path) -> dict:
    """The configuration with another first drafter: of an algorithm, or `imported`, evaluated only."""
    config = copy.deepcopy(config)
    drafter = config["drafters"]["first"]
    if kind == "imported":
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"block_size": 8}')
        drafter["path"] = str(folder)
        config["sources"] = {"test": config["sources"]["test"]}
        drafter["algorithm"] = "dflash"
    else:
        drafter["algorithm"] = kind
    return config


def knows(kind: str, child: dict) -> bool:
    """Whether a drafter of this kind has the key, by the key's annotation."""
    if kind == "imported":
        return not child.get("trained") and "dflash" in child.get("algorithms", ["dflash"])
    return kind in child.get("algorithms", [kind])


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "imported"])
@pytest.mark.parametrize(("path", "node", "name"), OPTIONAL, ids=OPTIONAL_IDS)
def test_every_optional_key_has_a_default_that_is_valid_and_filled_in_where_it_is_known(
    path, node, name, kind, base_config, tmp_path
):
    child = node["properties"][name]
    jsonschema.validate(child["default"], child)
    config = with_drafter(base_config, kind, tmp_path / "drafter")
    if not at(config, path[:2]) and path[:1] == ("sources",):
        return  # the training source is gone
    place = completed(config)
    for step in path:
        if step not in place:  # the section itself is of another kind of drafter
            assert path[0] == "drafters"
            return
        place = place[step]
    given = at(config, path)
    if not knows(kind, child):
        assert name not in place
    elif name in given:
        assert place[name] == given[name]
    elif "properties" in child and place[name] is not None and name != "layers":
        known = {key for key, inner in child["properties"].items() if knows(kind, inner)}
        assert set(place[name]) == known
    elif name not in DEPENDENT:
        assert place[name] == child["default"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("eagle3", {"draft_tokens": 4, "num_layers": NUM_LAYERS["eagle3"]}),
        ("dflash", {"draft_tokens": 15, "num_layers": NUM_LAYERS["dflash"]}),
        ("imported", {"draft_tokens": 7}),
    ],
)
def test_defaults_that_follow_from_other_keys(kind, expected, base_config, tmp_path):
    config = with_drafter(base_config, kind, tmp_path / "drafter")
    found = completed(config)["drafters"]["first"]
    assert {key: found[key] for key in expected} == expected
    assert found["layers"] == {"output_of": [1, 2]}
    assert NUM_LAYERS == {"eagle3": 1, "dflash": 5, "dflash2": 5, "dspark": 5}


@pytest.mark.parametrize(("path", "node", "name"), KEYS, ids=IDS)
def test_a_mistyped_key_is_refused_by_its_path_with_the_nearest_known_key(
    path, node, name, base_config, changed
):
    found = refusal(changed(base_config, dotted((*path, f"{name}x")), 1))
    assert f"'{dotted((*path, f'{name}x'))}'" in found
    assert found.endswith(f"nearest known key is '{name}'.")


@pytest.mark.parametrize(("path", "node"), [x for x in LEVELS if x[1].get("required")])
def test_a_missing_required_key_is_named(path, node, base_config):
    for name in node["required"]:
        config = copy.deepcopy(base_config)
        config["drafters"]["first"]["layers"] = {"output_of": [1]}
        del at(config, path)[name]
        found = refusal(config)
        assert f"'{name}'" in found
        assert dotted(path) in found


def test_the_input_is_not_changed(base_config):
    before = copy.deepcopy(base_config)
    completed(base_config)
    assert base_config == before


def test_two_drafters_share_no_default(base_config):
    base_config["drafters"]["second"] = {"algorithm": "eagle3", "capture": "low"}
    found = completed(base_config)["drafters"]
    found["first"]["training"]["steps"] = 3
    found["first"]["training"]["betas"][0] = 0.5
    assert found["second"]["training"]["betas"] == [0.9, 0.95]
    assert found["second"]["training"]["steps"] == 1000


def test_a_completed_configuration_completes_to_itself(base_config):
    once = completed(base_config)
    assert completed(once) == once


@pytest.mark.parametrize("name", ["config.yaml", "configs"])
def test_the_shipped_configurations_are_valid(name, repository):
    path = repository / name
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    assert files
    for file in files:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert completed(config)["run"] == config["run"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({}, "no checkpoint"),
        ({"path": "a", "hub": "b/c", "revision": "a" * 40}, "path and hub"),
        ({"path": "a", "package": "p", "gguf": "g"}, "path and package"),
        ({"hub": "b/c", "revision": "a" * 40, "package": "p", "gguf": "g"}, "hub and package"),
        ({"hub": "b/c"}, "'target.revision'"),
        ({"package": "p"}, "'target.gguf'"),
    ],
)
def test_the_target_is_exactly_one_of_path_hub_and_package(target, expected, base_config, changed):
    assert expected in refusal(changed(base_config, "target", target))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"path": "a", "hub": "b/c", "revision": "a" * 40}, "names path and hub"),
        ({"hub": "b/c"}, "belong together"),
        ({"revision": "a" * 40}, "belong together"),
        ({"hub": "b/c", "revision": "main"}, "'target.tokenizer.revision' is not valid"),
        ({"trust_remote_code": "yes"}, "'target.tokenizer.trust_remote_code' is not valid"),
    ],
)
def test_a_tokenizer_comes_from_one_pinned_place(tokenizer, expected, base_config, changed):
    assert expected in refusal(changed(base_config, "target.tokenizer", tokenizer))


def test_a_tokenizer_from_a_gguf_brings_no_code_that_could_be_trusted(repository, changed):
    config = yaml.safe_load((repository / "config.yaml").read_text(encoding="utf-8"))
    config = changed(config, "target.tokenizer", {"trust_remote_code": True})
    assert "a tokenizer from a GGUF file brings no code" in refusal(config)
    elsewhere = {"trust_remote_code": True, "path": "tokenizer"}
    assert completed(changed(config, "target.tokenizer", elsewhere))


@pytest.mark.parametrize("role", ["train", "validation", "test"])
def test_a_missing_role_is_named(role, base_config):
    del base_config["sources"][role]
    assert f"no source has the role {role};" in refusal(base_config)


def test_an_unknown_capture_is_named_beside_the_known_ones(base_config, changed):
    found = refusal(changed(base_config, "drafters.first.capture", "high"))
    assert "'drafters.first.capture' is 'high'" in found
    assert "low" in found


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"kind": "file", "role": "train"}, "path"),
        ({"kind": "hub", "role": "train", "rows": 3, "revision": "a" * 40}, "id"),
        ({"kind": "hub", "role": "train", "id": "a/b", "revision": "a" * 40}, "rows"),
        ({"kind": "hub", "role": "train", "id": "a/b", "rows": 3}, "revision"),
    ],
)
def test_a_source_that_lacks_what_its_kind_needs_is_refused(source, key, base_config, changed):
    found = refusal(changed(base_config, "sources.train", source))
    assert "'sources.train'" in found
    assert f"needs '{key}'" in found


def test_a_local_data_set_folder_needs_no_revision(tmp_path, base_config, changed):
    source = {"kind": "hub", "role": "train", "id": str(tmp_path), "rows": 3}
    assert completed(changed(base_config, "sources.train", source))


def test_stdlib_prompts_cannot_be_given_answers(base_config, changed):
    found = refusal(changed(base_config, "sources.train.responses", "given"))
    assert "'sources.train.responses'" in found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drafters.first.training.learning_rate", "1e-4"),
        ("drafters.first.training.steps", 0),
        ("drafters.first.training.steps", True),
        ("acceptance.draft_tokens", 1.5),
        ("hidden_states.gate.min_agreement", 1.1),
        ("hidden_states.captures.low.output_of", []),
        ("hidden_states.captures.low.output_of", [-1]),
        ("hidden_states.captures.low.output_of", [1, 1]),
        ("target.revision", "main"),
        ("sources.train.role", "dev"),
        ("leaks", None),
    ],
)
def test_a_value_outside_its_range_is_refused_by_its_path(key, value, base_config, changed):
    assert f"'{key}" in refusal(changed(base_config, key, value))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "key", ["hidden_states.gate.min_agreement", "drafters.first.training.learning_rate"]
)
def test_a_number_that_is_not_finite_is_refused(key, value, base_config, changed):
    assert key in refusal(changed(base_config, key, value))


def test_a_whole_number_written_as_a_float_becomes_an_integer_or_is_refused(base_config, changed):
    config = changed(base_config, "sources.train.limit", 5.0)
    try:
        found = completed(config)["sources"]["train"]["limit"]
    except DraftmillError:
        return
    assert type(found) is int


def test_a_date_that_yaml_made_of_a_text_is_refused_by_its_path(base_config, changed):
    config = changed(base_config, "report.title", datetime.date(2024, 2, 29))
    assert "report.title" in refusal(config)


@pytest.mark.parametrize("name", ["a b", "../up", ""])
def test_a_source_name_that_is_no_file_name_is_refused(name, base_config):
    base_config["sources"][name] = {"kind": "stdlib", "role": "test"}
    assert "'sources' is not valid" in refusal(base_config)


def test_a_layer_that_a_gguf_lacks_is_named_before_anything_is_built(
    monkeypatch, tmp_path, repository
):
    config = yaml.safe_load((repository / "config.yaml").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    config["hidden_states"]["captures"]["both"]["output_of"] += [30]
    with pytest.raises(DraftmillError, match="output_of 30, but the target has 30 decoder layers"):
        completed(config)


@pytest.fixture
def served(base_config, changed, monkeypatch):
    """settings of responses.openai -> a configuration that answers from a server."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return lambda **settings: changed(
        base_config, "responses", {"backend": "openai", "openai": settings}
    )


def test_a_server_without_an_address_is_refused_while_planning(served):
    found = refusal(served())
    assert "'responses.openai.base_url' is null" in found
    assert "OPENAI_BASE_URL is not set" in found


def test_the_address_may_stand_in_the_environment_and_stays_out_of_the_configuration(
    served, monkeypatch
):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://node7:8000/v1")
    found = completed(served())
    assert found["responses"]["openai"]["base_url"] is None
    assert reached(found["responses"])["base_url"] == "http://node7:8000/v1"
    found = completed(served(base_url="http://node8:8000/v1"))
    assert reached(found["responses"])["base_url"] == "http://node8:8000/v1"


def test_another_engine_needs_no_address(base_config, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert reached(completed(base_config)["responses"]) == {}


@pytest.mark.parametrize("url", ["node7:8000/v1", "ftp://node7/v1", "http:///v1", "http://n/?k=s3"])
@pytest.mark.parametrize("place", ["config", "environment"])
def test_an_address_that_is_none_is_refused_while_planning(url, place, served, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    found = refusal(served(base_url=url) if place == "config" else served())
    assert "'responses.openai.base_url' (or OPENAI_BASE_URL) is no http(s)://host/path" in found


def test_secrets_in_the_wrong_place_are_refused_without_being_repeated(served):
    for settings in (
        {"base_url": "http://me:s3cret@node7/v1"},
        {"base_url": "http://node7/v1", "api_key_env": "sk-s3cret"},
    ):
        found = refusal(served(**settings))
        assert "environment variable" in found
        assert "s3cret" not in found


@pytest.mark.parametrize("name", ["n", "stream", "stop_token_ids", "max_tokens"])
def test_a_field_that_the_stages_set_is_refused_in_the_extra_body(served, name):
    found = refusal(served(base_url="http://node7/v1", extra_body={name: 2}))
    assert f"'responses.openai.extra_body.{name}' is set by the stages" in found
