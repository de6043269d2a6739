"""The part of the plan that is about drafters: which rules make, audit, check and measure them, and with what."""

from draftmill import algorithms
from draftmill.driver import drafter_config, drafter_source
from draftmill.stage import combine

# rule -> prefixes of the modules that its script takes by name
BY_ALGORITHM = {
    "audit_training": ("", "audited_"),
    "check_drafter": ("",),
    "import_drafter": ("foreign_",),
    "measure_acceptance": ("",),
}
# keys of a drafter that say where it comes from and how it is measured, not how it is trained
NOT_TRAINED = ("capture", "draft_tokens", "path", "hub", "revision")


class DrafterPlan:
    """What a plan knows of its drafters; the plan has fingerprints, sources and the configuration."""

    def _modules(self, rule: str, drafter: str | None) -> list[str]:
        """The modules that a rule's script takes by the drafter's algorithm."""
        prefixes = BY_ALGORITHM.get(rule, ())
        return [algorithms.module_of(self.algorithm(drafter), prefix) for prefix in prefixes]

    def algorithm(self, drafter: str) -> str:
        return self.config["drafters"][drafter]["algorithm"]

    def trained(self) -> list[str]:
        """The drafters that are trained here; the others are only evaluated."""
        return drafter_config.trained_drafters(self.config)

    def _build_draft_vocab(self, drafter: str) -> tuple[dict, dict]:
        inputs = {
            n: self.of_sources("tokenize_conversations", [n]) for n in self.with_role("train")
        }
        settings = self.config["drafters"][drafter]
        # a mask token that is named is never drafted
        slice_ = {k: settings[k] for k in ("draft_vocab_size", "mask_token_id") if k in settings}
        inputs = {"target": self.fingerprint("prepare_target"), "tokens": combine(inputs.values())}
        return slice_, inputs

    def _training(self, drafter: str) -> tuple[dict, dict]:
        settings = self.config["drafters"][drafter]
        inputs = {
            "target": self.fingerprint("prepare_target"),
            "draft_vocab": self.fingerprint("build_draft_vocab", drafter=drafter),
        }
        for role in ("train", "validation"):
            items = [{"capture": settings["capture"], "source": n} for n in self.with_role(role)]
            inputs[role] = self.combined("index_hidden_states", items)
        return {k: v for k, v in settings.items() if k not in NOT_TRAINED}, inputs

    # the audit looks at the very training; nothing follows from it, so its code retrains nothing
    _train_eagle3 = _train_dflash = _train_dflash2 = _train_dspark = _training
    _audit_training = _training

    def _import_drafter(self, drafter: str) -> tuple[dict, dict]:
        settings = self.config["drafters"][drafter]
        slice_ = {k: settings[k] for k in ("algorithm", "path", "hub", "revision", "layers")}
        digest = drafter_source.digest(drafter, settings)
        return slice_ | {"digest": digest}, {"target": self.fingerprint("prepare_target")}

    def train_rule(self, drafter: str) -> str:
        """The rule that makes a drafter's files."""
        imported = drafter not in self.trained()
        return "import_drafter" if imported else f"train_{self.algorithm(drafter)}"

    def made_by(self, rule: str) -> list[str]:
        """The drafters that a rule makes."""
        return [d for d in self.config["drafters"] if self.train_rule(d) == rule]

    def checked_on(self, drafter: str) -> list[str]:
        """The sources whose states a drafter is checked on: those that chose its checkpoint, else a test source."""
        if drafter in self.trained():
            return self.with_role("validation")
        return self.with_role("test")[:1]

    def _check_drafter(self, drafter: str) -> tuple[dict, dict]:
        settings = self.config["drafters"][drafter]
        sources = self.checked_on(drafter)
        items = [{"capture": settings["capture"], "source": name} for name in sources]
        return {k: settings[k] for k in ("algorithm", "draft_tokens", "layers")}, {
            "drafter": self.fingerprint(self.train_rule(drafter), drafter=drafter),
            "hidden_states": self.combined("index_hidden_states", items),
            "target": self.fingerprint("prepare_target"),
        }

    def _measure_acceptance(self, drafter: str, source: str) -> tuple[dict, dict]:
        settings = self.config["drafters"][drafter]
        capture = settings["capture"]
        manifest = self.fingerprint("index_hidden_states", capture=capture, source=source)
        limit = self.config["responses"]["max_new_tokens"] if self.generates(source) else None
        kwargs = self.config["target"]["chat_template_kwargs"]
        conditions = {"max_new_tokens": limit, "chat_template_kwargs": kwargs}
        conditions |= {k: settings[k] for k in ("algorithm", "draft_tokens", "layers")}
        return dict(self.config["acceptance"]) | conditions, {
            "drafter": self.fingerprint(self.train_rule(drafter), drafter=drafter),
            "hidden_states": manifest,
            "target": self.fingerprint("prepare_target"),
        }

    def measured(self) -> list[dict[str, str]]:
        """drafter and source of every acceptance file."""
        tests = self.with_role("test")
        return [{"drafter": d, "source": s} for d in self.config["drafters"] for s in tests]
