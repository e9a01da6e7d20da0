"""What the stages of an evaluation share: models, keys, detectors; each made at its first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxbench import sample, transformer
from jaxbench.pretrained import tokenizer as tokenizers
from jaxbench.pretrained import weights
from jaxbench.watermark.attack import rewrite
from jaxbench.watermark.keys import Key
from jaxbench.watermark.study import evaluate_detect as detecting
from jaxbench.watermark.study import evaluate_models, quality
from jaxbench.watermark.study.evaluate_config import UNMARKED, Evaluate


class Parts:
    """The parts of one evaluation."""

    def __init__(self, settings: Evaluate, workdir: Path):
        """Load the tokenizer and derive the keys; models wait."""
        self.settings, self.workdir = settings, workdir
        self.tokenizer = tokenizers.load_tokenizer(evaluate_models.resolve(settings.model, workdir))
        rewriting = settings.rewriting
        self.rewriter = rewrite.Rewriter(
            evaluate_models.resolve(rewriting.model, workdir), dtype=rewriting.dtype, batch_size=rewriting.batch_size
        )
        base, numbers = Key.from_passphrase(settings.passphrase), range(settings.num_keys)
        self.keys = {name: [base.derive(f"{name}/{i}") for i in numbers] for name in settings.schemes}
        self._model: transformer.Transformer | None = None
        self._scorers: dict[tuple[str, str], quality.Scorer] = {}
        self._benches: dict[str, detecting.Bench] = {}

    def key(self, arm: str, row: int) -> Key:
        """Return the key of a row of an arm."""
        return self.keys[arm][row % self.settings.num_keys]

    def row_keys(self, arm: str, count: int) -> list[Key]:
        """Return the keys of the first rows of an arm."""
        return [self.key(arm, row) for row in range(count)]

    def processor(self, arm: str) -> Any:
        """Return a scheme's logits processor."""
        from jaxbench.watermark.logits_processor import Watermark

        return Watermark(self.settings.schemes[arm], vocab_size=self.vocab_size())

    def generator(self, arm: str) -> tuple[sample.Generator, Any]:
        """Return an arm's generator and its processor (None: unmarked)."""
        s = self.settings.generate
        processor = None if arm == UNMARKED else self.processor(arm)
        sampling = sample.SamplingParams(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)
        chain = () if processor is None else (processor,)
        made = sample.Generator(self.model(), eos_id=self.tokenizer.eos_id, sampling=sampling, processors=chain)
        return made, processor

    def bench(self, arm: str) -> detecting.Bench:
        """Return an arm's detector."""
        if arm not in self._benches:
            self._benches[arm] = detecting.Bench(
                self.settings.schemes[arm],
                tokenizer=self.tokenizer,
                vocab_size=self.vocab_size(),
                canonicalize=self.settings.detect.canonicalize,
            )
        return self._benches[arm]

    def vocab_size(self) -> int:
        """Return the width of the generating model's logits."""
        return self.model().embed.embedding.shape[0]

    def model(self) -> transformer.Transformer:
        """Return the generating model."""
        if self._model is None:
            self._model = self._build(self.settings.model, self.settings.generate.dtype)
        return self._model

    def scorer(self, model: str, dtype: str) -> quality.Scorer:
        """Return the scorer of a model; the generating model is not loaded twice."""
        place = (model, dtype)
        if place not in self._scorers:
            own = (self.settings.model, self.settings.generate.dtype)
            loaded = self.model() if place == own else self._build(model, dtype)
            self._scorers[place] = quality.Scorer(loaded, batch_size=self.settings.quality.batch_size)
        return self._scorers[place]

    def _build(self, spec: str, dtype: str) -> transformer.Transformer:
        checkpoint = weights.load_checkpoint(evaluate_models.resolve(spec, self.workdir))
        return transformer.build(checkpoint.config, checkpoint.params, dtype=dtype)
