"""Environments of ``verifiers`` 0.2 and later (its ``verifiers.v1``), played from outside.

There an environment runs its agents' programs by itself, against an OpenAI-compatible endpoint: that of an episode of
the run. Each of its tasks is an agent's task, and its rewards are those of the traces. `verifiers.py` has the older
environments, which are played turn by turn.
"""

import importlib
from typing import Any

from lorimer.cookbook.rl.agents import AgentCall, AgentFailed, ExternalAgents, Outcome
from lorimer.errors import InvalidInput

KEY_VARIABLE = "LORIMER_EPISODE_KEY"
"""Where verifiers looks for a key, in vain: the key is sent as a header, so that it is not in the environment."""


class VerifiersAgent:
    """Runs one episode of an environment; tasks are those of ``environment.taskset``.

    Train inside of ``async with environment.serving()``. The rewards of all traces are added. An agent with a client of
    its own, such as a judge, is answered by that and not recorded.
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self._types = load_verifiers()

    async def __call__(self, call: AgentCall) -> Outcome:
        client = self._types.EvalClientConfig(
            base_url=call.base_url, api_key_var=KEY_VARIABLE, headers={"X-API-Key": call.api_key}
        )
        context = self._types.ModelContext(model=call.model, client=client)
        episode = await self.environment.run_episode(call.task, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says no error"
            raise AgentFailed(f"the environment's episode failed: {said}")
        metrics = {
            name: float(value) for trace in episode.traces for name, value in trace.metrics.items() if value is not None
        }
        return Outcome(sum(trace.reward for trace in episode.traces), metrics)


def verifiers_agents(environment: Any, *, timeout_seconds: float = 600.0, max_concurrent: int = 16) -> ExternalAgents:
    """Agents for ``ProblemDataset(list(environment.taskset), ...)``."""
    return ExternalAgents(VerifiersAgent(environment), timeout_seconds=timeout_seconds, max_concurrent=max_concurrent)


def load_verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise InvalidInput(
            f"verifiers 0.2 or later is not installed ({error}): pip install 'verifiers>=0.2'"
        ) from error
