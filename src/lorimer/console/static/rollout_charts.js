// Rewards of rollouts at a glance: a strip of all steps, of which one can be chosen, and a histogram with bins to click.

import { button, h, replace, short, svg } from "./dom.js";

const HEIGHT = 96;
const MARGIN = { top: 6, right: 6, bottom: 18, left: 44 };
const MAX_COLUMNS = 160;

/** Build the strip of steps: for each the mean reward, with the range from least to greatest. Redrawn with its width. */
export function stepStrip(onStep) {
  const holder = h("div", { class: "step-strip" });
  let shown = null;
  const draw = () =>
    shown && holder.clientWidth && replace(holder, picture(holder.clientWidth, shown.steps, shown.edges, shown.step, onStep));
  new ResizeObserver(draw).observe(holder);
  return {
    element: holder,
    update(steps, edges, step) {
      shown = { steps, edges, step };
      draw();
    },
  };
}

function picture(width, steps, edges, chosen, onStep) {
  const [low, high] = edges.length ? [edges[0], edges.at(-1)] : [0, 1];
  const room = HEIGHT - MARGIN.top - MARGIN.bottom;
  const y = (value) => MARGIN.top + room * (high === low ? 0.5 : 1 - (value - low) / (high - low));
  const columns = bucketed(steps, MAX_COLUMNS);
  const slot = (width - MARGIN.left - MARGIN.right) / columns.length;
  const x = (i) => MARGIN.left + (i + 0.5) * slot;
  const means = columns.flatMap((column, i) => (column.mean === null ? [] : [`${x(i)},${y(column.mean)}`]));
  const label = `Rewards of ${steps.length} steps, from ${short(low)} to ${short(high)}`;
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": label },
    [...new Set([low, high])].map((value) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    ]),
    columns.map((column, i) => {
      const isChosen = column.first <= chosen && chosen <= column.last;
      const said = `${column.name}: ${short(column.count)} rollouts, mean reward ${short(column.mean)}`;
      return svg(
        "g",
        { class: isChosen ? "strip-step chosen" : "strip-step", "data-step": column.last, onclick: () => onStep(column.last) },
        svg("title", null, said),
        svg("rect", { class: "hit", x: x(i) - slot / 2, width: slot, y: 0, height: HEIGHT - MARGIN.bottom }),
        column.mean !== null &&
          svg("line", { class: "range", x1: x(i), x2: x(i), y1: y(column.max), y2: y(column.min) }),
      );
    }),
    means.length > 1 && svg("polyline", { class: "mean", points: means.join(" ") }),
    means.length === 1 && svg("circle", { class: "mean-dot", cx: means[0].split(",")[0], cy: means[0].split(",")[1], r: 3 }),
    ends(columns).map(([i, anchor]) =>
      svg("text", { class: "tick", x: x(i), y: HEIGHT - 4, "text-anchor": anchor }, short(columns[i].first)),
    ),
  );
}

const ends = (columns) =>
  columns.length > 1
    ? [
        [0, "start"],
        [columns.length - 1, "end"],
      ]
    : columns.map((_, i) => [i, "middle"]);

/** Put neighbouring steps together until there are at most `max` columns. */
function bucketed(steps, max) {
  const size = Math.max(1, Math.ceil(steps.length / max));
  return Array.from({ length: Math.ceil(steps.length / size) }, (_, i) => {
    const some = steps.slice(i * size, (i + 1) * size);
    const graded = some.filter((one) => one.mean_reward !== null);
    const number = graded.reduce((sum, one) => sum + one.num_rollouts, 0);
    const [first, last] = [some[0].step, some.at(-1).step];
    return {
      first,
      last,
      name: first === last ? `step ${first}` : `steps ${first} to ${last}`,
      count: some.reduce((sum, one) => sum + one.num_rollouts, 0),
      mean: number ? graded.reduce((sum, one) => sum + one.mean_reward * one.num_rollouts, 0) / number : null,
      min: Math.min(...graded.map((one) => one.min_reward)),
      max: Math.max(...graded.map((one) => one.max_reward)),
    };
  });
}

/**
 * Build a histogram whose bins are buttons. `chosen` is the number of the pressed bin or -1; `onBin(number)` gets -1 when
 * it is released.
 */
export function histogram(edges, counts, chosen, onBin) {
  const largest = Math.max(...counts, 1);
  const bins = counts.map((count, i) => {
    const name = `${short(edges[i])} to ${short(edges[i + 1])}: ${short(count)} rollouts`;
    const node = button("", () => onBin(i === chosen ? -1 : i), {
      class: count ? "bin" : "bin none",
      "aria-pressed": String(i === chosen),
      "aria-label": `Rewards from ${name}`,
      title: name,
      "data-count": count,
    });
    const bar = h("span", { class: "bin-bar" });
    bar.style.height = `${count ? Math.max((count / largest) * 100, 3) : 0}%`;
    node.append(bar);
    return node;
  });
  return h(
    "div",
    { class: "histogram", role: "group", "aria-label": "Rewards" },
    h("div", { class: "bins" }, bins),
    h("div", { class: "bin-edges muted" }, h("span", null, short(edges[0])), h("span", null, short(edges.at(-1)))),
  );
}
