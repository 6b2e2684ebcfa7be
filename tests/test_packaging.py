"""What lies around the code: example configurations, extras, and the files that the package must carry."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from pydantic.fields import FieldInfo

from jaxpar.config import Config, dump_toml, load_config, parse_config
from jaxpar.config.fields import field_annotation, unwrap, variants
from jaxpar.plan import make_plan

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NUM_DEVICES = {
    "gpt2_small": 8,
    "llama3_70b_pipeline": 128,
    "llama3_8b_fsdp": 64,
    "long_context": 8,
    "moe": 8,
    "pipeline": 8,
    "quickstart": 8,
    "qwen3_0.6b": 8,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_short_loads_and_prints_itself(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    config = load_config(path)
    assert parse_config(tomllib.loads(dump_toml(config))) == config


def test_the_plan_of_every_example_is_legal_on_its_devices() -> None:
    program = f"""
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", {max(NUM_DEVICES.values())})
from jaxpar.config import load_config
from jaxpar.plan import make_plan
for name, num_devices in {NUM_DEVICES}.items():
    config = load_config(f"configs/{{name}}.toml")
    plan = make_plan(config, jax.devices()[:num_devices], config.model.vocab_size or 4096)
    print(name, plan.mesh.size, sum(parameter.local_bytes for parameter in plan.parameters) < 2**34)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {size} True" for name, size in NUM_DEVICES.items()]
    assert {path.stem for path in CONFIGS} == NUM_DEVICES.keys()


def test_extras_that_messages_and_documents_name_exist() -> None:
    texts = [*(ROOT / "jaxpar").rglob("*.py"), *ROOT.glob("*.md"), *CONFIGS]
    named = {
        extra
        for path in texts
        for extras in re.findall(r"(?:jaxpar|\.)\[([\w,]+)\]\"|extras? `(\w+)`", path.read_text(encoding="utf-8"))
        for extra in "".join(extras).split(",")
    }
    assert {"datasets", "trackers"} <= named <= PROJECT["optional-dependencies"].keys()


def test_files_that_the_metadata_names_exist() -> None:
    assert (ROOT / PROJECT["readme"]).is_file()
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert licence.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"]


def test_every_toml_of_the_readme_is_a_run() -> None:
    """All but the user's own model, which has a test of its own, make a plan on 8 devices."""
    blocks = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    shown = [tomllib.loads(block) for block in blocks if not block.startswith("# my_model.toml")]
    assert len(shown) >= 7
    for table in shown:
        precision = table.setdefault("precision", {})
        precision["emulate_float8"] = precision.get("products") == "float8"
        config = parse_config({"model": {"name": "transformer", "vocab_size": 384}} | table)
        make_plan(config, jax.devices(), getattr(config.model, "vocab_size", 0) or 384)


def test_keys_that_documents_name_exist() -> None:
    sections = {name: _classes(field) for name, field in Config.model_fields.items() if name != "model"}
    named = {
        (section, key)
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
        for section, key in re.findall(r"(?<![\w./])([a-z]+)\.([a-z]\w*)", (ROOT / name).read_text(encoding="utf-8"))
        if section in sections and key not in ("py", "toml", "md", "run")
    }
    assert ("parallel", "zero_stage") in named
    unknown = [
        f"{section}.{key}"
        for section, key in sorted(named)
        if not any(key in fields.model_fields for fields in sections[section])
    ]
    # The README shows what happens to a key that is misspelt.
    assert unknown == ["parallel.tensr"]


def _classes(field: FieldInfo) -> list[type]:
    annotation, _ = unwrap(field_annotation(field))
    return list(variants(annotation).values()) or [annotation]


def test_links_of_the_documents_lead_somewhere() -> None:
    links = {
        f"{path.name}: {target}": (ROOT / target).exists()
        for path in ROOT.glob("*.md")
        for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
        if "://" not in target
    }
    assert links
    assert [link for link, exists in links.items() if not exists] == []
