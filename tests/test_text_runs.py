"""Runs of language models: every overlay composed, shrunk and run; resume and merge to the bit; what is refused."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, command_line
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

import config as configuration
import main  # registers the schema
import pipeline
import text
from checkpoint import load_model, read_run
from config import Config, SettingError
from experiments import collect
from kinds import KINDS

SMALL = ("model.width=16", "model.heads=2", "model.condition_width=8", "train.batch_size=4", "train.micro_batch=null")
SMALL += ("train.steps=3", "train.warmup_steps=1", "train.precision=fp32", "log.progress=false", "threads=1")
SMALL += (
    "sampler.num_samples=3",
    "sampler.batch_size=2",
    "eval.rows=4",
    "eval.draws=2",
    "eval.features=null",
    "eval.perplexity=[]",
)
SMALL += ("data.context=16", "sampler.length=8", "sampler.prompt=0", "sampler.prompts=null")
EMBEDDED = ("text_ar", "text_masked", "text_recurrent")
PAPER = ("lm1b_ar", "owt_ar", "text8_masked", "lm1b_recurrent")
SWEEPS = ("text_num_blocks", "lm1b_num_blocks")


def composed(*overrides: str, small: tuple[str, ...] = ()) -> Config:
    """Returns the resolved configuration of a command line, composed in this process; `small` counts as if it were in files."""
    assert main.store is not None
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        plain = compose("config", overrides=[*small, *overrides])
    OmegaConf.resolve(plain)
    config = OmegaConf.to_object(plain)
    configuration.check_typed(config, list(overrides))
    return configuration.resolve(configuration.with_trained_settings(config, list(overrides)))


def run(tmp_path: Path, *overrides: str) -> Path:
    small = (*SMALL, f"out={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    return pipeline.run(composed(*overrides, small=small))


def results(folder: Path) -> dict[str, dict]:
    return {result["kind"]: result for result in json.loads((folder / "results.json").read_text())}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE tokenizer of `tokenizers`, with an end of text."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"])
    inner.train_from_iterator(["the cat sat on the mat and the dog sat by the cat"] * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


@pytest.mark.parametrize("experiment", EMBEDDED)
def test_embedded_experiments_train_generate_and_score(experiment: str, tmp_path: Path):
    folder = run(tmp_path, f"experiment={experiment}", "train.evaluate_every=1")
    found = results(folder)
    curve = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    assert [row["step"] for row in curve] == list(range(1, len(curve) + 1))
    assert curve[-1]["bits_per_character"] == pytest.approx(found["likelihood"]["scores"]["bits_per_character"])
    assert {"training_cost", "likelihood", "heldout_text", "generated_text"} <= found.keys()
    assert found["likelihood"]["scores"]["bits_per_character"] > 1
    assert len((folder / found["generated_text"]["texts"]).read_text().split("\n\n")) == 3
    assert found["generated_text"]["protocol"]["sampler"]["temperature"] == 1.0
    again = composed(
        f"folder={folder}", "mode=sample", "sampler=text", "sampler.temperature=0.6", f"data.cache={tmp_path / 'cache'}"
    )
    assert (again.sampler.temperature, again.sampler.length) == (0.6, 8)
    before = len(list(folder.glob("samples/*/tokens.npy")))
    pipeline.run(again)
    assert len(list(folder.glob("samples/*/tokens.npy"))) == before + 1
    assert again.model.width == 16 and again.objective.name == found["training_cost"]["protocol"]["trained"]["objective"]["name"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_answers_what_the_pipeline_asks(kind: str):
    """By the number of arguments that pipeline.py and profiling.py give; a classifier draws nothing."""
    asked = {"check": 1, "load": 1, "source": 3, "plot_partition": 2, "measure": 4, "evaluate": 6, "sample_sets": 1}
    if kind not in ("vit", "noprop_cnn"):
        asked |= {"preview": 5, "sample": 6}
    for name, count in asked.items():
        inspect.signature(getattr(KINDS[kind], name)).bind(*range(count))


@pytest.mark.parametrize("experiment", PAPER)
def test_the_papers_settings_run_on_a_small_text(experiment: str, tmp_path: Path, tokenizer_file: Path):
    lines = ["the cat sat on the mat", "the dog sat by the cat and the mat", "a cat by a dog"] * 40
    settings = [f"experiment={experiment}", f"data.tokenizer={tokenizer_file}"]
    if experiment == "text8_masked":
        (tmp_path / "text8").write_text(" ".join(lines))
        settings = [settings[0], f"data.path={tmp_path / 'text8'}"]
    elif experiment == "owt_ar":
        import pyarrow
        from pyarrow import parquet

        (tmp_path / "owt").mkdir()
        parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "owt" / "train-0.parquet")
        parquet.write_table(pyarrow.table({"text": lines[:9]}), tmp_path / "owt" / "test-0.parquet")
        settings += ["data.name=files", f"data.path={tmp_path / 'owt'}"]
    else:
        for folder, name in (("training", "news.en-00001-of-00100"), ("heldout", "news.en.heldout-00000-of-00050")):
            path = tmp_path / "lm1b" / f"{folder}-monolingual.tokenized.shuffled"
            path.mkdir(parents=True)
            (path / name).write_text("\n".join(lines) + "\n")
        settings += [f"data.path={tmp_path / 'lm1b'}"]
    folder = run(tmp_path, *settings, "sampler.steps=4")
    assert results(folder)["likelihood"]["scores"]["bits_per_character"] > 0
    assert composed(f"experiment={experiment}", "data.path=x", "data.tokenizer=symbols").model.width in (512, 768)


@pytest.mark.parametrize("experiment", SWEEPS)
def test_sweeps_over_the_number_of_blocks_compose(experiment: str):
    config = composed(
        f"experiment={experiment}", "partition.num_blocks=2", *(["data.path=x", "data.tokenizer=bytes"] * ("lm1b" in experiment))
    )
    assert configuration.layer_split(config) == [config.model.depth // 2] * 2


def test_baselines_run_through_the_same_commands(tmp_path: Path):
    for overrides in (
        ("experiment=text_ar", "objective=next_token", "method=end_to_end"),
        ("experiment=text_ar", "method=end_to_end"),
        ("experiment=text_ar", "method=shallow", "objective.layout=inline"),
        ("experiment=text_ar", "objective.table=learned"),
        ("experiment=text_masked", "method=end_to_end"),
        ("experiment=text_recurrent", "objective=next_token"),
    ):
        cost = results(run(tmp_path, *overrides))["training_cost"]["scores"]
        assert cost["token_layers"] > 0


def test_costs_are_counted_as_the_papers_models_cost():
    plain = composed("experiment=lm1b_recurrent", "data.path=x", "data.tokenizer=symbols")
    huginn = composed("experiment=lm1b_recurrent", "data.path=x", "data.tokenizer=symbols", "objective=next_token")
    passes = [text.counted_cost(config)["layer_passes_per_token"] for config in (plain, huginn)]
    assert passes == [24, 208]
    block, whole = (text.counted_cost(composed("experiment=text_masked", *more)) for more in ((), ("method=end_to_end",)))
    assert block["token_layers"] == whole["token_layers"]
    assert block["parameters"] < 1.15 * whole["parameters"] / 4


@pytest.mark.parametrize("experiment", ["text_ar", "text_masked"])
def test_resume_and_merge_are_exact(experiment: str, tmp_path: Path):
    common = (f"experiment={experiment}", "partition.num_blocks=2", "model.depth=2", "mode=train")
    whole = run(tmp_path, *common, f"folder={tmp_path / 'whole'}", "train.schedule=constant")
    run(tmp_path, *common, f"folder={tmp_path / 'halves'}", "train.schedule=constant", "train.steps=1")
    halves = run(tmp_path, *common, f"folder={tmp_path / 'halves'}", "train.schedule=constant")
    for block in (0, 1):
        run(tmp_path, *common, f"folder={tmp_path / str(block)}", "train.schedule=constant", f"train.blocks=[{block}]")
    merged = run(tmp_path, *common[:-1], "mode=merge", "train.schedule=constant", f"folder={tmp_path / 'merged'}",
                 f"merge.runs=[{tmp_path / '0'},{tmp_path / '1'}]")  # fmt: skip
    for other in (halves, merged):
        for block in (0, 1):
            files = [f / "checkpoint" / read_run(f)["generation"] / f"block_{block}.safetensors" for f in (whole, other)]
            ours, theirs = map(load_file, files)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    model = load_model(merged)
    assert text.decode(model.config, torch.tensor([[1, 2]])) == ["ab"]


def test_samples_are_drawn_once_and_begin_with_their_prompts(tmp_path: Path):
    folder = run(tmp_path, "experiment=text_ar", "sampler.prompt=4", "sampler.prompts=1", "eval.temperatures=[0.5]")
    drawn = [np.load(path) for path in sorted(folder.glob("samples/*/tokens.npy"))]
    assert len(drawn) == 2 and all((tokens[:, :4] == tokens[0, :4]).all() and tokens.shape == (3, 12) for tokens in drawn)
    kinds = [result["kind"] for result in json.loads((folder / "results.json").read_text())]
    assert kinds.count("generated_text") == 2


def test_runs_become_records_in_which_a_plain_model_and_diffusion_share_columns(tmp_path: Path):
    """Next-token bits, generated text by temperature and cost share columns; an exact likelihood and a bound do not."""
    records = collect.Records(tmp_path / "records")
    small = (*SMALL, f"out={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}", "eval.temperatures=[0.5]")
    folders = {}
    for typed in (("method=end_to_end", "objective=next_token"), ("method=diffusion_blocks", "objective=token_diffusion_inline")):
        config = composed("experiment=text_ar", *typed, small=small)
        asked = {"experiment": "text_ar", "scale": "topics", "paper": "v4", "match": "layer_work", "overrides": list(typed)}
        folders[" ".join(typed)] = pipeline.run(config, asked)
    assert all(records.add(folder) for folder in folders.values())
    rows = records.scores["text_ar"]
    for metric in ("next_token_bits", "known_words", "distinct_2_ratio", "token_layers", "state_bytes"):
        own = [row for row in rows if row["metric"] == metric and row["setting"] != collect.FLOOR]
        by_setting = {
            setting: {(row["guidance"], row["protocol"]) for row in own if row["setting"] == setting} for setting in folders
        }
        assert len({frozenset(columns) for columns in by_setting.values()}) == 1 and all(by_setting.values()), metric
        temperatures = {0.5, 1.0} if metric in ("known_words", "distinct_2_ratio") else {""}
        assert {row["guidance"] for row in own} == temperatures
    plain, diffusion = (results(folder)["likelihood"]["scores"] for folder in folders.values())
    found = {(row["setting"], row["metric"]): float(row["value"]) for row in rows}
    for setting, bits in zip(folders, (plain["bits_per_character"], diffusion["bits_per_character_sigma_max"]), strict=True):
        assert found[setting, "next_token_bits"] == pytest.approx(bits, rel=1e-5)
    exact, bound = (setting for setting in folders)
    assert (exact, "bits_per_character_bound") not in found and (bound, "bits_per_character") not in found
    assert (bound, "bits_per_character_bound") in found and (collect.FLOOR, "entropy") in found
    assert (bound, "nats_block_3") in found and (bound, "embedding_nats_block_3") in found


def test_known_words_are_read_off_at_the_entropy_of_held_out_text():
    def drawn(temperature: float, entropy: float, known: float) -> dict:
        scores = {"entropy": entropy, "known_words": known, "distinct_2": 0.3}
        return {"kind": "generated_text", "title": "", "scores": scores, "protocol": {"sampler": {"temperature": temperature}}}

    real = {
        "kind": "heldout_text",
        "title": "",
        "scores": {"entropy": 3.0, "known_words": 0.96, "distinct_2": 0.6},
        "protocol": {},
    }
    generated = [drawn(0.5, 2.0, 0.9), drawn(1.0, 4.0, 0.7)]
    (matched,) = collect.compared([real, *generated])
    assert matched["scores"]["known_words_matched"] == pytest.approx(0.8)
    assert matched["protocol"]["sampler"]["temperature"] == [0.5, 1.0]
    assert [result["scores"]["distinct_2_ratio"] for result in generated] == [0.5, 0.5]
    (unreached,) = collect.compared([real, generated[0]])
    assert unreached["scores"]["known_words_matched"] is None


def test_blocks_at_equal_shares_of_a_pilots_nats(tmp_path: Path):
    pilot = run(tmp_path, "experiment=text_masked", "method=end_to_end", "eval.draws=8")
    config = composed("experiment=text_masked", "partition=equal_nats", f"partition.pilot={pilot}", "partition.num_blocks=4")
    edges = config.partition.edges
    assert edges[0] == 1 and edges[-1] == 0 and (np.diff(edges) < 0).all() and config.partition.pilot is None
    assert configuration.run_folder(config) == configuration.run_folder(
        composed("experiment=text_masked", "partition=custom", f"partition.edges={edges}", "partition.num_blocks=4")
    )


def test_mauve_and_perplexity_from_given_features_and_local_models(tmp_path: Path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "same.npz", generated=random.normal(size=(60, 8)), reference=random.normal(size=(60, 8)))
    np.savez(tmp_path / "far.npz", generated=random.normal(size=(60, 8)) + 9, reference=random.normal(size=(60, 8)))
    settings = ("experiment=text_ar", "sampler.num_samples=60", "sampler.batch_size=60", "eval.mauve_seeds=2")
    found = []
    for name in ("same", "far"):
        folder = run(tmp_path, *settings, f"eval.features={tmp_path / name}.npz", f"folder={tmp_path / name}")
        found.append(results(folder)["generated_text"])
    assert found[0]["scores"]["mauve"] > 0.5 > found[1]["scores"]["mauve"]
    assert found[0]["protocol"]["mauve_scaling"] == 5.0 and found[0]["protocol"]["mauve_seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("experiment=text_ar", "objective=next_token"), "set method=end_to_end"),
        (("experiment=text_ar", "objective.table=learned", "train.blocks=[0]"), "all blocks in one job"),
        (("experiment=text_recurrent", "objective.layout=concat"), "needs objective.layout=inline"),
        (("experiment=text_recurrent", "objective=masked"), "not masked"),
        (("experiment=text_masked", "partition=log_uniform"), "masked shares"),
        (("experiment=text_masked", "partition=equal_nats"), "partition.pilot"),
        (("experiment=text_masked", "partition=equal_nats", "partition.pilot=nowhere"), "is missing: train"),
        (("experiment=text_ar", "sampler.length=17"), "more than data.context"),
        (("experiment=text_ar", "sampler.prompt=16", "sampler.length=null"), "sampler.prompt=16 leaves nothing"),
        (("experiment=text_ar", "sampler.prompt=20", "sampler.length=null"), "sampler.prompt=20 leaves nothing"),
        (("experiment=text_ar", "sampler.rho=0"), "sampler.rho"),
        (("experiment=text_ar", "sampler.temperature=0"), "above 0"),
        (("experiment=text_ar", "sampler.top_p=0"), "sampler.top_p"),
        (("experiment=text_ar", "sampler.prompts=2"), "no meaning"),
        (("experiment=text_ar", "model.heads=3"), "multiple of 2"),
        (("experiment=text_ar", "train.label_dropout=0.2"), "no meaning"),
        (("experiment=text_masked", "sampler.schedule=karras"), "no meaning"),
        (("experiment=text_recurrent", "model.recurrence=4"), "no meaning"),
        (("experiment=text_ar", "train.compile=true"), "not supported"),
        (("experiment=text_ar", "eval.perplexity=[no-such-model]"), "HF_HUB_OFFLINE"),
        (("experiment=text_ar", "eval.features=nowhere.npz"), "nowhere.npz|mauve-text"),
    ],
)
def test_what_cannot_work_is_one_sentence(overrides: tuple, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingError, match=sentence):
        run(tmp_path, *overrides)
    assert not list(tmp_path.glob("runs/*/config.yaml"))


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (None, "not an .npz"),
        ({"generated": (3, 2)}, "not an .npz"),
        ({"generated": (3, 2), "reference": (3, 4)}, "must have `generated`"),
        ({"generated": (3,), "reference": (3,)}, "must have `generated`"),
        ({"generated": (2, 4), "reference": (3, 4)}, "there are 3 by sampler.num_samples"),
    ],
)
def test_features_that_do_not_fit_are_refused_before_training(arrays: dict | None, sentence: str, tmp_path: Path):
    path = tmp_path / "given.npz"
    path.write_bytes(b"junk")
    if arrays is not None:
        np.savez(path, **{name: np.zeros(shape) for name, shape in arrays.items()})
    with pytest.raises(SettingError, match=sentence):
        run(tmp_path, "experiment=text_ar", f"eval.features={path}")
    assert not list(tmp_path.glob("runs/*/config.yaml"))


def test_held_out_documents_too_short_to_compare_with_are_refused_before_training(tmp_path: Path):
    (tmp_path / "lines.txt").write_text("the cat sat\n" * 40)
    settings = ("experiment=text_ar", "data=text_files", f"data.path={tmp_path / 'lines.txt'}", "data.tokenizer=bytes")
    with pytest.raises(SettingError, match="no held-out document is that long"):
        run(tmp_path, *settings, "data.packing=documents", "sampler.length=12")
    assert not list(tmp_path.glob("runs/*/config.yaml"))


def test_a_tokenizer_that_changed_is_refused(tmp_path: Path, tokenizer_file: Path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 60)
    (tmp_path / "tokenizer.json").write_text(tokenizer_file.read_text())
    settings = ("experiment=text_ar", "data=text_files", f"data.path={tmp_path / 'a.txt'}", "mode=train")
    settings += (f"data.tokenizer={tmp_path / 'tokenizer.json'}", f"folder={tmp_path / 'run'}")
    run(tmp_path, *settings)
    changed = json.loads(tokenizer_file.read_text())
    changed["added_tokens"][0]["content"] = "<end>"
    changed["model"]["vocab"]["<end>"] = changed["model"]["vocab"].pop("</s>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    text.load_tokenizer.cache_clear()
    with pytest.raises(SettingError, match="another one now"):
        run(tmp_path, *settings)
    with pytest.raises(SettingError, match="another one now"):  # without the text, as for mode=sample
        load_model(tmp_path / "run")


def test_the_command_line_ends_with_one_line(tmp_path: Path):
    result = command_line("experiment=text_ar", "data=text_files", "data.context=8", "data.path=nowhere", cwd=tmp_path, expect=1)
    assert result.stderr.strip().splitlines()[-1] == "error: data.path=nowhere does not exist"
