"""Python files that come with a model: they run where the user says so, and nothing inside a folder says it instead."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from saved_state import saved_state
from test_model_card import facts
from tiny_recipes import make_recipe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from samecurve.checkpoint.manifest import MANIFEST, MARKER, file_name
from samecurve.cli import commands
from samecurve.config import own_code
from samecurve.config.schema import Recipe
from samecurve.data.chat_encoder import ChatEncoder
from samecurve.data.schemas.conversation import ChatSchema, Conversation
from samecurve.data.tokenizer import load_pretrained_tokenizer, load_tokenizer
from samecurve.errors import ConfigurationError, DataError
from samecurve.export.hf_export import ExportTarget, export
from samecurve.inference import loading
from samecurve.inference.generator import TextGenerator
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weight_files import weight_files
from samecurve.models.weights import load_weights
from samecurve.storage import trusted_code
from samecurve.storage.filesystem import is_own_file

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig

class ToyConfig(LlamaConfig):
    model_type = "toy"

Path(__file__).with_suffix(".ran").touch()
"""
MODELLING = """
from transformers import LlamaForCausalLM
from .configuration_toy import ToyConfig

class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits + 1
        return output
"""
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
NAMES = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}


@pytest.fixture(autouse=True)
def no_state_of_other_tests():
    """`evaluate` makes an Accelerator in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def sandbox(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # transformers adds the folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A whole model with code of its own, in the folder of what may be a run."""
    folder = tmp_path / "run" / "model"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "configuration_toy.py").write_text(CONFIGURATION)
    (folder / "modeling_toy.py").write_text(MODELLING)
    write(folder / "config.json", {"model_type": "toy", "auto_map": NAMES, **SIZES})
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"a": 0, "b": 1, "<s>": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>", pad_token="<s>")


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def ran(tmp_path: Path) -> bool:
    return any(tmp_path.rglob("*.ran"))


def made(folder: Path, **model) -> Recipe:
    blocks = {"model": {"path": str(folder), **model}, "batch": {"sequence_length": 8}}
    return make_recipe(folder.parent, "unused", "pretrain", tokenizer={"vocabulary_size": None}, **blocks)


def rows(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"a b {number} " * 20}) + "\n" for number in range(40)))
    return file


def adapter(tmp_path: Path, base: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path / "adapter"
    get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        folder
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    write(folder / "adapter_config.json", {**config, "base_model_name_or_path": str(base)})
    tokenizer().save_pretrained(folder)
    return folder


def forged_checkpoint(run: Path, recipe: dict) -> Path:
    """A checkpoint whose hashes match: who forges state.json forges the manifest too."""
    folder = run / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    (folder / file_name(0)).write_bytes(b"")
    write(folder / "state.json", saved_state(recipe=recipe))
    contents = {name: (folder / name).read_bytes() for name in (file_name(0), "state.json")}
    files = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    ]
    write(folder / MANIFEST, {"step": 1, "world_size": 1, "files": files})
    write(folder / MARKER, {"manifest_sha256": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()})
    return folder


COMMANDS = {
    "generate": ["generate", "{model}", "--prompt", "a"],
    "chat": ["chat", "{model}"],
    "predict": ["predict", "{model}", "a"],
    "evaluate": ["evaluate", "{run}", "{data}"],
    "lm_eval": ["lm_eval", "{model}", "arc_easy", "--show"],
    "merge": ["merge", "{adapter}", "--output", "{run}/merged"],
    "export": ["export", "{run}", "--checkpoint", "latest"],
    "base": ["generate", "{adapter}", "--prompt", "a"],
}


def words(name: str, tmp_path: Path, folder: Path, **keys) -> list[str]:
    """The command on the folder, on an adapter of it, or on a run with forged records that trust everything."""
    run = folder.parent
    data = {"path": str(rows(tmp_path)), "validation_fraction": 0.5}
    model = {"path": str(folder), "trust_remote_code": True}
    recipe = facts(recipe={"model": model, "data": data | keys.pop("data", {}), **keys})["recipe"]
    for place in (run, folder, tmp_path):
        write(place / "run.json", facts(recipe=recipe, engine="DDP", precision="fp32", strategy_path=None))
    forged_checkpoint(run, recipe)
    places = {"model": folder, "run": run, "data": data["path"], "adapter": adapter(tmp_path, folder)}
    return [word.format(**places) for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_records_of_a_folder_trust_nothing(name, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    assert commands.main(words(name, tmp_path, folder)) == ConfigurationError.exit_code
    assert not ran(tmp_path)
    said = capsys.readouterr().err
    assert str(folder) in said and "configuration_toy.py" in said and "--trust_remote_code" in said


OWN = {"task": "stranger:Task", "optimizer": {"name": "stranger:Optimizer"}, "data": {"source": "stranger:rows"}}


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> Path:
    """A module that leaves a mark where it is imported, in the working directory, which is on sys.path."""
    module = tmp_path / "stranger.py"
    module.write_text(
        "from pathlib import Path\nfrom samecurve.tasks.own import OwnTask as Task\n"
        "Path(__file__).with_suffix('.imported').touch()\ndef rows():\n    return [{'text': 'a b'}] * 40\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_code, "_allowed", {})
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return module.with_suffix(".imported")


@pytest.mark.parametrize("name", [*COMMANDS, "summary", "report", "held out"])
def test_a_run_folder_imports_nothing(name, folder, tmp_path, stranger, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    given = words("evaluate" if name in ("summary", "report", "held out") else name, tmp_path, folder, **OWN)
    given = [name, str(folder.parent)] if name in ("summary", "report") else given
    given = ["evaluate", str(folder.parent)] if name == "held out" else given
    code = commands.main([*given, *([] if name in ("summary", "report") else ["--trust_remote_code"])])
    assert not stranger.exists()
    if given[0] in ("evaluate", "export"):
        said = capsys.readouterr().err
        assert code == 2 and "stranger:" in said and "--own_code stranger:" in said


@pytest.mark.parametrize("name", ["evaluate", "export"])
def test_what_the_user_names_is_imported(name, folder, tmp_path, stranger):
    named = ["--own_code", "stranger:Task", "--own_code", "stranger:rows"]
    commands.main([*words(name, tmp_path, folder, **OWN), "--trust_remote_code", *named])
    assert stranger.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_option_runs_the_code(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    commands.main([*words(name, tmp_path, folder), "--trust_remote_code"])  # some then miss weights or a head
    assert ran(tmp_path)


@pytest.mark.parametrize("name", ["summary {run}", "report {run}", "export {run}", "inspect {recipe} --leak_test"])
def test_other_commands_run_no_code(name, folder, tmp_path):
    words("generate", tmp_path, folder)
    (folder.parent / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "tokens": 1, "step_seconds": 1.0}\n')
    recipe = tmp_path / "recipe.yaml"
    content = made(folder).model_dump(mode="json")
    recipe.write_text(yaml.safe_dump(content | {"data": {"path": str(rows(tmp_path))}}))
    commands.main(name.format(run=folder.parent, recipe=recipe).split())
    assert not ran(tmp_path)


def test_training_needs_the_recipe_to_say_so(folder, tmp_path):
    with pytest.raises(ConfigurationError, match=r"configuration_toy.py.*model.trust_remote_code=true"):
        build_skeleton(made(folder), 64)
    write(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["configuration_toy.T", None]}})
    with pytest.raises(ConfigurationError, match=r"configuration_toy.py.*model.trust_remote_code=true"):
        load_pretrained_tokenizer(str(folder), trust_remote_code=False)
    assert not ran(tmp_path)


def test_code_of_a_training_needs_no_option(folder, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    trusted_code.remember(str(folder))
    shutil.rmtree(folder)
    write(copy / "run.json", facts(recipe={"model": {"path": "x", "trust_remote_code": True}}))
    model, _ = loading.load_with_tokenizer(copy)
    assert type(model).__name__ == "ToyForCausalLM"
    assert commands.main(["merge", str(adapter(tmp_path, copy)), "--output", str(tmp_path / "merged")]) == 0
    assert type(loading.load_model(str(tmp_path / "merged"))).__name__ == "ToyForCausalLM"


def test_a_training_lists_the_code_it_ran(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    content = made(folder, trust_remote_code=True).model_dump(mode="json", exclude_defaults=True)
    output = {"output_dir": str(tmp_path / "trained"), "data": {"path": str(rows(tmp_path)), "packing": False}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content | output))
    command = [sys.executable, str(ROOT / "train.py"), str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, _ = loading.load_with_tokenizer(tmp_path / "trained" / "model")
    assert type(model).__name__ == "ToyForCausalLM"


def _other_module(folder: Path) -> None:
    (folder / "modeling_toy.py").write_text(MODELLING + "\n")


def _other_import(folder: Path) -> None:
    (folder / "configuration_toy.py").write_text(CONFIGURATION + "\n")


def _points_to(reference: str):
    def change(folder: Path) -> None:
        names = {**NAMES, "AutoModelForCausalLM": reference.format(folder=folder.parent)}
        write(folder / "config.json", {"model_type": "toy", "auto_map": names, **SIZES})

    return change


def _generation(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("def generate(model, **options): ...")


def _tokenizer(folder: Path) -> None:
    (folder / "evil.py").write_text("class T: ...")
    write(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "evil.T"]}})


def _other_config(folder: Path) -> None:
    """transformers reads the auto_map of the file that configuration_files names."""
    (folder / "config.1.0.0.json").write_text((folder / "config.json").read_text().replace("modeling_toy", "evil"))
    (folder / "evil.py").write_text((folder / "modeling_toy.py").read_text())
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"configuration_files": ["config.1.0.0.json"]}))


CHANGES = {
    "another config": _other_config,
    "another module": _other_module,
    "another import": _other_import,
    "the hub": _points_to("some/one--modeling_toy.ToyForCausalLM"),
    "an absolute path": _points_to("{folder}/modeling_toy.ToyForCausalLM"),
    "a parent": _points_to("../modeling_toy.ToyForCausalLM"),
    "generation": _generation,
    "a tokenizer": _tokenizer,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_list_names_content(change, folder, tmp_path):
    trusted_code.remember(str(folder))
    assert trusted_code.allows(False, str(folder))
    change(folder)
    assert not trusted_code.allows(False, str(folder))
    with pytest.raises(ConfigurationError):
        loading.load_with_tokenizer(folder)
    assert not ran(tmp_path)


def test_a_hub_name_is_never_in_the_list(folder):
    trusted_code.remember(str(folder))
    assert not trusted_code.allows(False, str(folder), "owner/name")
    assert not trusted_code.allows(False, "owner/name")
    assert not trusted_code.allows(False)


def test_the_list_is_not_in_the_working_directory(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.chdir(tmp_path)
    trusted_code.remember(str(folder))
    assert not trusted_code.allows(False, str(folder))
    assert not list(tmp_path.rglob("trusted_code"))


def test_a_known_family_does_not_replace_the_runs_own_code(folder, tmp_path):
    write(folder / "config.json", {"model_type": "llama", "auto_map": NAMES, **SIZES})
    model, _ = loading.load_with_tokenizer(folder)  # as transformers does
    assert type(model) is LlamaForCausalLM
    write(folder / "run.json", facts(recipe={"model": {"path": "x", "trust_remote_code": True}}))
    with pytest.raises(ConfigurationError, match="--trust_remote_code"):
        loading.load_with_tokenizer(folder)
    assert not ran(tmp_path)


def test_it_is_trained_and_exported_with_its_files(folder, tmp_path):
    recipe = made(folder, trust_remote_code=True)
    model = build_skeleton(recipe, 64)
    assert type(model).__name__ == "ToyForCausalLM"
    assert ran(tmp_path)
    weights = {name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()}
    export(iter(weights.items()), model, ExportTarget(tmp_path / "exported", tokenizer()), True)
    assert {"configuration_toy.py", "modeling_toy.py"} <= {path.name for path in (tmp_path / "exported").iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert type(again).__name__ == "ToyForCausalLM"
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
    assert not trusted_code.allows(False, str(tmp_path / "exported"))
    trusted_code.remember(str(folder))
    assert trusted_code.allows(False, str(tmp_path / "exported"))


TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class ToyTokenizer(PreTrainedTokenizerFast):
    COMMIT = 0
"""


@pytest.mark.parametrize("path", [None, "someone/toy"])
def test_all_code_of_a_hub_name_is_of_one_commit(path, folder, tmp_path, monkeypatch):
    """Of the config, the model and the tokenizer, while the branch has moved on."""
    hub = tmp_path / "hub" / "models--someone--toy"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.parent))
    (folder / "tokenization_toy.py").write_text(TOKENIZER)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "ToyTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_toy.ToyTokenizer"]}}
    write(folder / "tokenizer_config.json", content | own)
    commits = ["a" * 40, "b" * 40]
    for number, commit in enumerate(commits):
        shutil.copytree(folder, hub / "snapshots" / commit)
        for file in (hub / "snapshots" / commit).glob("*_toy.py"):
            text = file.read_text().replace('model_type = "toy"', 'model_type = "toy"; COMMIT = 0')
            text = text.replace("config_class = ToyConfig", "config_class = ToyConfig; COMMIT = 0")
            file.write_text(text.replace("COMMIT = 0", f"COMMIT = {number}"))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commits[1])
    for number in (0, 1):
        recipe = made(Path("someone/toy"), trust_remote_code=True, revision=commits[number])
        recipe = recipe.model_copy(update={"tokenizer": recipe.tokenizer.model_copy(update={"path": path})})
        model, words = build_skeleton(recipe, 64), load_tokenizer(recipe)
        assert [type(part).COMMIT for part in (model.config, model, words)] == [number] * 3


def test_its_weights_are_read_shard_by_shard_too(folder):
    recipe = made(folder, trust_remote_code=True)
    model = build_skeleton(recipe, 64)
    real = type(model)(model.config)
    real.save_pretrained(folder)
    weights = {}
    load_weights(model, recipe, weights.__setitem__)
    assert all(torch.equal(weights[name], p) for name, p in real.named_parameters())


def test_a_kernel_of_the_hub_is_code_too(folder):
    write(folder / "config.json", {"model_type": "llama", "attn_implementation": "some/kernel", **SIZES})
    with pytest.raises(ConfigurationError, match=r"some/kernel of the hub .*--trust_remote_code"):
        loading.load_with_tokenizer(folder)


@pytest.mark.parametrize("command", ["export", "merge"])
def test_a_link_out_of_a_folder_is_not_followed(command, folder, tmp_path, capsys):
    write(folder / "config.json", {"model_type": "llama", **SIZES})
    (tmp_path / "private").write_text("a secret")
    linked = folder if command == "export" else adapter(tmp_path, folder)
    write(folder.parent / "run.json", facts())
    (linked / "inside.txt").symlink_to(linked / "config.json" if command == "export" else linked / "README.md")
    (linked / "notes.txt").symlink_to(tmp_path / "private")
    asked = [command, str(folder.parent if command == "export" else linked), "--output", str(tmp_path / "shared")]
    assert commands.main(asked) == 4
    assert f"{linked / 'notes.txt'}: a link to {tmp_path / 'private'}" in capsys.readouterr().err
    assert not list(tmp_path.glob("shared*"))
    (linked / "notes.txt").unlink()
    assert commands.main(asked) == 0


@pytest.mark.parametrize("more", [[], ["--format", "gguf"]])
def test_a_link_to_another_file_of_the_run_is_not_followed(more, folder, tmp_path, capsys):
    write(folder / "config.json", {"model_type": "llama", **SIZES})
    write(folder.parent / "run.json", facts())
    (folder / "notes.txt").symlink_to(folder.parent / "run.json")
    assert commands.main(["export", str(folder.parent), "--output", str(tmp_path / "shared"), *more]) == 4
    assert f"{folder / 'notes.txt'}: a link to" in capsys.readouterr().err and not list(tmp_path.glob("shared*"))


def test_a_run_whose_model_is_elsewhere_is_not_exported(folder, tmp_path, capsys):
    write(folder / "config.json", {"model_type": "llama", **SIZES})
    write(folder.parent / "run.json", facts())
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert commands.main(["export", str(folder.parent), "--output", str(tmp_path / "shared")]) == 4
    assert f"{folder}: a link to {elsewhere}" in capsys.readouterr().err and not list(tmp_path.glob("shared*"))


def test_files_of_a_base_model_are_its_own(tmp_path):
    """In the hub's cache they are links, too; but to files of the same repository."""
    (tmp_path / "private").write_text("a secret")
    snapshot = tmp_path / "models--me--x" / "snapshots" / "1"
    (blobs := snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "b").write_text("{}")
    (snapshot / "processor_config.json").symlink_to("../../blobs/b")
    (snapshot / "preprocessor_config.json").symlink_to(tmp_path / "private")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.model").symlink_to(tmp_path / "private")
    assert is_own_file(snapshot / "processor_config.json")
    assert not is_own_file(snapshot / "preprocessor_config.json") and not is_own_file(snapshot / "none")
    assert not is_own_file(tmp_path / "plain" / "tokenizer.model")
    downloaded = tmp_path / "snapshots" / "1"  # a folder of this name makes no cache
    downloaded.mkdir(parents=True)
    (downloaded / "processor_config.json").symlink_to(tmp_path / "private")
    assert not is_own_file(downloaded / "processor_config.json")


@pytest.mark.parametrize("base", [None, 3, ["a"], "a" * 5000, "a\0b"])
def test_an_adapter_has_to_name_its_base_model(base, folder, tmp_path):
    write(adapter(tmp_path, folder) / "adapter_config.json", {"base_model_name_or_path": base})
    with pytest.raises(ConfigurationError, match=r"base_model_name_or_path: found .* name the base model there"):
        loading.load_with_tokenizer(tmp_path / "adapter")


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "adapter_model.bin"])
def test_pickled_weights_do_not_run(file, folder, tmp_path):
    write(folder / "config.json", {"model_type": "llama", **SIZES})
    model = adapter(tmp_path, folder) if file.startswith("adapter") else folder
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    torch.save({"w": Canary(tmp_path / "pickle.ran")}, model / file)
    with pytest.raises(ConfigurationError):
        loading.load_with_tokenizer(model)
    if model is folder:
        with pytest.raises(ConfigurationError, match="convert the weights to safetensors"):
            weight_files(str(folder))
    assert not ran(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('touch ran') }}",
    ],
)
def test_a_template_stays_in_its_sandbox(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_tokenizer = tokenizer()
    made_tokenizer.chat_template = text
    with pytest.raises(DataError):
        ChatEncoder(made_tokenizer, ChatSchema()).encode([Conversation("row 1", ({"role": "user", "content": "a"},))])
    generator = TextGenerator(tmp_path, None, made_tokenizer, None, True, [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="cannot render"):
        generator.render([{"role": "user", "content": "a"}])
    assert not (tmp_path / "ran").exists()
