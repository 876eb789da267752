"""The script that runs the study of video networks without Snakemake: the commands that it makes."""

from pathlib import Path

from helpers.files import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks/video_study.py"


def commands(folder, *flags):
    done = run_script(SCRIPT, "--dry-run", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_step_is_a_command_of_the_study(tmp_path):
    said = commands(tmp_path)
    assert [line[2:] for line in said[::2]] == [
        *("train trained", "video wan-1.3b-480p-81f", "video wan-1.3b-720p-81f", "video trained"),
        *("pictures trained", "recall trained-21x30x52"),
    ]
    train, video, *_, pictures, recall = said[1::2]
    assert "--output results/video/trained.safetensors" in train and "--device cuda --compiled" in train
    assert "--case wan-1.3b-480p-81f --output results/logs/video/wan-1.3b-480p-81f.csv" in video
    assert "--dtype bfloat16" in video and "--dtype" not in pictures
    assert "results/logs/video/trained.npz" in pictures and "results/logs/recall/trained-21x30x52.csv" in recall
    # What is trained is not trained again.
    (tmp_path / "results/video").mkdir(parents=True)
    (tmp_path / "results/video/trained.safetensors").touch()
    assert "# train trained" not in commands(tmp_path)


def test_settings_and_cases_can_be_stated(tmp_path):
    which = ("--steps", "video", "--cases", "wan-1.3b-720p-81f", "--attention", "dense", "slices80")
    said = commands(tmp_path, *which, "--set", 'modes=["eager"]')
    assert len(said) == 2 and said[1].endswith("--min-repetitions 10")
    assert said[1].rindex('modes=["eager"]') > said[1].index('modes=["compile"]')
    assert "slices80" in said[1] and "slices70" not in said[1]
