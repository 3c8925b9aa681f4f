"""The examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_the_demo_reaches_its_accuracy_with_plain_gradients() -> None:
    """The demo reaches its accuracy, and its gradients are the plain model's."""
    pytest.importorskip("sklearn")
    out = run("examples/digits_resnet.py")
    assert "test accuracy: 9" in out
    assert "gradients: " in out


def test_a_script_of_poptorchs() -> None:
    """It trains, on two copies of two stages, and tests with the other model."""
    pytest.importorskip("sklearn")
    out = run("examples/from_poptorch.py")
    assert "2 copies of 2 stages" in out
    assert "test accuracy: 9" in out


@pytest.mark.timeout(600)
def test_a_training_script_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Its losses after the checkpoint are those of a run in one go, to every digit of its log."""
    pytest.importorskip("sklearn")

    def epochs(number: int, folder: str) -> list[str]:
        run(
            "examples/training_script.py", "--into", str(tmp_path / folder), "--epochs", str(number)
        )
        log = (tmp_path / folder / "log.txt").read_text()
        return re.findall(r"epoch \d+: loss .*", log)

    assert len(epochs(1, "stopped")) == 1
    in_one_go = epochs(3, "in_one_go")
    assert epochs(3, "stopped") == in_one_go
    assert len(in_one_go) == 3
    assert float(in_one_go[-1].split()[-1]) > 0.9
    assert (tmp_path / "stopped" / "best.pt").exists()


def test_a_script_of_torchdistpackages() -> None:
    """It trains in bfloat16 on two stages, with clipping over both, and tests."""
    pytest.importorskip("sklearn")
    out = run("examples/from_torchdistpackage.py")
    assert "trained on 2 stages of one process" in out
    assert "test accuracy: 9" in out


def test_a_model_with_a_device_map_trains_and_generates() -> None:
    """Its pipeline is exact, and the model is whole without it."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = run("examples/from_device_map.py", "--steps", "20")
    assert "ok: " in out
    assert float(out.split("loss without the pipeline: ")[1]) < 4


def test_a_script_of_hugging_faces_trainer(tmp_path: Path) -> None:
    """It trains, evaluates, and saves a model that the library loads."""
    pytest.importorskip("accelerate")
    out = run("examples/trainer_text.py", "--steps", "20", "--directory", str(tmp_path))
    assert "loss on other text: 3." in out
    assert "stage 1 on" in out


@pytest.mark.parametrize("name", ["accelerate_digits", "lightning_digits"])
def test_other_libraries_loops_train_and_resume(name: str) -> None:
    """They reach their accuracy after a resumption."""
    pytest.importorskip("sklearn")
    pytest.importorskip(name.partition("_")[0])
    out = run(f"examples/{name}.py")
    assert len([line for line in out.splitlines() if line.startswith("epoch")]) == 6
    assert "test accuracy: 9" in out


def test_adapters_learn_to_count() -> None:
    """And are the same in the plain model."""
    pytest.importorskip("peft")
    out = run("examples/peft_gpt.py")
    assert "step 59: loss 2." in out
    assert "logits differ by" in out


def test_the_gpt_example_learns() -> None:
    """The GPT learns English."""
    out = run("examples/gpt_text.py", "--steps", "60")
    assert "bottom" in out
    assert "tied" in out or "embed.weight" in out


def test_the_large_model_is_trained_saved_and_loaded_elsewhere() -> None:
    """From meta to trained, saved, and loaded into other stages."""
    out = run("examples/large_model.py")
    assert "none of them in memory" in out
    assert "Measured" in out
    assert "loaded into two stages: loss 2." in out


def test_a_torchgpipe_script() -> None:
    """It is balanced, learns, and is the plain loop."""
    out = run("examples/from_torchgpipe.py")
    assert "partitions.0.0.module.block.0.weight" in out
    assert float(out.split("step 29: loss ")[1].split()[0]) < 0.3, out
    assert "ok: exact" in out


def test_found_stages_are_balanced_exact_and_drawn(tmp_path: Path) -> None:
    """Balanced, exact, and drawn."""
    pytest.importorskip("torchvision")
    page = tmp_path / "timeline.html"
    out = run("examples/find_stages.py", "--size", "32", "--page", str(page))
    assert "model.layer" in out
    assert "ok: " in out
    assert "Bubble" in out
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.timed
def test_a_large_model_is_recorded_and_planned() -> None:
    """U-Net (24, 160) of 7.8 B parameters, on the meta device, in far less than 30 s."""
    pytest.importorskip("torchvision")
    out = run("examples/benchmarks/large_models.py", "unet")
    assert "7.80 B parameters" in out
    assert float(out.split()[-1]) < 30, out


@pytest.mark.timed
def test_a_llama_is_recorded_and_summarized() -> None:
    """70 B parameters in eight stages, in less than 60 s and 4 GiB."""
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    out = run("examples/benchmarks/large_models.py", "llama")
    assert "70.55 B parameters" in out
    assert float(out.split()[-1]) < 60, out
    assert float(out.split("largest resident set: ")[1].split()[0]) < 4, out


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [
        "peers.py --workload tiny --chunks 2 --repeats 1 --only by-hand blockpipe torch-pipelining",
        "one_gpu.py --device cpu --tiny --workload small --mode eager compiled --repeats 1",
        "doors.py --widths 8 --repeats 2",
        "deferred_batch_norm.py --rows 2 --size 32 --repeats 1",
        "scaling.py --tiny --model resnet101 --devices 2 --rows 1 --repeats 1",
    ],
)
def test_benchmarks_run(command: str) -> None:
    """They check the gradients before they time anything; what they time is not looked at here."""
    pytest.importorskip("torchvision")
    assert run(*f"examples/benchmarks/{command}".split())


def test_the_page_on_clusters_has_the_tables_of_its_script(tmp_path: Path) -> None:
    """They are the same when they are put in anew."""
    page = (ROOT / "docs/explanation/clusters.md").read_text()
    anew = tmp_path / "clusters.md"
    anew.write_text(re.sub(r"(?<= -->\n\n)\|.*?(?=\n\n<!-- end)", "", page, flags=re.DOTALL))
    assert anew.read_text() != page
    run("examples/clusters.py", str(anew))
    assert anew.read_text() == page


def test_stages_and_replicas_in_processes() -> None:
    """Two replicas of two stages train, and their weights are the plain model's."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    out = run(*torchrun, "examples/distributed_resnet.py", "--replicas", "2")
    first, last = (float(out.split(f"step {n}: loss ")[1].split(",")[0]) for n in (0, 7))
    assert last < first
    assert "122 tensors gathered" in out
    right = out.split(" of 32 right")[0].splitlines()[-1]
    assert int(right) > 3  # as by chance: running statistics of 8 steps are far behind
