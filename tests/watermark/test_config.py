"""Schemes from names and mappings, their ranges, and what they need of a text."""

import pytest

from jaxbench.config import load
from jaxbench.watermark import config, generate, reference, serving
from jaxbench.watermark.study import power


def test_a_scheme_comes_from_its_name_a_mapping_or_itself():
    scheme = config.parse_scheme({"scheme": "kgw", "gamma": 0.5, "context": {"kind": "min", "width": 4}})
    assert scheme == config.Kgw(gamma=0.5, context=reference.ContextRule(kind="min", width=4))
    assert config.parse_scheme("kgw") == config.Kgw() and config.parse_scheme(scheme) is scheme
    assert {name: config.parse_scheme(name).scheme for name in config.SCHEMES} == {n: n for n in config.SCHEMES}


def test_a_list_with_a_wrong_entry_is_not_called_too_short():
    with pytest.raises(ValueError, match="payload=3, wanted below 1 for its payload_bits$"):
        load("configs/watermark/kgw.yaml", ("marks=[{name: a, scheme: kgw, payload: 3}]",), generate.GenerateConfig)
    with pytest.raises(ValueError, match="key 'marks' is .*at least 1 item"):
        load("configs/watermark/kgw.yaml", ("marks=[]",), generate.GenerateConfig)


def test_a_configuration_takes_a_scheme_by_its_name_alone():
    mark = "marks=[{name: a, key_file: x, scheme: gumbel}]"
    made = load("configs/watermark/kgw.yaml", (mark,), generate.GenerateConfig)
    assert made.marks[0].scheme == config.Gumbel()
    measured = load("configs/watermark/power.yaml", ("schemes={row: dip}", "bars=[]"), power.Power)
    assert measured.schemes == {"row": config.Dip()}
    assert serving.WatermarkKey(scheme="unigram").scheme == config.Unigram()
    with pytest.raises(ValueError, match="input tag 'gumble' found using 'scheme' .* 'kgw', 'unigram', 'gumbel'"):
        load("configs/watermark/kgw.yaml", (mark.replace("gumbel", "gumble"),), generate.GenerateConfig)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kgv", "'kgv' is unknown, the nearest is kgw"),
        ("SynthID", "'SynthID' is unknown, the nearest is synthid"),
        ("zzz", "wanted one of kgw, unigram"),
        ({"gamma": 0.5}, "names none"),
        (7, "names none"),
        ({"scheme": "kgw", "gama": 0.5}, "field 'gama' is unknown, the nearest is gamma"),
        ({"scheme": "kgw", "gamma": 1.0}, "gamma=1.0: input should be less than 1"),
        ({"scheme": "kgw", "gamma": 0.0}, "gamma=0.0"),
        (
            {"scheme": "kgw", "gamma": 2.0**-33},
            "gamma=1.1641532182693481e-10: input should be greater than or equal to",
        ),
        ({"scheme": "morphmark", "gamma": 1e-12}, "gamma=1e-12"),
        ({"scheme": "unigram", "delta": -1}, "delta=-1: input should be greater than or equal to 0"),
        ({"scheme": "synthid", "depth": 31}, "depth=31"),
        ({"scheme": "dip", "alpha": 0.6}, "alpha=0.6"),
        ({"scheme": "kgw", "context": {"width": 9}}, "context.width=9"),
        (
            {"scheme": "gumbel", "context": {"kind": "self", "width": 4}},
            "context.kind=self is for kgw and morphmark, wanted",
        ),
        ({"scheme": "kgw", "delta": 1e6}, "delta=1000000.0: input should be less than or equal to 1000"),
        ({"scheme": "unigram", "delta": 1e39}, "delta=1e\\+39"),
        ({"scheme": "kgw_transformers", "bias": 1e6}, "bias=1000000.0"),
        ({"scheme": "gumbel", "dual_key_alpha": 1e-9}, "dual_key_alpha=1e-09, wanted 0, 1, or a share of 0.0001"),
        ({"scheme": "gumbel", "prf": "vllm", "payload_bits": 3}, "prf=vllm knows .* payload_bits=3"),
    ],
)
def test_bad_schemes_are_named_with_the_cure(given, message):
    with pytest.raises(ValueError, match=message):
        config.parse_scheme(given)


@pytest.mark.parametrize(
    ("scheme", "length"),
    [
        ({"scheme": "kgw", "context": {"kind": "left", "width": 3}}, 3),
        ({"scheme": "kgw", "context": {"kind": "skip", "width": 3}}, 3),
        ({"scheme": "kgw", "context": {"kind": "min", "width": 3}}, 3),
        ({"scheme": "kgw", "context": {"kind": "self", "width": 3}}, 2),
        ({"scheme": "gumbel", "prf": "vllm"}, 0),
        ({"scheme": "unigram"}, 0),
        ({"scheme": "kgw_markllm", "prefix_length": 2}, 2),
        ({"scheme": "kgw_transformers", "seeding_scheme": "selfhash", "context_width": 4}, 3),
    ],
)
def test_context_lengths(scheme, length):
    assert config.parse_scheme(scheme).context_length == length


def test_payloads_and_drawing():
    assert config.num_payloads(config.Kgw(payload_bits=3)) == 8 and config.num_payloads(config.Unigram()) == 1
    assert {name for name in config.SCHEMES if config.SCHEMES[name].draws} == {"gumbel", "synthid", "dip"}
