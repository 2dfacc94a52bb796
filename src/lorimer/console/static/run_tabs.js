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

const DOUBLE_CLICK_MS = 300;

/** Let a click on a chart lead to the rollouts of that step, if the run has any, of the split of the metric; a double click does something else. */
export function followSteps({ navigate, signal }) {
  let waiting = null;
  const follow = async ({ run, step, metric }) => {
    const { num_rollouts: number, values } = await get(`/api/v1/runs/${part(run)}/rollout_steps`, { bins: 1 }, signal);
    const split = values.split?.find((name) => metric.startsWith(`${name}/`)); // `test/reward` is of the split `test`
    const query = new URLSearchParams({ step, ...(split && { split }) });
    if (number && !signal.aborted) navigate(`/console/runs/${part(run)}/rollouts?${query}`);
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
