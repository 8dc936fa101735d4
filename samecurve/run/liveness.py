"""Conclusions from what one rank knows of all ranks: which died or hang, which one reports it. No clock, no file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from samecurve.errors import PeerError
from samecurve.run.beats import Beat, Peer

# Phases without a time limit, because most of their work reports no progress: "start" waits for the launcher and other
# hosts, "build" takes as long as the data and the model need.
UNLIMITED = ("start", "build")


@dataclass(frozen=True)
class Liveness:
    """State of all ranks at one moment, as seen from one of them. Times are those of time.monotonic.

    Attributes:
        own: what this rank's heartbeat says now.
        peers: the other ranks that are visible.
        given_up: frozen ranks that are being ended.
        looked: when the heartbeat files were last read.
        now: the moment.
        limit: watchdog.timeout_seconds, 0 for no limit.
        stale: a running rank whose heartbeat has not changed for this many seconds is frozen.
    """

    own: Beat
    peers: Sequence[Peer]
    given_up: Collection[int]
    looked: float
    now: float
    limit: float
    stale: float

    @property
    def running(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.ended is None and peer.runs]

    @property
    def live(self) -> list[Peer]:
        """Peers that are running, have a fresh heartbeat and are not being ended."""
        fresh = [peer for peer in self.running if self.now - peer.changed <= self.stale]
        return [peer for peer in fresh if peer.beat.rank not in self.given_up]

    @property
    def frozen(self) -> list[Peer]:
        """Running peers whose heartbeat is stale. Empty if the storage does not answer: then all would look frozen."""
        if not self.storage_answers:
            return []
        return [peer for peer in self.running if self.now - peer.changed > self.stale]

    @property
    def storage_answers(self) -> bool:
        return self.now - self.looked <= self.stale

    def cause(self, after_seconds: float = 0.0) -> PeerError | None:
        """Return the most likely cause among failures and deaths of other ranks seen `after_seconds` ago or earlier.

        Ranks in `given_up` do not count, because their end is an effect.
        """
        latest = self.now - after_seconds
        known = [peer for peer in self.peers if peer.beat.rank not in self.given_up]
        ended = [peer for peer in known if peer.ended is not None and peer.ended <= latest]
        if not ended:
            return None
        # A reported failure comes first: it describes an error of its own or the effect of another rank's death. Among
        # several, the time decides, although clocks of hosts differ: a wrong choice is still a failure of this run.
        first = min(ended, key=lambda peer: (peer.died, peer.beat.time)).beat
        if first.state == "failed":
            return PeerError(first.reason, first.exit_code)
        return PeerError(
            f"{first.name} died, while rank {self.own.rank} was in {self.own.where}; it left no message, so look for "
            "its own output and for the system's (dmesg: out of memory?)"
        )

    @property
    def is_reported(self) -> bool:
        """Whether another rank has reported why the run ends, or rank 0 ended by its own."""
        beats = [peer.beat for peer in self.peers]
        return any(beat.has_reported or (beat.rank == 0 and beat.state in ("failed", "finished")) for beat in beats)

    @property
    def is_reporter(self) -> bool:
        """Whether this is the lowest rank that can still report why the run ends, and none has done so.

        A rank that has failed can: it may see later than others that the ranks below it are dead.
        """
        # until all ranks have started, the directory may belong to another run
        if self.own.rank == 0 or not self.own.num_phases:
            return self.own.rank == 0
        failed = [peer for peer in self.peers if peer.beat.state == "failed" and peer.beat.rank not in self.given_up]
        return not self.is_reported and all(peer.beat.rank > self.own.rank for peer in (*self.live, *failed))

    @property
    def replaces_rank_0(self) -> bool:
        """Whether this rank must write status.json: it is the reporter, and rank 0 had started but died or is stuck."""
        return self.own.rank > 0 and any(peer.beat.rank == 0 for peer in self.peers) and self.is_reporter

    @property
    def hangs(self) -> bool:
        """Whether to end the run because of a hang.

        A hang that another rank reports always counts. In a phase without a limit, a heartbeat that is missing for
        longer than `limit` counts; in any other phase, this rank's own idleness, unless another rank makes progress.
        """
        if not self.limit:
            return False
        if any(peer.beat.state == "hanging" for peer in self.live):
            return True
        if self.own.phase in UNLIMITED:
            return self.storage_answers and any(self.now - peer.changed > self.limit for peer in self.running)
        # This rank may just be waiting for a slow one, for example at a large file. In a blocked collective, no rank
        # makes progress.
        another_gets_on = any(peer.beat.idle_seconds < self.limit / 2 for peer in self.live)
        return self.own.idle_seconds > self.limit and not another_gets_on

    @property
    def may_hang_soon(self) -> bool:
        """Whether the limit is near, so that the progress of ranks on other hosts must be known."""
        return bool(self.limit) and self.own.phase not in UNLIMITED and self.own.idle_seconds > self.limit - self.stale

    def describe_hang(self, storage: object) -> str:
        """Describe the cause of the hang, as far as this rank can see it. storage: the folder to name."""
        if not self.storage_answers:
            return f"rank {self.own.rank} is in {self.own.where}, and the storage of {storage} does not answer"
        if self.frozen:
            return ", ".join(
                f"{peer.beat.name} shows no sign of life (stopped, or its host is dead), last seen in {peer.beat.where}"
                for peer in self.frozen
            )
        beats = sorted([self.own, *(peer.beat for peer in self.live)], key=lambda beat: beat.rank)
        least = min((beat.num_phases, beat.num_marks) for beat in beats)
        behind = [beat for beat in beats if (beat.num_phases, beat.num_marks) == least]
        ahead = max(beats, key=lambda beat: (beat.num_phases, beat.num_marks))
        if len(behind) < len(beats):
            names = ", ".join(f"{beat.name} has been in {beat.where} for {beat.idle_seconds:.0f} s" for beat in behind)
            return f"{names}, while rank {ahead.rank} is in {ahead.where}"
        who = f"rank {self.own.rank} is" if len(beats) == 1 else f"all {len(beats)} ranks that can be seen are"
        return f"{who} in {self.own.where}"
