"""The training loop: small, on accelerate, the same bytes after an interruption as without one."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from draftmill import training_state
from draftmill.dtype_policy import Ledger
from draftmill.errors import DraftmillError
from draftmill.packing import epoch_order, pack, packs
from draftmill.state_dataset import StateDataset
from draftmill.training_state import Progress, trainable

PROGRESS_EVERY = 10  # steps between progress lines


def learning_rate(step: int, settings: dict) -> float:
    """Linear warm-up, then a cosine from the peak to its final ratio; `step` counts from 0."""
    peak, last = settings["learning_rate"], settings["final_learning_rate_ratio"]
    warm = min(1.0, (step + 1) / max(1, settings["warmup_steps"]))
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings["steps"]))
    return peak * warm * (last + (1 - last) * cosine)


class Trainer:
    """Trains `model`, whose forward(batch) gives (loss, metrics), on packed samples.

    settings: the `training` section of a drafter. prepare: (sample, draw) -> the sample as the algorithm sees
    it, what it draws at random being a function of `draw`. length: tokens of a sample -> its rows.
    dtype: the declared compute dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: dict,
        prepare: Callable[[dict, str], dict],
        length: Callable[[int], int],
        dtype: str,
        ledger: Ledger,
    ):
        self.settings, self.prepare, self.length = settings, prepare, length
        self.dtype, self.ledger = dtype, ledger
        autocast = settings["precision"] == "mixed" and dtype == "bfloat16"
        self.accelerator = Accelerator(mixed_precision="bf16" if autocast else "no")
        optimizer = torch.optim.AdamW(
            trainable(model).values(),
            lr=settings["learning_rate"],
            betas=tuple(settings["betas"]),
            weight_decay=settings["weight_decay"],
        )
        self.bare = model
        self.model, self.prepared = self.accelerator.prepare(model, optimizer)
        self.optimizer = optimizer
        self.best: dict[str, torch.Tensor] = {}

    def run(self, train: StateDataset, validation: StateDataset, resume: Path) -> Progress:
        """All steps; afterwards the model holds the weights of the best validation loss."""
        limit = self.settings["tokens_per_batch"]
        cut = sum(rows > limit for rows in self._lengths(train))
        if cut:
            print(
                f"{cut} of {len(train)} conversations are longer than tokens_per_batch: {limit} and are "
                "cut there, ends of answers included",
                flush=True,
            )
        progress, self.best = training_state.restore(resume, self.bare, self.optimizer)
        began, first_step, first_token = time.monotonic(), progress.step, progress.tokens
        batches = self.batches(train, progress)
        self.model.train()
        while progress.step < self.settings["steps"]:
            epoch = progress.epoch
            progress.metrics.append(self._step(batches, progress))
            if progress.epoch > epoch:
                progress.metrics.append(epoch_row(progress.metrics, epoch))
            last = progress.step == self.settings["steps"]
            if last or progress.step % self.settings["validate_every"] == 0:
                self._validate(validation, progress)
            if not last and progress.step % self.settings["save_every"] == 0:
                training_state.save(resume, progress, self.bare, self.optimizer, self.best)
            if last or progress.step % PROGRESS_EVERY == 0:
                seconds = time.monotonic() - began
                left = seconds / (progress.step - first_step)
                left *= self.settings["steps"] - progress.step
                print(
                    f"step {progress.step}/{self.settings['steps']} "
                    f"loss {progress.metrics[-1]['loss']:.4f} "
                    f"{(progress.tokens - first_token) / seconds:.0f} tokens/s, {left:.0f} s left",
                    flush=True,
                )
        if not any(r.get("supervised") for r in progress.metrics if r["kind"] == "train"):
            raise DraftmillError(
                "training: no step saw a supervised token; the conversations are cut to "
                f"training.tokens_per_batch: {limit} before their answers (raise it), or hold no answer of more "
                "than a few tokens."
            )
        progress.cut_samples = cut
        with torch.no_grad():
            for name, parameter in trainable(self.bare).items():
                parameter.copy_(self.best[name])
        return progress

    def _lengths(self, data: StateDataset) -> list[int]:
        return [self.length(data.about(i)["tokens"]) for i in range(len(data))]

    def batches(self, data: StateDataset, progress: Progress) -> Iterator[dict]:
        """Endless packed batches from the saved place on; keeps the place in `progress`."""
        limit, seed = self.settings["tokens_per_batch"], self.settings["seed"]
        lengths = self._lengths(data)
        while True:
            order = epoch_order(len(data), seed, progress.epoch)
            for group in list(packs(order, lengths, limit))[progress.pack :]:
                progress.pack += 1
                yield self._load(data, group, f"{seed}/{progress.epoch}")
            progress.epoch, progress.pack = progress.epoch + 1, 0

    def _load(self, data: StateDataset, group: list[int], draw: str) -> dict[str, torch.Tensor]:
        """draw: what random choices depend on, beside the sample's own index: never on its neighbours."""
        samples = [self.prepare(data[i], f"{draw}/{i}") for i in group]
        batch = pack(samples, self.settings["tokens_per_batch"])
        for name in ("aux", "last"):
            self.ledger.expect(f"hidden states in training ({name})", batch[name].dtype, self.dtype)
        return {k: v.to(self.accelerator.device) for k, v in batch.items()}

    def _step(self, batches: Iterator[dict], progress: Progress) -> dict:
        rate = learning_rate(progress.step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        count = self.settings["gradient_accumulation"]
        total, sums, tokens, supervised = 0.0, {}, 0, 0
        for _ in range(count):
            batch = next(batches)
            loss, metrics = self.model(batch)
            self.ledger.expect("training loss", loss.dtype, "float32")
            self.accelerator.backward(loss / count)
            total += loss.item() / count
            tokens += int((batch["document_ids"] >= 0).sum())
            supervised += int(metrics["scored"])
            add_metrics(sums, metrics)
        norm = self.accelerator.clip_grad_norm_(
            trainable(self.bare).values(), self.settings["max_grad_norm"]
        )
        if not math.isfinite(total) or not torch.isfinite(norm):
            raise DraftmillError(
                f"training: loss {total} and gradient norm {float(norm)} at step {progress.step + 1} "
                "are not finite; lower training.learning_rate or look at the gates' figures."
            )
        self.prepared.step()
        self.prepared.zero_grad()
        progress.step += 1
        progress.tokens += tokens
        row = {"kind": "train", "step": progress.step, "epoch": progress.epoch, "loss": total}
        extra = {"learning_rate": rate, "gradient_norm": float(norm), "tokens": tokens}
        extra["supervised"] = supervised
        return row | extra | accuracies(sums)

    @torch.no_grad()
    def _validate(self, data: StateDataset, progress: Progress) -> None:
        """Mean loss over the validation sources, one pack at a time; keeps the best weights."""
        self.model.eval()
        lengths, limit = self._lengths(data), self.settings["tokens_per_batch"]
        total, weight, sums = 0.0, 0, {}
        for group in packs(list(range(len(data))), lengths, limit):
            loss, metrics = self.model(self._load(data, group, "validation"))
            scored = int(metrics["scored"])
            total, weight = total + loss.item() * scored, weight + scored
            add_metrics(sums, metrics)
        self.model.train()
        if not weight:
            raise DraftmillError("training: the validation sources hold no supervised token.")
        loss = total / weight
        row = {"kind": "validation", "step": progress.step, "epoch": progress.epoch, "loss": loss}
        progress.metrics.append(row | {"tokens": weight} | accuracies(sums))
        print(f"step {progress.step}: validation loss {loss:.4f}", flush=True)
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step = loss, progress.step
            self.best = {n: p.detach().clone().cpu() for n, p in trainable(self.bare).items()}


def epoch_row(metrics: list[dict], epoch: int) -> dict:
    """Means over the steps of an epoch, by tokens; a step counts to the epoch in which it ends."""
    rows = [r for r in metrics if r["kind"] == "train" and r["epoch"] == epoch]
    tokens = sum(r["tokens"] for r in rows)
    row = {"kind": "epoch", "epoch": epoch, "tokens": tokens, "step": metrics[-1]["step"]}
    names = [n for n in metrics[-1] if n == "loss" or n.startswith("full_acc_")]
    return row | {n: sum(r[n] * r["tokens"] for r in rows) / max(1, tokens) for n in names}


def add_metrics(sums: dict[str, float], metrics: dict[str, torch.Tensor]) -> None:
    for key, value in metrics.items():
        sums[key] = sums.get(key, 0.0) + float(value)


def accuracies(sums: dict[str, float]) -> dict[str, float]:
    """Share of positions at which draft k and every draft before it are right, all positions alike."""
    names = sorted(k.removesuffix("_sum") for k in sums if k.startswith("full_acc_"))
    return {
        name: sums[f"{name}_sum"] / max(1.0, sums[f"{name}_total"])
        for name in dict.fromkeys(n for n in names if f"{n}_sum" in sums)
    }
