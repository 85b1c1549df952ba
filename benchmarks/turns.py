"""Time providers in turns, so that all meet the same clocks.

The power of a GPU is capped: how fast it runs depends on what ran before, and for how long. A
provider alone on a rested chip, which `timing.device_time` sees, compares with the next one by
several per cent differently than on a chip at work. Here every provider has a turn in every round,
in an order drawn anew, since it matters as well whom one follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from random import Random
from statistics import median

import timing
from measure import Measurement, Subject, attempt
from provider import Case, Provider

ROUNDS = 8  # the first one is not counted: it warms up, and measures the host
TURN_MS = 10.0
LEAST_CALLS, MOST_CALLS = 3, 20  # of a turn
REGIME = "in turns"


class Player:
    """A provider, and the times of its turns."""

    def __init__(self, provider: Provider, case: Case, error: float | None, device: str) -> None:
        self.provider = provider
        self._case, self._error, self._device = case, error, device
        self._rounds: list[list[float]] = []
        self._host_ms = 0.0
        (estimate,) = self._times(1)
        self._count = max(LEAST_CALLS, min(MOST_CALLS, int(TURN_MS / estimate)))

    def turn(self) -> Measurement:
        """Take a turn, and say what all of them come to."""
        with self.provider.active():
            self._rounds.append(self._times(self._count))
        counted = self._rounds[1:] or self._rounds
        case = self._case
        return Measurement(median(chain.from_iterable(counted)), self._error, kernel=case.kernel,
                           tile=case.tile, note=case.note, regime=REGIME)

    def _times(self, count: int) -> list[float]:
        if self._device == "cpu":
            return timing.clock_times(self._case.call, count)
        times, self._host_ms = timing.queued_times(self._case.call, count, self._host_ms)
        return times


def measure_in_turns(
    subject: Subject, providers: Iterable[Provider], direction: str
) -> dict[str, Measurement]:
    """Measure all providers on one workload. Who fails has no turn any more.

    Returns
    -------
    dict
        A measurement by each provider's name.
    """
    device = subject.inputs.device
    players: dict[str, Player] = {}

    def enter(provider: Provider) -> Measurement:
        with provider.active():
            case = provider.prepare(subject.inputs, provider.load(subject.inputs), direction)
            error = subject.error(provider, case, case.call(), direction)
            players[provider.name] = Player(provider, case, error, device)
        return Measurement(max_error=error)

    found = {provider.name: attempt(device, enter, provider) for provider in providers}
    order = Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(list(players), len(players)):
            found[name] = attempt(device, players[name].turn)
            if found[name].device_ms is None:
                del players[name]
    return found
