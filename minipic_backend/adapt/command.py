"""`minipic adapt`: a LoRA adapter for a model that is to answer from spans."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from minipic_backend.adapt.tasks import TaskMaker, split_documents
from minipic_backend.config import Frame, SpanConfig, SpanOptions, Technique, resolve_technique
from minipic_backend.errors import ConfigurationError, shown
from minipic_backend.models import resolve_model
from minipic_backend.quality.kinds import KINDS
from minipic_backend.quality.passages import Passage, load_passages

__all__ = ["add_arguments", "run"]

_MIN_DOCUMENTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `minipic adapt`."""
    parser.add_argument("model", metavar="MODEL", help="folder or hub name")
    parser.add_argument(
        "--docs",
        type=Path,
        required=True,
        metavar="FILE",
        help="your documents: JSONL with title and text, or plain text with blank lines between",
    )
    parser.add_argument("--out", type=Path, default=Path("minipic-adapter"), metavar="FOLDER")
    parser.add_argument("--technique", choices=get_args(Technique), default="block_attention")
    parser.add_argument("--frame", choices=get_args(Frame), help="instead of the technique's")
    parser.add_argument("--no-primer", action="store_true")
    parser.add_argument(
        "--kinds",
        default="all",
        help=f"facts to ask for beside quotations, a,b: {', '.join(KINDS)}; all or none",
    )
    parser.add_argument("--documents", type=int, default=10, help="documents in a prompt, at most")
    parser.add_argument("--document-form", default="{title}\\n{text}")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=None, help="train no longer than that")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--validate-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--validation", type=int, default=32, help="held-out prompts")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        help="longer prompts are left out; on a GPU, so many are run together",
    )
    parser.add_argument("--block-size", type=int, default=16, help="of the engine to be used")
    parser.add_argument("--merge", action="store_true", help="also write a model with it merged in")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """Trains, saves, says what to do next; 1 where the adapter does not help.

    Raises:
        ConfigurationError: a wrong option or file, or peft is missing.
        ModelNotFoundError: no such model.
    """
    import torch

    from minipic_backend.adapt.training import Recipe, Trainer

    recipe = Recipe(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        validate_every=options.validate_every,
        time_limit_s=None if options.minutes is None else 60 * options.minutes,
        rank=options.rank,
        alpha=2 * options.rank,
        tokens_together=options.max_tokens if torch.cuda.is_available() else 0,
    )
    settings = resolve_technique(
        options.technique,
        frame=options.frame,
        late=0,
        primer=False if options.no_primer else None,
    )
    passages = read_documents(options.docs)
    path = str(resolve_model(options.model, progress=sys.stderr.isatty()))
    model, tokenizer = _load(path)
    examples, held_out = _examples(options, settings, passages, tokenizer)
    with tqdm(total=recipe.steps, unit="step", disable=None, file=sys.stderr) as bar:

        def progress(line: str, step: int) -> None:
            bar.update(step - bar.n)
            if line.startswith("loss"):
                bar.set_postfix_str(line)
            else:
                bar.write(line, file=sys.stderr)

        trainer = Trainer(model, recipe, options.out, progress)
        curve = trainer.train(examples, held_out)
    before, after = curve.baseline, curve.best
    print(
        f"Held-out divergence from full attention: {before.kl:.4f} without, {after.kl:.4f} with "
        f"the adapter; agreement {before.agreement:.1%} and {after.agreement:.1%}"
    )
    if not curve.helps:
        print(
            f"The adapter does not help; none was saved in {options.out}. "
            "More documents, more steps, or another --learning-rate may."
        )
        return 1
    tokenizer.save_pretrained(options.out)
    print(
        f"Saved in {options.out}. Serve it: minipic serve {options.model} --enable-lora "
        f"--max-lora-rank {options.rank} --lora-modules adapted={options.out}"
    )
    if options.merge:
        merged = options.out / "merged"
        trainer.model.merge_and_unload().save_pretrained(merged)
        tokenizer.save_pretrained(merged)
        print(f"Merged model in {merged}")
    return 0


def read_documents(path: Path) -> list[Passage]:
    """Documents of a JSONL file (`title`, `text`), or of plain text with blank lines between.

    Raises:
        ConfigurationError: no such file, a line that is no document, or too few documents.
    """
    if path.suffix == ".jsonl":
        passages = load_passages(path)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
        blocks = (block.strip() for block in text.split("\n\n"))
        passages = [Passage("", block) for block in dict.fromkeys(blocks) if block]
    if len(passages) < _MIN_DOCUMENTS:
        raise ConfigurationError(
            f"{path} has {len(passages)} documents; {_MIN_DOCUMENTS} are the least to learn from"
        )
    return passages


def _load(path: str) -> tuple[Any, Any]:
    import torch

    try:
        import peft  # noqa: F401  # only asked whether it is there
    except ImportError as error:
        raise ConfigurationError("adapt needs peft: pip install 'minipic[adapt]'") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from minipic_backend.adapt.span_attention import IMPLEMENTATION

    on_gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        attn_implementation=IMPLEMENTATION,
    )
    return model.to("cuda" if on_gpu else "cpu").eval(), AutoTokenizer.from_pretrained(path)


def _examples(
    options: argparse.Namespace, settings: Any, passages: list[Passage], tokenizer: Any
) -> tuple[Iterator[Any], list[Any]]:
    from minipic_backend.adapt.examples import make_example
    from minipic_backend.layout.markers import choose_markers
    from minipic_backend.layout.prompt_layout import Layout

    markers = choose_markers(tokenizer)
    config = SpanConfig(markers.ssep, markers.pdep, markers.pad, options.block_size)
    layout = Layout(tokenizer, config)
    span_options = SpanOptions(frame=settings.span_frame)
    chat = getattr(tokenizer, "chat_template", None) is not None
    train, held_out = split_documents(passages, 0.1, options.seed)
    kinds = _kinds(options.kinds)

    def supply(documents: list[Passage], asked: list[str], seed: int) -> Iterator[Any]:
        try:
            maker = TaskMaker(
                documents,
                kinds=asked,
                max_documents=options.documents,
                form=options.document_form.replace("\\n", "\n"),
                chat=chat,
                seed=seed,
            )
        except ValueError as error:
            raise ConfigurationError(f"{options.docs}: {error}") from error
        misses = 0
        while misses < 1000:
            example = make_example(
                maker.next(), layout, config, settings, span_options, tokenizer.eos_token_id,
                options.max_tokens,
            )  # fmt: skip
            misses = 0 if example else misses + 1
            if example:
                yield example
        raise ConfigurationError(f"No prompt is shorter than --max-tokens {options.max_tokens}")

    validation = supply(held_out, kinds, options.seed + 1)
    return supply(train, kinds, options.seed), list(
        itertools.islice(validation, options.validation)
    )


def _kinds(text: str) -> list[str]:
    if text in ("all", "none"):
        return list(KINDS) if text == "all" else []
    chosen = [kind.strip() for kind in text.split(",")]
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise ConfigurationError(
            f"No kind {shown(unknown[0])}; known: {', '.join(KINDS)}, all, none"
        )
    return chosen
