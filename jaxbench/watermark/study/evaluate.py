"""The evaluation: generate, attack, detect, judge quality, report; every finished stage is a file.

Stages' files are written atomically, so that a run killed at any moment resumes where it was. They are in the workdir:
material.json, generate/, attack/, detect/, quality/, spoof/, show/; results.json, results.csv and report.html come
last. No twin: it calls the parts of one backend.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxbench import config, outputs, sample, store
from jaxbench.generation import decoder
from jaxbench.watermark.attack import attacks, spoofing
from jaxbench.watermark.study import (
    detectability,
    evaluate_data,
    evaluate_models,
    evaluate_parts,
    evaluate_times,
    text_quality,
)
from jaxbench.watermark.study.evaluate_config import CLEAN, HUMAN, UNMARKED, Evaluate

FOLDERS = ("generate", "attack", "detect", "quality", "spoof", "show")
SETTINGS = "evaluate.json"
REWRITE_ROWS = 20  # texts per stage of rewriting: the most that a kill can lose
FORGED = 20  # forged texts per scheme


class Evaluation:
    """One evaluation in its folder; the model is loaded when a stage first needs it."""

    def __init__(
        self,
        settings: Evaluate,
        workdir: Path,
        *,
        choices: evaluate_parts.Choices | None = None,
        on_stage: Callable[[str, bool], None] | None = None,
    ):
        """Keep settings, folder and kernels (unset: xla's); on_stage(name, is_new) is called after each stage."""
        self.settings, self.workdir, self._on_stage = settings, Path(workdir), on_stage
        self.parts = evaluate_parts.Parts(settings, self.workdir, choices=choices)
        self.material: evaluate_data.Material

    # Stages

    def stage(self, name: str, compute: Callable[[], Any], texts: int = 0) -> Any:
        """Return a stage's result, from its file if finished; texts: how many it works on."""
        started = time.monotonic()
        result, is_kept = store.kept(self.workdir / f"{name}.json", compute)
        if not is_kept:
            evaluate_times.note(self.workdir, name, time.monotonic() - started, texts)
        if self._on_stage:
            self._on_stage(name, not is_kept)
        return result

    def parts_of(
        self, name: str, size: int, count: int, compute: Callable[[range], dict[str, list]]
    ) -> dict[str, list]:
        """Return the columns of rows 0..count-1, computed in stages of `size` rows."""
        columns: dict[str, list] = {}
        for start in range(0, count, size):
            rows = range(start, min(start + size, count))
            part = self.stage(f"{name}{start // size:03d}", functools.partial(compute, rows), len(rows))
            for key, values in part.items():
                columns.setdefault(key, []).extend(values)
        return columns

    def run(self) -> dict[str, Any]:
        """Run every stage and return all results."""
        s = self.settings
        self.material = evaluate_data.Material(**self.stage("material", lambda: self.read_material()._asdict()))
        texts = {arm: self._texts(arm) for arm in s.arms()}
        short = {arm: {CLEAN: self._short(texts[arm]["text"])} for arm in s.arms()}
        realised: dict[str, dict] = {name: {} for name in s.schemes}
        for name in s.schemes:
            for slug, attack in s.named_attacks().items():
                edits = self._attacked(f"attack/{name}/{slug}-", attack, short[name][CLEAN])
                short[name][slug] = edits.pop("texts")
                realised[name][slug] = edits
        arms: dict[str, dict[str, Any]] = {}
        for arm in [*s.schemes, UNMARKED]:
            arms[arm] = own = {}
            if arm != UNMARKED:
                detect = functools.partial(self._detect, arm, texts, short[arm])
                looked_at = s.generate.prompts * (2 + len(short[arm])) + len(self.material.human) * s.num_keys
                own["detect"] = self.stage(f"detect/{arm}", detect, looked_at)
                own["show"] = self.stage(f"show/{arm}", functools.partial(self._show, arm, texts[arm]["text"]))
            own["generation"] = self.stage(
                f"quality/{arm}/generation", functools.partial(self._generation, arm, texts[arm]), s.generate.prompts
            )
            own["quality"] = self._judged(arm, short[arm])
            if arm != UNMARKED and s.spoofing:
                own["spoof"] = self.stage(f"spoof/{arm}", functools.partial(self._spoof, arm, texts))
            lengths, limit = [len(ids) for ids in texts[arm]["ids"]], s.generate.new_tokens
            own["ending"] = text_quality.ending(lengths, limit=limit, has_ended=texts[arm]["ended"])
        human = {"quality": self._judged(HUMAN, {CLEAN: self._short(self.material.natural)})}
        num_prompts = len(set(map(tuple, self.material.prompts)))
        return {"arms": arms, "human": human, "realised": realised, "num_prompts": num_prompts}

    # What the stages compute

    def read_material(self) -> evaluate_data.Material:
        """Read prompts and human texts without writing anything.

        Raises:
          ValueError: as evaluate_data.load.
        """
        s = self.settings
        return evaluate_data.load(
            s.data,
            self.parts.tokenizer,
            prompts=s.generate.prompts,
            prompt_tokens=s.generate.prompt_tokens,
            natural_tokens=s.generate.new_tokens,
            human_texts=s.detect.human_texts,
        )

    def _texts(self, arm: str) -> dict[str, list]:
        """Return an arm's generated ids and texts, and whether each ended with an end token."""
        s, generator = self.settings.generate, functools.cache(self.parts.generator)
        compute = lambda rows: self._generate(*generator(arm), arm, rows)
        return self.parts_of(f"generate/{arm}/", s.batch_size, s.prompts, compute)

    def _generate(self, generator: sample.Generator, processor: Any, arm: str, rows: range) -> dict[str, list]:
        s, states = self.settings, None
        if processor is not None:
            keys = [self.parts.key(arm, row) for row in rows]
            states = (processor.state(keys, seed=s.seed, row_ids=list(rows)),)
        output = generator(
            [self.material.prompts[row] for row in rows],
            max_new_tokens=s.generate.new_tokens,
            seed=s.seed,
            row_ids=list(rows),
            processor_states=states,
        )
        ids = [tokens[:length].tolist() for tokens, length in zip(output.tokens, output.lengths)]
        ended = [bool(own) and own[-1] in self.parts.tokenizer.end_ids for own in ids]
        text = [self.parts.tokenizer.decode(own[:-1] if end else own) for own, end in zip(ids, ended)]
        return {"ids": ids, "text": text, "ended": ended}

    def _attacked(self, stage: str, attack: Any, texts: list[str]) -> dict[str, list]:
        """Return attacked texts and the realised edit rates of each."""
        tools = attacks.Tools(tokenizer=self.parts.tokenizer, human=self.material.human, rewrite=self.parts.rewriter)

        def compute(rows: range) -> dict[str, list]:
            own, seed = [texts[row] for row in rows], self.settings.seed
            changed, *rates = attacks.apply(attack, own, seed=seed, tools=tools, indices=rows)
            return dict(zip(attacks.Attacked._fields, (changed, *(rate.tolist() for rate in rates))))

        size = REWRITE_ROWS if attacks.rewrites(attack) else max(len(texts), 1)
        return self.parts_of(stage, size, len(texts), compute)

    def _detect(self, arm: str, texts: dict[str, dict], attacked: dict[str, list[str]]) -> dict[str, Any]:
        """Return p-values of marked and unmarked texts by length, whole attacked texts, and human texts per key."""
        bench, lengths = self.parts.bench(arm), list(self.settings.detect.lengths)
        scores: dict[str, Any] = {"lengths": lengths, "attacks": {}}
        cut = self.settings.attack_tokens
        for place, name in (("marked", arm), (UNMARKED, UNMARKED)):
            ids = bench.encode(texts[name]["text"])
            scores[place] = bench.at_lengths(ids, self.parts.row_keys(arm, len(ids)), lengths, cut=cut)
        for slug, changed in attacked.items():
            ids = bench.encode(changed)
            keys = self.parts.row_keys(arm, len(ids))
            scores["attacks"][slug] = bench.at_lengths(ids, keys, [], cut=max(map(len, ids), default=1))
        ids = bench.encode(self.material.human)
        scores["human"] = [bench.at_lengths(ids, key, lengths, cut=cut) for key in self.parts.keys[arm]]
        return scores

    def _show(self, arm: str, texts: list[str]) -> list[dict[str, Any]]:
        """Return single texts, marked and human, split into tokens with each token's evidence."""
        bench, shown = self.parts.bench(arm), []
        limit = self.settings.attack_tokens
        for i in range(min(self.settings.shown_texts, len(texts))):
            for kind, text in (("marked", texts[i]), (HUMAN, self.material.natural[i])):
                ids = bench.encode([text])[0][:limit]
                if not ids:
                    continue
                key = self.parts.key(arm, i)
                evidence, result = bench.evidence([ids], key), bench.score([ids], key)
                shade = self.settings.schemes[arm].shade(evidence.words[:1])[0]
                scored = evidence.scored[0]
                shown.append(
                    {
                        "kind": kind,
                        "text": i,
                        "p_value": float(result.p_value[0]),
                        "num_scored": int(result.num_scored[0]),
                        "tokens": pieces(self.parts.tokenizer, ids),
                        "shades": [round(float(shade[t]), 3) if scored[t] else None for t in range(len(ids))],
                    }
                )
        return shown

    def _generation(self, arm: str, texts: dict[str, list]) -> dict[str, list]:
        """Return quality after the prompt under the generating model itself."""
        s = self.settings
        scorer = self.parts.own_scorer
        rows = [[*prompt, *ids[: s.attack_tokens]] for prompt, ids in zip(self.material.prompts, texts["ids"])]
        has_logits = arm != UNMARKED and not s.schemes[arm].draws
        processor = self.parts.processor(arm) if has_logits else None
        scores = scorer(
            rows,
            prompt_lengths=[len(prompt) for prompt in self.material.prompts],
            processor=processor,
            states=lambda chosen: processor.state([self.parts.key(arm, row) for row in chosen]),
            temperature=s.generate.temperature,
        )
        return {name: getattr(scores, name).tolist() for name in ("nll", "entropy", "excess", "divergence")}

    def _judged(self, arm: str, texts: dict[str, list[str]]) -> dict[str, Any]:
        """Return quality under the second model setting, for each attack."""
        slugs = texts if self.settings.quality.attacked else (CLEAN,)
        compute = lambda slug: functools.partial(self._quality, texts[slug])
        return {slug: self.stage(f"quality/{arm}/{slug}", compute(slug), len(texts[slug])) for slug in slugs}

    def _quality(self, texts: list[str]) -> dict[str, list]:
        s = self.settings.quality
        ids = self.parts.tokenizer.encode_batch(texts, add_special=False)
        ids = [own[: 2 * self.settings.attack_tokens] for own in ids]  # copy-paste makes texts long
        prompts = self.material.prompts if s.context == "prompt" else [[] for _ in ids]
        scorer = self.parts.scorer(s.model, s.dtype)
        rows = [[*prompt, *own] for prompt, own in zip(prompts, ids)]
        scores = scorer(rows, prompt_lengths=[len(prompt) for prompt in prompts])
        variety = [text_quality.variety(text)._asdict() for text in texts]
        columns = {key: [one[key] for one in variety] for key in variety[0]}
        return {"nll": scores.nll.tolist(), "entropy": scores.entropy.tolist(), **columns}

    def _spoof(self, arm: str, texts: dict[str, dict]) -> dict[str, Any]:
        """Return guessed keys and forged texts, judged by the owner's detector."""
        bench, key = self.parts.bench(arm), self.parts.keys[arm][0]
        own = [row for row in range(self.settings.generate.prompts) if row % self.settings.num_keys == 0]
        marked = [ids for ids in bench.encode([texts[arm]["text"][row] for row in own]) if ids]
        guesses = spoofing.guess(lambda guessed: bench.score(marked, guessed).p_value) if marked else []
        width = max(1, self.settings.schemes[arm].context_length)
        plain = bench.encode(texts[UNMARKED]["text"])
        forged: dict[str, Any] = {"texts": 0, "learnt_from_tokens": sum(map(len, marked))}
        if any(len(ids) > width for ids in marked):
            learnt = spoofing.learn(marked, plain, width=width)
            size, seed = self.settings.attack_tokens, self.settings.seed
            made = [spoofing.forge(learnt, num_tokens=size, seed=seed, index=i) for i in range(FORGED)]
            p = bench.score(made, key).p_value
            accepted = detectability.rates(p, self.settings.detect.fprs)
            copied = [spoofing.longest_copy(text, marked) for text in made]
            forged |= {"texts": FORGED, "p_values": p.tolist(), "accepted": accepted, "longest_copied": copied}
        return {"guesses": [guess._asdict() for guess in guesses], "forged": forged}

    def _short(self, texts: list[str]) -> list[str]:
        return evaluate_data.first_tokens(self.parts.tokenizer, texts, self.settings.attack_tokens)


def run(
    settings: Evaluate,
    workdir: str | Path,
    *,
    resume: bool = True,
    data: str | None = None,
    options: decoder.Options = decoder.Options("xla"),
    say: Callable[[str], None] = lambda line: None,
    console: Any = None,
) -> dict[str, Any]:
    """Run an evaluation into a folder and write its report; return what results.json holds.

    Finished stages of the same configuration are kept unless resume is False; `data` replaces settings.data.
    `options`: kernels for decoding.

    Raises:
      ValueError: the folder holds stages of another configuration or of other kernels, the kernels are not available,
        or the data do not fit.
    """
    from jaxbench.watermark.study import evaluate_report

    if data is not None:
        settings = settings.model_copy(update={"data": data})
    workdir = Path(workdir)
    evaluate_data.fingerprint(settings.data)
    choices = evaluate_parts.choose(settings, options)
    if choices.generate.note:
        say(choices.generate.note)
    if not (resume and (workdir / "material.json").exists()):
        with tempfile.TemporaryDirectory() as place:  # a tiny model may be made here
            trial = Evaluation(settings, Path(place), choices=choices)
            trial.read_material()  # so that data or number types that do not fit leave nothing in the workdir
            if choices.generate.kernels == "native":
                trial.parts.generator(UNMARKED)
    prepare(settings, workdir, resume=resume, choices=choices)
    with evaluate_report.progress(num_stages(settings), console) as on_stage:
        evaluation = Evaluation(settings, workdir, choices=choices, on_stage=on_stage)
        results = evaluation.run()
    return evaluate_report.write(settings, evaluation.material, results, workdir, console=console)


def num_stages(s: Evaluate) -> int:
    """Count the stages of an evaluation."""
    rows = s.generate.prompts
    batches = -(-rows // s.generate.batch_size)
    parts = sum(-(-rows // REWRITE_ROWS) if attacks.rewrites(attack) else 1 for attack in s.attacks)
    judged = 1 + len(s.attacks) * s.quality.attacked
    of_a_scheme = batches + parts + 3 + judged + s.spoofing  # detect, show, generation quality
    return 1 + batches + 2 + 1 + len(s.schemes) * of_a_scheme


def prepare(
    settings: Evaluate, workdir: Path, *, resume: bool = True, choices: evaluate_parts.Choices | None = None
) -> None:
    """Prepare the folder for this configuration and these kernels (unset: xla's).

    Raises:
      ValueError: it holds stages of another configuration or of other kernels, or files with the names of stages that
        no evaluation made.
    """
    path = workdir / SETTINGS
    stages = [workdir / name for name in (*FOLDERS, "material.json")]
    strange = [str(one) for one in stages if one.exists() and not path.exists()]
    if strange:
        raise ValueError(f"evaluate: {strange[0]} is in the way, and {path} is not there; name another --workdir")
    models = {spec: evaluate_models.sha256(spec) for spec in evaluate_models.names(settings)}
    extra = {"text_sha256": evaluate_data.fingerprint(settings.data), "models": models}
    own = config.config_id(settings, exclude=("data",), extra=extra)
    choices = choices or evaluate_parts.choose(settings)
    own += choices.suffix(settings)
    extra["kernels"] = {name: choice.identity() for name, choice in choices._asdict().items()}
    if not resume:
        for name in FOLDERS:
            shutil.rmtree(workdir / name, ignore_errors=True)
        for name in (SETTINGS, "material.json", evaluate_times.TIMES):
            (workdir / name).unlink(missing_ok=True)
    if path.exists():
        held = outputs.read_json(path)
        there = held.get("config_id") if isinstance(held, dict) else None
        if there != own:
            raise ValueError(
                f"evaluate: {workdir} holds the stages of configuration {there}, this is {own}; name another "
                "--workdir, or throw them away with --noresume"
            )
    outputs.write_json(path, {"config_id": own, **extra, "settings": settings.model_dump(mode="json")})


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of several tokens that form one character, only the last adds text."""
    found, before = [], ""
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end])
        is_open = whole.endswith("\ufffd") and end < len(ids)
        found.append("" if is_open else whole[len(before) :])
        before = before if is_open else whole
    return found
