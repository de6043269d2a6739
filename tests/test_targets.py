"""Every family: its head found on disk, its logits from stored states, both backends alike, the gate passed."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import extract_hidden_states
import families
from draftmill import target_head, tensor_files
from draftmill.shard_reader import Shard
from draftmill.target_manifest import read_manifest
from draftmill.target_structure import final_norm
from mini_road import MiniRoad, write_data
from workflow import rows, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")
QUANTISED = ("deepseek_v3_fp8", "kimi_k25_int4", "llama_fp8", "llama_int4", "qwen3_5_fp8")


@pytest.fixture(scope="module", params=families.NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(name, tmp_path_factory) -> Path:
    return families.make(name, tmp_path_factory.mktemp("families") / name)


@pytest.fixture
def road(checkpoint, tmp_path, monkeypatch):
    """The road of a family up to its test source's tokens, in the given dtype."""

    def make(dtype: str) -> MiniRoad:
        folder = tmp_path / dtype
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_data(rows(2), rows(2, 500), rows(4, 600))
        config = tiny_config(checkpoint)
        config["target"]["dtype"] = dtype
        made = MiniRoad(config)
        made.prepare_target()
        made.prepare_prompts("judge")
        made.generate_responses("judge")
        made.tokenize_conversations("judge")
        return made

    return make


def loaded(name: str, checkpoint: Path, dtype: torch.dtype):
    """The model as transformers loads it, by no code of this project."""
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    if name == "kimi_k25_int4":  # its own list of what is not quantised forgets these
        ignored = config.text_config.quantization_config["ignore"]
        ignored += ["re:.*vision_tower.*", "re:.*mm_projector.*"]
    if name in (
        "llama_fp8",
        "llama_int4",
    ):  # else dequantised by the first pass, after they are widened
        config.quantization_config["dequantize"] = True
    if name == "llama_fp8":  # it would round activations in every pass
        config.quantization_config["config_groups"]["group_0"]["input_activations"] = None
    autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
    auto = next(a for a in autos if type(config) in a._model_mapping)
    model = auto.from_pretrained(checkpoint, config=config, dtype=dtype, trust_remote_code=False)
    return model.eval()


def test_embedding_norm_and_head_are_those_of_the_loaded_model(road, name, checkpoint):
    made = road("bfloat16")
    found, _ = tensor_files.read(made.head)
    model = loaded(name, checkpoint, torch.bfloat16)
    expected = {"embed_tokens.weight": model.get_input_embeddings().weight}
    for role, module in (("lm_head", model.get_output_embeddings()), ("norm", final_norm(model))):
        expected |= {f"{role}.{n}": p for n, p in module.named_parameters()}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor.to(torch.bfloat16)), key


def test_logits_from_stored_states_are_the_models_own(road, name, checkpoint):
    made = road("float32")
    made.extract_hidden_states("judge")
    shard = Shard(made.states("judge"), "float32")
    head = target_head.TargetHead(read_manifest(made.target), tensor_files.read(made.head)[0])
    # a quantised checkpoint is dequantised to bf16; the same weights widened
    model = loaded(name, checkpoint, torch.bfloat16 if name in QUANTISED else torch.float32)
    for weight in model.parameters():
        weight.data = weight.data.float()
    for index in range(len(shard.samples)):
        found = shard.read(index, ["input_ids", "last"])
        with torch.inference_mode():
            own = model(input_ids=found["input_ids"][None], use_cache=False).logits
            ours = head(found["last"][None])
        assert (ours - own).abs().max() <= 1e-5 * max(1, own.abs().max())


def test_the_gate_passes_on_the_familys_greedy_text(road):
    made = road("bfloat16")
    made.extract_hidden_states("judge")
    found = json.loads(made.gate_hidden_states("judge").read_text())
    assert found["agreement"] >= 0.99
    assert max(found["states"].values()) < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_resident_and_streamed_extraction_give_the_same_bytes(road, dtype):
    made = road(dtype)
    stage = made.stage("extract_hidden_states", capture="low", source="judge", shard="00000")
    files = {}
    for backend in ("resident", "streamed"):
        output = Path(f"{backend}.parquet")
        shard = (stage, made.table("tokens", "judge"), output)
        extract_hidden_states.extract([shard], made.target, backend)
        files[backend] = output.read_bytes()
    assert files["resident"] == files["streamed"]


def test_a_gate_that_streams_gives_the_same_figures(road):
    made = road("bfloat16")
    made.extract_hidden_states("judge")
    output = made.gate_hidden_states("judge")
    resident = output.read_bytes()
    output.unlink()
    assert made.gate_hidden_states("judge", backend="streamed").read_bytes() == resident
