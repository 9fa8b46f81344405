"""Self-distillation: the student attends as a technique does, the teacher is the model as it came.

    loss = mean over answer tokens of KL(teacher || student) + QUESTION_WEIGHT · the same over the
           question's tokens; mean over prompts

Both run on the same weights; the adapter is switched off for the teacher.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipic_backend.adapt.curve import Curve, Point
from minipic_backend.adapt.examples import Example, join
from minipic_backend.adapt.span_attention import (
    full_attention_of,
    inverse_frequencies,
    spans_of,
)
from minipic_backend.errors import ConfigurationError

__all__ = ["Recipe", "Trainer", "divergence"]

_NUM_CHECKPOINTS = 3
_NUM_BAD_STEPS = 5
"""Steps in a row without finite gradients after which training ends."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    Args:
        steps: optimizer steps, at most.
        batch_size: prompts in a step.
        learning_rate: at its highest; warmed up, then lowered along a cosine.
        warmup_steps: of the learning rate.
        validate_every: steps between validations.
        time_limit_s: seconds after which training ends, whatever `steps` says; None for none.
        rank: of the adapter.
        alpha: its scale is alpha / rank.
        tokens_together: a step's prompts are run together up to so many tokens, which keeps a GPU
            busy; 0: each by itself.
    """

    steps: int = 400
    batch_size: int = 8
    learning_rate: float = 2e-4
    warmup_steps: int = 10
    validate_every: int = 20
    time_limit_s: float | None = None
    rank: int = 16
    alpha: int = 32
    tokens_together: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "rank", "alpha"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: at least 1")
        if self.learning_rate <= 0:
            raise ConfigurationError(f"learning_rate={self.learning_rate}: above 0")


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of each row, in nats.

    Args:
        teacher: logits, [num_tokens, vocab].
        student: the same.

    Returns:
        float32 [num_tokens].
    """
    log_p = teacher.float().log_softmax(-1)
    log_q = student.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class Trainer:
    """Trains one adapter.

    Args:
        model: a transformers model whose attention is `span_attention.IMPLEMENTATION`.
        recipe: how.
        folder: where the adapter, its checkpoints and the curve go.
        progress: called with a line of text for people, and the step.
    """

    def __init__(
        self, model: Any, recipe: Recipe, folder: Path, progress: Callable[[str, int], None]
    ) -> None:
        from peft import LoraConfig, get_peft_model

        self._inv_freq = inverse_frequencies(model)
        config = LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self.model: Any = get_peft_model(model, config)
        self._recipe = recipe
        self._folder = folder
        self._progress = progress
        self._device = next(model.parameters()).device
        self._weights = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=recipe.learning_rate, weight_decay=0.0, betas=(0.9, 0.99)
        )
        self._best: list[Tensor] = []
        self._checkpoints: list[Path] = []
        self._started = time.monotonic()

    def train(self, examples: Iterator[Example], held_out: Sequence[Example]) -> Curve:
        """Trains until the recipe or the curve says to stop, and saves the best adapter, if any.

        Args:
            examples: endless.
            held_out: to validate on.

        Returns:
            The validation curve; `helps` says whether an adapter was saved.
        """
        recipe, curve = self._recipe, Curve()
        held_out = join(held_out, recipe.tokens_together)
        self._validate(curve, held_out, 0)
        step = bad = 0
        reason = curve.reason_to_stop()
        while reason is None and step < recipe.steps:
            if self._share_of_time() >= 1:
                reason = "out of time"
                break
            loss = self._step([next(examples) for _ in range(recipe.batch_size)], step)
            step += 1
            bad = 0 if math.isfinite(loss) else bad + 1
            if bad == _NUM_BAD_STEPS:
                reason = f"no finite gradients in the last {bad} steps"
                break
            self._progress(f"loss {loss:.4f}, held out {curve.points[-1].kl:.4f}", step)
            if step % recipe.validate_every == 0 or step == recipe.steps:
                self._validate(curve, held_out, step)
                reason = curve.reason_to_stop()
        if curve.points[-1].step != step:
            self._validate(curve, held_out, step)
        self._finish(curve, reason or "all steps done")
        return curve

    # ---- one step ---------------------------------------------------------------------------

    def _step(self, batch: Sequence[Example], step: int) -> float:
        """One optimizer step.

        Returns:
            The loss. Where it or a gradient is not finite: nan, and the weights stay as they were.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        losses = []
        for example in join(batch, self._recipe.tokens_together):
            example = example.to(self._device)
            kl, _ = self._compare(example)
            loss = (kl * example.weights).sum() / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        total = float(sum(losses))
        is_finite = math.isfinite(total) and bool(norm.isfinite())
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total if is_finite else math.nan

    def _compare(self, example: Example) -> tuple[Tensor, Tensor]:
        """Divergence at each compared token, and whether both would say the same there."""
        with self._precision():
            with torch.no_grad(), self.model.disable_adapter(), full_attention_of(example):
                teacher = self.model(
                    example.teacher_ids[None],
                    position_ids=example.teacher_positions[None],
                    logits_to_keep=example.teacher_rows,
                    use_cache=False,
                ).logits[0]
            with spans_of(example, self._inv_freq):
                student = self.model(
                    example.student_ids[None],
                    position_ids=example.positions[None],
                    logits_to_keep=example.student_rows,
                    use_cache=False,
                ).logits[0]
        return divergence(teacher, student), teacher.argmax(-1) == student.argmax(-1)

    def _precision(self) -> Any:
        if self._device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def _learning_rate(self, step: int) -> float:
        recipe = self._recipe
        share = min(max(step / recipe.steps, self._share_of_time()), 1.0)
        warm = min((step + 1) / max(recipe.warmup_steps, 1), 1.0)
        return recipe.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))

    def _share_of_time(self) -> float:
        limit = self._recipe.time_limit_s
        return 0.0 if limit is None else (time.monotonic() - self._started) / limit

    # ---- validation and what is kept --------------------------------------------------------

    @torch.no_grad()
    def _validate(self, curve: Curve, held_out: Sequence[Example], step: int) -> None:
        kl, agreement, count = 0.0, 0, 0
        for example in held_out:
            example = example.to(self._device)
            found, same = self._compare(example)
            kl += float(found[example.is_answer].sum())
            agreement += int(same[example.is_answer].sum())
            count += int(example.is_answer.sum())
        seconds = time.monotonic() - self._started
        point = Point(step, kl / count, agreement / count, seconds)
        is_best = curve.add(point)
        self._progress(
            f"step {step}: held-out divergence {point.kl:.4f}, agreement {point.agreement:.1%}",
            step,
        )
        if is_best and step:
            self._best = [weight.detach().clone() for weight in self._weights]
            self._checkpoint(step)
        self._write(curve)

    def _checkpoint(self, step: int) -> None:
        """Saves the adapter as it is; of earlier checkpoints the last few stay."""
        self._checkpoints.append(self._folder / "checkpoints" / f"step-{step}")
        self._save(self._checkpoints[-1])
        for old in self._checkpoints[:-_NUM_CHECKPOINTS]:
            shutil.rmtree(old)
        del self._checkpoints[:-_NUM_CHECKPOINTS]

    def _finish(self, curve: Curve, reason: str) -> None:
        if curve.helps:
            with torch.no_grad():
                for weight, best in zip(self._weights, self._best, strict=True):
                    weight.copy_(best)
            self._save(self._folder)
        self._write(curve, reason)
        self._progress(f"stopped: {reason}", curve.points[-1].step)

    def _save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def _write(self, curve: Curve, reason: str | None = None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {**curve.to_dict(), "recipe": asdict(self._recipe), "stopped": reason}
        (self._folder / "adapt.json").write_text(json.dumps(content, indent=1) + "\n")
