"""The work folder: our Terraform files as a copy that its user may edit, with settings, plans, logs and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from maskfleet.errors import InfraError
from maskfleet.infra.stacks import Place
from maskfleet.system.files import move_into_place, read_json, sha256, write_atomically, write_private_json

LOCK_FILE = ".terraform.lock.hcl"
_LEFT_OUT = {"__pycache__", "tests"}


class WorkFolder:
    """Where one cluster's infrastructure is driven from."""

    def __init__(self, path: Path, place: Place) -> None:
        self.path = path
        self.place = place
        self.manifest = path / "copied.json"
        self.settings = path / f"{place.name}.tfvars.json"
        self.journal = path / "journal.json"
        self.backend = path / "backend.json"
        self.logs = path / "logs"
        self.states = path / "state"
        self.kubeconfig = path / "kubeconfig"

    def root(self, name: str) -> Path:
        """The copy of a root of the place, such as `terraform/eks/aws`."""
        return self.path / "deploy" / name

    @property
    def exists(self) -> bool:
        return self.manifest.exists()

    def refresh(self, say: Callable[[str], None], *, take_ours: bool = False) -> None:
        """Copy what is new or changed in our files; files that the user edited stay, and that is said.

        A file that both changed is an error: mixing the two could make something that neither wrote. `take_ours`
        replaces edited files, with the user's kept beside them as NAME.yours.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        copied: dict[str, str] = read_json(self.manifest)
        ours = {str(file.relative_to(self.place.deploy)): file for file in self._sources()}
        edited = [name for name in copied if self._is_edited(name, copied)]
        # A file of the user's that we would now begin to ship is as much theirs as an edited one.
        edited += [
            name
            for name, file in ours.items()
            if name not in copied and self._target(name).exists() and sha256(self._target(name)) != sha256(file)
        ]
        if not take_ours:
            _check_conflicts(edited, copied, ours, self.path)
        for name, file in ours.items():
            sum_ = sha256(file)
            if name in edited and not take_ours:
                say(f"kept your {self._target(name)}, which differs from ours; --take-ours replaces it")
                continue
            if name in edited:
                kept = self._target(name).with_name(f"{self._target(name).name}.yours")
                move_into_place(self._target(name), kept)
                say(f"replaced {self._target(name)} with ours; yours is {kept}")
            if copied.get(name) != sum_ or not self._target(name).exists():
                self._target(name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._target(name), file.read_bytes())
            copied[name] = sum_
        for name in [name for name in copied if name not in ours]:
            if name not in edited:
                self._target(name).unlink(missing_ok=True)
            del copied[name]
        write_private_json(self.manifest, copied)

    def _target(self, name: str) -> Path:
        return self.path / "deploy" / name

    def _is_edited(self, name: str, copied: dict[str, str]) -> bool:
        # terraform init itself writes the lock file, and a deleted file is simply copied again.
        target = self._target(name)
        return target.name != LOCK_FILE and target.exists() and sha256(target) != copied[name]

    def _sources(self) -> Iterator[Path]:
        for folder in self.place.folders:
            for file in sorted((self.place.deploy / folder).rglob("*")):
                parts = file.relative_to(self.place.deploy).parts
                hidden = any(part.startswith(".") and part not in (LOCK_FILE, ".helmignore") for part in parts)
                if file.is_file() and not hidden and not _LEFT_OUT.intersection(parts) and ".tfstate" not in file.name:
                    yield file


def _check_conflicts(edited: list[str], copied: dict[str, str], ours: dict[str, Path], path: Path) -> None:
    both = [name for name in edited if name in ours and copied.get(name) != sha256(ours[name])]
    if both:
        raise InfraError(
            f"you edited {', '.join(both)} under {path / 'deploy'}, and this version of maskfleet changes them too",
            remedy="--take-ours takes the new files and keeps yours beside them as NAME.yours",
        )
