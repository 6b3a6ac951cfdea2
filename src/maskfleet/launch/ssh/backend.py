"""Hosts reached by SSH: sends the code and starts a detached supervisor on each host."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import asyncssh

from maskfleet.config.launch import SshLaunch
from maskfleet.config.load import RUN_FILE
from maskfleet.config.run import RunConfig
from maskfleet.errors import LaunchError
from maskfleet.launch.backend import Backend
from maskfleet.launch.files.transfer import Report, RunFiles, ignore
from maskfleet.launch.findings import Finding, Verdict
from maskfleet.launch.instances import INSTANCES, Instance
from maskfleet.launch.job import JobHandle, JobSpec, JobState, JobStatus, Rendered, job_for
from maskfleet.launch.ssh import environment
from maskfleet.launch.ssh.connect import Ask, Connection, ask_on_terminal, connect
from maskfleet.launch.ssh.doctor import examine_hosts
from maskfleet.launch.ssh.files import launch_of, location_of, remote_path, run_files
from maskfleet.launch.ssh.hosts import cluster_of
from maskfleet.launch.supervise.job_files import LAUNCH, Job
from maskfleet.launch.supervise.prepare import INCOMING, JOB_FILE
from maskfleet.launch.supervise.status import tell_notes
from maskfleet.launch.wheel import built_wheel
from maskfleet.system.process import quoted, remote_line
from maskfleet.system.rank_variables import COMPILED_CODE

REMOTE = f"{LAUNCH}/remote"
SETUP_S = 3600  # the first install of torch over a slow connection
RESTART_S = 10  # between checks for lost hosts to restart
logger = logging.getLogger("maskfleet")


class SshBackend(Backend):
    """Runs a job on the hosts of `launch`, in RUN_ROOT/runs/NAME, which all of them share."""

    def __init__(
        self,
        launch: SshLaunch,
        *,
        nodes: int | None = None,
        known: Mapping[str, Instance] = INSTANCES,
        ask: Ask = ask_on_terminal,
    ) -> None:
        self._ask = ask
        cluster = cluster_of(launch, known=known, nodes=nodes)
        if nodes is not None and nodes > len(cluster.hosts):
            raise LaunchError(
                f"--nodes {nodes}, but there are only {len(cluster.hosts)} hosts", remedy="name more hosts"
            )
        self._cluster = replace(cluster, hosts=cluster.hosts[:nodes])
        self._launch, self._routes, self.hosts = cluster.launch, cluster.routes, self._cluster.hosts
        self.slots = tuple(host.slots for host in self.hosts)

    @classmethod
    def for_handle(cls, handle: JobHandle) -> Self:
        return cls(launch_of(handle))

    def job(self, run: RunConfig, *, name: str | None = None) -> JobSpec:
        launch = self._launch
        return job_for(run, slots=self.slots, name=name, min_nodes=launch.min_nodes, max_restarts=launch.max_restarts)

    def render(self, job: JobSpec) -> Rendered:
        launch, root = self._launch, self._launch.run_root.rstrip("/")
        run_dir, folder = f"{root}/runs/{job.name}", launch.environment
        first, blobs, setup = self.hosts[0].address, {}, []
        files: dict[str, str] = {}
        if folder is None:
            digest, name, wheel = built_wheel()
            folder, code = f"{root}/environments/{digest}", f"{root}/wheels/{digest}"
            blobs = {f"{code}/{name}": wheel}
            files[f"{code}/environment.py"] = inspect.getsource(environment)
            make = [launch.python, f"{code}/environment.py", folder, f"{code}/{name}"]
            setup = [("ssh", first, "--", remote_line(make))]
        python = f"{folder.rstrip('/')}/bin/python"
        own = root if root.startswith(("/", "~")) else f"~/{root}"  # ranks do not start in the home directory
        plan = Job(
            job.name,
            launch.starter,
            tuple(self.hosts),
            job.min_nodes,
            job.max_restarts,
            launch.rendezvous_port or 0,
            root,
            env={COMPILED_CODE: f"{own}/compiled"},
            hosts_command=launch.hosts_command or "",
        )
        files[f"{run_dir}/{RUN_FILE}{INCOMING}"] = job.run_yaml
        files[f"{run_dir}/{JOB_FILE}{INCOMING}"] = plan.to_json()
        ask = f'exec {quoted(python)} -m maskfleet.launch.supervise.status {quoted(run_dir)} "$@"'
        remote = f"{run_dir}/{REMOTE}"
        files[remote] = f"#!/bin/sh\n{ask}\n"
        check = remote_line([python, "-c", "import maskfleet.launch.supervise.supervisor, torch"])
        commands = [*setup, *(("ssh", host.address, "--", check) for host in self.hosts)]
        commands.append(("ssh", first, "--", remote_line(["sh", remote, "place"])))
        for what in ("persist", "start") if launch.persist else ("start",):
            for index, host in enumerate(self.hosts):
                commands.append(("ssh", host.address, "--", remote_line(["sh", remote, what, str(index)])))
        return Rendered(job.name, files, tuple(commands), blobs)

    def submit(self, rendered: Rendered) -> JobHandle:
        if self._launch.stack is not None:
            self._check_hosts()
        asyncio.run(self._submit(rendered))
        run_dir = f"{self._launch.run_root.rstrip('/')}/runs/{rendered.name}"
        path = run_dir if run_dir.startswith("/") else f"/{run_dir}"
        return JobHandle("ssh", location_of(self._launch, self.hosts), path)

    def _check_hosts(self) -> None:
        """Run the doctor on nodes that a stack has just made; what it fails would fail the run."""
        found = examine_hosts(self._cluster, ask=self._ask)
        for one in found:
            if one.verdict is Verdict.WARN:
                logger.warning("%s: %s: %s", one.host, one.name, one.found)
        failed = [one for one in found if one.verdict is Verdict.FAIL]
        if failed:
            texts = "".join(f"\n  {one.host}: {one.name}: {one.found}" for one in failed)
            raise LaunchError(f"stack {self._launch.stack} cannot train yet:{texts}", remedy=failed[0].remedy)

    def status(self, handle: JobHandle) -> JobStatus:
        return asyncio.run(self._status(handle))

    def logs(self, handle: JobHandle, *, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        with asyncio.Runner() as runner:
            lines = self._lines(handle, follow=follow, rank=rank)
            while True:
                line = runner.run(_next_of(lines))
                if line is None:
                    return
                yield line

    def cancel(self, handle: JobHandle) -> None:
        asyncio.run(self._cancel(handle))

    def explain(self, handle: JobHandle) -> str:
        return asyncio.run(self._query(handle, ["explain"]))

    def doctor(self, *, folder: Path, data: str | None) -> list[Finding]:
        return examine_hosts(self._cluster, data=data, ask=self._ask)

    def files(
        self, handle: JobHandle, *, writable: bool = False, is_file: bool = False, report: Report = ignore
    ) -> AbstractContextManager[RunFiles]:
        return nullcontext(run_files(handle, self.hosts[0].address, self._routes))

    async def _submit(self, rendered: Rendered) -> None:
        async with self._all_hosts() as hosts:
            first = hosts[self.hosts[0].address]
            for name, blob in rendered.blobs.items():
                await first.put(name, blob)
            for name, content in rendered.files.items():
                await first.put(name, content.encode())
            await self._check_shared(hosts, rendered)
            before, starts = rendered.commands[: -len(self.hosts)], rendered.commands[-len(self.hosts) :]
            for command in before:
                tell_notes(await _run_on(hosts[command[1]], command[3], timeout_s=SETUP_S))
            await _each(_run_on(hosts[command[1]], command[3]) for command in starts)

    async def _check_shared(self, hosts: dict[str, Connection], rendered: Rendered) -> None:
        """Raise unless every host sees the file that was written on the first one."""
        name, content = next((n, c) for n, c in rendered.files.items() if n.endswith(f"{JOB_FILE}{INCOMING}"))
        first = self.hosts[0].address

        async def look(connection: Connection) -> None:
            if await connection.get(name) != content.encode():
                raise LaunchError(
                    f"{self._launch.run_root} is not shared between the hosts: {connection.address} does not see "
                    f"what was written on {first}",
                    remedy="point run_root at a folder that all hosts mount, such as EFS, FSx or NFS",
                )

        await _each(look(connection) for connection in hosts.values())

    async def _status(self, handle: JobHandle) -> JobStatus:
        try:
            return JobStatus.from_json(json.loads(await self._query(handle, ["status"])))
        except UnknownJobError as error:
            return JobStatus(JobState.UNKNOWN, error.what)

    async def _query(self, handle: JobHandle, arguments: list[str]) -> str:
        """The output of the job's `remote` script on the first reachable host."""
        with closing(await self._first_host()) as connection:
            done = await connection.run(_remote(handle, arguments))
        _refuse_unknown(done.code, handle)
        if done.code != 0:
            said = done.err.strip() or done.out.strip()
            raise LaunchError(f"host {connection.address}: {said}", remedy="see `maskfleet status`")
        return done.out.rstrip("\n")

    async def _lines(self, handle: JobHandle, *, follow: bool, rank: int | None) -> AsyncIterator[str]:
        """Lines of the log; if the host that sends them is lost, another one continues after the last line."""
        restarter = asyncio.create_task(self._restart_lost_hosts(handle)) if follow else None
        options = [*(["--follow"] if follow else []), *([f"--rank={rank}"] if rank is not None else [])]
        after = ""
        try:
            while True:
                line = _remote(handle, ["logs", f"--after={after}", *options])
                with closing(await self._first_host()) as connection:
                    try:
                        process = await connection.raw.create_process(line, stdin=asyncssh.DEVNULL, errors="replace")
                        async for text in process.stdout:
                            if not text:
                                break  # the end comes as an empty line
                            after = text[:27]
                            yield text[28:].rstrip("\n")
                        await process.wait()
                        if process.exit_status is not None and process.exit_status >= 0:
                            _refuse_unknown(process.exit_status, handle)
                            return
                    except (asyncssh.Error, OSError):
                        await asyncio.sleep(1)
        finally:
            if restarter is not None:
                restarter.cancel()

    async def _restart_lost_hosts(self, handle: JobHandle) -> None:
        """While following the log: restart the supervisors of lost hosts. The leader does so too."""
        while True:
            await asyncio.sleep(RESTART_S)
            with contextlib.suppress(LaunchError):  # not reachable now; try again later
                status = await self._status(handle)
                if status.state is not JobState.RUNNING:
                    continue
                lost = [index for index, host in enumerate(status.hosts) if host.state == "lost"]
                addresses = self._addresses(status)
                await _each(self._restart(handle, index, addresses[index]) for index in lost)

    async def _restart(self, handle: JobHandle, index: int, address: str) -> None:
        with closing(await self._connect(address)) as connection:
            await connection.run(_remote(handle, ["start", str(index)]))

    async def _cancel(self, handle: JobHandle) -> None:
        try:
            await self._query(handle, ["cancel"])
        except UnknownJobError:
            return
        addresses = self._addresses(await self._status(handle))
        results = await asyncio.gather(
            *(self._stop(handle, index, address) for index, address in enumerate(addresses)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, LaunchError):
                logger.warning("%s; the run ends there as soon as that host sees the shared folder again", result.what)
            elif isinstance(result, BaseException):
                raise result

    def _addresses(self, status: JobStatus) -> list[str]:
        """The addresses of the job's hosts, in their order; of a stack those in the job, which may be replaced ones."""
        return [host.address for host in (status.hosts if self._launch.stack is not None else self.hosts)]

    async def _stop(self, handle: JobHandle, index: int, address: str) -> None:
        with closing(await self._connect(address)) as connection:
            done = await connection.run(_remote(handle, ["stop", str(index)]), timeout_s=150)
        if done.code != 0:
            raise LaunchError(
                f"host {connection.address}: {done.err.strip()}",
                remedy=f"log in with `ssh {connection.address}` and check its processes",
            )

    @contextlib.asynccontextmanager
    async def _all_hosts(self) -> AsyncIterator[dict[str, Connection]]:
        """Connections to all hosts; the error names every host that fails."""
        opened = await asyncio.gather(*(self._connect(host.address) for host in self.hosts), return_exceptions=True)
        with contextlib.ExitStack() as stack:
            good = [stack.enter_context(closing(one)) for one in opened if isinstance(one, Connection)]
            _raise_all([one for one in opened if isinstance(one, BaseException)])
            yield {one.address: one for one in good}

    async def _first_host(self) -> Connection:
        """A connection to the first reachable host."""
        failures = []
        for host in self.hosts:
            try:
                return await self._connect(host.address)
            except LaunchError as error:
                failures.append(error)
        _raise_all(failures)
        raise AssertionError("a job has hosts")

    async def _connect(self, address: str) -> Connection:
        accept_new = self._launch.accept_new_host_keys
        return await connect(address, accept_new=accept_new, ask=self._ask, routes=self._routes)


class UnknownJobError(LaunchError):
    """There is no such job on the hosts."""


def _remote(handle: JobHandle, arguments: list[str]) -> str:
    return remote_line(["sh", f"{remote_path(handle)}/{REMOTE}", *arguments])


def _refuse_unknown(code: int, handle: JobHandle) -> None:
    if code in (2, 127):  # exit codes of a shell that cannot open the script
        raise UnknownJobError(f"there is no job {handle} on its hosts", remedy="check the handle and the hosts in it")


async def _run_on(connection: Connection, line: str, *, timeout_s: float = 60) -> str:
    done = await connection.run(line, timeout_s=timeout_s)
    if done.code != 0:
        output = (done.err.strip() or done.out.strip() or f"code {done.code}")[-2000:]
        raise LaunchError(f"host {connection.address} failed at `{line}`:\n{output}", remedy=_remedy(output))
    return done.out


def _remedy(output: str) -> str:
    if "No space left" in output or "quota" in output:
        return "free disk space on that host, or choose another run_root"
    if "not found" in output or "No such file" in output or "needs Python" in output:
        return "install Python 3.11 or newer there, or name one with --launch-set python=/path/to/python3"
    if "No module named" in output:
        return "the environment there lacks it; launch without `environment` to create one"
    return "see the output of that host above; `maskfleet doctor --on ssh` checks every host"


async def _each(tasks: Any) -> None:
    """Run all of `tasks` concurrently; the error names every host that fails."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    _raise_all([one for one in results if isinstance(one, BaseException)])


def _raise_all(failures: list[Any]) -> None:
    for failure in failures:
        if not isinstance(failure, LaunchError):
            raise failure
    if len(failures) == 1:
        raise failures[0]
    if failures:
        whats = "\n".join(failure.what for failure in failures)
        raise LaunchError(whats, remedy=failures[0].remedy)


async def _next_of(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)
