"""The drafters of a configuration: which keys an algorithm knows, and what a drafter must say."""

from collections.abc import Iterator
from pathlib import Path

from draftmill.atomic import read_json
from draftmill.errors import DraftmillError, broken

NUM_LAYERS = {
    "eagle3": 1,
    "dflash": 5,
    "dflash2": 5,
    "dspark": 5,
}  # as published for eagle3 and dflash
UNDRAFTED = {"dflash": 1, "dflash2": 1, "dspark": 0}  # slots of a block that draft no token
FOREIGN = ("eagle3", "dflash")  # those whose published checkpoints can be taken over


def is_imported(drafter: dict) -> bool:
    """Whether a drafter is only evaluated: it comes from a folder or the hub."""
    return bool(drafter["path"] or drafter["hub"])


def trained_drafters(config: dict) -> list[str]:
    return [name for name, drafter in config["drafters"].items() if not is_imported(drafter)]


def settle(config: dict, given: dict, schema: dict) -> None:
    """Leaves each drafter the keys that it knows, with the defaults that depend on its algorithm.

    config: validated and completed. given: as it was written.
    Raises DraftmillError for a key of another algorithm, and for a drafter that lacks what it needs.
    """
    properties = schema["$defs"]["drafter"]["properties"]
    for name, drafter in config["drafters"].items():
        for path, why in unknown(drafter, properties):
            *parents, key = path
            written = given["drafters"][name]
            for parent in parents:
                written = written.get(parent, {})
            if key in written:
                raise DraftmillError(f"config: 'drafters.{name}.{'.'.join(path)}' {why}.")
            place = drafter
            for parent in parents:
                place = place[parent]
            del place[key]
        check(name, drafter, config)
        if drafter["algorithm"] == "dflash2":
            take_whole_vocabulary(name, drafter, given["drafters"][name])
        complete(name, drafter, config)


def unknown(drafter: dict, properties: dict) -> Iterator[tuple[list[str], str]]:
    """The path of every key that the drafter's algorithm, or a drafter that is not trained, does not know."""
    algorithm, imported = drafter["algorithm"], is_imported(drafter)
    for key, schema in properties.items():
        if key not in drafter:
            continue
        if imported and schema.get("trained"):
            yield [key], "is for training, but the drafter is only evaluated; leave it out"
        elif algorithm not in schema.get("algorithms", [algorithm]):
            yield [key], f"is not known to {algorithm}; leave it out"
        elif schema.get("type") == "object" and "properties" in schema:
            inner = unknown(drafter[key] | of_drafter(drafter), schema["properties"])
            yield from (([key, *path], why) for path, why in inner)


def of_drafter(drafter: dict) -> dict:
    return {key: drafter[key] for key in ("algorithm", "path", "hub")}


def check(name: str, drafter: dict, config: dict) -> None:
    where = f"config: 'drafters.{name}"
    captures = config["hidden_states"]["captures"]
    if drafter["capture"] not in captures:
        raise DraftmillError(
            f"{where}.capture' is '{drafter['capture']}', but the captures are {', '.join(captures)}."
        )
    captured = captures[drafter["capture"]]["output_of"]
    wanted = drafter["layers"]["output_of"] if drafter["layers"] else captured
    missing = [layer for layer in wanted if layer not in captured]
    if missing:
        raise DraftmillError(
            f"{where}.layers.output_of' names {missing}, but the capture '{drafter['capture']}' stores "
            f"output_of {captured}; add them there or leave them out."
        )
    if wanted != sorted(wanted):
        raise DraftmillError(
            f"{where}.layers.output_of' is {wanted}; write the layers in ascending order, the order in which the "
            "states are stored and serving engines concatenate them."
        )
    if is_imported(drafter) and drafter["algorithm"] not in FOREIGN:
        raise DraftmillError(
            f"{where}' names path or hub, but finished drafters are taken over for {' and '.join(FOREIGN)} only; "
            f"leave it out to train a {drafter['algorithm']} drafter here."
        )
    if drafter["path"] and drafter["hub"]:
        raise DraftmillError(f"{where}' names path and hub; give one of them.")
    if bool(drafter["hub"]) != bool(drafter["revision"]):
        raise DraftmillError(f"{where}.hub' and '{where[9:]}.revision' belong together; give both.")
    if drafter["path"] and not Path(drafter["path"], "config.json").is_file():
        raise DraftmillError(
            f"{where}.path' is '{drafter['path']}', where no config.json is; give the folder of a drafter."
        )
    if not is_imported(drafter):
        check_training(where, drafter, config)


def check_training(where: str, drafter: dict, config: dict) -> None:
    training = drafter["training"]
    if training["precision"] == "bf16" and config["target"]["dtype"] != "bfloat16":
        raise DraftmillError(
            f"{where}.training.precision' is bf16, but 'target.dtype' is {config['target']['dtype']}; use "
            "mixed."
        )
    first, layers = drafter.get("initial_layers"), drafter["num_layers"]
    if first is not None and len(first) != (layers or NUM_LAYERS[drafter["algorithm"]]):
        raise DraftmillError(
            f"{where}.initial_layers' names {len(first)} layers of the target, but the drafter has "
            f"{layers or NUM_LAYERS[drafter['algorithm']]}; give one for each."
        )


def take_whole_vocabulary(name: str, drafter: dict, written: dict) -> None:
    """DFlash2's selector has a row for each of the target's tokens, and speculators no draft vocabulary."""
    if written.get("draft_vocab_size") is not None:
        raise DraftmillError(
            f"config: 'drafters.{name}.draft_vocab_size' is {written['draft_vocab_size']}, but dflash2 drafts from "
            "the target's whole vocabulary; leave it out."
        )
    drafter["draft_vocab_size"] = None


def complete(name: str, drafter: dict, config: dict) -> None:
    """The defaults that depend on other keys."""
    if drafter["layers"] is None:
        drafter["layers"] = config["hidden_states"]["captures"][drafter["capture"]]
    if drafter["draft_tokens"] is None:
        algorithm = drafter["algorithm"]
        if algorithm in UNDRAFTED:
            drafter["draft_tokens"] = block_of(name, drafter) - UNDRAFTED[algorithm]
        else:
            drafter["draft_tokens"] = config["acceptance"]["draft_tokens"]
    if "num_layers" in drafter and drafter["num_layers"] is None:
        drafter["num_layers"] = NUM_LAYERS[drafter["algorithm"]]


def block_of(name: str, drafter: dict) -> int:
    """The block of a DFlash drafter: the configuration's, or what the files of an evaluated one say.

    Raises DraftmillError where nothing at hand says it.
    """
    if not is_imported(drafter):
        return drafter["block_size"]
    found = read_json(Path(drafter["path"], "config.json"), broken) if drafter["path"] else {}
    inner = found.get("dflash_config")
    block = found.get("block_size") or (
        inner.get("block_size") if isinstance(inner, dict) else None
    )
    if type(block) is not int or block < 2:
        place = f"{drafter['path']}/config.json names none" if drafter["path"] else "it is not here"
        raise DraftmillError(
            f"config: 'drafters.{name}.draft_tokens' is not set, and the drafter's block is not known while "
            f"planning ({place}); give the number of tokens to draft per step, 15 for a block of 16."
        )
    return block
