// The tabs of a run: its overview with charts, and its rollouts.

import { get, part } from "./api.js";
import { h } from "./dom.js";

const TABS = [
  ["", "Overview"],
  ["/rollouts", "Rollouts"],
];

/** Build the links to the pages of a run, of which one is the current. */
export function runTabs(runId, current) {
  return h(
    "nav",
    { class: "run-tabs", "aria-label": "Pages of the run" },
    TABS.map(([path, label]) =>
      h(
        "a",
        {
          href: `/console/runs/${part(runId)}${path}`,
          "aria-current": path === (current ? `/${current}` : "") ? "page" : null,
        },
        label,
      ),
    ),
  );
}

/** Return the address of a step's rollouts. */
export const stepRollouts = (runId, step) => `/console/runs/${part(runId)}/rollouts?step=${step}`;

const DOUBLE_CLICK_MS = 300;

/** Let a click on a chart lead to the rollouts of that step, if the run has any; a double click does something else. */
export function followSteps({ navigate, signal }) {
  let waiting = null;
  const follow = async ({ run, step }) => {
    const { num_rollouts: number } = await get(`/api/v1/runs/${part(run)}/rollout_steps`, { bins: 1 }, signal);
    if (number && !signal.aborted) navigate(stepRollouts(run, step));
  };
  window.addEventListener("dblclick", () => clearTimeout(waiting), { signal });
  window.addEventListener(
    "lorimer:step",
    ({ detail }) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => follow(detail), DOUBLE_CLICK_MS);
    },
    { signal },
  );
}
