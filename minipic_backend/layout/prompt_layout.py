"""From a prompt to token ids and segments.

    [BOS text primer … newlines][SSep doc … pads][SSep doc … pads][PDep late-doc question]

- Text before the first document is the prefix, with the primer at its end (not with frame "none"),
  filled up to a block boundary with line breaks. A document at the very start gets a prefix of BOS
  and primer, where there are such.
- With frame "universal" the prefix is the opening of the chat template (`Renderer.opening`; of a
  raw prompt the BOS) and the primer. The rest of the text before the first document is a dependent
  segment: a system prompt, say.
- Each document is a span, encoded on its own in canonical form (`canonical_document`), so that it
  has the same tokens wherever it stands. Even an empty one is a span.
- Text behind documents is a dependent segment. White space between documents, and what leads a
  text behind one, is dropped: a document ends in a blank line of its own. Text in front of a
  document ends in a blank line too, whatever white space it came with, and so does a line of the
  chat template's that the primer would go on with.
- A prompt that ends in a document gets the dependent segment [PDep newline].
- With settings.best_last the ranked documents of a run stand in the order of their ranks, behind
  unranked ones, the best one last; else as given.
- Late documents, the best-ranked of the last run of documents, go in front of the text behind that
  run, the best one last. If all are late, the prefix (and primer) and the dependent segment remain.
- Blocks of documents that are to be computed anew, in context, follow the run of documents that
  they belong to, as patches. With settings.split the first blocks are cut off instead, and each
  stands in front of its rest, as a dependent segment.
- A prompt without documents, or with settings.spans False, is an ordinary prompt, without markers,
  pads and primer: documents stand in it as canonical text, in the order given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any

from minipic_backend.config import SpanConfig, SpanOptions, TechniqueSettings
from minipic_backend.errors import ConfigurationError, ContextWindowError, PromptError, shown
from minipic_backend.layout.laid_out import LaidOutPrompt, LaidOutSegment, explain_rows, preview
from minipic_backend.layout.primer import primer_passages
from minipic_backend.layout.recompute import asked_for_blocks, first_blocks
from minipic_backend.layout.rendering import Renderer
from minipic_backend.layout.sections import (
    Document,
    Section,
    best_last,
    canonical_document,
    end_line,
    late_documents,
    read_sections,
)
from minipic_backend.layout.surrogates import check_documents
from minipic_backend.layout.tokenizer import Tokenizer
from minipic_backend.layout.tokens import TextEncoder
from minipic_backend.prompt import Prompt
from minipic_backend.prompt_cache.chunks import Slot, schema_chunks, with_scaffolds
from minipic_backend.prompt_cache.schema import SchemaPrompt
from minipic_backend.spans.patches import Patch, Place
from minipic_backend.spans.segments import parse_segments

__all__ = ["LaidOutPrompt", "LaidOutSegment", "Layout", "canonical_document", "explain_rows"]


@dataclass(slots=True)
class _Builder:
    """Token ids and descriptions, segment by segment."""

    block_size: int
    token_ids: list[int] = field(default_factory=list)
    segments: list[LaidOutSegment] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    prefix_end: int = 0
    seen_prefix: int | None = None

    def add_whole(self, ids: Sequence[int], num_pads: int, label: str, text: str) -> None:
        """Appends a segment of whole blocks, its pads included."""
        self.token_ids += ids
        self.segments.append(LaidOutSegment(label, preview(text), num_pads))

    def add(self, ids: Sequence[int], filler: int | None, label: str, text: str) -> None:
        """Appends a segment, filled up to a block boundary unless `filler` is None."""
        self.token_ids += ids
        num_pads = 0 if filler is None else -len(ids) % self.block_size
        if filler is not None:
            self.token_ids += [filler] * num_pads
        self.segments.append(LaidOutSegment(label, preview(text), num_pads))


class Layout:
    """Lays out prompts for one tokenizer and one engine configuration. Thread-safe.

    Args:
        tokenizer: a Hugging Face tokenizer.
        config: markers, pad, block size.
        max_cached_tokens: tokens of documents to remember.

    Attributes:
        encoder: encodes text with special tokens off.

    Raises:
        ConfigurationError: a tokenizer whose special tokens cannot be switched off.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: SpanConfig, *, max_cached_tokens: int = 1_000_000
    ) -> None:
        self._config = config
        markers = (config.ssep, config.pdep, config.pad)
        self.encoder = TextEncoder(tokenizer, markers, max_cached_tokens)
        self._renderer = Renderer(tokenizer, self.encoder)

    def lay_out(
        self, prompt: Prompt, settings: TechniqueSettings, *, options: SpanOptions | None = None
    ) -> LaidOutPrompt:
        """Token ids and segments of a prompt.

        Args:
            prompt: raw or a chat.
            settings: spans or not, primer, late documents; `options` must have its `span_frame`.
            options: frame, offsets and marker visibility; default: the engine's, with the frame of
                `settings`.

        Raises:
            PromptError: text or messages that cannot be rendered or encoded; an empty prompt; frame
                "universal" and nothing that could be one.
            ConfigurationError: settings and options name different frames.
        """
        if options is None:
            options = SpanOptions.from_dict({"frame": settings.span_frame}, self._config.options)
        if settings.spans and options.frame != settings.span_frame:
            raise ConfigurationError(
                f"The technique computes spans behind frame {shown(settings.span_frame)}, the "
                f"request's options say {shown(options.frame)}"
            )
        modules: SchemaPrompt | None = None
        if settings.schema:
            if not isinstance(prompt, SchemaPrompt):
                raise PromptError(
                    'Technique "prompt_cache" lays out modules of a schema: '
                    "give it Schema(...).prompt(...)"
                )
            modules, prompt = prompt, prompt.frame()
        head, sections = read_sections(self._renderer.render(prompt), self.encoder)
        if not (sections and settings.spans):
            return self._ordinary(self._bos(prompt), head, sections)

        builder = _Builder(self._config.block_size)
        prefix, text = self._split_head(prompt, head, settings)
        self._add_prefix(builder, self._bos(prompt), prefix, settings)
        if text:
            self._add_dependent(builder, text, "text", filler=self._config.pad)
        if modules is not None:
            self._add_modules(builder, modules)
            self._add_last(builder, [], sections[-1].text)
            # Positions are the schema's, which knows no pads.
            return self._laid_out(builder, replace(options, offsets="compact"), settings)
        order = best_last if settings.best_last else list
        for section in sections[:-1]:
            self._add_documents(builder, order(section.documents), section.text, settings)
            self._add_dependent(builder, section.text, "text", filler=self._config.pad)
        last = sections[-1]
        late = late_documents(last.documents, settings.late)
        early = [document for document in order(last.documents) if document not in late]
        self._add_documents(builder, early, last.text, settings)
        self._add_last(builder, late, last.text)

        return self._laid_out(builder, options, settings)

    def lay_out_span(self, text: str) -> tuple[int, ...]:
        """[SSep document pads], whole blocks: what this document is in every prompt."""
        ids = [self._config.ssep, *self.encoder.encode_document(canonical_document(text))]
        return (*ids, *[self._config.pad] * (-len(ids) % self._config.block_size))

    def lay_out_prefix(self, prompt: Prompt | None, settings: TechniqueSettings) -> tuple[int, ...]:
        """The frame of a prompt's spans, whole blocks; empty with frame "none".

        Args:
            prompt: holds at least one `Span`, whatever its text, where documents will stand; None
                for a prompt that starts with its documents, or, with frame "universal", for chats
                with a system prompt (for raw prompts where there is no chat template).
            settings: as for `lay_out`.

        Raises:
            PromptError: no span in the prompt.
        """
        if not settings.spans or settings.frame == "none":
            return ()
        builder = _Builder(self._config.block_size)
        if prompt is None:
            opening = ""
            if settings.frame == "universal":
                opening = self._renderer.opening("system") or self._renderer.opening("user")
            opening = end_line(opening, self.encoder)
            self._add_prefix(builder, () if opening else self.encoder.bos, opening, settings)
            return tuple(builder.token_ids)
        head, sections = read_sections(self._renderer.render(prompt), self.encoder)
        if not sections:
            raise PromptError(
                "This prompt has no documents: put a Span, Span('') will do, where they will stand"
            )
        prefix, _ = self._split_head(prompt, head, settings)
        self._add_prefix(builder, self._bos(prompt), prefix, settings)
        return tuple(builder.token_ids)

    def warm_prompts(
        self,
        documents: Iterable[str],
        *,
        prefix_token_ids: Sequence[int] = (),
        max_tokens: int,
        chunk: int | None = None,
    ) -> list[tuple[int, ...]]:
        """Prompts [prefix][SSep d1]…[SSep dn][PDep newline] that compute every document once.

        Args:
            documents: in any number; equal ones are computed once.
            prefix_token_ids: the frame, from `lay_out_prefix` or `LaidOutPrompt`.
            max_tokens: the most tokens that a prompt may have: one less than the context holds.
            chunk: documents come together up to so many tokens; a longer one comes alone. None: as
                many as fit.

        Raises:
            ContextWindowError: a document that does not fit even alone.
            PromptError: a document that is no text.
        """
        if isinstance(documents, str):
            raise PromptError("documents is a list of texts, not a single str")
        documents = list(documents)
        check_documents(documents)
        prefix = tuple(prefix_token_ids)
        tail = (self._config.pdep, self.encoder.newline)
        room = max_tokens - len(prefix) - len(tail)
        chunk = room if chunk is None else min(chunk, room)
        prompts: list[tuple[int, ...]] = []
        pending: list[int] = []
        for span in dict.fromkeys(self.lay_out_span(document) for document in documents):
            if len(span) > room:
                raise ContextWindowError(len(prefix) + len(span) + len(tail), max_tokens + 1)
            if pending and len(pending) + len(span) > chunk:
                prompts.append((*prefix, *pending, *tail))
                pending = []
            pending += span
        if pending:
            prompts.append((*prefix, *pending, *tail))
        return prompts

    def _laid_out(
        self, builder: _Builder, options: SpanOptions, settings: TechniqueSettings
    ) -> LaidOutPrompt:
        options = replace(
            options,
            patches=tuple(builder.patches),
            places=tuple(builder.places),
            seen_prefix=builder.seen_prefix,
        )
        table = parse_segments(builder.token_ids, self._config, options)
        if table is None or len(table.segments) != len(builder.segments):
            raise AssertionError("the layout and the segment table disagree")
        notes: tuple[str, ...] = ()
        if settings.primer and settings.frame == "none":
            notes = ("The primer is left out: with frame 'none' no span would see it.",)
        return LaidOutPrompt(tuple(builder.token_ids), table, tuple(builder.segments), notes)

    def _add_modules(self, builder: _Builder, prompt: SchemaPrompt) -> None:
        """Imported modules at their reserved positions, then their arguments, as patches."""
        encoder, filler = self.encoder, self.encoder.newline
        chosen = [
            chunk
            for chunk in schema_chunks(prompt.schema, encoder.encode, filler)
            if not chunk.path or chunk.path in prompt.arguments
        ]
        base = len(builder.token_ids)
        fills = []
        position = base
        for chunk in with_scaffolds(chosen, prompt.schema.scaffolds, filler):
            start = len(builder.token_ids)
            if start:
                builder.places.append(Place(start, base + chunk.offset))
            else:  # nothing in front: the first module of this prompt stands at 0
                base = -chunk.offset
            ids = [self._config.ssep, *chunk.token_ids]
            label = f"module {chunk.path}" if chunk.path else "schema"
            builder.add(ids, self._config.pad, label, encoder.decode(chunk.token_ids))
            fills += [(slot, start) for slot in chunk.slots]
            position = base + chunk.end
        for slot, start in fills:
            value = prompt.arguments[slot.path].get(slot.parameter.name)
            if value is not None:
                self._add_argument(builder, slot, start, value)
        if builder.token_ids:
            builder.places.append(Place(len(builder.token_ids), position))

    def _add_argument(self, builder: _Builder, slot: Slot, start: int, value: str) -> None:
        ids = self.encoder.encode(value)
        if not 0 < len(ids) <= slot.parameter.length:
            raise PromptError(
                f"Argument {shown(slot.parameter.name)} of module {shown(slot.path)} has "
                f"{len(ids)} tokens; at least 1 and at most {slot.parameter.length} are reserved "
                "for it"
            )
        first, end = start + 1 + slot.start, start + 1 + slot.end
        builder.patches.append(Patch(len(builder.token_ids), first, end))
        builder.add(ids, self._config.pad, f"{slot.path}: {slot.parameter.name}", value)

    def _ordinary(
        self, bos: Sequence[int], head: str, sections: Sequence[Section]
    ) -> LaidOutPrompt:
        documents = [document for section in sections for document in section.documents]
        text = head + "".join(_joined(section.documents) + section.text for section in sections)
        ids = (*bos, *self.encoder.encode(text, first=True))
        if not ids:
            raise PromptError("The prompt is empty: it has not a single token")
        label = "ordinary prompt" + (f" (inline: {_labels(documents)})" if documents else "")
        segment = LaidOutSegment(label, preview(self.encoder.unmark(text)))
        return LaidOutPrompt(ids, None, (segment,))

    def _bos(self, prompt: Prompt) -> tuple[int, ...]:
        """What stands in front of a prompt's text: a chat template writes its own."""
        return () if prompt.is_chat else self.encoder.bos

    def _split_head(
        self, prompt: Prompt, head: str, settings: TechniqueSettings
    ) -> tuple[str, str]:
        """Text of the prefix, and what stands between it and the first document."""
        if settings.frame != "universal":
            return head, ""
        opening = ""
        if prompt.is_chat:
            opening = self._renderer.opening(prompt.messages[0].role, prompt.template_kwargs)
        start = opening.rstrip(" \t")
        if not head.startswith(start):  # tools, say, which stand in front of the first message
            common = start[: _num_shared(start, head)]
            start = opening = self.encoder.through_last_special(common)
        return end_line(opening, self.encoder), head[len(start) :].lstrip()

    def _add_prefix(
        self, builder: _Builder, bos: Sequence[int], head: str, settings: TechniqueSettings
    ) -> None:
        passages = primer_passages(settings.primer) if settings.frame != "none" else ()
        text = head + "".join(map(canonical_document, passages))
        ids = [*bos, *self.encoder.encode(text, first=True)]
        if not ids:
            if settings.frame == "universal":
                raise PromptError(
                    "Frame 'universal' has nothing to put in front of the documents: this prompt "
                    "opens with the caller's own text. Give a primer, or choose frame 'none'"
                )
            return
        plural = "s" if len(passages) > 1 else ""
        label = "frame" if settings.frame == "universal" else "prefix"
        label += f" (+{len(passages)} primer{plural})" if passages else ""
        builder.add(ids, self.encoder.newline, label, self.encoder.unmark(text))
        builder.prefix_end = len(builder.token_ids)
        if passages and not settings.see_primer:
            own = [*bos, *self.encoder.encode(head, first=True)]
            # Where all is primer, its first token stays: much attention goes to a prompt's first.
            seen = max(_num_shared(own, ids), 1)
            builder.seen_prefix = seen if seen < builder.prefix_end else None

    def _add_documents(
        self,
        builder: _Builder,
        documents: Sequence[Document],
        question: str,
        settings: TechniqueSettings,
    ) -> None:
        """Documents of one section, and what is computed anew of them."""
        if settings.split:
            for document in documents:
                self._add_split(builder, document, settings.blocks)
            return
        starts = []
        for document in documents:
            starts.append(len(builder.token_ids))
            ids = [self._config.ssep, *self.encoder.encode_document(document.text)]
            builder.add(ids, self._config.pad, document.label, document.text)
        if settings.blocks or settings.budget:
            self._add_patches(builder, documents, starts, question, settings)

    def _add_patches(
        self,
        builder: _Builder,
        documents: Sequence[Document],
        starts: Sequence[int],
        question: str,
        settings: TechniqueSettings,
    ) -> None:
        size, pad = self._config.block_size, self._config.pad
        bounds = [*starts, len(builder.token_ids)]
        if settings.budget:
            texts = [
                [
                    self._decode(builder.token_ids[block : block + size])
                    for block in range(start, end, size)
                ]
                for start, end in pairwise(bounds)
            ]
            chosen = asked_for_blocks(texts, self.encoder.until_special(question), settings.budget)
        else:
            chosen = [
                first_blocks((end - start) // size, settings.blocks)
                for start, end in pairwise(bounds)
            ]
        for document, start, ranges in zip(documents, starts, chosen, strict=True):
            is_first = settings.frame != "none" and start == builder.prefix_end
            if is_first and builder.seen_prefix is None:
                continue  # right behind its frame, a document is in context already
            for first, last in ranges:
                lo, hi = start + first * size, start + last * size
                ids = builder.token_ids[lo:hi]
                builder.patches.append(Patch(len(builder.token_ids), lo, hi))
                shown = self._decode(ids) if first else document.text
                builder.add_whole(ids, ids.count(pad), f"{document.label} again", shown)

    def _add_split(self, builder: _Builder, document: Document, num_blocks: int) -> None:
        ids = self.encoder.encode_document(document.text)
        cut = max(num_blocks * self._config.block_size - 1, 0)
        if cut:
            head = [self._config.pdep, *ids[:cut]]
            builder.add(head, self._config.pad, f"{document.label} head", document.text)
        if rest := ids[cut:]:
            text = self._decode(rest) if cut else document.text
            builder.add([self._config.ssep, *rest], self._config.pad, document.label, text)

    def _decode(self, ids: Sequence[int]) -> str:
        """Text of a block, without marker and pads."""
        reserved = (self._config.ssep, self._config.pad)
        return self.encoder.decode(tuple(token for token in ids if token not in reserved))

    def _add_last(self, builder: _Builder, late: Sequence[Document], text: str) -> None:
        label = "question" if text else "end"
        if late:
            label += f" (late: {_labels(late)})"
        marked = _joined(late) + text or "\n"
        self._add_dependent(builder, marked, label, filler=None, preview=text)

    def _add_dependent(
        self, builder: _Builder, text: str, label: str, *, filler: int | None, preview: str = ""
    ) -> None:
        ids = [self._config.pdep, *self.encoder.encode(text)]
        builder.add(ids, filler, label, self.encoder.unmark(preview or text))


def _joined(documents: Iterable[Document]) -> str:
    return "".join(document.text for document in documents)


def _labels(documents: Iterable[Document]) -> str:
    return ", ".join(document.label for document in documents)


def _num_shared(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Length of the longest common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
