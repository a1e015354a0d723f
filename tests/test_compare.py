"""Two revisions of a user's repository, as a process; the repository is only read."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from command import ROOT, mla_bench, one_line, read_records, started

from mla_bench.errors import MlaBenchError
from mla_bench.revisions import find_revision, write_tree

LAYER = '''
"""Attention probabilities summed over heads."""
import jax
import jax.numpy as jnp


def probabilities(q, k):
    logits = jnp.einsum("hbtd,hbsd->hbts", q, k, preferred_element_type=jnp.float32)
    return jax.nn.softmax(logits).sum(0)


def target(q, k, chunk):
    split = [x.reshape(-1, chunk, *x.shape[1:]) for x in (q, k)]
    zero = jnp.zeros((q.shape[1], q.shape[2], k.shape[2]), jnp.float32)
    step = jax.checkpoint(probabilities)
    return jax.lax.scan(lambda acc, x: (acc + step(*x), None), zero, split)[0]
'''
BUILD = """
import jax
import jax.numpy as jnp
from mine.layer import target
from mla_bench import Graph


def build(case):
    heads = jax.ShapeDtypeStruct((16, 1, case.seq_len, 64), jnp.bfloat16)

    def train(q, k):
        def loss(q, k):
            return jnp.square(target(q, k, case.head_chunk or 16)).sum()

        value, (dq, dk) = jax.value_and_grad(loss, argnums=(0, 1))(q, k)
        return {"loss": value, "grad_q": dq, "grad_k": dk}

    return Graph(train, (heads, heads))
"""
CASES = ("--impl", "build.py:build", "--seq", "2k", "--chunk", "4", "--target", "v5e")


def git(repo, *arguments):
    who = {f"GIT_{role}_{what}": "me" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-C", repo, *arguments], env=os.environ | who, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A repository whose second commit forgets the checkpoint, with changes that are not committed."""
    place = tmp_path_factory.mktemp("repo") / "mine"
    (place / "src" / "mine").mkdir(parents=True)
    git(place.parent, "init", "-q", "mine")
    (place / "src" / "mine" / "layer.py").write_text(LAYER)
    (place / "build.py").write_text(BUILD)
    (place / ".gitignore").write_text("ignored.py\n")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "Chunked attention")
    (place / "src" / "mine" / "layer.py").write_text(
        LAYER.replace("jax.checkpoint(probabilities)", "probabilities")
    )
    git(place, "commit", "-qam", "Tidy up | a pipe")
    (place / "src" / "mine" / "layer.py").write_text(LAYER + "\n# not committed\n")
    (place / "new.py").write_text("new\n")
    (place / "ignored.py").write_text("ignored\n")
    git(place, "add", "new.py")  # staged: an index of the user's own
    return place


def contents(repo):
    """Every file of the repository, `.git` and its index among them."""
    return {
        str(path.relative_to(repo)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(repo.rglob("*"))
        if path.is_file()
    } | {str(path.relative_to(repo)): "folder" for path in repo.rglob("*") if path.is_dir()}


def test_a_forgotten_checkpoint_is_named_with_its_line(repo, tmp_path):
    pytest.importorskip("libtpu")
    before, out = contents(repo), tmp_path / "out"
    process = mla_bench(
        "compare", "--repo", repo, "--before", "HEAD~1", "--after", "HEAD", "--path", "src", "--path", ".",
        *CASES, "--out", out,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert contents(repo) == before
    text = (out / "report.md").read_text()
    first, second = git(repo, "rev-parse", "HEAD~1", "HEAD").split()
    assert f"{first[:10]} (Chunked attention) against {second[:10]} (Tidy up" in " ".join(text.split())
    assert "MORE HBM than before" in " ".join(text.split())
    line = LAYER.splitlines().index(
        "    return jax.lax.scan(lambda acc, x: (acc + step(*x), None), zero, split)[0]"
    )
    # The residual of every chunk, stacked, and the line of the scan that keeps it.
    assert (
        f"| new | +0.25 | scores | `f32[4,4,1,2048,2048]` | broadcast\\_in\\_dim, layer.py:{line + 1} |"
        in text
    )
    assert sorted(path.name for path in out.iterdir()) == [
        f"after-{second[:10]}", f"before-{first[:10]}", "plots", "report.md",
    ]  # fmt: skip
    (record,) = read_records(out / f"before-{first[:10]}")
    manifest = json.loads((out / f"before-{first[:10]}" / "run.json").read_text())
    assert manifest["git"] == first[:10]
    # What is not committed is the first revision's program: it comes from the cache.
    process = mla_bench(
        "compare", "--repo", repo, "--before", "HEAD~1", "--after", "WORKTREE", "--path", "src",
        "--path", ".", *CASES, "--out", tmp_path / "again",
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    (again,) = read_records(tmp_path / "again" / f"after-{second[:10]}-uncommitted")
    assert (again["cached"], again["program"]) == (True, record["program"])
    assert "HBM stays as it is in the one case that compares: to the byte" in process.stdout.replace(
        "\n", " "
    )
    assert contents(repo) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_repository_is_as_it_was_whenever_the_command_is_ended(repo, tmp_path, number):
    before, out = contents(repo), tmp_path / "out"
    flags = ("--impl", "build.py:build", "--seq", "64", "--chunk", "4", "--target", "local", "--out", out)
    with started(
        "compare", "--repo", repo, "--before", "HEAD~1", "--after", "WORKTREE", "--path", "src", *flags
    ) as process:
        time.sleep(random.uniform(0.3, 5))
        process.send_signal(number)
        process.communicate(timeout=60)
    assert contents(repo) == before
    if number != signal.SIGKILL:
        assert not (out / ".trees").exists()


def test_a_tree_has_what_its_revision_has(repo, tmp_path):
    write_tree(repo, find_revision(repo, "HEAD~1"), tmp_path / "commit")
    assert (tmp_path / "commit" / "src" / "mine" / "layer.py").read_text() == LAYER
    assert not (tmp_path / "commit" / "new.py").exists()
    write_tree(repo / "src", find_revision(repo, "WORKTREE"), tmp_path / "now")
    assert (tmp_path / "now" / "src" / "mine" / "layer.py").read_text().endswith("# not committed\n")
    assert (tmp_path / "now" / "new.py").exists()
    assert not (tmp_path / "now" / "ignored.py").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commit", "now"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--repo", "/tmp", "--before", "HEAD", "--after", "HEAD"),
            "--repo /tmp: there is no git repository",
        ),
        (
            ("--before", "nonsense", "--after", "HEAD"),
            "has no revision 'nonsense'; write a commit, branch or tag",
        ),
        (("--before", "--upload-pack=x", "--after", "HEAD"), "has no revision"),
        (("--before", "HEAD", "--after", "HEAD", "--path", "nowhere"), "has no such folder"),
        (("--before", "HEAD", "--after", "HEAD", "--impl", "gone.py:build"), "there is no file gone.py"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_nothing_is_left(repo, tmp_path, flags, words):
    asked = flags if "--repo" in flags else ("--repo", repo, *flags)
    asked = asked if "--impl" in asked else (*asked, "--impl", "build.py:build")
    assert words in one_line(mla_bench("compare", *asked, "--seq", "64", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_revision_that_cannot_be_written_is_one_line(repo, tmp_path):
    (tmp_path / "full").write_text("")
    with pytest.raises(MlaBenchError, match="cannot write"):
        write_tree(repo, find_revision(repo, "HEAD"), tmp_path / "full" / "tree")


def test_without_git_there_is_one_line(repo, tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "mla_bench", "compare", "--repo", repo, "--before", "HEAD", "--after", "HEAD"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        check=False,
    )
    assert shutil.which("git") is not None
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert "git does not run" in process.stderr
