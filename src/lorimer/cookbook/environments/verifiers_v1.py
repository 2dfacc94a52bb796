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
        client = self._types.clients.EvalClientConfig(
            base_url=call.base_url, api_key_var=KEY_VARIABLE, headers={"X-API-Key": call.api_key}
        )
        if hasattr(self.environment, "run_episode"):
            context = self._types.ModelContext(model=call.model, client=client)
            episode = await self.environment.run_episode(call.task, context)
            traces, errors, is_ok = episode.traces, list(episode.errors), episode.ok
        else:
            traces, errors = await self._run_rollout(call, client), []
            is_ok = not any(trace.errors for trace in traces)
        if not is_ok:
            errors += [error for trace in traces for error in trace.errors]
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says no error"
            raise AgentFailed(f"the environment's episode failed: {said}")
        metrics = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
        return Outcome(sum(trace.reward for trace in traces), metrics)

    async def _run_rollout(self, call: AgentCall, client: Any) -> list[Any]:
        """Play a task in 0.2, where an environment has one agent, and its caller opens and closes the client."""
        opened = self._types.clients.resolve_client(client)
        sampling = importlib.import_module("verifiers.v1.types").SamplingConfig()
        try:
            context = self._types.ModelContext(model=call.model, client=opened, sampling=sampling)
            traces: list[Any] = await self.environment.episode(call.task, context).run()
        finally:
            await opened.close()
        return traces


def verifiers_agents(environment: Any, *, timeout_seconds: float = 600.0, max_concurrent: int = 16) -> ExternalAgents:
    """Agents for ``ProblemDataset(list(environment.taskset), ...)``."""
    return ExternalAgents(VerifiersAgent(environment), timeout_seconds=timeout_seconds, max_concurrent=max_concurrent)


def load_verifiers() -> Any:
    try:
        found = importlib.import_module("verifiers.v1")
        importlib.import_module("verifiers.v1.clients")
    except ImportError as error:
        raise InvalidInput(
            f"verifiers 0.2 or later is not installed ({error}): pip install 'verifiers>=0.2'"
        ) from error
    if not hasattr(found, "ModelContext"):  # 0.1.14 has a module of this name with another interface
        raise InvalidInput("the installed verifiers is older than 0.2: pip install 'verifiers>=0.2'")
    return found
