"""Revisions of a user's git repository as plain folders; nothing is ever written into the repository.

Neither a worktree nor a checkout: both would leave something in `.git`, and a killed process would leave it
for good. git fills an index of ours, which lies elsewhere, from the revision, and writes the files from that.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mla_bench.errors import MlaBenchError
from mla_bench.text import one_line

WORKTREE = "WORKTREE"


@dataclass(frozen=True)
class Revision:
    """A state of a repository.

    Attributes:
      asked: as the user named it.
      commit: in full; of `WORKTREE` the one that it is based on.
      subject: first line of the commit's message.
    """

    asked: str
    commit: str
    subject: str

    @property
    def name(self) -> str:
        """Short, for a title or a folder."""
        return f"{self.commit[:10]}{'-uncommitted' if self.asked == WORKTREE else ''}"


def find_revision(repo: Path, asked: str) -> Revision:
    """The revision that `asked` names in `repo`: any of git's names, or `WORKTREE`, its uncommitted state.

    Raises:
      MlaBenchError: `repo` is no git repository, or has no such revision.
    """
    if not (repo.is_dir() and _git(repo, "rev-parse", "--git-dir").returncode == 0):
        raise MlaBenchError(f"--repo {repo}: there is no git repository")
    wanted = "HEAD" if asked == WORKTREE else asked
    found = _git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")
    if found.returncode:
        raise MlaBenchError(f"{repo} has no revision {asked!r}; write a commit, branch or tag, or {WORKTREE}")
    commit = found.stdout.strip()
    subject = _git(repo, "show", "--no-patch", "--format=%s", commit).stdout.strip()
    return Revision(asked, commit, subject)


def write_tree(repo: Path, revision: Revision, folder: Path) -> None:
    """Writes the files of `revision` into a new `folder`: tracked ones, and of `WORKTREE` new ones too.

    Raises:
      MlaBenchError: git or the disk refuses it.
    """
    try:
        folder.mkdir(parents=True)
        if revision.asked == WORKTREE:
            _copy(repo, folder)
        else:
            _check_out(repo, revision.commit, folder)
    except OSError as error:
        raise MlaBenchError(f"cannot write {folder}: {error.strerror}") from error


def _check_out(repo: Path, commit: str, folder: Path) -> None:
    index = {"GIT_INDEX_FILE": str(folder.with_suffix(".index").absolute())}
    for command in (
        ("read-tree", commit),
        ("checkout-index", "--all", "--quiet", f"--prefix={folder.absolute()}/"),
    ):
        done = _git(_top(repo), *command, **index)
        if done.returncode:
            raise MlaBenchError(f"git cannot write the files of {commit[:10]}: {one_line(done.stderr)}")
    folder.with_suffix(".index").unlink(missing_ok=True)


def _copy(repo: Path, folder: Path) -> None:
    top = _top(repo)
    listed = _git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in dict.fromkeys(filter(None, listed.stdout.split("\0"))):
        source, target = top / name, folder / name
        if source.is_file():  # and not removed, nor a submodule
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _top(repo: Path) -> Path:
    return Path(_git(repo, "rev-parse", "--show-toplevel").stdout.strip() or repo)


def _git(repo: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Without optional locks git does not refresh the user's own index either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", "-C", str(repo), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"} | variables,
        )
    except OSError as error:
        raise MlaBenchError(f"git does not run: {error.strerror}") from error
