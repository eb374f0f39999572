"""Environment variables of ours that name no setting: refused by name, with the likely right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_facts import LAPTOP

from splitserve.config import SECTIONS, check_environment, unknown_variables
from splitserve.errors import ConfigError
from splitserve.launch.deployment import parse
from splitserve.launch.doctor import examine

PAIR = {"deployment": {"model": "m"}, "prefill": {}, "decode": {}}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_is_looked_at(section: str) -> None:
    name = f"SPLITSERVE_{section}_NO_SUCH_THING".upper()
    with pytest.raises(ConfigError, match=name):
        check_environment({name: "1"})


def test_a_deployment_is_refused_with_the_likely_right_name() -> None:
    with pytest.raises(ConfigError, match="SPLITSERVE_ENGINE_MAX_SEQ is no setting") as e:
        parse(PAIR, "file x.toml", environ={"SPLITSERVE_ENGINE_MAX_SEQ": "8"})
    assert e.value.fix == "did you mean SPLITSERVE_ENGINE_MAX_SEQS?"


def test_right_names_and_other_sections_are_let_be() -> None:
    right = {
        "SPLITSERVE_DECODE_REPLICAS": "2",
        "SPLITSERVE_ENGINE_PYTHON": "python3",
        "SPLITSERVE_DEBUG": "1",
    }
    assert unknown_variables({**right, "SPLITSERVE_TEST_SGLANG": "1", "UCX_TLS": "tcp"}) == []


def test_the_doctor_warns_of_it() -> None:
    facts = replace(LAPTOP, environment={"SPLITSERVE_ROUTER_PROT": "8001"})
    finding = next(f for f in examine(facts) if f.subject == "environment")
    assert finding.level == "warning"
    assert "SPLITSERVE_ROUTER_PORT" in finding.text
