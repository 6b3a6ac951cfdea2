"""The work folder: a copy of our Terraform files that users may edit, with settings, plans, logs and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from maskfleet.errors import InfraError
from maskfleet.infra.stacks import Stack
from maskfleet.system.files import move_into_place, read_json, sha256, write_atomically, write_private_json

LOCK_FILE = ".terraform.lock.hcl"
_EXCLUDED = {"__pycache__", "tests"}


class WorkFolder:
    """The folder from which one cluster's infrastructure is managed."""

    def __init__(self, path: Path, stack: Stack) -> None:
        self.path = path
        self.stack = stack
        self.manifest = path / "copied.json"
        self.settings = path / f"{stack.name}.tfvars.json"
        self.journal = path / "journal.json"
        self.backend = path / "backend.json"
        self.logs = path / "logs"
        self.states = path / "state"
        self.kubeconfig = path / "kubeconfig"
        self.existing = path / "cluster.json"

    def copy_of(self, name: str) -> Path:
        """The copy of a file or folder of ours, such as `terraform/eks/aws`."""
        return self.path / "deploy" / name

    def refresh(self, say: Callable[[str], None], *, take_ours: bool = False) -> None:
        """Copy our new and changed files; files that the user edited are kept, and named in a message.

        A file that both changed is an error: a mix of versions could create something that nobody intended.
        `take_ours` replaces edited files and keeps the user's as NAME.yours.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        copied: dict[str, str] = read_json(self.manifest)
        ours = {str(file.relative_to(self.stack.deploy)): file for file in self._sources()}
        # terraform init writes the lock file itself, and a deleted file is simply copied again.
        edited = [name for name in copied if Path(name).name != LOCK_FILE and self._differs(name, copied[name])]
        # A user's own file with the name of one that we now ship is treated as edited.
        edited += [name for name, file in ours.items() if name not in copied and self._differs(name, sha256(file))]
        if not take_ours:
            _check_conflicts(edited, copied, ours, self.path)
        for name, file in ours.items():
            digest = sha256(file)
            if name in edited and not take_ours:
                say(f"kept your {self.copy_of(name)}, which differs from ours; --take-ours replaces it")
                continue
            if name in edited:
                kept = self.copy_of(name).with_name(f"{self.copy_of(name).name}.yours")
                move_into_place(self.copy_of(name), kept)
                say(f"replaced {self.copy_of(name)} with ours; yours is {kept}")
            if copied.get(name) != digest or not self.copy_of(name).exists():
                self.copy_of(name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.copy_of(name), file.read_bytes())
            copied[name] = digest
        for name in [name for name in copied if name not in ours]:
            if name not in edited:
                self.copy_of(name).unlink(missing_ok=True)
            del copied[name]
        write_private_json(self.manifest, copied)

    def _differs(self, name: str, digest: str) -> bool:
        return self.copy_of(name).exists() and sha256(self.copy_of(name)) != digest

    def _sources(self) -> Iterator[Path]:
        for folder in self.stack.folders:
            for file in sorted((self.stack.deploy / folder).rglob("*")):
                parts = file.relative_to(self.stack.deploy).parts
                hidden = any(part.startswith(".") and part not in (LOCK_FILE, ".helmignore") for part in parts)
                if file.is_file() and not hidden and not _EXCLUDED.intersection(parts) and ".tfstate" not in file.name:
                    yield file


def _check_conflicts(edited: list[str], copied: dict[str, str], ours: dict[str, Path], path: Path) -> None:
    both = [name for name in edited if name in ours and copied.get(name) != sha256(ours[name])]
    if both:
        raise InfraError(
            f"you edited {', '.join(both)} under {path / 'deploy'}, and this version of maskfleet changes them too",
            remedy="--take-ours takes the new files and keeps yours beside them as NAME.yours",
        )
