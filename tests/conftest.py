"""What the tests share: paths, one tiny target, a small configuration, hypothesis without a clock."""

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
torch.set_num_threads(1)
# no deadline: a slow machine is no failure; no database: the tests leave nothing behind
settings.register_profile("draftmill", deadline=None, database=None, derandomize=True)
settings.load_profile("draftmill")


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """A checkpoint folder with tokenizer and chat template."""
    from tiny_target import make_target

    return make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable:
    """template -> a tiny tokenizer with that chat template."""
    from tiny_target import make_tokenizer

    made = make_tokenizer()

    def with_template(template: str | None):
        tokenizer = copy.deepcopy(made)
        tokenizer.chat_template = template
        return tokenizer

    return with_template


@pytest.fixture
def tokenizer(tokenizer_with):
    from tiny_target import CHATML

    return tokenizer_with(CHATML)


@pytest.fixture
def base_config() -> dict:
    """The smallest configuration that is valid; nothing in it is opened by the validation."""
    roles = ("train", "validation", "test")
    return {
        "run": "tiny",
        "target": {"path": "target"},
        "sources": {role: {"kind": "stdlib", "role": role} for role in roles},
        "hidden_states": {"captures": {"low": {"output_of": [1, 2]}}},
        "drafters": {"first": {"algorithm": "eagle3", "capture": "low"}},
    }


@pytest.fixture
def changed() -> Callable:
    """(config, dotted key, value) -> a copy of the configuration with that one value."""

    def change(config: dict, key: str, value: object) -> dict:
        config = copy.deepcopy(config)
        place = config
        *parents, last = key.split(".")
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
        return config

    return change


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A current directory of the test's own, since the driver's index stands in .draftmill there."""
    from draftmill.driver import sources

    monkeypatch.chdir(tmp_path)
    sources.folder_digest.cache_clear()
    yield tmp_path
    sources.folder_digest.cache_clear()


@pytest.fixture
def write_rows() -> Callable:
    """(path, values) -> the path of a JSONL file with one value a line."""

    def write(path: Path, values: list) -> Path:
        text = "".join(json.dumps(value) + "\n" for value in values)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def finished_run(tiny_target, tmp_path_factory):
    """The whole road on the tiny target, finished; tests work on copies of it."""
    from workflow import Run, tiny_config

    run = Run(tmp_path_factory.mktemp("finished") / "run", tiny_config(tiny_target))
    run.write_data()
    run.snakemake()
    return run


@pytest.fixture(scope="session")
def four_drafters(finished_run, tmp_path_factory):
    """That run with a drafter of either algorithm, and with the export of each taken over from data/taken."""
    from workflow import publish, with_block_drafter, with_imported

    run = finished_run.copy(tmp_path_factory.mktemp("four") / "run")
    run.write_config(with_block_drafter(copy.deepcopy(run.config)))
    run.snakemake("--until", "train_dflash")
    publish(run.result("drafters"), run.folder / "data/taken")
    run.write_config(with_imported(run.config, "data/taken"))
    run.snakemake()
    return run


@pytest.fixture
def config(tiny_target, tmp_path, monkeypatch) -> dict:
    """The tiny configuration, its sources in a fresh current folder."""
    from mini_road import write_data
    from workflow import rows, tiny_config

    monkeypatch.chdir(tmp_path)
    write_data(rows(6), rows(3, 500), rows(3, 600))
    return tiny_config(tiny_target)


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Callable[[str], Path]:
    """name of a tiny family -> its checkpoint, made once."""
    import families

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = families.make(name, tmp_path_factory.mktemp("family") / name)
        return made[name]

    return folder


@pytest.fixture
def edited(family, tmp_path, monkeypatch) -> Callable:
    """name of a tiny family -> a copy that the test may change; the current folder is the test's own."""
    from edited_checkpoint import Edited

    monkeypatch.chdir(tmp_path)
    return lambda name: Edited(family(name), tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def prepared_target(tiny_target, tmp_path_factory) -> Path:
    """results/tiny/target, made once."""
    from mini_road import MiniRoad, write_data
    from workflow import rows, tiny_config

    folder, before = tmp_path_factory.mktemp("prepared"), Path.cwd()
    os.chdir(folder)
    try:
        write_data(rows(6), rows(3, 500), rows(3, 600))
        MiniRoad(tiny_config(tiny_target)).prepare_target()
    finally:
        os.chdir(before)
    return folder / "results/tiny/target"


@pytest.fixture
def foreign_target(prepared_target, tmp_path, monkeypatch):
    """The tiny target, for drafters that others trained; the current folder is the test's own."""
    import torch

    from foreign_checkpoints import Target

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return Target(prepared_target)


@pytest.fixture
def ready_road(config, prepared_target):
    """Everything that training needs: states of all sources, draft vocabulary."""
    from mini_road import road_of

    road = road_of(config, prepared_target)
    for source in ("learn", "choose", "judge"):
        road.to_states(source)
    road.build_draft_vocab()
    return road


@pytest.fixture(scope="session")
def block_extraction(tiny_target, tmp_path_factory) -> tuple[Path, dict]:
    """A folder with an extraction in float32, made once, and its configuration."""
    from block_models import extracted

    folder, before = tmp_path_factory.mktemp("blocks"), Path.cwd()
    os.chdir(folder)
    try:
        return folder, extracted(tiny_target, "float32")
    finally:
        os.chdir(before)


@pytest.fixture
def block_states(block_extraction, monkeypatch) -> dict:
    """That configuration; its folder is the current one. Tests plan drafters of their own over it."""
    folder, config = block_extraction
    monkeypatch.chdir(folder)
    return copy.deepcopy(config)


@pytest.fixture
def model_of(block_states) -> Callable:
    """(case, settings of training) -> a drafter of a block algorithm with its samples."""
    from block_models import Model

    return lambda case, **training: Model(block_states, case, **training)


@pytest.fixture
def asked(config, prepared_target, monkeypatch):
    """(endpoint, settings of responses.openai, source, other settings) -> the road, its answers made."""
    from mini_road import road_of

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    def ask(endpoint, source: str = "judge", responses=None, **settings):
        section = {"base_url": endpoint.url, "retries": 2} | settings
        config["responses"] |= {"backend": "openai", "openai": section} | (responses or {})
        shutil.rmtree("results", ignore_errors=True)
        road = road_of(config, prepared_target)
        road.prepare_prompts(source)
        road.generate_responses(source)
        return road

    return ask


@pytest.fixture
def golden(tiny_target, tmp_path) -> Path:
    """The golden table of the tiny target's tokenizer."""
    import make_golden_table
    from draftmill.golden_table import PROBES

    path = tmp_path / "golden.jsonl"
    make_golden_table.make(str(tiny_target), None, False, PROBES, path)
    return path


@pytest.fixture
def modules_of_this_test_alone(tmp_path, monkeypatch):
    """transformers copies a folder's code into a package of modules before it imports it."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.setattr("sys.path", [*sys.path])


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate keeps its precision for a whole process; a job has a process of its own."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def zlab_package() -> None:
    """z-lab's own code (PyPI `dflash`), which `make install-dev` installs; CI may not do without."""
    try:
        import dflash.model  # noqa: F401
    except ImportError:
        if "CI" in os.environ:
            raise
        pytest.skip("z-lab's package is missing: pip install --no-deps -r envs/zlab.txt")
