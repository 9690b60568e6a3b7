"""docs/start/hospitals.md, done: check, simulate, federate, judge, deploy, go on. Only training is little, and the port another."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from contracts.test_federation_page import free_port, shell
from fedloom.testing import tiny_file

PAGE = Path(__file__).parents[2] / "docs" / "start" / "hospitals.md"
SITES = ("north", "east", "south", "west")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.network
@pytest.mark.timeout(500)
def test_the_hospitals_go_all_the_way(tmp_path: Path) -> None:
    port = free_port()
    tiny_file(tmp_path)  # in place of the preset
    for block in (*blocks("toml"), *blocks("python")):
        named = re.match(r"# (\w+\.(toml|py))\n", block)
        assert named
        (tmp_path / named[1]).write_text(block.replace('"own-images"', '"tiny.toml"').replace(":9092", f":{port}"))
    images, check, simulate, federate, judge, deploy, go_on = (block.replace("own-images", "tiny.toml") for block in blocks("bash"))
    shell(images, tmp_path)
    said = shell(check, tmp_path)
    assert "Nothing would stop a run." in said and "takes about" in said
    shell(f"{simulate.splitlines()[0]} clients=4 participants=4\n{simulate.splitlines()[1]}", tmp_path)
    assert sorted(row["name"] for row in json.loads((tmp_path / "runs/simulated/result.json").read_text())["clients"]) == sorted(SITES)
    assert "4 of 4 sites have their personal model" in shell(federate, tmp_path, 300)
    said = shell(judge, tmp_path)
    assert "malignant" in said and "sensitivity" in said
    rows = list(csv.DictReader((tmp_path / "judged.csv").read_text().splitlines()))
    assert len(rows) == 40 and {row["truth"] for row in rows} == {"benign", "malignant"}
    assert "The largest difference is 0.00" in shell(deploy, tmp_path)
    said = shell(go_on, tmp_path, 300)
    assert "4 of 4 sites have their personal model" in said and "sensitivity" in said
    for site in SITES:
        first, second = (
            json.loads((tmp_path / f"at-{site}" / name / site / "result.json").read_text()) for name in ("lesions", "lesions-2")
        )
        assert second["clients"][0]["train_examples"] > first["clients"][0]["train_examples"]
    assert "newcomers.safetensors" in json.loads((tmp_path / "at-server-2/result.json").read_text())["environment"]["weights"]
