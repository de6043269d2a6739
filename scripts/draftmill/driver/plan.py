"""From the configuration alone: every job's settings string, and so every artefact's fingerprint.

The settings of a job hold its rule, the code it runs, the slice of the configuration it needs and the
fingerprints of its inputs. A fingerprint therefore changes exactly with what can change the artefact,
and is known without opening a file. Gates are nobody's input here: what they guard does not change
with them.
"""

from functools import cached_property, lru_cache
from pathlib import Path

from draftmill.driver import engine, sources, target_source, tokenizer_source
from draftmill.driver.code import code_of
from draftmill.driver.drafter_plan import DrafterPlan
from draftmill.stage import canonical, combine, fingerprint_of

ENVS = Path(__file__).resolve().parents[3] / "envs"
LOCKS = ("torch.txt", "requirements.lock")
PROBES = Path(__file__).resolve().parents[3] / "resources" / "tokenizer_probes.jsonl"
REPORT_TEMPLATE = Path(__file__).resolve().parents[3] / "resources" / "report.html.jinja"
PUBLISHED = Path(__file__).resolve().parents[3] / "resources" / "published_tau.tsv"


class Plan(DrafterPlan):
    """The plan of one completed configuration."""

    def __init__(self, config: dict):
        self.config = config
        self.root = f"results/{config['run']}"
        self.settings = lru_cache(None)(self._settings)

    # ---- names -------------------------------------------------------------------------------

    @cached_property
    def ranges(self) -> dict[str, dict[str, tuple[int, int]]]:
        """source -> shard name -> row range."""
        return {
            name: {f"{i:05d}": r for i, r in enumerate(sources.row_ranges(name, source))}
            for name, source in self.config["sources"].items()
        }

    def shards(self, source: str) -> list[str]:
        return list(self.ranges[source])

    def shard_counts(self) -> list[list]:
        """[name, number of shards] of every source, in the order of the configuration."""
        return [[name, len(self.shards(name))] for name in self.config["sources"]]

    def with_role(self, *roles: str) -> list[str]:
        """The sources with these roles, in the order of the configuration; all without a role."""
        sources = self.config["sources"].items()
        return [name for name, source in sources if not roles or source["role"] in roles]

    def captures(self) -> list[str]:
        """The captures that a drafter uses."""
        return sorted({d["capture"] for d in self.config["drafters"].values()})

    # ---- settings ----------------------------------------------------------------------------

    def _settings(self, rule: str, **wildcards: str) -> str:
        slice_, inputs = getattr(self, f"_{rule}")(**wildcards)
        modules = self._modules(rule, wildcards.get("drafter"))
        code = code_of(f"{rule}.py", *modules)
        value = {"rule": rule, "code": code, "packages": self.packages}
        if modules:
            value["modules"] = modules
        return canonical(value | {"config": slice_, "inputs": inputs})

    @cached_property
    def packages(self) -> str:
        """One digest over the locks: third-party code is versioned by them."""
        return combine(sources.file_digest(ENVS / name) for name in LOCKS)

    @cached_property
    def engine_options(self) -> str:
        """How the engine of generate_responses is reached, as JSON: part of no settings."""
        return canonical(engine.reached(self.config["responses"]))

    def fingerprint(self, rule: str, **wildcards: str) -> str:
        return fingerprint_of(self.settings(rule, **wildcards))

    def combined(self, rule: str, items: list[dict[str, str]]) -> str:
        """One fingerprint for a list of inputs in a fixed order."""
        return combine(self.fingerprint(rule, **wildcards) for wildcards in items)

    def of_sources(self, rule: str, names: list[str], **fixed: str) -> str:
        items = [{"source": n, "shard": s, **fixed} for n in names for s in self.shards(n)]
        return self.combined(rule, items)

    def _prepare_target(self) -> tuple[dict, dict]:
        target = self.config["target"]
        keys = ("path", "hub", "revision", "package", "gguf", "dtype", "trust_remote_code")
        slice_ = {k: target[k] for k in keys} | {"digest": target_source.digest(target)}
        tokenizer = tokenizer_source.settings_of(target["tokenizer"])
        # the probes decide whether tokenizer.json is taken as it is
        return slice_ | {"tokenizer": tokenizer | {"probes": sources.file_digest(PROBES)}}, {}

    def _prepare_prompts(self, source: str, shard: str) -> tuple[dict, dict]:
        settings = dict(self.config["sources"][source])
        start, stop = self.ranges[source][shard]
        kept = ("kind", "path", "id", "revision", "subset", "split", "rows", "responses")
        slice_ = {k: settings[k] for k in (*kept, "on_malformed") if settings[k] is not None}
        digest = sources.rows_digest(settings, start, stop)
        return slice_ | {"start": start, "stop": stop, "digest": digest}, {}

    def _check_leaks(self) -> tuple[dict, dict]:
        roles = {name: self.config["sources"][name]["role"] for name in self.config["sources"]}
        inputs = {name: self.of_sources("prepare_prompts", [name]) for name in roles}
        return {"roles": roles, "duplicates": self.config["leaks"]["duplicates"]}, inputs

    def _generate_responses(self, source: str, shard: str) -> tuple[dict, dict]:
        settings = self.config["sources"][source]
        slice_ = engine.science(self.config["responses"]) | self._rendering(source)
        del slice_["truncated"]  # decided when the answers are tokenized
        if slice_["backend"] != "transformers":
            del slice_["padding"]  # a server batches as it likes
        if settings["role"] != "train":
            slice_ |= {"temperature": 0.0, "top_p": 1.0}
        if slice_["temperature"] == 0:
            del slice_["seed"], slice_["top_p"]
        else:
            slice_ |= {"stream": f"{source}/{shard}"}
        return slice_, {
            "prompts": self.fingerprint("prepare_prompts", source=source, shard=shard),
            "target": self.fingerprint("prepare_target"),
        }

    def _rendering(self, source: str) -> dict:
        settings, target = self.config["sources"][source], self.config["target"]
        return {
            "chat_template_kwargs": target["chat_template_kwargs"],
            "max_length": target["max_length"],
            "padding": "left" if settings["role"] == "train" else "none",
            "on_malformed": settings["on_malformed"],
        }

    def _tokenize_conversations(self, source: str, shard: str) -> tuple[dict, dict]:
        slice_ = self._rendering(source)
        del slice_["padding"]
        inputs = {
            "prompts": self.fingerprint("prepare_prompts", source=source, shard=shard),
            "target": self.fingerprint("prepare_target"),
        }
        if self.generates(source):
            made = self.fingerprint("generate_responses", source=source, shard=shard)
            inputs["responses"] = made
            slice_["truncated"] = self.config["responses"]["truncated"]
        return slice_, inputs

    def generates(self, source: str) -> bool:
        return self.config["sources"][source]["responses"] == "generate"

    def _extract_hidden_states(self, capture: str, source: str, shard: str) -> tuple[dict, dict]:
        states = self.config["hidden_states"]
        role = self.config["sources"][source]["role"]
        slice_ = {
            "layers": states["captures"][capture],
            "batch_tokens": states["batch_tokens"],
            "padding": "right" if role == "train" else "none",
        }
        return slice_, {
            "tokens": self.fingerprint("tokenize_conversations", source=source, shard=shard),
            "target": self.fingerprint("prepare_target"),
        }

    def _gate_hidden_states(self, **wildcards: str) -> tuple[dict, dict]:
        greedy = self.config["sources"][wildcards["source"]]["role"] != "train"
        return dict(self.config["hidden_states"]["gate"]) | {"greedy": greedy}, {
            "hidden_states": self.fingerprint("extract_hidden_states", **wildcards),
            "target": self.fingerprint("prepare_target"),
        }

    def _index_hidden_states(self, capture: str, source: str) -> tuple[dict, dict]:
        made = self.of_sources("extract_hidden_states", [source], capture=capture)
        return {"shards": len(self.shards(source))}, {"hidden_states": made}

    def _results(self) -> dict:
        drafters = list(self.config["drafters"])
        trained = [self.fingerprint(self.train_rule(d), drafter=d) for d in drafters]
        measured = self.combined("measure_acceptance", self.measured())
        return {"acceptance": measured, "drafters": combine(trained)}

    def _plot(self) -> tuple[dict, dict]:
        trained = combine(self.fingerprint(self.train_rule(d), drafter=d) for d in self.trained())
        names = {d: self.algorithm(d) for d in self.trained()}
        return {"algorithms": names}, self._results() | {"drafters": trained}

    def _report(self) -> tuple[dict, dict]:
        drafters = list(self.config["drafters"])
        gates = [self.of_sources("gate_hidden_states", [s], capture=c) for c, s in self.captured()]
        inputs = self._results() | {
            "gates": combine(gates),
            "leaks": self.fingerprint("check_leaks"),
            "checks": combine(self.fingerprint("check_drafter", drafter=d) for d in drafters),
            "audits": combine(
                self.fingerprint("audit_training", drafter=d) for d in self.trained()
            ),
            "plot": self.fingerprint("plot"),
        }
        names = {
            "run": self.config["run"],
            "drafters": drafters,
            "trained": self.trained(),
            "captured": [list(pair) for pair in self.captured()],
            "sources": self.shard_counts(),
            "tests": self.with_role("test"),
            "generated": [n for n in self.config["sources"] if self.generates(n)],
            "template": sources.file_digest(REPORT_TEMPLATE),
            "published": sources.file_digest(PUBLISHED),
        }
        return dict(self.config["report"]) | names, inputs

    def captured(self) -> list[tuple[str, str]]:
        """capture and source of all hidden states: those of training and validation only where a drafter that
        reads the capture is trained."""
        trained = {self.config["drafters"][d]["capture"] for d in self.trained()}
        return [
            (capture, source)
            for capture in self.captures()
            for source in self.with_role(*(() if capture in trained else ("test",)))
        ]
