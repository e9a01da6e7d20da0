"""Score regression, metrics, stored scores: published figures, brute force, what other responses make of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbench.hallucination import metrics, score_regression, stored_scores
from tests.structure import ROOT

DATA = ROOT.parent / "shared" / "data" / "ragtruth"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="RAGTruth's stored scores are not beside the project")


def brute_auc(labels, scores):
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    return sum(pairs) / len(pairs)


PUBLISHED = {  # file -> AUC and PCC where columns were chosen on the same responses
    "scores_redeep_llama2_7b": (0.747254, 0.420721),
    "scores_document_baseline": (0.688547, 0.323143),
}


@needs_data
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_come_out_and_do_not_hold_on_other_responses(name):
    units = stored_scores.load(DATA / f"{name}.jsonl.gz")
    rows = stored_scores.table(units, score_regression.Point(), folds=5, repeats=2)
    assert [round(each, 6) for each in rows[0][1:3]] == list(PUBLISHED[name])
    assert rows[2][1] < rows[0][1] and rows[3][1] < rows[1][1]


values = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=30)


@given(values)
def test_auc_is_the_share_of_pairs_in_order(rows):
    labels, scores = np.array([a for a, _ in rows]), np.array([float(b) for _, b in rows])
    if labels.all() or not labels.any():
        assert np.isnan(metrics.auc(labels, scores))
        return
    assert metrics.auc(labels, scores) == pytest.approx(brute_auc(labels, scores))
    cells = np.zeros(len(labels), int)
    assert metrics.stratified_auc(labels, scores, cells) == pytest.approx(brute_auc(labels, scores))


def test_labels_may_be_ones_and_zeros_and_nothing_else():
    labels, scores = np.array([1, 0, 1, 1, 0]), np.array([0.9, 0.8, 0.7, 0.6, 0.1])
    cells = np.array(["a", "a", "b", "b", "b"])
    assert metrics.auc(labels, scores) == metrics.auc(labels == 1, scores) == pytest.approx(4 / 6)
    assert metrics.stratified_auc(labels, scores, cells) == 1.0 == metrics.macro_auc(labels, scores, cells)
    for found in (metrics.auc, lambda *given: metrics.stratified_auc(*given, cells)):
        with pytest.raises(ValueError, match="labels hold 2, wanted True and False, or 1 and 0"):
            found(np.array([1, 0, 2, 1, 0]), scores)


def test_average_precision_and_threshold_are_those_of_scikit_learn():
    from sklearn import metrics as theirs

    random = np.random.default_rng(0)
    labels, scores = random.random(300) < 0.3, random.integers(0, 40, 300).astype(float)
    scores += labels * random.integers(0, 20, 300)
    assert metrics.average_precision(labels, scores) == pytest.approx(theirs.average_precision_score(labels, scores))
    assert metrics.auc(labels, scores) == pytest.approx(theirs.roc_auc_score(labels, scores))
    best = metrics.f1(labels, scores >= metrics.best_threshold(labels, scores))
    found = [theirs.f1_score(labels, scores >= threshold) for threshold in np.unique(scores)]
    assert best[0] == pytest.approx(max(found))
    assert metrics.correlation(labels, scores) == pytest.approx(np.corrcoef(labels, scores)[0, 1])


def test_a_threshold_between_neighbouring_numbers_flags_the_upper_one_alone():
    low, high = 0.5, np.nextafter(0.5, 1.0)
    labels, scores = np.repeat([True, False], 5), np.repeat([high, low], 5)
    assert metrics.best_threshold(labels, scores) == high and metrics.best_threshold(~labels, scores) == low


@pytest.mark.parametrize("score", [0.5, 0.3, 0.1])
def test_scores_that_are_the_same_throughout_have_no_correlation_and_no_warning(score):
    labels = np.arange(21) % 3 == 0
    assert np.isnan(metrics.correlation(labels, np.full(21, score)))
    assert metrics.correlation(labels, labels * score) == pytest.approx(1.0)


def test_knowing_the_cell_alone_is_worth_nothing_within_cells():
    cells = np.repeat(["easy", "hard"], 50)
    labels = np.concatenate([np.arange(50) < 5, np.arange(50) < 40])
    prior = np.where(cells == "hard", 0.8, 0.1)
    assert metrics.auc(labels, prior) > 0.8
    assert metrics.stratified_auc(labels, prior, cells) == metrics.macro_auc(labels, prior, cells) == 0.5


def test_intervals_resample_clusters_and_pair_differences():
    random = np.random.default_rng(1)
    clusters = np.repeat(np.arange(40), 6)
    labels = random.random(240) < 0.4
    scores = labels + random.standard_normal(240)
    copies = [lambda rows: metrics.auc(labels[rows], scores[rows])] * 2
    both = metrics.bootstrap([*copies, lambda rows: copies[0](rows) - copies[1](rows)], clusters, draws=200)
    assert both[0] == both[1] and both[2] == (0.0, 0.0, 0.0)
    assert both[0].low < both[0].value < both[0].high


def random_units(num=240, seed=0):
    random = np.random.default_rng(seed)
    response = np.sort(random.integers(0, 90, num))
    response = np.unique(response, return_inverse=True)[1]
    label = random.random(num) < 0.4
    external = random.standard_normal((num, 9)) - 2.0 * label[:, None] * np.linspace(0, 1, 9)
    parametric = random.standard_normal((num, 8)) + 2.0 * label[:, None] * np.linspace(1, 0, 8)
    return score_regression.Units(external, parametric, label, response)


def test_the_search_finds_what_trying_every_point_finds():
    units = random_units()
    grid = {"top_n": (1, 3), "top_k": (2, 5), "alpha": (0.4, 1.0), "m": (0.5, 1.0)}
    labels, tried = score_regression.response_labels(units), {}
    for point in score_regression.itertools.product(*grid.values()):
        fitted = score_regression.fit(units, score_regression.Point(*point))
        tried[point] = brute_auc(labels, score_regression.response_scores(fitted, units))
    best, found = score_regression.search(units, grid)
    assert found == pytest.approx(max(tried.values())) == pytest.approx(tried[tuple(best)])
    heads, layers = score_regression.ranking(units)
    assert {heads[0], heads[1]} <= {6, 7, 8} and layers[-1] >= 5  # those that know least are last


def test_the_grid_is_the_documents():
    assert np.prod([len(each) for each in score_regression.GRID.values()]) == 1960


def test_nested_scores_of_noise_are_noise_where_the_same_responses_look_good():
    units = random_units(seed=3)
    random = np.random.default_rng(5)
    noise = units._replace(external=random.standard_normal((240, 60)), parametric=random.standard_normal((240, 60)))
    labels = score_regression.response_labels(noise)
    _, flattered = score_regression.search(noise)
    nested = [metrics.auc(labels, stored_scores.nested(noise, score_regression.GRID, folds=4, seed=s)) for s in (0, 1)]
    assert flattered > 0.65 and max(nested) < 0.62


def shared_noise(seed, *, num_sources=60, answers=6):
    """Return rows whose scores and labels are their sources', and have nothing to do with each other."""
    random = np.random.default_rng(seed)
    labelled = random.permutation(num_sources) < num_sources // 2
    source = np.repeat(np.arange(num_sources), answers)
    label = np.where(random.random(len(source)) < 0.9, labelled[source], ~labelled[source])
    scores = [
        random.normal(size=(num_sources, num))[source] + 0.5 * random.normal(size=(len(source), num))
        for num in (120, 20)
    ]
    return [
        {"response": i, "source_id": f"s{source[i]}", "chunk_label": int(label[i]),
         "external": [[each] for each in scores[0][i].tolist()], "parametric": scores[1][i].tolist()}
        for i in range(len(source))
    ]  # fmt: skip


def written(path, rows):
    """Return the path of a file of rows, which begins with a byte order mark."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8-sig")
    return path


def test_noise_that_answers_to_one_source_share_is_noise_on_other_sources(tmp_path):
    grid, found = stored_scores._only(score_regression.Point()), []
    for seed in range(100, 106):
        units = stored_scores.load(written(tmp_path / "scores.jsonl", shared_noise(seed)))
        labels = score_regression.response_labels(units)
        alone = units._replace(source=None)  # what other answers to its source taught counts for it
        found.append([metrics.auc(labels, stored_scores.nested(each, grid, folds=5)) for each in (units, alone)])
    mean = np.mean(found, axis=0)
    assert mean[0] < 0.57 and mean[1] > 0.6, mean


def test_sources_are_dealt_whole_and_responses_without_one_are_their_own(tmp_path, monkeypatch):
    rows = shared_noise(0, num_sources=20, answers=3)
    seen, part = [], stored_scores._part
    monkeypatch.setattr(stored_scores, "_part", lambda units, at: seen.append((units, at)) or part(units, at))
    units = stored_scores.load(written(tmp_path / "a.jsonl", rows))
    table = stored_scores.table(units, score_regression.Point(3, 2), folds=4, repeats=1)
    assert [row[3] for row in table[2:]] == ["other sources, 4 folds, 1 shuffles"] * 2
    for (_, train), (judged, test) in zip(seen[::2], seen[1::2], strict=True):
        assert not set(judged.source[train]) & set(judged.source[test])
    plain = [{name: value for name, value in row.items() if name != "source_id"} for row in rows]
    assert stored_scores.load(written(tmp_path / "b.jsonl", plain)).source is None
    own = stored_scores.load(written(tmp_path / "c.jsonl", plain[:3] + rows[3:]))
    assert own.source.tolist() == [0, 1, 2, *np.repeat(np.arange(3, 22), 3)]


def test_responses_that_are_their_own_sources_are_dealt_as_without_sources():
    units = random_units()
    grid = {"top_n": (1, 3), "top_k": (2, 5), "alpha": (0.4, 1.0), "m": (0.5, 1.0)}
    plain, own = (
        stored_scores.nested(each, grid, folds=4, seed=1) for each in (units, units._replace(source=units.response))
    )
    np.testing.assert_array_equal(plain, own)


def test_too_few_sources_of_a_class_are_counted_as_sources(tmp_path):
    rows = [row | {"source_id": row["response"] // 15} for row in shared_noise(0, num_sources=20, answers=3)]
    units = stored_scores.load(written(tmp_path / "a.jsonl", rows))
    with pytest.raises(ValueError, match="--folds=4: of 4 sources 4 have a labelled response and 4 another"):
        stored_scores.table(units, score_regression.Point(3, 2), folds=4, repeats=1)


ROW = '{"response": 0, "chunk_label": 0, "external": {"a": 1.0}, "parametric": {"b": 2.0}}'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "holds no row"),
        ("[1]", "line 1: '\\[1\\]' is no object"),
        ("{", "line 1: no JSON"),
        (ROW.replace('"chunk_label": 0', '"chunk_label": 2'), "chunk_label is 2, wanted 0 or 1"),
        (ROW.replace("1.0", "NaN"), "external a is nan, wanted a finite number"),
        (ROW + "\n" + ROW.replace('"a"', '"c"'), "line 2: external has other columns"),
        (ROW.replace("{", '{"source_id": 1.5, ', 1), "line 1: source_id is '1.5', wanted a text or a whole number"),
        (
            ROW + "\n\n" + ROW.replace("{", '{"source_id": "s", ', 1),
            "line 3: response 0 has source_id 's', and None in a line before",
        ),
        (ROW, "wanted both classes"),
    ],
)
def test_bad_scores_are_refused_by_line(tmp_path, text, match):
    path = tmp_path / "scores.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        stored_scores.load(Path(path))


def _flushed(values):
    """XLA:CPU takes what is below the normal numbers for 0."""
    values = np.asarray(values)
    return np.where(values < np.finfo(np.float32).tiny, 0, values)


def test_the_kth_largest_of_values_with_ties_and_zeros_is_that_of_a_sort():
    from jaxbench.hallucination import token_scores

    random = np.random.default_rng(0)
    values = np.round(random.random((2, 3, 5, 70)), 2).astype(np.float32) * (random.random((2, 3, 5, 70)) < 0.7)
    k = np.array([1, 44], np.int32)
    wanted = np.stack([np.sort(each, axis=-1)[..., -count] for each, count in zip(values, k, strict=True)])
    assert (wanted == 0).any() and (wanted > 0).any()
    np.testing.assert_array_equal(_flushed(token_scores.kth_largest(values, k)), wanted)


@pytest.mark.parametrize("width", [64, 100])
def test_native_external_scores_are_those_of_xla(monkeypatch, width):
    import jax.numpy as jnp

    from jaxbench.hallucination import token_scores
    from jaxbench.native import library

    if not library.is_available():
        pytest.skip("native kernels cannot be had on this machine (no C compiler)")
    random = np.random.default_rng(0)
    weights = np.round(random.random((2, 3, 40, 70)), 2).astype(np.float32) * (random.random((2, 3, 40, 70)) < 0.7)
    weights[0, 0, :3] = 0.0
    given = [jnp.asarray(random.normal(0.5, 1, shape).astype(np.float32)) for shape in ((2, 70, width), (2, 40, width))]
    for dtype in ("float32", "bfloat16"):
        states, k = given[0].astype(dtype), jnp.asarray([7, 44], jnp.int32)
        with monkeypatch.context() as off:
            off.setattr(library, "is_available", lambda: False)
            wanted = token_scores._external(jnp.asarray(weights), states, given[1], k)
        found = token_scores._external(jnp.asarray(weights), states, given[1], k)
        np.testing.assert_allclose(found, wanted, atol=2e-6)
        assert (np.asarray(found)[0, 0, :3] == 0).all() and np.abs(np.asarray(found)[1]).min() > 0
