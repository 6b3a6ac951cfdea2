"""The log of a training job: CloudWatch streams of all hosts, merged by time, across throttling and late lines."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from maskfleet.errors import LaunchError
from maskfleet.launch.sagemaker.services import Json, Services, asking, is_transient
from maskfleet.launch.sagemaker.status import describe_job, event_text, host_of, read_job, state_of
from maskfleet.system.aws import aws_exceptions, code_of

GROUP = "/aws/sagemaker/TrainingJobs"
FIRST_HOST = "algo-1"
POLL_S = 3.0
HOLD_MS = 3000  # lines of one host may arrive this much after those of another
LATE_S = 12.0  # lines may arrive this long after the job has ended
GIVE_UP_S = 900.0  # of requests that CloudWatch does not answer
MAX_PAUSE_S = 60.0
MAX_TAIL_PAGES = 20  # asked for to find the last lines: a status must not take minutes
PERMISSIONS = "logs:DescribeLogStreams and logs:GetLogEvents on log group /aws/sagemaker/TrainingJobs"
_RANK = re.compile(r"^\[rank(\d+)\]: ")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """One line of one host; lines are ordered by time, then as they arrived."""

    stamp_ms: int
    stream: str
    number: int  # within its stream
    text: str = field(compare=False)

    def tagged(self) -> str:
        """The line with its rank: the container leaves out the tag of rank 0, which runs on the first host."""
        is_plain = _RANK.match(self.text) is None and host_of(self.stream) == FIRST_HOST
        return f"[rank0]: {self.text}" if is_plain else self.shown()

    def shown(self) -> str:
        """The line for people: with the host if it has no rank and comes from another host than the first."""
        host = host_of(self.stream)
        return self.text if host == FIRST_HOST or _RANK.match(self.text) else f"[{host}]: {self.text}"


class LogReader:
    """Reads each line of each stream of a job once, across several requests."""

    def __init__(
        self,
        services: Services,
        job: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._client, self._job, self._sleep, self._clock = services.client("logs"), job, sleep, clock
        self._give_up_s = give_up_s
        self._tokens: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def streams(self) -> list[str]:
        """Names of the job's log streams; a job that was restarted has several of each host."""
        found: list[str] = []
        request: Json = {"logGroupName": GROUP, "logStreamNamePrefix": f"{self._job}/"}
        while True:
            try:
                page = self.patiently(self._client.describe_log_streams, **request)
            except aws_exceptions() as error:
                if code_of(error) == "ResourceNotFoundException":
                    return []  # the first job of the account has not started yet
                raise
            found += [one["logStreamName"] for one in page["logStreams"]]
            if not page.get("nextToken"):
                return found
            request["nextToken"] = page["nextToken"]

    def new_lines(self, stream: str) -> Iterator[LogLine]:
        """Lines of `stream` since the last call. A page may be empty although more follow: the end repeats a token."""
        while True:
            token = self._tokens.get(stream)
            where = {"nextToken": token} if token else {}
            page = self.patiently(
                self._client.get_log_events, logGroupName=GROUP, logStreamName=stream, startFromHead=True, **where
            )
            self._tokens[stream] = page["nextForwardToken"]
            for event in page["events"]:
                yield from self._lines(stream, event)
            if page["nextForwardToken"] == token:
                return

    def tail(self, stream: str, limit: int = 200) -> list[tuple[int, str]]:
        """The last (time in ms, text) of `stream`."""
        read = partial(self.patiently, self._client.get_log_events)
        return [(one["timestamp"], one["message"]) for one in last_events(read, GROUP, stream, limit)]

    def all_lines(self) -> Iterator[LogLine]:
        """Lines of all streams by time; pages are read as they are needed."""
        yield from heapq.merge(*(self.new_lines(stream) for stream in self.streams()))

    def _lines(self, stream: str, event: Json) -> Iterator[LogLine]:
        for text in event["message"].splitlines() or [""]:
            number = self._counts.get(stream, 0)
            self._counts[stream] = number + 1
            yield LogLine(event["timestamp"], stream, number, text)

    def patiently(self, call: Callable[..., T], **request: Any) -> T:
        """What `call` returns; a busy service is asked again, less and less often."""
        since, pause_s = self._clock(), POLL_S
        while True:
            try:
                return call(**request)
            except aws_exceptions() as error:
                if not is_transient(error) or self._clock() - since >= self._give_up_s:
                    raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def last_events(read: Callable[..., Json], group: str, stream: str, limit: int) -> list[Json]:
    """The last `limit` events of a log stream, oldest first; `read` is GetLogEvents.

    CloudWatch pages by time: the first pages may be empty or short although there are events. The beginning of the
    stream repeats a token.
    """
    found: list[Json] = []
    where: Json = {}
    for _ in range(MAX_TAIL_PAGES):
        page = read(logGroupName=group, logStreamName=stream, startFromHead=False, limit=limit, **where)
        found = [*page["events"], *found]
        if len(found) >= limit or page["nextBackwardToken"] == where.get("nextToken"):
            break
        where = {"nextToken": page["nextBackwardToken"]}
    return found[-limit:]


def job_lines(
    services: Services,
    job: str,
    *,
    follow: bool = False,
    rank: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Lines of all hosts, oldest first; with `follow`, until the job is over and its late lines have arrived."""
    reader = LogReader(services, job, sleep=sleep, clock=clock)
    found = describe_job(services, job)
    if found is None:
        raise LaunchError(f"there is no job {job} in {services.region}", remedy="check the handle and the AWS account")
    with asking(f"read the log of {job}", permissions=PERMISSIONS, service="CloudWatch Logs"):
        lines = _Follower(services, job, reader, sleep, clock).lines() if follow else reader.all_lines()
        seen = False
        for line in lines:
            seen = True
            if isinstance(line, str):
                if rank is None:
                    yield line
            elif rank is None or line.tagged().startswith(f"[rank{rank}]: "):
                yield line.shown()
        if not seen:
            yield f"[sagemaker]: no line has arrived yet; the job is {state_of(found)}"


class _Follower:
    """Merges new lines of all hosts until the job is over."""

    def __init__(
        self,
        services: Services,
        job: str,
        reader: LogReader,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._services, self._job, self._reader, self._sleep, self._clock = services, job, reader, sleep, clock
        self._held: list[LogLine] = []
        self._newest_ms = 0
        self._reported = ""

    def lines(self) -> Iterator[LogLine | str]:
        """Lines by time, and what SageMaker does meanwhile. A line later than those already given follows them."""
        quiet_since: float | None = None
        while True:
            job = self._reader.patiently(read_job, services=self._services, name=self._job)
            yield from self._report(job)
            is_over = job is None or state_of(job).is_final
            count = self._read()
            if count:
                quiet_since = None
                yield from self._release(self._newest_ms - HOLD_MS)
            else:
                yield from self._release(self._newest_ms)
                quiet_since = self._clock() if quiet_since is None else quiet_since
                if is_over and self._clock() - quiet_since >= LATE_S:
                    return
            self._sleep(POLL_S)

    def _read(self) -> int:
        count = 0
        for stream in self._reader.streams():
            for line in self._reader.new_lines(stream):
                count += 1
                self._newest_ms = max(self._newest_ms, line.stamp_ms)
                heapq.heappush(self._held, line)
        return count

    def _release(self, until_ms: int) -> Iterator[LogLine]:
        while self._held and self._held[0].stamp_ms <= until_ms:
            yield heapq.heappop(self._held)

    def _report(self, job: Json | None) -> Iterator[str]:
        transitions = (job or {}).get("SecondaryStatusTransitions", [])
        text = event_text(transitions[-1]) if transitions else ""
        if text and text != self._reported:
            self._reported = text
            yield f"[sagemaker]: {text}"
